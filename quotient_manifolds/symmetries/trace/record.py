"""Record one forward pass as a program, under `torch.func.functionalize`: no operation writes to its arguments."""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from quotient_manifolds.batches import mapped, tensors_in
from quotient_manifolds.replica import Cast, attention_by_formula, replica, unchanged
from quotient_manifolds.symmetries.checks import ModelError, running
from quotient_manifolds.symmetries.outputs import Evaluate, doubled, floating
from quotient_manifolds.symmetries.trace.decompositions import DECOMPOSITIONS
from quotient_manifolds.symmetries.trace.program import Layout, Operation, Program, Ref

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Recording:
    """Hold a program, its values at the time of recording, and the parameters that share memory.

    tied: for each parameter that shares all its memory with an earlier one, the name of the earlier one. origins: for
    each input, its index among the distinct tensors of the batch, or None if it is not one of them. buffers: names of
    the constants that are floating point buffers, by number. written: names of buffers that were written to.
    """

    program: Program
    values: tuple[Tensor, ...]
    parameters: Mapping[str, Tensor]
    tied: Mapping[str, str]
    origins: tuple[int | None, ...] = ()
    buffers: Mapping[int, str] = field(default_factory=dict)
    written: tuple[str, ...] = ()


_OF_NUMBERS = {aten.add.Scalar: aten.add.Tensor, aten.add_.Scalar: aten.add_.Tensor}
"""Operations with a number as argument, and their overloads that take a tensor in its place, too."""
PRECISIONS: tuple[Cast, ...] = (unchanged, doubled)
"""Casts that are tried in turn: the model's own precision, and float64 for a batch of another precision."""


def recorded(
    model: nn.Module, batch: Any, evaluate: Evaluate, casts: Sequence[Cast] = PRECISIONS
) -> tuple[Recording, Cast]:
    """Record a copy of a model with the first cast that works, and return this cast as well.

    The model is copied because it may set its attributes while it runs. In its own precision the copy shares the
    model's parameters. Raises the first cast's ModelError if no cast works.
    """
    errors = []
    for cast in casts:
        try:
            if cast is unchanged:
                return record(replica(model, dict(model.named_parameters())), batch, evaluate), cast
            return record(replica(model, {}, cast), mapped(cast, batch), evaluate), cast
        except ModelError as error:
            errors.append(error)
    raise errors[0] from errors[0].__cause__


