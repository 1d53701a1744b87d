"""Record what a model computes, operation by operation, and follow single numbers of it through views."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.symmetries.operations import CHOICES, Key, Operation, is_plain, key
from quotient_manifolds.symmetries.outputs import Evaluate, answer
from quotient_manifolds.symmetries.recorder import record
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


def _taken(operation: Operation, numbers: Tensor) -> Tensor:
    """Return which of the numbers that it is given an operation takes: some, where it chooses experts from a stack."""
    if operation.name not in CHOICES or numbers.ndim < 3 or operation.arguments[0].shape != numbers.shape:
        return numbers
    found: Tensor = operation.call(numbers, *operation.arguments[1:], **operation.options)
    return found


def _home(name: str) -> str:
    """Return the path of the module in which a parameter's module stands."""
    return name.rpartition(".")[0].rpartition(".")[0]


class Trace:
    """Run the model once on the inputs, in float64, and hold what it computed.

    operations: in the order of their calls, weights among their arguments in their own type. outputs: the model's
    floating point ones. params: by name, as they were used, which are the model's own weights, not to be written to; a
    float64 copy of one only where the model writes to it, or where its numbers do not lie in a memory of their own, in
    order. One parameter may be used in parts, and by several operations: `parts` tells which numbers of it a tensor is,
    by indices on the CPU wherever the model is.
    """

    def __init__(self, model: nn.Module, inputs: Any, evaluate: Evaluate | None = None) -> None:
        run = record(model, inputs, evaluate or answer)
        self.params, self.outputs, self._given = run.params, run.outputs, run.given
        self.operations = simplified(run.operations, self.params.values(), self.outputs)
        self._users: dict[Key, list[Operation]] = {}
        self._linears: dict[int, LinearMap | None] = {}
        for operation in self.operations:
            for used in {key(tensor): tensor for tensor in operation.inputs}:
                self._users.setdefault(used, []).append(operation)

    @cached_property
    def parts(self) -> dict[Key, Part]:
        """Return which numbers of which parameter a tensor is, by its key; made when it is first asked for."""
        found: dict[Key, Part] = {}
        for name, w in self.params.items():
            for tensor, numbers in self.follow(w, self._count[: w.numel()].view(w.shape)):
                found[key(tensor)] = name, numbers
        return found

    @cached_property
    def _count(self) -> Tensor:
        """Return the flat indices of the largest parameter, of which all others are views."""
        return torch.arange(max((w.numel() for w in self.params.values()), default=0))

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
    def idle(self) -> dict[str, Tensor]:
        """Return where in a parameter, flat, the numbers are that did not run, by the names of those that have such.

        No operation used them, as happens to branches and to experts that are stacked in one parameter. Rows of a
        table that are not looked up have run: what does one thing with one row does it with another.
        """
        found = {}
        for name, w in self.params.items():
            taken = [_taken(operation, numbers) for operation, numbers in self._uses.get(name, [])]
            if not any(map(self._is_whole, taken, itertools.repeat(w))):
                idle = ~self.mask(name, taken)
                if bool(idle.any()):
                    found[name] = idle
        return found

    def _is_whole(self, numbers: Tensor, weight: Tensor) -> bool:
        """Return whether indices are those of all numbers of a parameter, in some order."""
        views = numbers.untyped_storage().data_ptr() == self._count.untyped_storage().data_ptr()
        return views and numbers.numel() == weight.numel() and 0 not in numbers.stride()

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
            alike = elements.stride(0) == 0 or bool((elements == elements[:1]).all())
            return (name, elements[0]) if alike else ("", matrix)
        return (name, elements) if elements.ndim == 2 else ("", matrix)

    def linear(self, operation: Operation) -> LinearMap | None:
        """Return the linear map that an operation computes with a parameter on the right; None if it does not."""
        if id(operation) not in self._linears:
            self._linears[id(operation)] = self._linear(operation)
        return self._linears[id(operation)]

    def _linear(self, operation: Operation) -> LinearMap | None:
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
        first = min(users, key=lambda user: self._places[id(user)], default=None)
        if first is None or len(first.inputs) != 2:
            return None
        alone = all(user is first for user in users)
        return first if first.name == "add_" or (first.name == "add" and alone) else None

    @cached_property
    def _places(self) -> dict[int, int]:
        return {id(operation): place for place, operation in enumerate(self.operations)}

    def used_besides(self, parts: Iterable[Part], known: Set[int]) -> str:
        """Return what else than the operations known (by id) uses these numbers of parameters; "" if nothing does."""
        touched: dict[str, list[Tensor]] = {}
        for name, elements in parts:
            touched.setdefault(name, []).append(elements)
        uses = [(operation, name, its) for name in touched for operation, its in self._uses.get(name, [])]
        others = [each for each in uses if id(each[0]) not in known]
        masks: dict[str, Tensor] = {}
        for operation, name, numbers in sorted(others, key=lambda each: self._places[id(each[0])]):
            if name not in masks:
                masks[name] = self.mask(name, touched[name])
            if bool(masks[name][numbers].any()):
                return f"{operation.name} uses {name} too"
        return ""

    @cached_property
    def _uses(self) -> dict[str, list[tuple[Operation, Tensor]]]:
        """Return the operations that use numbers of a parameter, by its name, and which numbers."""
        found: dict[str, list[tuple[Operation, Tensor]]] = {}
        for operation in self.operations:
            for tensor in () if operation.is_view else operation.inputs:
                if key(tensor) in self.parts:
                    name, numbers = self.parts[key(tensor)]
                    found.setdefault(name, []).append((operation, numbers))
        return found

    def mask(self, name: str, parts: Iterable[Tensor]) -> Tensor:
        """Return where in a parameter, flat, the numbers are that indices say."""
        mask = torch.zeros(self.params[name].numel(), dtype=torch.bool)
        for numbers in parts:
            mask[numbers] = True
        return mask
