"""Record one forward pass as operations on tensors whose identity is the object.

Under `torch.func.functionalize` there are no in-place operations and no two tensors of one object, so a tensor is known
by its identity: neither views nor buffers that are used again can be confused.
"""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from quotient_manifolds.batches import taken_apart, tensors_in
from quotient_manifolds.replica import attention_by_formula
from quotient_manifolds.symmetries.checks import running
from quotient_manifolds.symmetries.outputs import Evaluate
from quotient_manifolds.symmetries.trace.record import forward_alone, layers_apart
from quotient_manifolds.symmetries.wires.decompositions import DECOMPOSITIONS


@dataclass(frozen=True, eq=False)
class Operation:
    """Hold one call of an ATen operation, and the path of the module that makes it."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    module: str = ""

    @property
    def name(self) -> str:
        """An operation in place, inside of one that is recorded, is that operation.

        A rounded quotient is none, and what looks at the bits of a number is no view.
        """
        name, rounding = str(self.func.overloadpacket.__name__).removesuffix("_"), self.kwargs.get("rounding_mode")
        name = re.sub("^_?unsafe_", "", name)  # which shares memory or checks no index
        rounding = "dtype" if self.func is torch.ops.aten.view.dtype else rounding
        return f"{name} {rounding}" if rounding else name

    def renamed(self, tensor: Tensor, other: Tensor) -> Operation:
        """Return the operation with another tensor in the place of one."""
        if all(each is not tensor for each in (*self.inputs, *self.outputs)):
            return self
        swap = partial(tree_map_only, Tensor, lambda each: other if each is tensor else each)
        return replace(self, args=swap(self.args), kwargs=swap(self.kwargs), out=swap(self.out))

    @property
    def inputs(self) -> list[Tensor]:
        return tensors((self.args, self.kwargs))

    @property
    def outputs(self) -> list[Tensor]:
        return tensors(self.out)


def tensors(tree: Any) -> list[Tensor]:
    """Return the tensors of nested containers, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@dataclass(frozen=True, eq=False)
class Recording:
    """Hold the operations of a forward pass in order, its parameters by name, its inputs, and the outputs.

    given: the inputs, all tensors that no operation made and that come to the model from outside: from a batch of any
    type, or from what a loss closes over. Constants are what the model holds and what its code makes of numbers.
    """

    operations: tuple[Operation, ...]
    parameters: Mapping[str, Tensor]
    given: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    """Return what tells where in memory each entry of a tensor is: strides of single entries tell nothing."""
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.shape, tensor.storage_offset(), [stride for size, stride in axes if size > 1]


class _Recorder(TorchDispatchMode):
    def __init__(self, kept: Collection[int], held: Collection[int], given: Collection[Tensor]) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.kept = kept
        self.given = {id(each): each for each in given}
        """Inputs, by identity: those that were handed over, and those that are found where the model is called."""
        self.known = {*kept, *held}
        """Tensors, by identity, that are no inputs: the model's own, and those that operations made."""
        self.given_numbers = False
        """Whether the model was called with what it may make tensors of: numbers, arrays, text."""
        self.apart = set[int]()
        """Tensors, by identity, that torch promises to use as if they were no views of each other."""
        self.modules = [""]
        """Paths of the modules that are running, the innermost last."""

    def watch(self, model: nn.Module) -> None:
        """Follow which module of a model is running."""
        for name, module in model.named_modules():
            module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True)
            module.register_forward_hook(self._leave)

    def _enter(self, name: str, _: nn.Module, *given: Any) -> None:
        if len(self.modules) == 1:
            self.given_numbers |= any(_makes_tensors(leaf) for _, leaf in taken_apart(given))
            self._is_given(each for each in tensors_in(given) if not torch._is_functional_tensor(each))
        self.modules.append(name)

    def _leave(self, *_: Any) -> None:
        self.modules.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and id(args[0]) in self.kept:
            if not torch.equal(*args[:2]):  # a cast to the dtype that it has writes what is there
                raise ValueError("the model must not write to its own weights while it runs. Found that it does")
            return args[0]
        with self:  # what it is made of is recorded in its place
            out = DECOMPOSITIONS.get(func.overloadpacket.__name__, func.decompose)(*args, **(kwargs or {}))
        if out is not NotImplemented:
            return out
        before = _layout(args[0]) if func is torch.ops.aten.as_strided_.default else None
        first = func._schema.arguments[0].alias_info if args and isinstance(args[0], Tensor) else None
        former = args[0].clone() if first is not None and first.is_write else None
        out = func(*args, **(kwargs or {}))
        if before is not None and before == _layout(out):
            return out  # every entry stays where it is: a mean over pixels for another order in memory
        made = Operation(func, args, kwargs or {}, out, self.modules[-1])
        if len(self.modules) == 1 or (self.given_numbers and func is torch.ops.aten.lift_fresh.default):
            self._is_given(made.inputs)
        self.known.update(id(each) for each in made.outputs)
        made = made if former is None else self._written(made, args[0], former)
        self.operations.append(made)
        if func.overloadpacket.__name__.startswith("unsafe_"):
            self.apart.update(map(id, (*made.inputs, *made.outputs)))
        return out

    def _written(self, operation: Operation, tensor: Tensor, former: Tensor) -> Operation:
        """Return an operation that writes to a tensor as one that makes it of what it was, which was another tensor.

        Of tensors that look at the same memory no rule tells what they are then: it takes and gives them as well.
        """
        if id(tensor) in self.given:
            self.given[id(former)] = former
        func, memory = operation.func, tensor.untyped_storage()._cdata
        same = {id(each): each for made in self.operations for each in made.outputs if each is not tensor}
        if id(tensor) in self.apart:
            same = {key: each for key, each in same.items() if key not in self.apart}
        views = [each for each in same.values() if each.untyped_storage()._cdata == memory]
        if views and torch.Tag.inplace_view not in func.tags:
            return replace(operation, args=(*operation.args, views), out=[tensor, *views])
        self.operations = [each.renamed(tensor, former) for each in self.operations]
        others = getattr(torch.ops.aten, func.overloadpacket.__name__.removesuffix("_"))
        found = others.overloads()
        same_name = getattr(others, func._overloadname if func._overloadname in found else found[0])
        return replace(operation, func=same_name, args=(former, *operation.args[1:]))

    def _is_given(self, several: Iterable[Tensor]) -> None:
        self.given.update((id(each), each) for each in several if id(each) not in self.known)


