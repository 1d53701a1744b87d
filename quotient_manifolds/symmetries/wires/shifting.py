"""Represent shifts: what one parameter adds, others take away again, or a softmax or norm ignores."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from quotient_manifolds.symmetries.freedom import Freedom, gaussian, typical
from quotient_manifolds.symmetries.pair import Params
from quotient_manifolds.symmetries.wires.constants import At, Constants, unreached_basis
from quotient_manifolds.symmetries.wires.relations import linked, parts_of
from quotient_manifolds.symmetries.wires.shifts import Answer, Shifts
from quotient_manifolds.symmetries.wires.walk import Linear, Vector

Array = np.ndarray
Owner = tuple[str, str, int]
"""What a shift starts from: "bias" or "weight", the parameter, and the place of the number or the row."""
SMALL = 1e-9
TINY = 1e-13
SWEEPS = 20
TOGETHER = 16  # directions that are evaluated at once
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
            held = found.held(params, self.pivots) - self.targets
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
        return next(
            each
            for each in self.constants.walk.linears
            if (each.entries.name, each.entries.first) == (name, place // ROWS)
        )

    def _shift(self, params: Params, z: Array, control: torch.Generator | None = None) -> None:
        found = Solved.at(self.constants, params)
        size = found.added([self.pivots], [z])[:, 0]
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


class Sources:
    """Tell what each unknown belongs to: a number of a vector, or a row of a weight."""

    def __init__(self, shifts: Shifts) -> None:
        vectors = [each for each in shifts.walk.vectors if not each.gain]
        self.parts: list[Vector | Answer] = [*vectors, *shifts.virtual]
        self.part, self.place = np.full(shifts.count + 1, -1), np.zeros(shifts.count + 1, np.int64)
        self.factor = np.ones(shifts.count + 1)
        """How a total grows with the number that sets it."""
        for number, vector in reversed([*enumerate(vectors)]):  # what is shared belongs to the first
            nodes = np.array(vector.outs)[::-1]
            unknown = shifts.total(nodes)
            self.part[unknown], self.factor[unknown] = number, shifts.factor[nodes]
            self.place[unknown] = vector.entries.index().numpy().reshape(nodes.shape)[::-1]
        for number, each in enumerate(shifts.virtual, len(vectors)):
            self.part[each.unknowns] = number
            self.place[each.unknowns] = each.linear.entries.first * ROWS + np.arange(len(each.unknowns))
        self.part[0] = -1

    def owners(self, unknowns: Array) -> list[Owner]:
        """Return what shifts start from."""
        parts = [self.parts[number] for number in self.part[unknowns].tolist()]
        places = zip(parts, self.place[unknowns].tolist(), strict=True)
        return [
            ("bias", part.entries.name, place)
            if isinstance(part, Vector)
            else ("weight", part.linear.entries.name, place)
            for part, place in places
        ]

    def of(self, owners: Collection[Owner]) -> Array:
        """Return the unknowns that belong to numbers of vectors."""
        places: dict[str, list[int]] = defaultdict(list)
        for _, name, place in owners:
            places[name].append(place)
        found = [np.zeros(0, np.int64)]
        for number, part in enumerate(self.parts):
            if isinstance(part, Vector) and part.entries.name in places:
                own = np.flatnonzero(self.part == number)
                found.append(own[np.isin(self.place[own], places[part.entries.name])])
        return np.concatenate(found)

    def held(self, params: Params, unknowns: Array) -> Array:
        """Return the constants that numbers or rows of weights add."""
        found = np.zeros(len(unknowns))
        for number in np.unique(self.part[unknowns]).tolist():
            here, part = np.flatnonzero(self.part[unknowns] == number), self.parts[number]
            place = self.place[unknowns[here]]
            if isinstance(part, Vector):
                numbers = params[part.entries.name].detach().reshape(-1)[torch.from_numpy(place)].double().cpu().numpy()
                found[here] = (part.entries.scale * numbers + part.entries.offset) * self.factor[unknowns[here]]
            else:
                W = part.linear.entries.read(params)[0].cpu().numpy()
                found[here] = (W @ part.u / (part.u @ part.u))[place % ROWS]
        return found


@dataclass(frozen=True, eq=False)
class Solved:
    """Hold shifts at some parameters: directions (names of unknowns, directions), each by what it starts from."""

    shifts: Shifts
    sources: Sources
    directions: scipy.sparse.csc_matrix
    first: Array
    """The unknown that each direction starts from, which no other direction has."""
    column: dict[Owner, int]

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
        sources, system = Sources(shifts), shifts.apart()
        held = sources.of(still)
        system.equal(held[:, None], np.ones((len(held), 1)))
        directions, first = _echelon(*system.solutions(), shifts.count + 1)
        known = np.flatnonzero(sources.part[first] >= 0)
        directions, first = directions[:, known], first[known]
        column = {owner: k for k, owner in enumerate(sources.owners(first))}
        return Solved(shifts, sources, directions, first, column)

    def added(self, pivots: Sequence[Sequence[Owner]], z: Sequence[Array]) -> Array:
        """Return what every source adds (nodes, batch) where pivots do by these sizes, one list after the other."""
        taken = np.zeros((len(self.first), len(pivots)))
        for k, (some, sizes) in enumerate(zip(pivots, z, strict=True)):
            columns = self._columns(some)
            taken[columns[columns >= 0], k] = sizes[columns >= 0]
        return self.shifts.evaluate(self.directions @ taken)

    def held(self, params: Params, pivots: Sequence[Owner]) -> Array:
        """Return the constants that pivots add: 0 for what is not constant any more, as where inputs are 0 on average."""
        columns = self._columns(pivots)
        found = np.zeros(len(columns))
        found[columns >= 0] = self.sources.held(params, self.first[columns[columns >= 0]])
        return found

    def _columns(self, pivots: Sequence[Owner]) -> Array:
        return np.array([self.column.get(each, -1) for each in pivots], np.int64)


def _echelon(unknowns: Array, solutions: scipy.sparse.csr_matrix, count: int) -> tuple[scipy.sparse.csc_matrix, Array]:
    """Return a basis (names of unknowns, directions) in which no direction has the first unknown of another one."""
    _, part = linked(solutions)
    alone = np.bincount(part, minlength=1)[part] == 1 if len(part) else np.zeros(0, bool)
    single = solutions[:, alone].tocoo()
    parts = [(unknowns[single.row], single.col, single.data)]
    width = single.shape[1]
    for component in parts_of(unknowns, solutions[:, ~alone].tocsr()):
        basis = _reduced(component.basis)
        row, column = np.nonzero(np.abs(basis) > TINY)
        parts.append((component.unknowns[row], width + column, basis[row, column]))
        width += basis.shape[1]
    row, column, value = (np.concatenate(each) for each in zip(*parts, strict=True))
    found = scipy.sparse.csc_matrix((value, (row, column)), shape=(count, width))
    found.sort_indices()
    found.data /= np.repeat(found.data[found.indptr[:-1]], np.diff(found.indptr))
    first = found.indices[found.indptr[:-1]]
    order = np.argsort(first)
    return found[:, order], first[order]


def _reduced(basis: Array) -> Array:
    """Return a basis (k, d) of the same space whose columns have the first places that they can to themselves."""
    rows, place = basis.T.copy(), 0
    for column in range(rows.shape[1]):
        if place == len(rows):
            break
        best = place + int(np.abs(rows[place:, column]).argmax())
        if abs(rows[best, column]) <= SMALL * max(1.0, np.abs(rows).max()):
            continue
        rows[[place, best]] = rows[[best, place]]
        rows[place] /= rows[place, column]
        others = np.arange(len(rows)) != place
        rows[others] -= np.outer(rows[others, column], rows[place])
        rows[others, column] = 0.0
        place += 1
    return rows[:place].T


def shifts_of(constants: Constants, params: Mapping[str, Tensor]) -> Iterator[Shift]:
    """Yield the shifts that start at each parameter, those first that stand before others."""
    found = Solved.at(constants, params)
    groups: dict[tuple[str, str], list[Owner]] = defaultdict(list)
    for owner in found.column:  # in the order of their unknowns
        groups[owner[:2]].append(owner)
    several = list(groups.values())
    for start in range(0, len(several), TOGETHER):
        some = several[start : start + TOGETHER]
        sizes = found.added(some, [np.random.default_rng(0).normal(size=len(each)) for each in some])
        for pivots, size in zip(some, sizes.T, strict=True):
            yield _shift(constants.at(params), found, pivots, size, constants)


def _shift(at: At, found: Solved, pivots: Sequence[Owner], size: Array, constants: Constants) -> Shift:
    """Return the record of the shifts that start at one parameter; size: what sources add where it does at random."""
    kind, name, _ = pivots[0]
    changed = [entries.name for entries, change in found.shifts.biases(size) if float(change.abs().max()) > 1e-12]
    answers = [each.linear for each, answer in found.shifts.answers(size) if np.abs(answer).max() > 1e-12]
    changed += [each.entries.name for each in answers]
    targets = (0.0,) * len(pivots)
    if kind == "bias" and answers and len(pivots) == answers[0].shape[2]:
        scale = constants.walk.notes["source", "size"][np.array(answers[0].ins[0])]
        u = common(at, answers[0]) * np.exp(-scale)  # where gains are 1
        targets = tuple((u * len(u) ** 0.5 / np.linalg.norm(u)).tolist())
    return Shift(constants, tuple(pivots), targets, tuple(dict.fromkeys((name, *changed))), FAMILY[kind])


def common(at: At, linear: Linear) -> Array:
    """Return u with u . x = 1 for all that a weight takes."""
    if linear.table:
        return np.ones(linear.shape[2])
    U, c = at.unreached.common(linear.ins)
    if not len(c) or not np.abs(c).max() > SMALL:
        raise ValueError(f"what {linear.entries.name} takes must have something in common. Found nothing here.")
    return np.asarray(c @ U / (c @ c))


FAMILY = {"bias": "bias that others hold as well", "weight": "constant that a weight adds"}
