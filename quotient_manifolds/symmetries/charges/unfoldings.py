"""Find linear vector fields on the weights of small networks that act on no wire, as proposed by shapes alone.

Handwritten complex layers, hypernetworks, or bilinear maps of a map with itself mix rows of different parameters. An
unfolding of a parameter is a matrix: some axes form its rows, and the others, the rest, its columns. Unknowns are a
constant for each entry, and a matrix for each two unfoldings with the same rest, which adds rows of one to rows of the
other. Charges at generic points leave the Lie algebra of symmetries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np
import scipy.linalg
import torch
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from quotient_manifolds.symmetries.charges.kernel import Point, null_space, solve
from quotient_manifolds.symmetries.charges.readings import Readings
from quotient_manifolds.symmetries.charges.recognition import sparse
from quotient_manifolds.symmetries.groups import Charted, Gauge, Linear, Params, Symmetry

LARGEST = 2_400
"""Most unknowns that are solved for: a second or two of linear algebra."""
_MOST = 1_600
"""If rows with one rest form at most this many pairs, all pairs are unknowns."""
_FEW = 16
"""Rows formed by several axes are added to rows at other places only if there are at most this many."""
_SAME, _APART = 1e-8, 1e-6
"""Relative sizes: numbers below _SAME are rounding; components above _APART are new directions."""


@dataclass(frozen=True, eq=False)
class Unfolding:
    """Hold entries (rows, rest) of parameters; unknown k adds a multiple of row of[k] to row into[k]."""

    entries: Tensor
    into: Tensor
    of: Tensor

    def kept(self, some: Tensor) -> Unfolding:
        """Return the unfolding with some of its unknowns."""
        return Unfolding(self.entries, self.into[some], self.of[some])


def unfoldings(shapes: Sequence[torch.Size]) -> Iterator[Unfolding]:
    """Yield the unfoldings of each rest, with the pairs of rows that are unknowns.

    Every row is added to rows at its place in unfoldings with as many rows. Rows that are one axis, or few, are also
    added to all rows of their unfolding, to and from single rows, and, unless these are too many pairs, to all others.
    A row is not added to itself, as every single entry is scaled already.
    """
    found: dict[tuple[int, ...], list[tuple[Tensor, bool]]] = {}
    start = 0
    for shape in shapes:
        sizes = [n for n in shape if n > 1] or [1]
        at = torch.arange(start, start := start + math.prod(sizes)).view(sizes)
        for count in range(at.ndim + 1):
            for axes in combinations(range(at.ndim), count):
                rest = tuple(n for axis, n in enumerate(sizes) if axis not in axes)
                rows = at.movedim(axes, tuple(range(count))).reshape(-1, math.prod(rest))
                found.setdefault(rest, []).append((rows, count <= 1 or len(rows) <= _FEW))
    for rest, parts in found.items():
        counts = torch.tensor([len(rows) for rows, _ in parts])
        number = torch.repeat_interleave(torch.arange(len(parts)), counts)
        narrow = torch.tensor([few for _, few in parts])[number]
        place, size = torch.cat([torch.arange(len(rows)) for rows, _ in parts]), counts[number]
        near, same = narrow[:, None] & narrow, number[:, None] == number
        aligned = place[:, None] == place
        mask = same & (near | aligned) | aligned & (size[:, None] == size)
        if rest:
            mask |= ((size[:, None] == 1) | (size == 1)) & near
        if int(near.sum()) <= _MOST:
            mask |= near
        if rest:
            mask.fill_diagonal_(False)
        into, of = torch.nonzero(mask, as_tuple=True)
        yield Unfolding(torch.cat([rows for rows, _ in parts]), into, of)


class Unfoldings:
    """Number the unknowns, constants first, and compute their charges and vector fields, as `Unknowns` does for wires.

    some: the entries that fields may change, bool (P,).
    """

    def __init__(self, shapes: Mapping[str, torch.Size], some: Tensor) -> None:
        self.shapes, self.some = dict(shapes), some
        every = unfoldings(list(self.shapes.values()))
        self.parts = [part.kept(some[part.entries].any(1)[part.into]) for part in every]
        single = torch.zeros(len(some), len(some), dtype=torch.bool)
        for part in self.parts:
            if part.entries.shape[1] == 1:
                single[part.entries[part.into, 0], part.entries[part.of, 0]] = True
        for k, part in enumerate(self.parts):
            if part.entries.shape[1] > 1:  # without sums of unknowns that are there already
                self.parts[k] = part.kept(~single[part.entries[part.into], part.entries[part.of]].all(1))
        self.size = sum(shape.numel() for shape in shapes.values())
        self.count = self.size + sum(len(part.into) for part in self.parts)

    @property
    def groups(self) -> list[Tensor]:
        """Return one set of all unknowns: they are solved for together."""
        return [torch.arange(self.count)]

    def slices_of(self, entries: Tensor) -> Tensor:
        """Return which unknowns change some of these entries, bool (unknowns,)."""
        return torch.cat([entries, *(entries[part.entries].any(1)[part.into] for part in self.parts)])

    def charges(self, point: Point) -> tuple[Tensor, Tensor]:
        """Return the charges of all unknowns, (losses, unknowns), and the sums of their absolute summands."""
        g, theta = point.gradients * self.some, point.theta
        total, size = [g], [g.abs()]
        for part in self.parts:
            G, W = g[:, part.entries], theta[part.entries]
            total.append((G @ W.T)[:, part.into, part.of])
            size.append((G.abs() @ W.abs().T)[:, part.into, part.of])
        return torch.cat(total, 1), torch.cat(size, 1)

    @cached_property
    def index(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the unknowns as sparse matrices [M c]: unknown, entry that changes, and entry that it depends on."""
        unknown, changed, by = (
            [torch.arange(self.size)],
            [torch.arange(self.size)],
            [torch.full((self.size,), self.size)],
        )
        start = self.size
        for part in self.parts:
            rest = part.entries.shape[1]
            unknown.append(torch.arange(start, start := start + len(part.into)).repeat_interleave(rest))
            changed.append(part.entries[part.into].reshape(-1))
            by.append(part.entries[part.of].reshape(-1))
        every = [torch.cat(each) for each in (unknown, changed, by)]
        keep = self.some[every[1]]
        return every[0][keep], every[1][keep], every[2][keep]

    def fields(self, theta: Tensor, basis: Tensor) -> Tensor:
        """Return the changes of theta, (P, k), by columns of unknowns."""
        unknown, changed, by = self.index
        x = torch.cat([theta, theta.new_ones(1)])[by]
        made = csr_matrix((x.numpy(), (changed.numpy(), unknown.numpy())), shape=(self.size, self.count))
        return torch.from_numpy(made @ basis.numpy())

    def split(self, theta: Tensor) -> Params:
        """Split a vector of weights, (P,), into parameters by name."""
        parts = theta.split([shape.numel() for shape in self.shapes.values()])
        return {name: w.view(shape) for (name, shape), w in zip(self.shapes.items(), parts, strict=True)}

    def distinct(self, basis: Tensor, generator: torch.Generator) -> Tensor:
        """Return combinations of columns with independent fields: several unknowns may have the same field."""
        points = torch.randn(2 + basis.shape[1] // self.size, self.size, generator=generator, dtype=torch.float64)
        _, s, Vh = torch.linalg.svd(torch.cat([self.fields(theta, basis) for theta in points]), full_matrices=False)
        return basis @ Vh[s > _SAME].T

    def constants(self, basis: Tensor, generator: torch.Generator) -> Tensor:
        """Return the combinations of columns of unknowns whose fields are constant, the same at all weights."""
        zero = self.fields(torch.zeros(self.size, dtype=torch.float64), basis)
        points = torch.randn(2 + basis.shape[1] // self.size, self.size, generator=generator, dtype=torch.float64)
        return basis @ null_space(torch.cat([self.fields(theta, basis) - zero for theta in points]), _SAME)[0]

    def matrices(self, basis: Tensor) -> Tensor:
        """Return columns of unknowns as matrices [M c; 0 0], (k, P + 1, P + 1)."""
        unknown, changed, by = self.index
        n = self.size + 1
        made = csr_matrix((np.ones(len(by)), ((changed * n + by).numpy(), unknown.numpy())), shape=(n * n, self.count))
        X = torch.from_numpy((made @ basis.numpy()).T.reshape(-1, n, n).copy())
        return torch.where(X.abs() > _SAME, X, 0.0)


@dataclass(frozen=True, eq=False)
class Rest:
    """Hold the symmetries found beyond known ones. largest, smallest: as in `Kernel`."""

    symmetries: tuple[Linear | Charted, ...] = ()
    largest: float = 0.0
    smallest: float = float("inf")

    def and_(self, other: Rest) -> Rest:
        """Return the symmetries of both."""
        gap = max(self.largest, other.largest), min(self.smallest, other.smallest)
        return Rest((*self.symmetries, *other.symmetries), *gap)

    def beside(self, read: Readings, missing: int) -> Readings:
        """Return earlier readings with these symmetries, and a sentence on the `missing` dimensions, if any."""
        largest, smallest = max(read.largest, self.largest), min(read.smallest, self.smallest)
        why = f"{missing} dimensions: of no group, or with coefficients that are rational in other weights"
        refused = (*read.refused, why) if missing else read.refused
        return Readings((*read.symmetries, *self.symmetries), refused, largest, smallest)


def read_rest(
    shapes: Mapping[str, torch.Size],
    draw: Callable[[], Point],
    theta: Tensor,
    kernel: Tensor,
    known: Tensor,
    generator: torch.Generator,
) -> Rest:
    """Return linear fields that move the weights theta in directions beyond the known ones, (P, k).

    There is one symmetry for each connected set of parameters. It is a Lie algebra, as brackets of symmetries are
    symmetries. kernel: all directions at theta, columns, that are orthogonal to gradients.
    """
    unknowns = Unfoldings(shapes, open_to(kernel, known))
    X, *gap = fields(unknowns, draw, theta, known, generator)
    return Rest(tuple(by_parameters(unknowns.shapes, X)), *gap)


def open_to(kernel: Tensor, known: Tensor) -> Tensor:
    """Return which entries, (P,), are in blocks where the kernel has more dimensions than the known directions.

    If the kernel at generic weights is a sum of parts on disjoint sets of entries, it is so at all weights. Then the
    restriction of a symmetry to a set is a symmetry: sets on which the whole kernel is known have no others.
    """
    K, Q = spanned(kernel), spanned(known)
    both = K @ K.T
    part = torch.from_numpy(connected_components(csr_matrix((both.abs() > _APART).numpy()), directed=False)[1]).long()
    more = (both.diagonal() - Q.square().sum(1)).clamp(min=0)
    return (torch.zeros(len(part), dtype=torch.float64).index_add(0, part, more) > _APART)[part]


def fields(
    unknowns: Unfoldings, draw: Callable[[], Point], theta: Tensor, known: Tensor, generator: torch.Generator
) -> tuple[Tensor, float, float]:
    """Return a Lie algebra of linear fields (k, P + 1, P + 1) that moves theta beyond the known directions.

    The largest charge that was kept and the smallest pivot are returned, too.
    """
    made = [torch.zeros(0, unknowns.size + 1, unknowns.size + 1, dtype=torch.float64)]
    if unknowns.count > LARGEST:
        return made[0], 0.0, float("inf")
    kernel = solve(unknowns, draw)
    N = unknowns.distinct(kernel.basis, generator)
    for some in (unknowns.constants(N, generator), N):  # constants first, or c theta_q would stand for a constant
        some = sparse(some, some)
        moved = unknowns.fields(theta, some)
        new = beyond(moved, known)
        made.append(unknowns.matrices(some[:, new]))
        known = torch.cat([known, moved[:, new]], 1)
    return closed(torch.cat(made), generator), kernel.largest, kernel.smallest


def closed(X: Tensor, generator: torch.Generator) -> Tensor:
    """Return a sparse basis of the Lie algebra that matrices (k, n, n) generate, or of their span if it is too large.

    The limit is 2 k + 16 dimensions. Beyond it, flows are still symmetries, but products of flows need not be flows.
    """
    calm, most = 0, 2 * len(X) + 16
    while len(X) > 1 and calm < 2:
        if len(X) == most:
            X = X[: (most - 16) // 2]
            break
        Q = torch.linalg.qr((X / X.flatten(1).norm(dim=1)[:, None, None]).flatten(1).T)[0]
        A, B = torch.randn(2, len(X), generator=generator, dtype=torch.float64) @ X.flatten(1).view(len(X), -1)
        A, B = (each.view(X.shape[1:]) / each.norm() for each in (A, B))
        bracket = (A @ B - B @ A).flatten()
        rest = bracket - Q @ (Q.T @ bracket)
        calm = calm + 1 if float(rest.norm()) < _APART else 0
        if not calm:
            X = torch.cat([X, bracket.view(1, *X.shape[1:])])
    if not len(X):
        return X
    flat = X.flatten(1).T
    some = flat.any(1)
    left = sparse(flat[some], flat[some])
    return X.new_zeros(left.shape[1], len(flat)).T.index_put((some,), left).T.reshape(-1, *X.shape[1:])


def by_parameters(shapes: dict[str, torch.Size], X: Tensor) -> Iterator[Linear]:
    """Yield a symmetry for each set of matrices [M c; 0 0] that are connected by common parameters."""
    sizes = torch.tensor([shape.numel() for shape in shapes.values()])
    owner = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    involved = (X != 0).any(1)[:, :-1] | (X != 0).any(2)[:, :-1]
    touched = torch.zeros(len(X), len(sizes)).index_add(1, owner, involved.float()) > 0
    part = torch.from_numpy(
        connected_components(csr_matrix((touched.float() @ touched.float().T).numpy()), directed=False)[1]
    )
    for one in part.unique():
        mine = touched[part == one].any(0)
        at = torch.nonzero(mine[owner])[:, 0]
        into = torch.cat([at, torch.tensor([len(owner)])])
        own = {name: tuple(shape) for k, (name, shape) in enumerate(shapes.items()) if bool(mine[k])}
        yield Linear.of(own, X[part == one][:, at[:, None], into])


def tangents(symmetries: Sequence[Symmetry], params: Params) -> Tensor:
    """Return the tangent vectors of all generators at the parameters, as columns (P, k)."""
    made = [torch.zeros(sum(w.numel() for w in params.values()), 0, dtype=torch.float64)]
    for each in symmetries:
        E = torch.eye(math.prod(each.shape), dtype=torch.float64).view(-1, *each.shape)
        along = each.tangent(params, each.algebra.project(E) if isinstance(each, Gauge) else E)
        parts = [along.get(name, w.new_zeros(len(E), *w.shape)).reshape(len(E), -1) for name, w in params.items()]
        made.append(torch.cat(parts, 1).T)
    return torch.cat(made, 1)


def spanned(D: Tensor) -> Tensor:
    """Return an orthonormal basis of the span of the columns of D, which are normalized first."""
    norms = D.norm(dim=0)
    D = D[:, norms > _SAME * norms.max().clamp(1e-300)] if D.shape[1] else D
    U, s, _ = torch.linalg.svd(D / D.norm(dim=0), full_matrices=False)
    return U[:, s > _SAME]


def beyond(D: Tensor, known: Tensor) -> Tensor:
    """Return the indices of the fewest columns of D that, with the known columns, span all columns of D."""
    Q, norms = spanned(known), D.norm(dim=0)
    rest = torch.where(norms > _SAME * norms.max().clamp(1e-300), D / norms.clamp(1e-300), 0.0) if D.shape[1] else D
    for _ in range(2):
        rest = rest - Q @ (Q.T @ rest)
    if not rest.shape[1]:
        return torch.zeros(0, dtype=torch.long)
    R, order = scipy.linalg.qr(rest.numpy(), mode="r", pivoting=True)
    return torch.from_numpy(order[: int((np.abs(np.diagonal(R)) > _APART).sum())].astype(np.int64)).sort()[0]