def _makes_tensors(leaf: Any) -> bool:
    """Return whether code may make a tensor of numbers of this: all but tensors, flags, and what holds nothing."""
    return leaf is not None and not isinstance(leaf, (Tensor, bool, Mapping, list, tuple, deque))


class _Numbers(TorchFunctionMode):
    """Read numbers of the tensors that are recorded: functionalization has no memory in which torch looks for them.

    Nor does it know of gradients, so a tensor that the model wants to have one is left as it is.
    """

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.requires_grad_, Tensor.retain_grad):
            return args[0] if func is Tensor.requires_grad_ else None
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            index = tuple(map(_read, args[1])) if isinstance(args[1], tuple) else _read(args[1])
            args = (args[0], index, *args[2:])
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
            torch.equal(args[0], args[0])  # an operation, which is recorded: whoever makes numbers of a tensor sees it
            args = (self.recorder.operations[-1].args[0], *args[1:])
        return func(*args, **(kwargs or {}))


def _read(index: Any) -> Any:
    if not isinstance(index, (list, tuple)):
        return index
    return [each.item() if isinstance(each, Tensor) and each.ndim == 0 else _read(each) for each in index]


def record(model: nn.Module, batch: Any, evaluate: Evaluate) -> Recording:
    """Return the operations by which `evaluate(model, batch)` is computed, in the model's own dtype and on its device.

    Attention is computed by its formula. Raises ModelError for what the model raises, and where the pass has operations
    that functionalization does not know.
    """
    parameters = {name: w.detach() for name, w in model.named_parameters()}
    buffers = {name: w.detach() for name, w in model.named_buffers()}

    class Called(nn.Module):  # `evaluate` calls the model as it likes
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, given: Any) -> Any:
            with running(model):
                return evaluate(self.inner, given)

    def run(parameters: dict[str, Tensor], buffers: dict[str, Tensor], given: Any) -> Any:
        state = {f"inner.{name}": w for name, w in {**parameters, **buffers}.items()}
        return torch.func.functional_call(called, state, (given,))

    attributes = (tensors_in(vars(module)) for module in model.modules())
    held = {id(w) for own in (buffers.values(), *attributes) for w in own}
    called, recorder = Called(), _Recorder({id(w) for w in parameters.values()}, held, tensors_in(batch))
    recorder.watch(model)
    with attention_by_formula(), forward_alone(), layers_apart(), torch.no_grad(), recorder, _Numbers(recorder):
        out = torch.func.functionalize(run)(parameters, buffers, batch)
    return Recording(tuple(recorder.operations), parameters, tuple(recorder.given.values()), tuple(tensors(out)))


def digest(recording: Recording) -> str:
    """Return what two recordings have in common whose operations do the same with parameters of the same names.

    That includes shapes, and the values of inputs and constants, but not the values of parameters.
    """
    found = hashlib.sha256()
    labels = {id(w): f"{name} {tuple(w.shape)}" for name, w in recording.parameters.items()}

    def label(leaf: Any) -> str:
        if not isinstance(leaf, Tensor):
            return repr(leaf)
        if id(leaf) not in labels:  # an input, or a constant
            labels[id(leaf)] = f"{tuple(leaf.shape)} {hashlib.sha256(_bytes(leaf)).hexdigest()}"
        return labels[id(leaf)]

    for number, operation in enumerate(recording.operations):
        leaves, structure = tree_flatten((operation.args, operation.kwargs))
        given, made = [label(leaf) for leaf in leaves], operation.outputs
        found.update("; ".join([str(operation.func), str(structure), *given, str(len(made))]).encode())
        labels.update((id(out), f"{number}.{place} {tuple(out.shape)}") for place, out in enumerate(made))
    found.update("; ".join(map(label, recording.outputs)).encode())
    return found.hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    numbers = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    numbers = numbers.double() if numbers.is_floating_point() else numbers
    return bytes(numbers.detach().cpu().contiguous().numpy().tobytes())
