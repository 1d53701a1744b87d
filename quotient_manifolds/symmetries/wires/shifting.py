"""Represent shifts: what one parameter adds, others take away again, or a softmax or norm ignores."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quotient_manifolds.symmetries.freedom import Freedom, gaussian, typical
from quotient_manifolds.symmetries.pair import Params
from quotient_manifolds.symmetries.wires.constants import At, Constants, add, unreached_basis
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
        return dict(Counter(FAMILY[kind] for kind, _, _ in self.pivots))

    def beside(self, other: Freedom) -> Freedom | None:
        """Return both as one, for which equations are solved once."""
        if not isinstance(other, Shift) or other.constants is not self.constants:
            return None
        changed = tuple(dict.fromkeys((*self.changed, *other.changed)))
        return Shift(self.constants, (*self.pivots, *other.pivots), (*self.targets, *other.targets), changed)

    def move(self, params: Params, generator: torch.Generator, size: float, control: bool = False) -> None:
        """Shift by Gaussians of the typical size of the parameter's numbers, in place; as a control add noise to it.

        It alone may shift without being seen, such as a constant of keys that softmax ignores.
        """
        if control:
            for name, noise in self._noise(params, generator).items():
                params[name] += size * noise
        else:
            self._shift(params, self.pivots, size * self._drawn(params, generator))

    def tangent(self, params: Mapping[str, Tensor], generator: torch.Generator, control: bool = False) -> Params:
        """Return what a shift changes, to first order."""
        if control:
            return {name: torch.zeros_like(params[name]) for name in self.names} | self._noise(params, generator)
        found = Solved.at(self.constants, params)
        size = found.added(self.pivots, self._drawn(params, generator))
        tangent = {name: torch.zeros_like(params[name]) for name in self.names}
        for entries, change in found.shifts.biases(size):
            entries.add_to(tangent, change)
        for each, answer in found.shifts.answers(size):
            each.linear.entries.add_to(tangent, torch.from_numpy(np.outer(answer, each.u))[None])
        return tangent

    def fold(self, params: Params) -> None:
        """Let the others take over all constants, in place.

        Those of biases at once; then those of weights one after the other, whose inputs may have nothing in common now.
        """
        self._settle(params, [each for each in self.pivots if each[0] == "bias"])
        for linear in self._weights(params):
            place = _first(linear)
            self._settle(params, [each for each in self.pivots if (each[1], each[2] // ROWS) == place])

    def _settle(self, params: Params, pivots: list[Owner]) -> None:
        """Let others take over these constants, in place."""
        target = dict(zip(self.pivots, self.targets, strict=True))
        for _ in range(SWEEPS if pivots else 0):
            found = Solved.at(self.constants, params)
            held = found.held(params, pivots) - [target[pivot] for pivot in pivots]
            if not (np.abs(held) > SETTLED * self._sizes(params, pivots)).any():
                return
            self._shift(params, pivots, -held)

    def _weights(self, params: Params) -> list[Linear]:
        """Return the weights of which constants are left, and take away what others answer to what they no longer have.

        That is what is left where others took away all that the inputs of a weight have in common.
        """
        own = {(name, place // ROWS) for kind, name, place in self.pivots if kind == "weight"}
        if not own:
            return []
        found = {first: each for each in reversed(self.constants.walk.linears) if (first := _first(each)) in own}
        at, changes = self.constants.at(params), []
        for linear in found.values():
            basis = torch.from_numpy(unreached_basis(at, [linear]))
            if basis.shape[1]:
                W = linear.entries.read(params).cpu()
                changes.append((linear.entries, -(W @ basis) @ basis.mT))
        add(params, changes)
        left = {(name, place // ROWS) for _, name, place in Solved.at(self.constants, params).directions}
        return [each for first, each in reversed(found.items()) if first in left]

    def _drawn(self, params: Mapping[str, Tensor], generator: torch.Generator) -> Array:
        return self._sizes(params, self.pivots) * gaussian(torch.empty(len(self.pivots)), generator).numpy()

    def _noise(self, params: Mapping[str, Tensor], generator: torch.Generator) -> Params:
        own = dict.fromkeys(name for _, name, _ in self.pivots)
        return {name: typical(params[name]) * gaussian(params[name], generator) for name in own}

    def _sizes(self, params: Mapping[str, Tensor], pivots: Sequence[Owner]) -> Array:
        """Return the typical size of the parameter of each constant."""
        size = {name: typical(params[name]) for name in dict.fromkeys(name for _, name, _ in pivots)}
        return np.array([size[name] for _, name, _ in pivots])

    def _shift(self, params: Params, pivots: Sequence[Owner], z: Array) -> None:
        found = Solved.at(self.constants, params)
        size = found.added(pivots, z)
        add(params, found.shifts.biases(size))
        for each, answer in [*found.shifts.answers(size)]:  # to what its inputs have in common now
            u = common(self.constants.at(params), each.linear)
            add(params, [(each.linear.entries, torch.from_numpy(np.outer(answer, u)))])


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

    def held(self, params: Params, pivots: Sequence[Owner]) -> Array:
        """Return the constants that numbers and rows of weights add; 0 where what a weight takes has none."""
        by_weight = {_first(each.linear): each for each in self.shifts.virtual}
        answers: dict[tuple[str, int], Array] = {}
        found = np.zeros(len(pivots))
        for number, (kind, name, place) in enumerate(pivots):
            if (kind, name, place) not in self.directions:
                continue
            if kind == "bias":
                scale, offset = self.shifts.walk.notes["source", name, place]
                stored = float(params[name].detach().reshape(-1)[place].double())
                found[number] = (scale * stored + offset) * self.factors[kind, name, place]
                continue
            first = name, place // ROWS
            if first not in answers:
                each = by_weight[first]
                answers[first] = each.linear.entries.read(params)[0].cpu().numpy() @ each.u / (each.u @ each.u)
            found[number] = answers[first][place % ROWS]
        return found


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
        size = found.added(groups[key], np.random.default_rng(0).normal(size=len(groups[key])))
        changed = [entries.name for entries, change in found.shifts.biases(size) if float(change.abs().max()) > 1e-12]
        answers = [each.linear for each, answer in found.shifts.answers(size) if np.abs(answer).max() > 1e-12]
        changed += [each.entries.name for each in answers]
        targets = (0.0,) * len(groups[key])
        if key[0] == "bias" and answers and len(groups[key]) == answers[0].shape[2]:
            size = constants.walk.notes["source", "size"][np.array(answers[0].ins[0])]
            u = common(constants.at(params), answers[0]) * np.exp(-size)  # where gains are 1
            targets = tuple((u * len(u) ** 0.5 / np.linalg.norm(u)).tolist())
        yield Shift(constants, tuple(groups[key]), targets, tuple(dict.fromkeys((key[1], *changed))))


def common(at: At, linear: Linear) -> Array:
    """Return u with u . x = 1 for all that a weight takes."""
    if linear.table:
        return np.ones(linear.shape[2])
    U, c = at.unreached.common(linear.ins)
    if not len(c) or not np.abs(c).max() > SMALL:
        raise ValueError(f"what {linear.entries.name} takes must have something in common. Found nothing here.")
    return np.asarray(c @ U / (c @ c))


FAMILY = {"bias": "bias that others hold as well", "weight": "constant that a weight adds"}
