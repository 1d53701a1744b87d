"""Say of every number that a model computes which rows of parameters are added to it, and which sums are used."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from quotient_manifolds.symmetries.operations import SUMS, Key, Operation, key, looked_up
from quotient_manifolds.symmetries.trace import Trace


@dataclass(eq=False)
class Unit:
    """Hold rows (rows, channels) of a parameter that move together, by flat indices, and the operations that add them.

    rank: what comes first makes up for the others: tables, then rows of positions, then vectors.
    """

    name: str
    rows: Tensor
    rank: tuple[int, int]
    operations: set[int] = field(default_factory=set)


Row = dict[Unit, float]
"""A sum of units, with their coefficients."""


def added_units(trace: Trace) -> tuple[list[Unit], list[Row], list[Row]]:
    """Return all that is added to something, and the sums that may not change, for more than a sum is taken of them.

    The mean over channels of those in the last list may: LayerNorms alone take them.
    """
    sums = _Sums(trace)
    for operation in trace.operations:
        sums.follow(operation)
    for output in trace.outputs:
        sums.take(output)
    normed = sums.normed.keys() - sums.taken.keys()
    taken, centred = ([dict(sums.sets[index]) for index in found if sums.sets[index]] for found in (sums.taken, normed))
    return list(sums.units.values()), taken, centred


class _Sums:
    """Give every tensor a label for each of its numbers: the index of the sum of units in it."""

    def __init__(self, trace: Trace) -> None:
        self.units: dict[tuple[str, int, int], Unit] = {}
        self.sets: list[tuple[tuple[Unit, float], ...]] = [()]
        self.taken: dict[int, None] = {}
        self.normed: dict[int, None] = {}
        self._trace = trace
        self._labels: dict[Key, Tensor] = {}
        self._indices: dict[frozenset[tuple[Unit, float]], int] = {frozenset(): 0}

    def follow(self, operation: Operation) -> None:
        """Label what an operation gives, or note down what it takes."""
        if operation.is_view:
            labels = self._labels.get(key(operation.inputs[0]))
            if labels is not None:
                for output, moved in zip(operation.outputs, operation.moved(labels), strict=True):
                    self._labels[key(output)] = moved
            return
        labels = self._sum(operation)
        if labels is None:
            for tensor in operation.inputs:
                self.take(tensor, operation)
        for output in operation.outputs:
            self._labels.pop(key(output), None)
        if labels is not None and bool(_few(labels).any()):
            self._labels[key(operation.outputs[0])] = labels

    def take(self, tensor: Tensor, by: Operation | None = None) -> None:
        """Note down that something else than a sum takes these numbers."""
        if key(tensor) in self._labels:
            labels = self._labels[key(tensor)]
            normed = by is not None and by.name == "native_layer_norm" and _is_of_channels(by, tensor, labels)
            found = self.normed if normed else self.taken
            found |= dict.fromkeys(_few(labels).unique().tolist())

    def _sum(self, operation: Operation) -> Tensor | None:
        """Return the labels of a sum, a sequence put together, a table, or a bias; None for anything else."""
        arguments, name = operation.arguments, operation.name
        if any(each.is_nested or each.layout != torch.strided for each in (*operation.inputs, *operation.outputs)):
            return None
        shape = operation.outputs[0].shape if operation.outputs else torch.Size()
        if (found := looked_up(operation)) is not None and key(found[0]) in self._trace.parts:
            return self._table(operation, *found, shape)
        if name in (*SUMS, "sub", "sub_"):
            factor = operation.options.get("alpha", 1) * (-1 if name.startswith("sub") else 1)
            first, second = (self._label(each, operation).expand(shape) for each in arguments[:2])
            return self._added(first, second, float(factor))
        if name == "cat":
            return torch.cat([self._label(each, operation) for each in arguments[0]], *arguments[1:])
        if name in ("mul", "mul_", "div", "div_") and (factor := self._number(arguments[1])):
            labels = self._label(arguments[0], operation)
            return self._added(torch.zeros_like(labels), labels, factor if name.startswith("mul") else 1 / factor)
        if name == "addmm" and operation.options.get("beta", 1) == 1:
            self.take(arguments[1])
            return self._label(arguments[0], operation).expand(shape)
        if name == "native_layer_norm" and arguments[3] is not None:
            self.take(arguments[0], operation)
            return self._label(arguments[3], operation).expand(shape)
        if name == "convolution" and arguments[2] is not None:
            self.take(arguments[0])
            bias = self._label(arguments[2], operation)
            return bias.view(-1, *[1] * (len(shape) - 2)).expand(shape)
        return None

    def _number(self, factor: object) -> float:
        """Return a factor that is a number for all, and 0 for any other."""
        if isinstance(factor, Tensor):
            own = factor.numel() == 1 and factor.ndim == 0 and key(factor) not in self._trace.parts
            return float(factor) if own else 0.0
        return float(factor) if isinstance(factor, (int, float)) else 0.0

    def _label(self, tensor: object, operation: Operation) -> Tensor:
        """Return the labels of what is added; rows of a parameter are units of their own."""
        none = torch.zeros((), dtype=torch.long)
        if not isinstance(tensor, Tensor):
            return none
        name, numbers = self._trace.parts.get(key(tensor), ("", none))
        width = numbers.shape[-1] if numbers.ndim else 0
        if not name or width < 2 or not numbers.numel():
            return self._labels.get(key(tensor), none.new_zeros(tensor.shape))
        flat = numbers.reshape(-1, width)
        offsets = flat - flat[:, :1]
        if not bool((offsets == offsets[:1]).all()):
            return none.new_zeros(tensor.shape)
        starts, which = flat[:, 0].unique(return_inverse=True)
        vector = numbers.unique().numel() == width == self._trace.params[name].numel()
        units = [self._unit(name, (start + offsets[0])[None], 2 if vector else 1, operation) for start in starts]
        labels = torch.tensor([self._index({unit: 1.0}) for unit in units])
        return labels[which].view(*numbers.shape[:-1], 1).expand(numbers.shape)

    def _table(self, operation: Operation, table: Tensor, words: Tensor, shape: torch.Size) -> Tensor | None:
        name, rows = self._trace.parts[key(table)]
        if rows.ndim != 2:
            return None
        if self._trace.is_told(words) or words.unique().numel() < len(rows):  # another input may ask for others
            return torch.tensor(self._index({self._unit(name, rows, 0, operation): 1.0})).expand(shape)
        units = [self._unit(name, row[None], 1, operation) for row in rows]
        labels = torch.tensor([self._index({unit: 1.0}) for unit in units])
        return labels[words.cpu()][..., None].expand(shape)

    def _unit(self, name: str, rows: Tensor, rank: int, operation: Operation) -> Unit:
        place = name, int(rows[0, 0]), rows.numel()
        unit = self.units.setdefault(place, Unit(name, rows, (rank, len(self.units))))
        unit.operations.add(id(operation))
        return unit

    def _index(self, row: Row) -> int:
        items = frozenset((unit, value) for unit, value in row.items() if value)
        if items not in self._indices:
            self._indices[items] = len(self.sets)
            self.sets.append(tuple(items))
        return self._indices[items]

    def _added(self, first: Tensor, second: Tensor, factor: float) -> Tensor:
        """Return the labels of first + factor * second, of one shape."""
        shape = first.shape
        if first.ndim and first.stride(-1) == second.stride(-1) == 0:  # the same for all channels
            first, second = first[..., :1], second[..., :1]
        count = len(self.sets)
        codes, which = (first * count + second).unique(return_inverse=True)
        found = []
        for code in codes.tolist():
            row = dict(self.sets[code // count])
            for unit, value in self.sets[code % count]:
                row[unit] = row.get(unit, 0.0) + factor * value
            found.append(self._index(row))
        return torch.tensor(found)[which].expand(shape)


def _few(labels: Tensor) -> Tensor:
    """Return the labels once for all channels, where they are the same."""
    return labels[..., :1] if labels.ndim and labels.stride(-1) == 0 else labels


def _is_of_channels(norm: Operation, x: Tensor, labels: Tensor) -> bool:
    """Return whether a norm of x is over rows of it all channels of which have the same label."""
    alike = bool((labels == labels[..., :1]).all())
    return alike and key(norm.arguments[0]) == key(x) and list(norm.arguments[1]) == [x.shape[-1]]