def record(model: nn.Module, batch: Any, evaluate: Evaluate) -> Recording:
    """Record `evaluate(model, batch)`, which must not compute gradients, in the model's own precision.

    A tensor that no operation produced is an input if it is part of the batch, is passed to the model, or is used
    outside of the model. (A loss may close over its data, or draw it with its own generator.) All other such tensors
    are constants of the model: buffers, attributes, and whatever a forward pass closes over. Parameters that share all
    their memory count as one. A parameter is a constant unless it is a float of at least 16 bits. Attention is computed
    by its formula.

    Raises ModelError if the model raises, draws random numbers or writes to its own weights, and ValueError if
    parameters share a part of their memory.
    """
    parameters, tied = by_memory(
        {
            f"{path}.{key}".removeprefix("."): w.detach()
            for path, module in model.named_modules()  # modules occur once, parameters under each of their names
            for key, w in module._parameters.items()
            if w is not None
        }
    )
    parameters = {name: w if _alone(w) else w.clone().contiguous() for name, w in parameters.items()}
    held = {name: w.detach() for name, w in model.named_buffers()}
    names = [*parameters, *tied, *held]
    state = [*parameters.values(), *(parameters[first] for first in tied.values()), *held.values()]
    given = {id(tensor): tensor for tensor in tensors_in(batch)}

    class Called(nn.Module):
        """Let `functional_call` swap the tensors of the model, however `evaluate` calls it."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, batch: Any) -> Any:
            with running(model):
                return evaluate(self.inner, batch)

    called = Called()

    def run(state: list[Tensor], tensors: list[Tensor]) -> list[Tensor]:
        swapped = {f"inner.{name}": w for name, w in zip(names, state, strict=True)}
        put = dict(zip(given, tensors, strict=True))
        made = mapped(lambda tensor: put[id(tensor)], batch)
        return floating(torch.func.functional_call(called, swapped, (made,), tie_weights=False))

    recorder = _Recorder(parameters)
    hooks = [each for name, module in model.named_modules() for each in recorder.watch(name, module)]
    try:
        with (
            attention_by_formula(),
            forward_alone(),
            layers_apart(),
            plain_kernels(),
            torch.no_grad(),
            recorder,
            _Numbers(),
        ):
            tensors = [tensor.detach().clone() for tensor in given.values()]  # the model may write to its inputs
            recorder.given.update(map(id, tensors))
            outputs = torch.func.functionalize(run)(state, tensors)
    finally:
        for hook in hooks:
            hook.remove()
    order = {id(tensor): place for place, tensor in enumerate(given.values())}
    origins = tuple(order.get(id(recorder.values[number])) for number in recorder.inputs)
    spots = {_spot(w): name for name, w in held.items() if movable(w) and w.numel() and _alone(w)}
    buffers = {n: spots[_spot(tensor)] for n, tensor in recorder.constants.items() if _spot(tensor) in spots}
    written = tuple(name for name, w in held.items() if w.untyped_storage().data_ptr() in recorder.written)
    return Recording(recorder.program(outputs), tuple(recorder.values), parameters, tied, origins, buffers, written)


def by_memory(parameters: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the parameters without duplicates in memory, and the name of the first one for each duplicate.

    Raises ValueError if parameters share a part of their memory.
    """
    alone: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    sharing: dict[int, list[str]] = defaultdict(list)
    for name, w in parameters.items():
        memory = w.untyped_storage().data_ptr()
        first = next((other for other in sharing[memory] if _aliased(w, alone[other])), None)
        if first is not None:
            tied[name] = first
            continue
        if part := next((other for other in sharing[memory] if _overlap(w, alone[other])), None):
            raise ValueError(
                f"Parameters must share all their memory or none. Found that {name} is a part of {part}; make it a "
                f"view that the forward pass takes, or clone it"
            )
        alone[name] = w
        sharing[memory].append(name)
    return alone, tied


