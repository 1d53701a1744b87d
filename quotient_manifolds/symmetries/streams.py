"""Find what a stream that only LayerNorms read does not tell: means of its writers, and exchanges between tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quotient_manifolds.symmetries.freedom import Freedom, gaussian, read, typical, write
from quotient_manifolds.symmetries.pair import Params
from quotient_manifolds.symmetries.trace import SUMS, Key, Operation, Part, Trace, is_plain, key


@dataclass(frozen=True, eq=False)
class UnreadMean(Freedom):
    """Describe a writer whose answers are only ever read by LayerNorms, alone or in sums, so that their mean is free.

    A LayerNorm takes the mean over channels off what it reads, so W x + b and W x + b + (u^T x + c) 1 are the same to
    it. parts: names of parameters, with flat indices (rows, channels); the mean of each row may be any number.
    """

    parts: tuple[Part, ...]
    kind: ClassVar[str] = "mean"

    @property
    def names(self) -> tuple[str, ...]:
        """Return the parameters that a move touches."""
        return tuple(name for name, _ in self.parts)

    @property
    def families(self) -> dict[str, int]:
        """Return the dimensions of the moves that leave the function alone, by their name."""
        return {"mean that no norm reads": sum(len(elements) for _, elements in self.parts)}

    def fold(self, params: Params) -> None:
        """Make the mean of every row 0, in place."""
        for name, elements in self.parts:
            rows = read(params, name, elements)
            write(params, name, elements, rows - rows.mean(dim=1, keepdim=True))

    def move(self, params: Params, generator: torch.Generator, size: float, control: bool = False) -> None:
        """Add a number to every row, in place; with `control`, to every other channel of it."""
        for name, elements in self.parts:
            rows = read(params, name, elements)
            shift = size * typical(rows) * gaussian(rows, generator, len(rows), 1).expand(rows.shape).clone()
            if control:
                shift[:, ::2] = 0.0
            write(params, name, elements, rows + shift)


@dataclass(frozen=True, eq=False)
class Exchange(Freedom):
    """Describe tables of embeddings that are added: a vector may be moved from all rows of one to those of another.

    tables: their names; the first takes over the mean row of the others. width: the number of channels. centred: the
    rows of all have mean 0, so that the vector has, too.
    """

    tables: tuple[str, ...]
    width: int
    centred: bool
    kind: ClassVar[str] = "tables"

    @property
    def names(self) -> tuple[str, ...]:
        """Return the parameters that a move touches."""
        return self.tables

    @property
    def families(self) -> dict[str, int]:
        """Return the dimension of the moves that leave the function alone, by their name."""
        return {"vector between tables": (len(self.tables) - 1) * (self.width - self.centred)}

    def fold(self, params: Params) -> None:
        """Make the mean row of all tables but the first 0, in place."""
        for name in self.tables[1:]:
            self._exchange(params, name, params[name].double().reshape(-1, self.width).mean(dim=0))

    def move(self, params: Params, generator: torch.Generator, size: float, control: bool = False) -> None:
        """Take a random vector from every table but the first; give it to the first, unless for `control`; in place."""
        for name in self.tables[1:]:
            row = size * typical(params[name]) * gaussian(params[name], generator, self.width)
            self._exchange(params, name, row, give=not control)

    def _exchange(self, params: Params, name: str, row: Tensor, give: bool = True) -> None:
        first = self.tables[0]
        params[name] = (params[name].double() - row).to(params[name].dtype)
        if give:
            params[first] = (params[first].double() + row).to(params[first].dtype)


def find_means(trace: Trace) -> Iterator[UnreadMean]:
    """Yield the writers whose mean no norm reads."""
    found: dict[tuple[str, ...], list[_Writer]] = {}
    for operation in trace.operations:
        for writer in _writers(trace, operation):
            found.setdefault(tuple(name for name, _ in writer.parts), []).append(writer)
    for writers in found.values():
        parts = writers[0].parts
        alike = all(torch.equal(a, b) for other in writers for (_, a), (_, b) in zip(parts, other.parts, strict=True))
        known = {id(operation) for writer in writers for operation in writer.operations}
        if alike and not trace.used_besides(parts, known) and all(_ends_in_norms(trace, each) for each in writers):
            yield UnreadMean(parts)


def find_exchanges(trace: Trace, means: list[UnreadMean]) -> Iterator[Exchange]:
    """Yield the tables that are added before anything else is done with them."""
    centred = {name for mean in means for name in mean.names}
    sums: dict[str, list[int]] = {}
    for operation in trace.operations:
        for writer in _writers(trace, operation, linear=False):
            ((name, rows),) = writer.parts
            if operation.name == "cat":  # not every token has it
                continue
            known = {id(each) for each in writer.operations}
            if rows.numel() == trace.params[name].numel() and not trace.used_besides(writer.parts, known):
                sums[name] = [*sums.get(name, []), *_sums_after(trace, writer)]
    left = list(sums)
    while left:
        first = left.pop(0)
        others = [name for name in left if set(sums[name]) & set(sums[first])]
        width = trace.params[first].shape[-1]
        if others:
            left = [name for name in left if name not in others]
            names = (first, *others)
            yield Exchange(names, width, centred.issuperset(names))


@dataclass(frozen=True, eq=False)
class _Writer:
    """Hold what writes y: numbers of parameters (rows, channels), and the operations that use them for it.

    axis: that of y along which its channels lie.
    """

    parts: tuple[Part, ...]
    y: Tensor
    operations: tuple[Operation, ...]
    axis: int = -1

    @property
    def channels(self) -> Tensor:
        """Return for every entry of y which channel it is."""
        shape = [1] * self.y.ndim
        shape[self.axis] = -1
        return torch.arange(self.y.shape[self.axis]).view(shape).expand(self.y.shape)


def _writers(trace: Trace, operation: Operation, linear: bool = True) -> Iterator[_Writer]:
    if operation.name == "embedding":
        part = trace.parts.get(key(operation.arguments[0]))
        if part is not None and part[1].ndim == 2:
            yield _Writer((part,), operation.outputs[0], (operation,))
    if operation.name in (*SUMS, "cat"):  # a table, or a single vector, that is a parameter and used as it is
        for tensor in operation.inputs:
            part = trace.parts.get(key(tensor))
            if part is not None and part[1].ndim > 1:
                rows = part[1].flatten(0, -2).unique(dim=0)  # one for all examples
                yield _Writer(((part[0], rows),), operation.outputs[0], (operation,))
    if operation.name == "convolution" and linear:
        given = [trace.parts.get(key(each)) for each in operation.arguments[1:3] if isinstance(each, Tensor)]
        rows_of = [(part[0], part[1].flatten(1).mT if part[1].ndim > 1 else part[1][None]) for part in given if part]
        if len(rows_of) == len(given):
            yield _Writer(tuple(rows_of), operation.outputs[0], (operation,), axis=1)
    found = trace.linear(operation) if linear else None
    if found is not None:
        bias = ((found.bias, found.bias_elements[None]),) if found.bias_elements is not None else ()
        parts = ((found.weight, found.elements), *bias)
        yield _Writer(parts, found.y, (operation, *([found.adding] if found.adding else [])))


def _ends_in_norms(trace: Trace, writer: _Writer) -> bool:
    """Return whether the numbers of y end in LayerNorms over its channels, after sums with others or none."""
    width, seen, norms = writer.y.shape[writer.axis], set[Key](), 0
    waiting = [(writer.y, writer.channels)]
    while waiting:
        for tensor, numbers in trace.follow(*waiting.pop()):
            used = [user for user in trace.users(tensor) if not user.is_view]
            if trace.is_output(tensor):
                return False
            if key(tensor) in seen or not used:
                continue
            seen.add(key(tensor))
            alike = numbers.shape[-1:] == (width,) and torch.equal(numbers, torch.arange(width).expand(numbers.shape))
            if not alike:
                return False
            for operation in used:
                if not _keeps_channels(operation, width):
                    return False
                if operation.name == "native_layer_norm":
                    norms += 1
                else:
                    total = operation.outputs[0]
                    waiting.append((total, torch.arange(width).expand(total.shape)))
    return norms > 0


def _keeps_channels(operation: Operation, width: int) -> bool:
    """Return whether it is a sum, a sequence put together, or a LayerNorm over these channels."""
    if operation.name == "native_layer_norm":
        return list(operation.arguments[1]) == [width]
    if operation.outputs[0].shape[-1:] != (width,):
        return False
    if operation.name == "cat":
        along = operation.arguments[1] if len(operation.arguments) > 1 else 0
        return along % operation.outputs[0].ndim != operation.outputs[0].ndim - 1
    return operation.name in SUMS and is_plain(operation)


def _sums_after(trace: Trace, writer: _Writer) -> list[int]:
    """Return the sums that y goes into, one after the other, while nothing else is done with it."""
    sums = [id(writer.operations[0])] if writer.operations[0].name in SUMS else []
    y = writer.y
    while True:
        used = {id(user): user for view, _ in trace.follow(y, y) for user in trace.users(view) if not user.is_view}
        (only,) = used.values() if len(used) == 1 else (None,)
        if only is None or only.name != "add" or trace.is_output(y) or not is_plain(only):
            return sums
        sums.append(id(only))
        y = only.outputs[0]
