"""Record what a model computes, operation by operation, and follow single numbers of it through views."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quotient_manifolds.replica import private_batch, replica
from quotient_manifolds.symmetries.operations import Key, Operation, is_plain, key
from quotient_manifolds.symmetries.outputs import Evaluate, answer, doubled, floating
from quotient_manifolds.symmetries.simplified import simplified

_NUMBER = re.compile(r"\.\d+(?=\.)")  # of a layer, or of one of several experts
Part = tuple[str, Tensor]
"""A tensor that is cut out of a parameter: its name, and for every entry the flat index in it."""


@dataclass(frozen=True, eq=False)
class LinearMap:
    """Hold x -> x M + b, where M (in, out) and b (out,) are numbers of parameters, by flat indices.

    y: the answer, with b if there is one. adding: the operation that adds b, where it is one of its own.
    """

    weight: str
    elements: Tensor
    y: Tensor
    bias: str = ""
    bias_elements: Tensor | None = None
    adding: Operation | None = None


def _home(name: str) -> str:
    """Return the path of the module in which a parameter's module stands."""
    return name.rpartition(".")[0].rpartition(".")[0]


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
    used. One parameter may be used in parts, and by several operations: `parts` tells which numbers of it a tensor is,
    by indices on the CPU wherever the model is.
    """

    def __init__(self, model: nn.Module, inputs: Any, evaluate: Evaluate | None = None) -> None:
        self.params = {
            name: doubled(w.detach().clone(memory_format=torch.contiguous_format))
            for name, w in model.named_parameters()
        }
        copy = replica(model, {name: nn.Parameter(w, requires_grad=False) for name, w in self.params.items()}, doubled)
        self.params = dict(copy.named_parameters())
        fast = torch.backends.mha.get_fastpath_enabled()
        recorder = _Recorder()
        try:
            torch.backends.mha.set_fastpath_enabled(False)  # one fused operation would hide all of a torch layer
            given = private_batch(inputs, doubled)
            with torch.no_grad(), recorder:
                found = (evaluate or answer)(copy, given)
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
        self.outputs = floating(found)
        self.operations = simplified(recorder.operations, self.params.values(), self.outputs)
        self._given = tree_leaves(given)
        self._users: dict[Key, list[Operation]] = {}
        for operation in self.operations:
            for used in {key(tensor): tensor for tensor in operation.inputs}:
                self._users.setdefault(used, []).append(operation)

    @cached_property
    def parts(self) -> dict[Key, Part]:
        """Return which numbers of which parameter a tensor is, by its key; made when it is first asked for."""
        found: dict[Key, Part] = {}
        for name, w in self.params.items():
            for tensor, numbers in self.follow(w, torch.arange(w.numel()).view(w.shape)):
                found[key(tensor)] = name, numbers
        return found

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

    @cached_property
    def idle(self) -> frozenset[str]:
        """Return the parameters that no operation used, or not all of where they are stacked, as experts are."""
        taken: dict[str, int] = {}
        for operation in self.operations:
            for used in {key(tensor) for tensor in operation.inputs if not operation.is_view}:
                if used in self.parts:
                    name, elements = self.parts[used]
                    taken[name] = taken.get(name, 0) + elements.numel()
        stacked = (name for name, w in self.params.items() if w.ndim == 3 and taken.get(name, 0) < w.numel())
        return frozenset((*(self.params.keys() - taken.keys()), *stacked))

    def idle_like(self, names: Iterable[str]) -> str:
        """Return an idle parameter that may do what one of these does elsewhere; "" if none is.

        One of the same path but for a number, as experts have, or a matrix of a module beside it, as branches are.
        """
        kinds = {_NUMBER.sub(".*", f".{name}.") for name in names}
        homes = {_home(name) for name in names}
        for name in sorted(self.idle):
            matrix = self.params[name].numel() > self.params[name].shape[-1:].numel()
            if _NUMBER.sub(".*", f".{name}.") in kinds or (matrix and _home(name) in homes):
                return name
        return ""

    def is_told(self, tensor: Tensor) -> bool:
        """Return whether what was given to the model may tell what the tensor is."""
        return self._told is None or key(tensor) in self._told

    @cached_property
    def _told(self) -> set[Key] | None:
        """Return what is computed from the inputs; None if they hold more than tensors and numbers."""
        tensors = [leaf for leaf in self._given if isinstance(leaf, Tensor)]
        if not all(isinstance(leaf, (Tensor, bool, int, float, str, type(None))) for leaf in self._given):
            return None
        found = {key(tensor) for tensor in tensors}
        for operation in self.operations:
            if any(key(tensor) in found for tensor in operation.inputs):
                found |= {key(output) for output in operation.outputs}
        return found

    def only_user(self, tensor: Tensor) -> Operation | None:
        """Return the one operation that takes a tensor or views of it; None if there are several or it is an output."""
        users: dict[int, Operation] = {}
        for view, _ in self.follow(tensor, tensor):
            if self.is_output(view):
                return None
            users |= {id(user): user for user in self.users(view) if not user.is_view}
        return next(iter(users.values())) if len(users) == 1 else None

    def is_output(self, tensor: Tensor) -> bool:
        """Return whether the model answers with the tensor."""
        return any(key(tensor) == key(output) for output in self.outputs)

    def part(self, matrix: Tensor) -> Part:
        """Return the parameter that a matrix, or one for every example, is numbers of, and which; no name if none."""
        name, elements = self.parts.get(key(matrix), ("", matrix))
        if name and elements.ndim == 3:
            return (name, elements[0]) if bool((elements == elements[:1]).all()) else ("", matrix)
        return (name, elements) if elements.ndim == 2 else ("", matrix)

    def linear(self, operation: Operation) -> LinearMap | None:
        """Return the linear map that an operation computes with a parameter on the right; None if it does not."""
        if operation.name not in ("mm", "bmm", "addmm"):
            return None
        weight, elements = self.part(operation.arguments[-1])
        if not weight or not elements.numel():
            return None
        adding = operation if operation.name == "addmm" else self.first_sum(operation)
        if adding is not None and is_plain(adding):
            for bias, numbers in (self.parts[key(each)] for each in adding.inputs if key(each) in self.parts):
                if bias != weight and numbers.numel() == elements.shape[1]:
                    own = None if adding is operation else adding
                    return LinearMap(weight, elements, adding.outputs[0], bias, numbers.flatten(), own)
        return LinearMap(weight, elements, operation.outputs[0])

    def first_sum(self, product: Operation) -> Operation | None:
        """Return the sum with a product that comes before anything else is done with it: torch adds biases so."""
        y = product.outputs[0]
        users = [user for view, _ in self.follow(y, y) for user in self.users(view) if not user.is_view]
        first = min(users, key=self.operations.index, default=None)
        if first is None or len(first.inputs) != 2:
            return None
        alone = all(user is first for user in users)
        return first if first.name == "add_" or (first.name == "add" and alone) else None

    def used_besides(self, parts: Iterable[Part], known: Set[int]) -> str:
        """Return what else than the operations known (by id) uses these numbers of parameters; "" if nothing does."""
        touched: dict[str, Tensor] = {}
        for name, elements in parts:
            mask = touched.setdefault(name, torch.zeros(self.params[name].numel(), dtype=torch.bool))
            mask[elements.flatten()] = True
        for operation in self.operations:
            if operation.is_view or id(operation) in known:
                continue
            for tensor in operation.inputs:
                name, numbers = self.parts.get(key(tensor), ("", tensor))
                if name in touched and bool(touched[name][numbers.flatten()].any()):
                    return f"{operation.name} uses {name} too"
        return ""
