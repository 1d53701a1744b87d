"""Represent shifts: what one parameter adds, others take away again, or a softmax or norm ignores."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from quotient_manifolds.symmetries.freedom import Freedom, gaussian, typical
from quotient_manifolds.symmetries.pair import Params
from quotient_manifolds.symmetries.wires.constants import At, Constants, unreached_basis
from quotient_manifolds.symmetries.wires.relations import Component
from quotient_manifolds.symmetries.wires.shifts import Shifts
from quotient_manifolds.symmetries.wires.walk import Linear

Array = np.ndarray
Owner = tuple[str, str, int]
"""What a shift starts from: "bias" or "weight", the parameter, and the place of the number or the row."""
Direction = dict[int, float]
SMALL = 1e-9
SWEEPS = 20
ROWS = 1 << 24  # more than a weight has
SETTLED = 1e-14


@dataclass(frozen=True, eq=False)
class Shift(Freedom):
    """Describe constants that a parameter may add, as others make up for it. At the one place it adds none of them,
    or, where readers without a bias make up for it, what they take is 1 on average: their answer to that is a bias.

    Of a weight it is what it adds as a bias: its answer to what its inputs have in common, on every input.
    """

    constants: Constants
    pivots: tuple[Owner, ...]
    targets: tuple[float, ...]
    changed: tuple[str, ...]
    family: str
    kind = "shift"

    @property
    def name(self) -> str:
        """Return the parameter that shifts, and what it is about."""
        return f"{self.pivots[0][1]} {self.kind}"

    @property
    def names(self) -> tuple[str, ...]:
        """Return the parameters that a move changes, that which shifts first."""
        return self.changed

    @property
    def families(self) -> dict[str, int]:
        """Return the number of constants."""
        return {self.family: len(self.pivots)}

    def move(self, params: Params, generator: torch.Generator, size: float, control: bool = False) -> None:
        """Shift by Gaussians of the typical size of the parameter's numbers, in place; as a control it alone.

        What a weight answers to a constant, or what is added to all numbers of a table alike, may be seen by nobody, as
        with keys and scores; so a control moves the numbers by different amounts.
        """
        own = params[self.pivots[0][1]]
        z = size * typical(own) * gaussian(torch.empty(len(self.pivots)), generator).numpy()
        self._shift(params, z, generator if control else None)

    def fold(self, params: Params) -> None:
        """Let the others take over all constants, in place."""
        if self.pivots[0][0] == "weight":
            self._forget(params)
        for _ in range(SWEEPS):
            found = Solved.at(self.constants, params)
            held = np.array([found.held(params, pivot) for pivot in self.pivots])
            held -= self.targets
            if np.abs(held).max() <= SETTLED * typical(params[self.pivots[0][1]]):
                return
            self._shift(params, -held)

    def _forget(self, params: Params) -> None:
        """Take away what a weight answers to what its inputs no longer have, where others took constants away."""
        at, linear = self.constants.at(params), self._linear()
        Q = unreached_basis(at, [linear])
        W = linear.entries.read(params)
        basis = torch.from_numpy(Q).to(W.device)
        linear.entries.write(params, W - (W @ basis) @ basis.mT)

    def _linear(self) -> Linear:
        _, name, place = self.pivots[0]
        return next(each for each in self.constants.walk.linears if _first(each) == (name, place // ROWS))

    def _shift(self, params: Params, z: Array, control: torch.Generator | None = None) -> None:
        found = Solved.at(self.constants, params)
        size = found.added(self.pivots, z)
        own = self.pivots[0][1]
        for entries, change in found.shifts.biases(size):
            if control is not None:
                change = change * gaussian(change, control)
            if control is None or entries.name == own:
                entries.write(params, entries.read(params) + change.to(params[entries.name].device))
        for each, answer in found.shifts.answers(size):  # to what its inputs have in common now
            linear = each.linear
            if control is not None and linear.entries.name != own:
                continue
            u = torch.from_numpy(common(self.constants.at(params), linear))
            if control is not None:
                u = u.norm() * gaussian(u, control)
            W = linear.entries.read(params)
            linear.entries.write(params, W + torch.outer(torch.from_numpy(answer), u).to(W.device))


@dataclass(frozen=True, eq=False)
class Solved:
    """Hold shifts at some parameters, the directions by what they start from, and what starts where."""

    shifts: Shifts
    directions: dict[Owner, Direction]
    factors: dict[Owner, float]

    @staticmethod
    def at(constants: Constants, params: Mapping[str, Tensor]) -> Solved:
        """Return the solution at these parameters."""
        at = constants.at(params)
        if "shifts" not in at.kept:
            at.kept["shifts"] = Solved.of(at.shifts(constants.walk), constants.still)
        found: Solved = at.kept["shifts"]
        return found

    @staticmethod
    def of(shifts: Shifts, still: Collection[Owner] = ()) -> Solved:
        """Solve the equations, with directions that start where nothing stands before."""
        owners, factors = _owners(shifts)
        held = [unknown for unknown, owner in owners.items() if owner in still]
        shifts.system.equal(np.array(held, np.int64)[:, None], np.ones((len(held), 1)))
        directions: dict[Owner, Direction] = {}
        for component in shifts.system.components():
            for first, direction in _echelon(component):
                if first in owners:
                    directions[owners[first]] = direction
        return Solved(shifts, directions, factors)

    def added(self, pivots: Sequence[Owner], z: Array) -> Array:
        """Return what every source adds where pivots do by these sizes."""
        total = np.zeros((self.shifts.count + 1, 1))
        for pivot, size in zip(pivots, z.tolist(), strict=True):
            direction = self.directions.get(pivot, {})
            total[list(direction), 0] += size * np.array(list(direction.values()))
        return self.shifts.evaluate(total)[:, 0]

    def held(self, params: Params, pivot: Owner) -> float:
        """Return the constant that a number or a row of a weight adds."""
        if pivot not in self.directions:  # all that the weight takes is 0 on average: nothing is constant
            return 0.0
        kind, name, place = pivot
        if kind == "bias":
            vector_scale, offset = self.shifts.walk.notes["source", name, place]
            number = float(params[name].detach().reshape(-1)[place].double())
            return (vector_scale * number + offset) * self.factors[pivot]
        for each in self.shifts.virtual:
            if _first(each.linear) == (name, place // ROWS):
                W = each.linear.entries.read(params)[0].cpu().numpy()
                return float(W[place % ROWS] @ each.u / (each.u @ each.u))
        return 0.0


def _first(linear: Linear) -> tuple[str, int]:
    """Return the parameter of a weight, and the place of its first number."""
    return linear.entries.name, int(linear.entries.index()[0, 0, 0])


def _owners(shifts: Shifts) -> tuple[dict[int, Owner], dict[Owner, float]]:
    """Return what each unknown belongs to, and how a total grows with the number that sets it."""
    owners: dict[int, Owner] = {}
    factors: dict[Owner, float] = {}
    place: dict[int, Owner] = {}
    for vector in shifts.walk.vectors:
        if vector.gain:
            continue
        index = vector.entries.index()
        for row, numbers in zip(vector.outs, index.reshape(len(vector.outs), -1).tolist(), strict=True):
            for node, number in zip(row, numbers, strict=True):
                place.setdefault(node, ("bias", vector.entries.name, number))
                shifts.walk.notes["source", vector.entries.name, number] = vector.entries.scale, vector.entries.offset
    for node, owner in place.items():
        unknown = int(shifts.total(node))
        if unknown:
            owners.setdefault(unknown, owner)
            factors.setdefault(owner, float(shifts.factor[node]))
    for each in shifts.virtual:
        name, first = _first(each.linear)
        for row, unknown in enumerate(each.unknowns.tolist()):
            owners[unknown] = "weight", name, first * ROWS + row
    return owners, factors


def _echelon(component: Component) -> Iterator[tuple[int, Direction]]:
    """Yield directions by their first unknown, which no other direction has: in the order in which they were made."""
    rows = component.basis.T.copy()
    unknowns = component.unknowns
    pivots: list[int] = []
    for column in range(len(unknowns)):
        place = len(pivots)
        if place == len(rows):
            break
        best = place + int(np.abs(rows[place:, column]).argmax())
        if abs(rows[best, column]) <= SMALL * max(1.0, np.abs(rows).max()):
            continue
        rows[[place, best]] = rows[[best, place]]
        rows[place] /= rows[place, column]
        others = np.arange(len(rows)) != place
        rows[others] -= np.outer(rows[others, column], rows[place])
        pivots.append(column)
    for row, column in zip(rows, pivots, strict=False):
        kept = np.flatnonzero(np.abs(row) > 1e-13)
        yield int(unknowns[column]), dict(zip(unknowns[kept].tolist(), row[kept].tolist(), strict=True))


def shifts_of(constants: Constants, params: Mapping[str, Tensor]) -> Iterator[Shift]:
    """Yield the shifts that start at each parameter, those first that stand before others."""
    found = Solved.at(constants, params)
    groups: dict[tuple[str, str], list[Owner]] = defaultdict(list)
    order: dict[tuple[str, str], int] = {}
    for owner, direction in found.directions.items():
        groups[owner[:2]].append(owner)
        order[owner[:2]] = min(order.get(owner[:2], min(direction)), min(direction))
    for key in sorted(groups, key=order.__getitem__):
        record = Shift(constants, tuple(groups[key]), (), (key[1],), FAMILY[key[0]])
        rng = np.random.default_rng(0)
        size = found.added(groups[key], rng.normal(size=len(groups[key])))
        changed = [entries.name for entries, change in found.shifts.biases(size) if float(change.abs().max()) > 1e-12]
        answers = [each.linear for each, answer in found.shifts.answers(size) if np.abs(answer).max() > 1e-12]
        changed += [each.entries.name for each in answers]
        targets = (0.0,) * len(record.pivots)
        if key[0] == "bias" and answers and len(record.pivots) == answers[0].shape[2]:
            size = constants.walk.notes["source", "size"][np.array(answers[0].ins[0])]
            u = common(constants.at(params), answers[0]) * np.exp(-size)  # where gains are 1
            targets = tuple((u * len(u) ** 0.5 / np.linalg.norm(u)).tolist())
        yield replace(record, changed=tuple(dict.fromkeys((key[1], *changed))), targets=targets)


def common(at: At, linear: Linear) -> Array:
    """Return u with u . x = 1 for all that a weight takes."""
    if linear.table:
        return np.ones(linear.shape[2])
    U, c = at.unreached.common(linear.ins)
    if not len(c) or not np.abs(c).max() > SMALL:
        raise ValueError(f"what {linear.entries.name} takes must have something in common. Found nothing here.")
    return np.asarray(c @ U / (c @ c))


FAMILY = {"bias": "bias that others hold as well", "weight": "constant that a weight adds"}
