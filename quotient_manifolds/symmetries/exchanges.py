"""Find vectors that may be moved between what is added: tables, positions, class tokens, biases of parallel layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quotient_manifolds.symmetries.freedom import Freedom, gaussian, read, typical, write
from quotient_manifolds.symmetries.pair import Params
from quotient_manifolds.symmetries.streams import UnreadMean
from quotient_manifolds.symmetries.sums import Row, Unit, added_units
from quotient_manifolds.symmetries.trace import Part, Trace

SMALL = 1e-9  # a coefficient that is 0 but for rounding


@dataclass(frozen=True, eq=False)
class Exchange(Freedom):
    """Describe rows of parameters whose sums alone are used: vectors may be moved from some to others.

    parts: flat indices (rows, channels) of parameters; all rows of a part move by the same vector. directions (free,
    parts): part p moves by directions[f, p] v for any vector v and each f. The f-th direction moves the part free[f],
    with coefficient 1, and none of the others in `free`: their mean rows can be made 0. centred: the rows of all have
    mean 0, so that the vectors have, too. single: the parameters that are one row, and free.
    """

    parts: tuple[Part, ...]
    free: tuple[int, ...]
    directions: Tensor
    width: int
    centred: bool
    single: tuple[str, ...] = ()
    kind: ClassVar[str] = "tables"

    @property
    def name(self) -> str:
        """Return the name of the first part that can be made 0, and what it is about."""
        return f"{self.parts[self.free[0]][0]} {self.kind}"

    @property
    def names(self) -> tuple[str, ...]:
        """Return the parameters that a move touches, each once."""
        return tuple(dict.fromkeys(name for name, _ in self.parts))

    @property
    def families(self) -> dict[str, int]:
        """Return the dimension of the moves that leave the function alone, by their name."""
        return {"vector between tables": len(self.free) * (self.width - self.centred)}

    @property
    def constant(self) -> tuple[str, ...]:
        """Return the parameters that become 0: those that are one row, all of it."""
        return self.single

    def fold(self, params: Params) -> None:
        """Make the mean row of every free part 0, in place."""
        for direction, index in zip(self.directions, self.free, strict=True):
            self._move(params, direction, -self._allowed(read(params, *self.parts[index])).mean(dim=0))

    def move(self, params: Params, generator: torch.Generator, size: float, control: bool = False) -> None:
        """Move a random vector in every direction, in place; with `control`, only the free parts of it."""
        for direction, index in zip(self.directions, self.free, strict=True):
            rows = read(params, *self.parts[index])
            vector = size * typical(rows) * gaussian(rows, generator, *self._allowed(rows).shape[1:])
            alone = torch.arange(len(direction)) == index
            self._move(params, direction * alone if control else direction, vector)

    def _allowed(self, rows: Tensor) -> Tensor:
        """Return coordinates (rows, n) of what may be moved of rows (rows, width)."""
        return rows

    def _move(self, params: Params, direction: Tensor, vector: Tensor) -> None:
        for (name, rows), coefficient in zip(self.parts, direction.tolist(), strict=True):
            if coefficient:
                write(params, name, rows, read(params, name, rows) + coefficient * vector)


@dataclass(frozen=True, eq=False)
class MeanExchange(Exchange):
    """Describe rows of parameters whose sums LayerNorms alone read on the way to where all of them are added.

    A multiple of the vector of ones may be moved from some to others: the norms between do not see it.
    """

    kind: ClassVar[str] = "means"

    @property
    def families(self) -> dict[str, int]:
        """Return the dimension of the moves that leave the function alone, by their name."""
        return {"mean from one bias to another": len(self.free)}

    def _allowed(self, rows: Tensor) -> Tensor:
        return rows.mean(dim=1, keepdim=True)


def find_exchanges(trace: Trace, means: Iterable[UnreadMean]) -> Iterator[Exchange]:
    """Yield the tables, rows and biases that are added before anything else is done with their sum.

    means: what is free anyway.
    """
    units, taken, normed = added_units(trace)
    centred = [part for mean in means for part in mean.parts]
    directions = _free(trace, units, [*taken, *normed])
    for free in _together(directions):
        found = _exchange(trace, {unit: directions[unit] for unit in free}, centred)
        if found is not None:
            yield found
    settled = [unit for unit in units if unit in directions or _are_among(trace, unit.name, unit.rows, centred)]
    directions = _free(trace, units, [*taken, *({unit: 1.0} for unit in settled)])
    for free in _together(directions):
        found = _exchange(trace, {unit: directions[unit] for unit in free}, centred)
        if found is not None:
            yield MeanExchange(found.parts, found.free, found.directions, found.width, centred=False)


def _free(trace: Trace, units: list[Unit], rows: list[Row]) -> dict[Unit, Row]:
    """Return the directions in which no row changes, by free units; without what is used for anything else."""
    tied: set[str] = set()
    while True:
        directions = _null_space(units, [*rows, *({unit: 1.0} for unit in units if unit.name in tied)])
        names = {unit.name for direction in directions.values() for unit in direction} - tied
        more = {name for name in names if _is_used_besides(trace, [unit for unit in units if unit.name == name])}
        if not more:
            return directions
        tied |= more


def _are_among(trace: Trace, name: str, rows: Tensor, parts: Iterable[Part]) -> bool:
    """Return whether all these numbers of a parameter are in the parts."""
    among = [its for other, its in parts if other == name]
    return bool(among) and bool(trace.mask(name, among)[rows].all())


def _is_used_besides(trace: Trace, units: list[Unit]) -> bool:
    name = units[0].name
    known = {operation for unit in units for operation in unit.operations}
    once = int(trace.mask(name, [unit.rows for unit in units]).sum()) == sum(unit.rows.numel() for unit in units)
    return not once or bool(trace.used_besides([(name, unit.rows) for unit in units], known))


def _null_space(units: list[Unit], rows: Iterable[Row]) -> dict[Unit, Row]:
    """Return for each unit that others can make up for what all of them move by, itself by 1.

    Gaussian elimination, whose pivots are the first of the units wherever there is a choice.
    """
    order = {unit: index for index, unit in enumerate(sorted(units, key=lambda unit: unit.rank))}
    pivots: dict[Unit, Row] = {}
    met: set[Unit] = set()
    for row in rows:
        left = dict(row)
        met |= left.keys()
        while left:
            lead = min(left, key=order.__getitem__)
            factor = left[lead]
            if lead not in pivots:
                pivots[lead] = {unit: value / factor for unit, value in left.items()}
                break
            for unit, value in pivots[lead].items():
                left[unit] = left.get(unit, 0.0) - factor * value
            left = {unit: value for unit, value in left.items() if abs(value) > SMALL}
    directions: dict[Unit, Row] = {}
    for free in sorted(met - pivots.keys(), key=order.__getitem__):
        direction = {free: 1.0}
        for lead in sorted(pivots, key=order.__getitem__, reverse=True):
            moved = sum(value * direction.get(unit, 0.0) for unit, value in pivots[lead].items())
            if abs(moved) > SMALL:
                direction[lead] = -moved
        if len(direction) > 1:
            directions[free] = direction
    return directions


def _together(directions: dict[Unit, Row]) -> list[list[Unit]]:
    """Return those free units together that move the same others."""
    groups: list[tuple[set[Unit], list[Unit]]] = []
    for free, direction in directions.items():
        touching = [group for group in groups if not group[0].isdisjoint(direction)]
        groups = [group for group in groups if group not in touching]
        moved = set(direction).union(*(group[0] for group in touching))
        groups.append((moved, [*(unit for group in touching for unit in group[1]), free]))
    return [group[1] for group in groups]


def _exchange(trace: Trace, directions: dict[Unit, Row], centred: Sequence[Part]) -> Exchange | None:
    """Return the exchange along these directions; rows of one parameter that move alike are one part of it."""
    alike: dict[tuple[str, tuple[float, ...]], list[Unit]] = {}
    for unit in sorted({unit for direction in directions.values() for unit in direction}, key=lambda unit: unit.rank):
        column = tuple(direction.get(unit, 0.0) for direction in directions.values())
        alike.setdefault((unit.name, column), []).append(unit)
    parts = tuple(
        (units[0].name, units[0].rows if len(units) == 1 else torch.cat([unit.rows for unit in units]))
        for units in alike.values()
    )
    members = list(alike.values())
    width = parts[0][1].shape[1]
    if any(rows.shape[1] != width for _, rows in parts):
        return None
    free = tuple(next(index for index, units in enumerate(members) if unit in units) for unit in directions)
    single = (parts[index] for index in free)
    return Exchange(
        parts,
        free,
        torch.tensor(
            [[each.get(units[0], 0.0) for units in members] for each in directions.values()], dtype=torch.float64
        ),
        width,
        all(_are_among(trace, name, rows, centred) for name, rows in parts),
        tuple(name for name, rows in single if len(rows) == 1 and rows.numel() == trace.params[name].numel()),
    )
