"""Record what a model computes, operation by operation, and follow single numbers of it through views."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quotient_manifolds.replica import private_batch, replica
from quotient_manifolds.symmetries.outputs import Evaluate, answer, doubled, floating

# Operations that move numbers and change none; a cast rounds them, which is none of their meaning.
_VIEWS = frozenset(
    [
        "view",
        "_unsafe_view",
        "reshape",
        "permute",
        "transpose",
        "t",
        "expand",
        "slice",
        "select",
        "unsqueeze",
        "squeeze",
        "clone",
        "alias",
        "detach",
        "_to_copy",
        "split",
        "split_with_sizes",
        "unbind",
    ]
)


@dataclass(frozen=True, eq=False)
class Operation:
    """Hold one call of an operation of ATen: its name, such as "addmm", its arguments and its tensors."""

    name: str
    call: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    outputs: tuple[Tensor, ...]

    @property
    def inputs(self) -> list[Tensor]:
        """Return the tensors among the arguments."""
        return [leaf for leaf in tree_leaves((self.arguments, self.options)) if isinstance(leaf, Tensor)]

    @property
    def is_view(self) -> bool:
        """Return whether it moves numbers and changes none."""
        return self.name in _VIEWS and self.call is not torch.ops.aten.view.dtype

    def moved(self, numbers: Tensor) -> tuple[Tensor, ...]:
        """Apply a view to other numbers in place of its input."""
        if self.name in ("_to_copy", "detach", "alias", "clone"):
            return (numbers,)
        if self.name in ("view", "_unsafe_view", "reshape"):  # numbers may lie in memory in another way
            return (numbers.reshape(self.outputs[0].shape),)
        found = self.call(numbers, *self.arguments[1:], **self.options)
        return (found,) if isinstance(found, Tensor) else tuple(found)


Key = tuple[Any, ...]


def key(tensor: Tensor) -> Key:
    """Return what tells a tensor from others that are alive: autograd makes new objects of the same memory."""
    if tensor.is_nested or tensor.layout != torch.strided:  # several memories, or none that can be asked for
        return (id(tensor),)
    storage = tensor.untyped_storage().data_ptr()
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


class _Recorder(TorchDispatchMode):
    """Write down every operation of ATen; the tensors are kept alive, so that no memory is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        outputs = tuple(leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor))
        self.operations.append(Operation(func.overloadpacket.__name__, func, args, kwargs or {}, outputs))
        return found


class Trace:
    """Run the model once on the inputs, in float64, and hold what it computed.

    operations: in the order of their calls. outputs: the model's floating point ones. params: by name, as they were
    used. One parameter may be used in parts, and by several operations: `parts` tells which numbers of it a tensor is.
    """

    def __init__(self, model: nn.Module, inputs: Any, evaluate: Evaluate | None = None) -> None:
        self.params = {name: doubled(w.detach().clone()) for name, w in model.named_parameters()}
        copy = replica(model, {name: nn.Parameter(w, requires_grad=False) for name, w in self.params.items()}, doubled)
        self.params = dict(copy.named_parameters())
        fast = torch.backends.mha.get_fastpath_enabled()
        recorder = _Recorder()
        try:
            torch.backends.mha.set_fastpath_enabled(False)  # one fused operation would hide all of a torch layer
            with torch.no_grad(), recorder:
                found = (evaluate or answer)(copy, private_batch(inputs, doubled))
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
        self.operations = recorder.operations
        self.outputs = floating(found)
        self._users: dict[Key, list[Operation]] = {}
        for operation in self.operations:
            for used in {key(tensor): tensor for tensor in operation.inputs}:
                self._users.setdefault(used, []).append(operation)
        self.parts: dict[Key, tuple[str, Tensor]] = {}
        for name, w in self.params.items():
            for tensor, numbers in self.follow(w, torch.arange(w.numel(), device=w.device).view_as(w)):
                self.parts[key(tensor)] = name, numbers

    def users(self, tensor: Tensor) -> list[Operation]:
        """Return the operations that take the tensor."""
        return self._users.get(key(tensor), [])

    def follow(self, tensor: Tensor, numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the tensor and all views of it, with whatever `numbers`, of its shape, say of its entries."""
        waiting, seen = [(tensor, numbers)], set[Key]()
        while waiting:
            one, its = waiting.pop()
            if key(one) in seen:
                continue
            seen.add(key(one))
            yield one, its
            for operation in self.users(one):
                if operation.is_view and key(operation.inputs[0]) == key(one):
                    waiting += zip(operation.outputs, operation.moved(its), strict=True)
