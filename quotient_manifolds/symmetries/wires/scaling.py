"""Represent scales of channels: positive factors that what writes to channels takes and what reads them gives back."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import scipy.linalg
import scipy.sparse
import torch
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from quotient_manifolds.symmetries.pair import Params
from quotient_manifolds.symmetries.wires.constants import Constants
from quotient_manifolds.symmetries.wires.entries import Entries
from quotient_manifolds.symmetries.wires.labels import Roles
from quotient_manifolds.symmetries.wires.linear_algebra import Array
from quotient_manifolds.symmetries.wires.partners import Partners
from quotient_manifolds.symmetries.wires.relations import Component, alike
from quotient_manifolds.symmetries.wires.reparameterization import Reparameterization, gaussian, typical
from quotient_manifolds.symmetries.wires.shifting import MakeUp
from quotient_manifolds.symmetries.wires.uses import Linear, Vector
from quotient_manifolds.symmetries.wires.walk import Walk

Sparse: TypeAlias = scipy.sparse.csr_matrix
SWEEPS = 100
SETTLED = 1e-13  # of log-scales: what is left when lengths agree
STEP, MEMORY = 2 / 3, 5  # where nothing has been met yet; steps that are remembered
FAR = 30  # times what is left: no step goes farther
NULL = 1e-9
NEAR = 1e-6  # of log-scales: what rounding leaves


@dataclass(frozen=True, eq=False)
class ScaledWeight:
    """Hold a weight (taps, out, in) and by which combination of log-scales its rows grow and its columns shrink."""

    entries: Entries
    rows: Sparse  # (out, dimensions)
    columns: Sparse  # (in, dimensions)
    partners: Partners

    def apply(self, params: Params, z: Tensor) -> None:
        """Multiply rows and divide columns, in place."""
        W = self.entries.read(params, z.dtype)
        rows, columns = combined(self.rows, z).exp(), combined(self.columns, -z).exp()
        self.entries.write(params, W * rows[:, None] * columns)

    def lengths(self, params: Mapping[str, Tensor]) -> tuple[Array, Sparse]:
        """Return the logarithms of the lengths of rows and columns that are scaled, and how log-scales change them."""
        W = self.partners.measured(self.entries, params).numpy()
        (r, R), (c, C) = _lengths((W**2).sum((0, 2)), self.rows), _lengths((W**2).sum((0, 1)), -self.columns)
        return np.concatenate([r, c]), scipy.sparse.vstack([R, C]).tocsr()


@dataclass(frozen=True, eq=False)
class ScaledVector:
    """Hold numbers that are added to channels, or multiply them (a gain), and by which log-scales each grows."""

    entries: Entries  # one axis
    exponents: Sparse  # (numbers, dimensions)
    gain: bool

    def apply(self, params: Params, z: Tensor) -> None:
        """Multiply each number, in place."""
        v = self.entries.read(params, z.dtype)
        self.entries.write(params, v * combined(self.exponents, z).exp())

    def lengths(self, params: Mapping[str, Tensor]) -> tuple[Array, Sparse]:
        """Return the logarithms of the sizes of gains, or of numbers scaled alike, and how scales change them."""
        v = self.entries.read(params).detach().numpy()
        if self.gain:
            return _log(np.abs(v)), self.exponents
        return _lengths(v**2, self.exponents)


def combined(exponents: Sparse, z: Tensor) -> Tensor:
    """Return the combinations of log-scales z that a sparse matrix holds; autograd follows z."""
    found = exponents.tocoo()
    values = torch.from_numpy(found.data).to(z.dtype) * z[torch.from_numpy(found.col).long()]
    return z.new_zeros(exponents.shape[0]).index_add(0, torch.from_numpy(found.row).long(), values)


def _lengths(squares: Array, exponents: Sparse) -> tuple[Array, Sparse]:
    """Return logarithms of lengths, one for all that is scaled alike, which no rotation among these changes."""
    first, group = alike(exponents)
    sizes = np.sqrt(np.bincount(group[group >= 0], squares[group >= 0], len(first)))
    return _log(sizes), exponents[first]


@dataclass(frozen=True, eq=False)
class Scaling(Reparameterization):
    """Describe scales: exp(B z) multiplies gains and what writes to channels, and divides what reads them.

    The one place is where the gains that z changes are of size 1, as nearly as least squares of their logarithms can
    bring them; where no gain tells, rows that are written and columns that are read are equally long, again by least
    squares of logarithms.
    components: how the log-scales of channels follow from z; those of different components change no number in common.
    offsets: what shifts beside them, where constants are added to channels; shifted: which parameters it changes.
    """

    weights: tuple[ScaledWeight, ...]
    vectors: tuple[ScaledVector, ...]
    components: tuple[Component, ...]
    kind: str
    offsets: MakeUp | None = None
    shifted: tuple[str, ...] = ()
    number: int = 1

    @property
    def group(self) -> str:
        """Return the name of the group, such as GL+(1)^32."""
        return f"GL+(1)^{self.dimension}"

    @property
    def names(self) -> tuple[str, ...]:
        """Return the parameters that a move touches, gains first, each once."""
        vectors = sorted(self.vectors, key=lambda each: not each.gain)
        entries = (*(each.entries for each in vectors), *(each.entries for each in self.weights))
        return tuple(dict.fromkeys((*(each.name for each in entries), *self.shifted)))

    @property
    def dimension(self) -> int:
        """Return the number of log-scales."""
        return sum(each.basis.shape[1] for each in self.components)

    @property
    def blocks(self) -> list[list[int]]:
        """Return the log-scales that belong together, component by component."""
        ends = np.cumsum([0, *(each.basis.shape[1] for each in self.components)]).tolist()
        return [[*range(start, stop)] for start, stop in itertools.pairwise(ends)]

    @property
    def families(self) -> dict[str, int]:
        """Return the number of log-scales by their kind."""
        return {self.kind: self.dimension}

    @property
    def constant(self) -> tuple[str, ...]:
        """Return the parameters all of whose numbers are 1 at the one place: gains that nothing else ties."""
        gains = [each for each in self.vectors if each.gain]
        alone = [each for each in gains if _is_square(each.exponents) and len(gains) == 1]
        return tuple(each.entries.name for each in alone if each.entries.offset == 0)

    def apply(self, params: Params, z: Array | Tensor, *, control: bool = False) -> None:
        """Scale by exp(B z), in place; as a control the first of what changes alone.

        Autograd follows z and the parameters where no shift has to make up for constants.
        """
        z = torch.as_tensor(z)
        parts: Sequence[ScaledVector | ScaledWeight] = (*self.vectors, *self.weights)
        for each in parts[:1] if control else parts:
            each.apply(params, z)
        if self.offsets is not None and not control:
            self.offsets.make_up(params, z.detach().double().numpy())

    def canonicalize(self, params: Params) -> None:
        """Go to the one place in the orbit, in place."""
        self.to_place(params)

    @property
    def multiplies(self) -> bool:
        """Return True."""
        return True

    @property
    def tells(self) -> bool:
        """Return whether there are gains that tell the place."""
        return any(each.gain for each in self.vectors)

    @property
    def by_lengths(self) -> bool:
        """Return whether gains do not tell all of the place."""
        return any(basis.size for basis in self.free)

    @cached_property
    def free(self) -> list[Array]:
        """Return for each component the log-scales of which gains tell nothing."""
        gains = [each.exponents for each in self.vectors if each.gain]
        return _null_spaces(scipy.sparse.vstack(gains or [Sparse((0, self.dimension))]).tocsc(), self.blocks)

    def by_gains(self, params: Mapping[str, Tensor]) -> Array:
        """Return the log-scales by which gains come to 1, as nearly as they can."""
        gains = [each.lengths(params) for each in self.vectors if each.gain]
        if not gains:
            return np.zeros(self.dimension)
        sizes, matrix = np.concatenate([g for g, _ in gains]), scipy.sparse.vstack([B for _, B in gains]).tocsc()
        return self._solve(matrix, sizes, None)

    def to_place(self, params: Params) -> Array:
        """Go to the one place in the orbit, in place, and return the log-scales that lead there."""
        total = self.by_gains(params)
        if self.tells:
            self.apply(params, total)
        free = self.free
        if not any(each.size for each in free):
            return total
        z, met = np.zeros(self.dimension), list[tuple[Array, Array]]()
        kept = self._following(params, free)
        for _ in range(SWEEPS):
            sizes, matrix = self._lengths(params)
            left = self._solve(matrix[kept].tocsc(), sizes[kept], free)
            most = np.abs(left).max()
            if not most > SETTLED:
                break
            met = [*(met[-MEMORY:] if not met or most <= 2 * np.abs(met[-1][1]).max() else []), (z, left)]
            step = STEP * left
            if len(met) > 1:  # Anderson's acceleration, for lengths that pairs measure follow log-scales
                Z, F = (np.diff(np.stack(each, 1)) for each in zip(*met, strict=True))
                faster = step - (Z + STEP * F) @ np.linalg.lstsq(F, left, rcond=NULL)[0]
                step = faster if np.abs(faster).max() <= FAR * most else step
            self.apply(params, step)
            z = z + step
        return total + z

    def _lengths(self, params: Mapping[str, Tensor]) -> tuple[Array, Sparse]:
        """Return the logarithms of lengths that tell the place where no gain does, and how log-scales change them."""
        found = [each.lengths(params) for each in self.weights or self.vectors]
        return np.concatenate([g for g, _ in found]), scipy.sparse.vstack([B for _, B in found]).tocsr()

    def _following(self, params: Mapping[str, Tensor], free: list[Array]) -> Array:
        """Say of lengths whether they count: those that follow log-scales, where these suffice, or else all.

        Of what a pair mixes, the length is measured by the other side, which the same scales may change, too: this is
        a constant then, and many of these would outweigh the lengths that change.
        """
        sizes, matrix = self._lengths(params)
        kept = np.ones(len(sizes), bool)
        if not any(each.partners.pairs for each in self.weights):
            return kept
        z = gaussian(torch.empty(self.dimension), torch.Generator().manual_seed(0))
        moved = {name: params[name].clone() for name in self.names}
        parts: Sequence[ScaledVector | ScaledWeight] = (*self.vectors, *self.weights)
        for each in parts:
            each.apply(moved, z)
        after, _ = self._lengths({**params, **moved})
        follows = np.abs(after - sizes - matrix @ z.numpy()) <= NEAR
        if follows.all():
            return kept
        by_columns = matrix.tocsc()
        for block, basis in zip(self.blocks, free, strict=True):
            part = by_columns[:, block].tocsr()
            rows = np.unique(part.nonzero()[0])
            if follows[rows].all():
                continue
            seen = part[rows] @ basis
            if np.linalg.matrix_rank(seen[follows[rows]], NULL) == np.linalg.matrix_rank(seen, NULL):
                kept[rows] = follows[rows]
        return kept

    def transform(self, params: Params, generator: torch.Generator, size: float, control: bool = False) -> None:
        """Scale by exp(size z), z Gaussian, in place; as a control the first of what is scaled alone.

        What is a power of another is no more than that: z is of what grows or shrinks most.
        Where that is all, noise is added to it: it has a length that nobody sees.
        """
        if control and len(self.vectors) + len(self.weights) == 1:
            own = params[self.names[0]]
            params[self.names[0]] += size * typical(own) * gaussian(own, generator)
            return
        z = gaussian(torch.empty(self.dimension), generator).numpy()
        self.apply(params, size * z / self._powers(), control=control)

    def _powers(self) -> Array:
        """Return for each log-scale the largest multiple of it by which anything grows or shrinks."""
        weights = (B for each in self.weights for B in (each.rows, each.columns))
        every = scipy.sparse.vstack([*(each.exponents for each in self.vectors), *weights])
        found = abs(every).max(0).toarray()[0]
        return np.where(found > 0, found, 1.0)

    def _solve(self, matrix: Any, sizes: Array, free: list[Array] | None) -> Array:
        """Return the shortest z with the least |sizes + matrix z|, block by block, in the directions that are free."""
        squares = np.asarray(matrix.power(2).sum(0)).reshape(-1)
        z = -np.divide(matrix.T @ sizes, squares, out=np.zeros(self.dimension), where=squares > 0)
        for place, block in enumerate(self.blocks):
            if len(block) == 1:
                z[block] *= free is None or free[place].size > 0
                continue
            z[block] = 0.0
            part = matrix[:, block]
            rows = np.unique(part.indices)
            dense = part[rows].toarray()
            basis = np.eye(len(block)) if free is None else free[place]
            seen = dense @ basis
            seen[np.abs(seen) <= NULL] = 0.0  # what no length shows is rounding, which a relative bound lets pass
            if seen.any():
                z[block] = -basis @ scipy.linalg.lstsq(seen, sizes[rows], cond=NULL)[0]
        return z


def scalings(
    walk: Walk, roles: Roles, components: Iterable[Component], partners: Partners, constants: Constants
) -> Iterator[Scaling]:
    """Yield the scales of a walk: the components that change the same parameters together.

    roles: what channels are for. components: solutions of the equations of log-scales, those that pairs have left.
    partners: lengths of what pairs mix. constants: what shifts beside scales where constants are added to channels.
    """
    touched = _Touched(walk, partners)
    for several in touched.groups(list(components)):
        yield _scaling(roles, several, touched, constants)


class _Touched:
    """Tell which weights and vectors log-scales of nodes change."""

    def __init__(self, walk: Walk, partners: Partners) -> None:
        self.partners, self._count = partners, walk.count
        self.weights, self.vectors = _distinct(walk.linears), _distinct(walk.vectors)
        self._nodes = {id(each): _scaled(each) for each in (*self.weights, *self.vectors)}

    def by(self, unknowns: Array) -> Callable[[Linear | Vector], bool]:
        """Return what says whether log-scales change a weight or vector."""
        inside = np.zeros(self._count, bool)
        inside[unknowns] = True
        return lambda part: bool(inside[self._nodes[id(part)]].any())

    def groups(self, components: Sequence[Component]) -> Iterable[list[Component]]:
        """Return the components that change the same parameters, or that lengths of one weight or one pair tell."""
        owner = np.full(self._count, -1)
        for number, each in enumerate(components):
            owner[each.unknowns] = number
        names: dict[int, set[str]] = defaultdict(set)
        told, links, free = self._told(components), [(0, 0)], dict[str, list[int]]()
        for part in (*self.weights, *self.vectors):
            own = np.unique(owner[self._nodes[id(part)]]).tolist()
            for number in own:
                names[number].add(part.entries.name)
            if isinstance(part, Linear):
                left = [number for number in own if number >= 0 and not told[number]]
                links += itertools.pairwise(left)
                free.setdefault(part.entries.name, []).extend(left)
        for pair in self.partners.pairs:  # lengths of the one side are measured by the other
            links += itertools.pairwise(number for name in pair.names for number in free.get(name, ()))
        edges = scipy.sparse.csr_matrix((np.ones(len(links)), np.transpose(links)), shape=(len(components) or 1,) * 2)
        groups = connected_components(edges, directed=False)[1].tolist()
        several: dict[int, set[str]] = defaultdict(set)
        for number, group in enumerate(groups):
            several[group] |= names[number]
        found: dict[frozenset[str], list[Component]] = defaultdict(list)
        for group, each in zip(groups, components, strict=False):
            if several[group]:
                found[frozenset(several[group])].append(each)
        return found.values()

    def _told(self, components: Sequence[Component]) -> list[bool]:
        """Say of components whether gains tell all of their log-scales."""
        gain = np.zeros(self._count, bool)
        for each in self.vectors:
            if each.gain:
                gain[self._nodes[id(each)]] = True
        parts = (each.basis[gain[each.unknowns]] for each in components)
        return [bool(np.any(B)) if B.shape[1] == 1 else np.linalg.matrix_rank(B) == B.shape[1] for B in parts]


def _scaled(part: Linear | Vector) -> Array:
    """Return the nodes, or the unknowns, whose log-scales change the numbers of a part."""
    if isinstance(part, Linear):
        return np.concatenate([part.takes, part.outs[0]])
    return (part.unknowns if part.gain else part.outs).reshape(-1)


def _distinct(parts: Iterable[Any]) -> list[Any]:
    """Return one of those that use the same entries in the same way; they change together."""
    found: dict[Any, Any] = {}
    for each in parts:
        found.setdefault((each.entries.key, getattr(each, "gain", None)), each)
    return list(found.values())


def _scaling(roles: Roles, components: Sequence[Component], touched: _Touched, constants: Constants) -> Scaling:
    start = 0
    names, places, values = [], [], []
    for each in components:
        rows, columns = np.nonzero(each.basis)
        names.append(each.unknowns[rows])
        places.append(start + columns)
        values.append(each.basis[rows, columns])
        start += each.basis.shape[1]
    order = np.unique(np.concatenate(names))
    rows = np.searchsorted(order, np.concatenate(names))
    B = scipy.sparse.csr_matrix((np.concatenate(values), (rows, np.concatenate(places))), shape=(len(order) + 1, start))

    def exponents(nodes: Sequence[int] | Array) -> Sparse:
        row = np.searchsorted(order, nodes)
        known = (row < len(order)) & (order[np.minimum(row, len(order) - 1)] == np.asarray(nodes))
        return B[np.where(known, row, len(order))]

    scaled = touched.by(order)
    weights, vectors, gains = [], [], []
    for each in touched.weights:
        if scaled(each):
            weights.append(ScaledWeight(each.entries, exponents(each.outs[0]), exponents(each.takes), touched.partners))
    for each in touched.vectors:
        if not scaled(each):
            continue
        if each.gain:
            place, first = np.unique(each.index, return_index=True)
            entries = Entries(each.entries.name, torch.from_numpy(place), each.entries.scale, each.entries.offset)
            vectors.append(ScaledVector(entries, exponents(each.unknowns[0][first]), True))
            gains.append(each)
        else:
            (line,) = each.entries.apply(lambda layout: layout.reshape(-1))
            vectors.append(ScaledVector(line, exponents(each.outs.reshape(-1)), False))
    used = np.concatenate([each.unknowns[np.any(np.abs(each.basis) > NULL, axis=1)] for each in components])
    kind = roles.scaling(used, gains, bool(weights))
    made = Scaling(tuple(weights), tuple(vectors), tuple(components), kind)
    turns = exponents([next(iter(each)) for each in constants.scaled])
    turned = np.flatnonzero(np.diff(turns.indptr))
    if not len(turned):
        return made
    offsets = MakeUp(constants, turned, turns[turned])
    return replace(made, offsets=offsets, shifted=offsets.names(roles.walk.parameters))


def _log(sizes: Array) -> Array:
    """Return logarithms, and 0 for what is 0 and has no length to change."""
    return np.where(sizes > 0, np.log(np.where(sizes > 0, sizes, 1.0)), 0.0)


def _null_spaces(matrix: Any, blocks: Sequence[Sequence[int]]) -> list[Array]:
    """Return for each block of columns what they take to 0."""
    empty, found = np.diff(matrix.indptr) == 0, list[Array]()
    for block in blocks:
        if empty[block].all() or len(block) == 1:
            found.append(np.eye(len(block))[:, empty[block]])
        else:
            part = matrix[:, block]
            found.append(scipy.linalg.null_space(part[np.unique(part.indices)].toarray(), rcond=NULL))
    return found


def _is_square(exponents: Sparse) -> bool:
    return bool(exponents.shape[0] == len(np.unique(exponents.indices)) == exponents.nnz)