def _aliased(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors consist of the same entries of the same memory."""
    return (
        one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.storage_offset() == other.storage_offset()
        and not one.is_meta
        and torch.Size(one.shape).numel() > 0
    )


def _alone(w: Tensor) -> bool:
    """Return whether a tensor covers all of its memory, in order."""
    return w.is_contiguous() and w.untyped_storage().nbytes() == w.numel() * w.element_size()


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors' stretches of memory, from first to last entry, overlap."""
    if not (one.numel() and other.numel()) or one.is_meta or other.is_meta:
        return False
    ends = []
    for each in (one, other):
        reach = sum((size - 1) * stride for size, stride in zip(each.shape, each.stride(), strict=True))
        ends.append((each.storage_offset(), each.storage_offset() + reach))
    return ends[0][0] <= ends[1][1] and ends[1][0] <= ends[0][1]


def movable(w: Tensor) -> bool:
    """Return whether groups can act on a parameter: a nonempty, strided, unquantized tensor of floats of >= 16 bits."""
    return (
        w.numel() > 0
        and w.is_floating_point()
        and w.dtype.itemsize > 1
        and w.layout == torch.strided
        and not w.is_quantized
    )


class _Recorder(TorchDispatchMode):
    """Number the arguments and results of operations by identity; all of them are kept alive here."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: otherwise torch imports its compiler, which takes seconds, only to disable compilation."""
        return False

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.parameters = parameters
        self.operations: list[Operation] = []
        self.values: list[Tensor] = []
        self.layouts: list[Layout] = []
        self.numbers: dict[int, int] = {}
        self.memories: dict[int, int] = {}
        self.leaves: dict[int, str] = {}
        self.inputs: list[int] = []
        self.constants: dict[int, Tensor] = {}
        self.modules = [""]
        moved = {name: w for name, w in parameters.items() if movable(w) and w.numel()}
        self.names = {w.untyped_storage().data_ptr(): name for name, w in moved.items()}
        self.given = set[int]()
        self.drawn: dict[int, str] = {}
        self.written = set[int]()

    def watch(self, name: str, module: nn.Module) -> list[Any]:
        """Register hooks that track the running module and the arguments of the outermost one, and return them."""

        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            if len(self.modules) == 1:
                self.given.update(map(id, tensors_in((args, kwargs))))
            self.modules.append(name or "the model")

        def leave(*_: Any) -> None:
            self.modules.pop()

        return [module.register_forward_pre_hook(enter, with_kwargs=True), module.register_forward_hook(leave)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.copy_.default and id(args[0]) in self.numbers and self._leaf(args[0]):
            return self._written_back(*args[:2])
        with self:
            made = DECOMPOSITIONS.get(func.overloadpacket.__name__, func.decompose)(*args, **kwargs)
        if made is not NotImplemented:
            return made
        taken = self._referred((args, kwargs))
        operation = Operation(_OF_NUMBERS.get(func, func), taken[0], taken[1], (), self.modules[-1])
        drawn = next((self.drawn[n] for n in operation.ins if n in self.drawn), None)
        if torch.Tag.nondeterministic_seeded in func.tags:
            if len(self.modules) == 1 and kwargs.get("generator") is not None:
                return func(*args, **kwargs)  # data of a loss, the same in each run
            drawn = f"{self.modules[-1] or 'its forward'} draws random numbers ({func.overloadpacket.__name__})"
        out = func(*args, **kwargs)
        if drawn is not None:
            self._draw([self._number(t, fresh=True) for t in _tensors(out)], drawn)
            return out
        if func is aten.lift_fresh.default or func is aten.lift.default:
            self.constants[self._number(out)] = out
        else:
            outs = tuple(self._number(t, fresh=True) for t in _tensors(out))
            self.operations.append(replace(operation, outs=outs))
        return out

    def _draw(self, outs: list[int], how: str) -> None:
        """Mark values as dependent on random numbers; operations on them are left out of the program.

        Raises ModelError if there are no values: then a Python number is read, which may decide what runs.
        """
        if not outs:
            raise ModelError(f"The model must compute the same on the same inputs. Found that {how}")
        self.drawn.update(dict.fromkeys(outs, how))

    def _written_back(self, old: Tensor, new: Tensor) -> Tensor:
        """Record that functionalization writes a changed value back to memory; raise ModelError for parameters."""
        memory = old.untyped_storage().data_ptr()
        if not torch.equal(old, new):
            if memory in self.names:
                raise ModelError("The model must not write to its own weights while it runs. Found that it does")
            self.written.add(memory)
        return old

    def _leaf(self, tensor: Tensor) -> bool:
        number = self.numbers[id(tensor)]
        return number in self.leaves or number in self.constants or number in self.inputs

    def _number(self, tensor: Tensor, fresh: bool = False) -> int:
        """Return the number of a tensor, a new one if it has no number or is `fresh`."""
        if not fresh and id(tensor) in self.numbers:
            return self.numbers[id(tensor)]
        number = self.numbers[id(tensor)] = len(self.values)
        self.values.append(tensor)
        storage = tensor.untyped_storage()
        memory = self.memories.setdefault(storage._cdata, len(self.memories))
        size = max(tensor.element_size(), 1)
        self.layouts.append(
            Layout(
                memory,
                tuple(tensor.shape),
                tensor.stride(),
                int(tensor.storage_offset()),
                tensor.dtype,
                int(storage.nbytes()) // size,
            )
        )
        return number

    def _referred(self, tree: Any) -> Any:
        """Return nested arguments with Refs in place of tensors."""
        if isinstance(tree, Tensor):
            return Ref(self.numbers[id(tree)] if id(tree) in self.numbers else self._found(tree))
        if isinstance(tree, (list, tuple)):
            return type(tree)(self._referred(item) for item in tree)
        return {key: self._referred(item) for key, item in tree.items()} if isinstance(tree, dict) else tree

    def _found(self, tensor: Tensor) -> int:
        """Number a tensor that no operation produced, as a parameter, an input or a constant."""
        number = self._number(tensor)
        memory = tensor.untyped_storage().data_ptr()
        if memory in self.names:
            self.leaves[number] = self.names[memory]
        elif id(tensor) in self.given or len(self.modules) == 1:
            self.inputs.append(number)
        else:
            self.constants[number] = tensor
        return number

    def program(self, outputs: list[Tensor]) -> Program:
        """Return the recorded program with these outputs."""
        places = {_spot(t): n for n, t in enumerate(self.values)}
        numbers = [self.numbers.get(id(t), places.get(_spot(t), -1)) for t in outputs]
        if how := next((self.drawn[n] for n in numbers if n in self.drawn), None):
            self._draw([], how)
        return Program(
            tuple(self.operations),
            tuple(self.layouts),
            self.leaves,
            tuple(self.inputs),
            self.constants,
            tuple(dict.fromkeys(n for n in numbers if n >= 0)),
        )


def _spot(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key that identifies a value, also among views of one memory."""
    return tensor.untyped_storage()._cdata, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [tensor for item in tree for tensor in _tensors(item)] if isinstance(tree, (list, tuple)) else []


class _Numbers(TorchFunctionMode):
    """Handle calls that functionalized tensors do not support: conversion to Python numbers, and `requires_grad`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.requires_grad_, Tensor.retain_grad):
            return args[0]
        if func is Tensor.requires_grad.__set__:  # type: ignore[attr-defined]
            return None
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            index = tuple(map(_plain, args[1])) if isinstance(args[1], tuple) else _plain(args[1])
            args = (args[0], index, *args[2:])
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
            args = (_value(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


def _plain(index: Any) -> Any:
    """Return an index with numbers in place of 0-dimensional tensors in lists."""
    if not isinstance(index, (list, tuple)):
        return index
    return [each.item() if isinstance(each, Tensor) and each.ndim == 0 else _plain(each) for each in index]


def _value(tensor: Tensor) -> Tensor:
    """Return the tensor inside a functional one; `torch.equal` records that it is read."""
    torch.equal(tensor, tensor)
    if not torch._is_functional_tensor(tensor):
        return tensor
    torch._sync(tensor)  # type: ignore[attr-defined]
    return torch._from_functional_tensor(tensor)


@contextmanager
def forward_alone() -> Iterator[None]:
    """Run only the forward of each autograd.Function, in this thread: functorch has further requirements for these."""
    apply, own = torch.autograd.Function.__dict__["apply"], threading.get_ident()

    def forward(function: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != own:
            return apply.__get__(None, function)(*args, **kwargs)
        if function.setup_context is not torch.autograd.function._SingleLevelFunction.setup_context:
            return function.forward(*args, **kwargs)
        return function.forward(torch.autograd.function.FunctionCtx(), *args, **kwargs)

    try:
        torch.autograd.Function.apply = classmethod(forward)  # type: ignore[assignment, method-assign]
        yield
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]


@contextmanager
def layers_apart() -> Iterator[None]:
    """Compute torch's layers step by step, without the fast path that makes some a single operation."""
    fused = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Disable oneDNN, whose recurrent layers are a single operation, and in float32 only."""
    enabled = torch._C._get_mkldnn_enabled()
    try:
        torch._C._set_mkldnn_enabled(False)
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def digest(recording: Recording) -> str:
    """Return a hash that is equal for recordings with the same operations on parameters of the same names.

    It includes shapes and the values of constants, such as statistics of norms. It excludes the values of inputs and
    parameters, and the precision.
    """
    program, digested = recording.program, hashlib.sha256()
    operations = [(str(each.func), each.args, each.kwargs, each.outs) for each in program.operations]
    layouts = [
        (each.memory, each.shape, each.stride, each.offset, each.room, each.dtype.is_floating_point)
        for each in program.layouts
    ]
    digested.update(repr((operations, layouts, program.parameters, program.inputs, program.outputs)).encode())
    for number, tensor in program.constants.items():
        values = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        digested.update(repr((number, values.detach().cpu().tolist())).encode())
    return digested.hexdigest()
