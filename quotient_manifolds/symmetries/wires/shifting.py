"""Represent shifts: what one parameter adds, others take away again, or a softmax or norm ignores."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse
import scipy.sparse.linalg
import torch
from torch import Tensor

from quotient_manifolds.symmetries.pair import Params
from quotient_manifolds.symmetries.wires.constants import At, Constants, add, unreached_basis
from quotient_manifolds.symmetries.wires.labels import SHIFTED
from quotient_manifolds.symmetries.wires.linear_algebra import SURE, Array, reduced
from quotient_manifolds.symmetries.wires.partners import ROWS, Owner
from quotient_manifolds.symmetries.wires.relations import alike, alone, parts_of
from quotient_manifolds.symmetries.wires.reparameterization import Reparameterization, gaussian, typical
from quotient_manifolds.symmetries.wires.shifts import Answer, Offsets, Shifts
from quotient_manifolds.symmetries.wires.uses import Linear, Vector
from quotient_manifolds.symmetries.wires.walk import Walk

SMALL = 1e-9
TINY = 1e-13
NOTHING = 1e-12  # what folding leaves of a constant
TOGETHER = 16  # directions that are evaluated at once
SWEEPS = 20
SETTLED = 1e-14
SHARE = 0.5  # of what readers without a bias take, that a move may take away


@dataclass(frozen=True, eq=False)
class Shift(Reparameterization):
    """Describe constants that a parameter may add, as others make up for it. At the one place it adds none of them,
    or, where readers without a bias make up for it, what they take is 1 on average: their answer to that is a bias.

    Of a weight it is what it adds as a bias: its answer to what its inputs have in common, on every input.
    """

    constants: Constants
    pivots: tuple[Owner, ...]
    targets: tuple[float, ...]
    changed: tuple[str, ...]
    readers: tuple[tuple[int, Linear], ...] = ()  # that have no bias, each with the place of its first pivot
    number: int = 1

    @property
    def kind(self) -> str:  # type: ignore[override]
        """Return what the first pivot is about."""
        return SHIFTED[self.pivots[0][0]]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the parameters that a move changes, that which shifts first."""
        return self.changed

    @property
    def families(self) -> dict[str, int]:
        """Return the number of constants."""
        return dict(Counter(SHIFTED[kind] for kind, _, _ in self.pivots))

    @property
    def zeros(self) -> dict[str, set[int]]:
        """Return by bias the places of numbers that are 0 at the one place."""
        found = defaultdict[str, set[int]](set)
        for (kind, name, place), to in zip(self.pivots, self.targets, strict=True):
            if kind == "bias" and not to:
                found[name].add(place)
        return found

    @property
    def constant(self) -> tuple[str, ...]:
        """Return the biases all of whose numbers are 0 at the one place."""
        shapes = self.constants.walk.shapes
        return tuple(name for name, places in self.zeros.items() if len(places) == shapes[name].numel())

    def beside(self, other: Reparameterization) -> Reparameterization | None:
        """Return both as one, for which equations are solved once."""
        if not isinstance(other, Shift) or other.constants is not self.constants:
            return None
        changed = tuple(dict.fromkeys((*self.changed, *other.changed)))
        readers = (*self.readers, *((len(self.pivots) + place, reader) for place, reader in other.readers))
        return Shift(self.constants, (*self.pivots, *other.pivots), (*self.targets, *other.targets), changed, readers)

    def transform(self, params: Params, generator: torch.Generator, size: float, control: bool = False) -> None:
        """Shift by Gaussians of the typical size of the parameter's numbers, in place; as a control add noise to it.

        It alone may shift without being seen, such as a constant of keys that softmax ignores.
        """
        if control:
            for name, noise in self._noise(params, generator).items():
                params[name] += size * noise
        else:
            self._shift(params, self.pivots, self._apart(params, size * self._drawn(params, generator)))

    def tangent(self, params: Mapping[str, Tensor], generator: torch.Generator, control: bool = False) -> Params:
        """Return what a shift changes, to first order."""
        if control:
            return {name: torch.zeros_like(params[name]) for name in self.names} | self._noise(params, generator)
        found = Solved.at(self.constants, params)
        size = found.added([self.pivots], [self._drawn(params, generator)])[:, 0]
        tangent = {name: torch.zeros_like(params[name]) for name in self.names}
        for entries, change in found.shifts.biases(size, seen=True, whole=self.constants.whole):
            if entries.name in tangent:
                entries.add_to(tangent, change)
        for each, answer in found.shifts.answers(size, seen=True):
            if each.linear.entries.name in tangent:
                each.linear.entries.add_to(tangent, torch.from_numpy(np.outer(answer, each.u))[None])
        return tangent

    def toward(self, params: Params, other: Params) -> Tensor:
        """Return the shift after which constants are those of other parameters, as nearly as they can be."""
        found, z = Solved.at(self.constants, params), dict.fromkeys(self.pivots, 0.0)
        for unknowns, own, D in found.groups(self.pivots):
            t = found.sources.held(params, unknowns) - found.sources.held(other, unknowns)
            z.update(zip(own, np.linalg.lstsq(D.toarray(), -t, rcond=TINY)[0].tolist(), strict=True))
        return torch.tensor([*z.values()], dtype=torch.float64)

    def add(self, params: Params, z: Tensor) -> None:
        """Shift the constants by z, in place."""
        self._shift(params, self.pivots, z.numpy())

    def canonicalize(self, params: Params) -> None:
        """Let the others take over all constants, in place.

        Those of biases at once; then those of weights one after the other, whose inputs may have nothing in common now;
        then those of biases that took over what weights added, until nothing is left.
        """
        biases, last = [each for each in self.pivots if each[0] == "bias"], np.inf
        for _ in range(SWEEPS):
            left = self._sweep(params, biases)
            if last < np.inf and _settled(left, last):
                break
            for linear in self._weights(params):
                place = _first(linear)
                self._settle(params, [each for each in self.pivots if (each[1], each[2] // ROWS) == place])
            last = left
        for name in dict.fromkeys(name for _, name, _ in biases):  # rounding is no size to go by
            params[name] = params[name].masked_fill(params[name].abs() <= NOTHING, 0.0)

    def _settle(self, params: Params, pivots: list[Owner]) -> None:
        """Let others take over these constants, in place, whatever that changes in the equations."""
        last = np.inf
        for _ in range(SWEEPS):
            left = self._sweep(params, pivots)
            if _settled(left, last):
                return
            last = left

    def _sweep(self, params: Params, pivots: list[Owner]) -> float:
        """Let others take over these constants, in place, by the equations as they are here; return how much was left.

        That is the largest constant relative to the typical size of its parameter. One bias may take over what another
        one has, and then has it to pass on; weights that answer make the equations others.
        """
        if not pivots:
            return 0.0
        found, sizes = Solved.at(self.constants, params), self._sizes(params, pivots)
        left = list[float]()
        for _ in range(SWEEPS):
            z = self._left(params, pivots, found)
            left.append(float((np.abs(z) / sizes).max()))
            if _settled(left[-1], left[-2] if len(left) > 1 else np.inf):
                break
            if _add(self.constants, params, found, found.added([pivots], [z])[:, 0]):
                break
        return left[0]

    def _left(self, params: Params, pivots: Sequence[Owner], found: Solved) -> Array:
        """Return by how much to shift; of some directions alone what is left is orthogonal to them.

        What is left, t + D z for directions D, has the least length that those who read it see: (D^T M D) z = -D^T M t.
        """
        target, z = dict(zip(self.pivots, self.targets, strict=True)), dict.fromkeys(pivots, 0.0)
        for unknowns, own, D in found.groups(pivots):
            owners = found.sources.owners(unknowns)
            t = found.sources.held(params, unknowns) - [target.get(each, 0.0) for each in owners]
            if len(own) == len(owners):  # a permutation, up to rounding: none has what another one starts from
                size = scipy.sparse.linalg.spsolve(D, -t)
            else:
                MD = self.constants.partners.gram(params, owners) @ D.toarray()
                size = np.linalg.lstsq(D.T @ MD, -MD.T @ t, rcond=TINY)[0]
            z.update(zip(own, size.tolist(), strict=True))
        return np.array([*z.values()])

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
                answer = linear.entries.read(params) @ basis
                if float(answer.abs().max()) > SETTLED * typical(params[linear.entries.name]):
                    changes.append((linear.entries, -answer @ basis.mT))
        add(params, changes)
        left = {(name, place // ROWS) for _, name, place in Solved.at(self.constants, params).column}
        return [each for first, each in reversed(found.items()) if first in left]

    def _drawn(self, params: Mapping[str, Tensor], generator: torch.Generator) -> Array:
        return self._sizes(params, self.pivots) * gaussian(torch.empty(len(self.pivots)), generator).numpy()

    def _apart(self, params: Params, z: Array) -> Array:
        """Return a shift of which what readers without a bias take does not come near 0: they would answer with 1/0."""
        found, at = Solved.at(self.constants, params), self.constants.at(params)
        for place, reader in self.readers:
            own = slice(place, place + reader.shape[2])
            columns = found.columns(self.pivots[own])
            if (columns < 0).any() or not at.unreached.common(reader.ins)[1].any():  # nothing is taken here
                continue
            share = common(at, reader) @ (z[own] / found.sources.factor[found.first[columns]])
            z[own] *= -1 if share < -SHARE else 1
        return z

    def _noise(self, params: Mapping[str, Tensor], generator: torch.Generator) -> Params:
        own = dict.fromkeys(name for _, name, _ in self.pivots)
        return {name: typical(params[name]) * gaussian(params[name], generator) for name in own}

    def _sizes(self, params: Mapping[str, Tensor], pivots: Sequence[Owner]) -> Array:
        """Return for each constant the typical size of its parameter, or what makes a weight change by that."""
        size = {name: typical(params[name]) for name in dict.fromkeys(name for _, name, _ in pivots)}
        answers = Solved.at(self.constants, params).shifts.virtual
        lengths = {_first(each.linear): np.linalg.norm(each.u) / len(each.u) ** 0.5 for each in answers}
        return np.array(
            [
                size[name] / (lengths.get((name, place // ROWS), 1.0) if kind == "weight" else 1.0)
                for kind, name, place in pivots
            ]
        )

    def _shift(self, params: Params, pivots: Sequence[Owner], z: Array) -> None:
        found = Solved.at(self.constants, params)
        _add(self.constants, params, found, found.added([pivots], [z])[:, 0])


def _add(constants: Constants, params: Params, found: Solved, size: Array) -> bool:
    """Add to parameters what sources add, in place; return whether weights are among them."""
    add(params, found.shifts.biases(size, seen=True, whole=constants.whole))
    answers = [*found.shifts.answers(size, seen=True)]
    for each, answer in answers:  # to what its inputs have in common now
        u = common(constants.at(params), each.linear)
        add(params, [(each.linear.entries, torch.from_numpy(np.outer(answer, u)))])
    return bool(answers)


@dataclass(frozen=True, eq=False)
class MakeUp:
    """Shift what makes up for constants that are added to channels where these are scaled."""

    constants: Constants
    turned: Array
    """Which of the channels that scales change alike."""
    exponents: scipy.sparse.csr_matrix  # (turned, dimensions)

    def make_up(self, params: Params, z: Array) -> None:
        """Shift, in place, as scales exp(z) have acted: e^z x + c is e^z (x + c), less (e^z - 1) c."""
        found = Solved.at(self.constants, params)
        _add(self.constants, params, found, self._size(found, np.expm1(self.exponents @ z)))

    def names(self, params: Mapping[str, Tensor]) -> tuple[str, ...]:
        """Return the parameters that shift."""
        found = Solved.at(self.constants, params)
        return _changed(found, self._size(found, 1 + np.arange(len(self.turned)) / len(self.turned)))[0]

    def _size(self, found: Solved, turns: Array) -> Array:
        scattered = np.zeros(len(found.shifts.turns))
        scattered[self.turned] = turns
        return found.shifts.evaluate((found.turning @ scattered[found.turned])[:, None])[:, 0]


def _changed(found: Solved, size: Array) -> tuple[tuple[str, ...], list[Linear]]:
    """Return the parameters that change where sources add this, and the weights among them that answer."""
    changed = [entries.name for entries, change in found.shifts.biases(size) if float(change.abs().max()) > NOTHING]
    answers = [each.linear for each, answer in found.shifts.answers(size) if np.abs(answer).max() > NOTHING]
    return tuple(dict.fromkeys((*changed, *(each.entries.name for each in answers)))), answers


def offset_channels(walk: Walk) -> Iterator[Offsets]:
    """Yield channels to which constants are added, those that scales change alike together."""
    nodes = np.unique(walk.offsets())
    if not len(nodes):
        return
    unknowns, solutions = walk.loose.solutions()
    nodes = nodes[np.isin(nodes, unknowns)]
    _, group = alike(solutions[np.searchsorted(unknowns, nodes)])
    flows = [flow for flow in walk.flows if flow.kind == "offset"]
    plus = {n: c for flow in flows for n, c in zip(flow.outs.tolist(), flow.plus.tolist(), strict=True)}
    for number in range(group.max(initial=-1) + 1):
        yield {n: plus[n] for n in nodes[group == number].tolist()}


class Sources:
    """Tell what each unknown belongs to: a number of a vector, or a row of a weight."""

    def __init__(self, shifts: Shifts) -> None:
        vectors = [each for each in shifts.walk.vectors if not each.gain]
        self.parts: list[Vector | Answer] = [*vectors, *shifts.virtual]
        self.part, self.place = np.full(shifts.count + 1, -1), np.zeros(shifts.count + 1, np.int64)
        self.factor = np.ones(shifts.count + 1)
        """How a total grows with the number that sets it."""
        for number, vector in reversed([*enumerate(vectors)]):  # what is shared belongs to the first
            nodes = vector.outs[::-1]
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

    def like(self, key: tuple[Any, ...]) -> Array:
        """Return the unknowns of numbers of one bias, or of rows of one weight."""
        kind, name, *first = key
        found = [np.zeros(0, np.int64)]
        for number, part in enumerate(self.parts):
            entries = part.entries if isinstance(part, Vector) else part.linear.entries
            if entries.name == name and isinstance(part, Vector) == (kind == "bias") and first in ([], [entries.first]):
                found.append(np.flatnonzero(self.part == number))
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
                W = part.linear.entries.read(params)[0].numpy()
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
    turning: scipy.sparse.csc_matrix
    """What makes up for scales of channels to which constants are added, (names of unknowns, those that have such)."""
    turned: Array
    """Which of them these are."""

    @staticmethod
    def at(constants: Constants, params: Mapping[str, Tensor]) -> Solved:
        """Return the solution at these parameters."""
        at = constants.at(params)
        if "shifts" not in at.kept:
            shifts = at.shifts(constants.walk, constants.scaled)
            at.kept["shifts"] = Solved.of(shifts, constants.whole)
        found: Solved = at.kept["shifts"]
        return found

    @staticmethod
    def of(shifts: Shifts, whole: Collection[Any] = ()) -> Solved:
        """Solve the equations, with directions that start where nothing stands before."""
        sources, system = Sources(shifts), shifts.apart(whole)
        directions, first = _echelon(*system.solutions(), shifts.count + 1)
        alone = np.flatnonzero(np.isin(first, shifts.turns))
        alone = alone[np.diff(directions[shifts.turns][:, alone].tocsc().indptr) == 1]
        turning, turned = directions[:, alone], np.searchsorted(shifts.turns, first[alone])
        known = np.flatnonzero(sources.part[first] >= 0)
        directions, first = directions[:, known], first[known]
        column = {owner: k for k, owner in enumerate(sources.owners(first))}
        return Solved(shifts, sources, directions, first, column, turning, turned)

    def added(self, pivots: Sequence[Sequence[Owner]], z: Sequence[Array]) -> Array:
        """Return what every source adds (nodes, batch) where pivots do by these sizes, one list after the other."""
        taken = np.zeros((len(self.first), len(pivots)))
        for k, (some, sizes) in enumerate(zip(pivots, z, strict=True)):
            columns = self.columns(some)
            taken[columns[columns >= 0], k] = sizes[columns >= 0]
        return self.shifts.evaluate(self.directions @ taken)

    def groups(self, pivots: Sequence[Owner]) -> Iterator[tuple[Array, list[Owner], scipy.sparse.csc_matrix]]:
        """Yield unknowns of one bias or weight, pivots among their owners, and what directions of pivots do to them."""
        several: dict[tuple[Any, ...], list[Owner]] = defaultdict(list)
        for pivot in pivots:
            if pivot in self.column:
                several[source(pivot)].append(pivot)
        for key, own in several.items():
            unknowns = self.sources.like(key)
            yield unknowns, own, self.directions[:, self.columns(own)][unknowns]

    def columns(self, pivots: Sequence[Owner]) -> Array:
        """Return which directions start from these; -1 where none does."""
        return np.array([self.column.get(each, -1) for each in pivots], np.int64)


def _settled(left: float, last: float) -> bool:
    """Say whether no more is left than rounding leaves, in any precision; last: what was left before.

    What nobody sees is left as it is, however large.
    """
    stays = (last <= SMALL and left > last / 2) or (last <= SURE and left > 0.9 * last)
    return left <= SETTLED or stays or abs(left / last - 1) <= SETTLED


def source(owner: Owner) -> tuple[Any, ...]:
    """Return what numbers of one bias, or rows of one weight, have in common."""
    kind, name, place = owner
    return (kind, name, place // ROWS) if kind == "weight" else (kind, name)


def _first(linear: Linear) -> tuple[str, int]:
    """Return the parameter of a weight, and the place of its first number."""
    return linear.entries.name, linear.entries.first


def _echelon(unknowns: Array, solutions: scipy.sparse.csr_matrix, count: int) -> tuple[scipy.sparse.csc_matrix, Array]:
    """Return a basis (names of unknowns, directions) in which no direction has the first unknown of another one."""
    lone = alone(solutions)
    single = solutions[:, lone].tocoo()
    most = np.zeros(single.shape[1])
    np.maximum.at(most, single.col, np.abs(single.data))
    kept = np.abs(single.data) > TINY * most[single.col]  # the rest is rounding, with which no direction begins
    parts = [(unknowns[single.row[kept]], single.col[kept], single.data[kept])]
    width = single.shape[1]
    for component in parts_of(unknowns, solutions[:, ~lone].tocsr()):
        basis = reduced(component.basis / np.abs(component.basis).max(0))
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


def whole_biases(shifts: Shifts) -> frozenset[Any]:
    """Return the keys of biases that weights have to answer to, so that they are never 0: all of those shifts."""
    some = list(shifts.read())
    if not some:
        return frozenset()
    found = Solved.of(shifts, {each.entries.key for each in some})
    answers = found.directions[np.concatenate([each.unknowns for each in shifts.virtual])]
    answered = set(found.first[np.unique(answers.nonzero()[1])].tolist())
    return frozenset(each.entries.key for each in some if not answered.isdisjoint(shifts.total(each.outs[0]).tolist()))


def shifts_of(constants: Constants, params: Mapping[str, Tensor]) -> Iterator[Shift]:
    """Yield the shifts that start at each parameter, those first that stand before others."""
    found = Solved.at(constants, params)
    groups: dict[tuple[str, str], list[Owner]] = defaultdict(list)
    for owner in found.column:  # in the order of their unknowns
        groups[owner[:2]].append(owner)
    several = list(groups.values())
    for start in range(0, len(several), TOGETHER):
        some = several[start : start + TOGETHER]
        drawn = (gaussian(torch.empty(len(each)), torch.Generator().manual_seed(0)) for each in some)
        sizes = found.added(some, [each.numpy() for each in drawn])
        for pivots, size in zip(some, sizes.T, strict=True):
            yield _record(constants.at(params), found, pivots, size, constants)


def _record(at: At, found: Solved, pivots: Sequence[Owner], size: Array, constants: Constants) -> Shift:
    """Return the record of the shifts that start at one parameter; size: what sources add where it does at random."""
    kind, name, place = pivots[0]
    changed, answers = _changed(found, size)
    targets = (0.0,) * len(pivots)
    readers: tuple[tuple[int, Linear], ...] = ()
    others = [each for each in answers if kind == "bias" or _first(each) != (name, place // ROWS)]
    if others:
        scale = constants.walk.notes["source", "size"][others[0].ins[0]]
        u = common(at, others[0]) * np.exp(-scale)  # where gains are 1
        if kind == "bias" and len(pivots) == others[0].shape[2]:
            readers = ((0, others[0]),)
        else:  # how what it takes grows with what is added
            taken = found.shifts.expressions(others[0].ins[0])[:, : found.directions.shape[0]]
            u = (taken @ found.directions[:, found.columns(pivots)]).T @ u
        length = np.linalg.norm(u)
        if length > NOTHING:
            targets = tuple((u * np.copysign(len(u) ** 0.5 / length, u.sum())).tolist())  # of either sign here
    return Shift(constants, tuple(pivots), targets, tuple(dict.fromkeys((name, *changed))), readers)


def common(at: At, linear: Linear) -> Array:
    """Return u with u . x = 1 for all that a weight takes."""
    if linear.table:
        return np.ones(linear.shape[2])
    U, c = at.unreached.common(linear.ins)
    if not c.any():
        raise ValueError(
            f"the constants that {linear.entries.name} answers to must not vanish. Found that they do where all others "
            "take over what they can; measure with symmetries='pairs', or give symmetries= without shifts"
        )
    return np.asarray(c @ U / (c @ c))
