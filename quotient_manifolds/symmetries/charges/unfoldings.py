"""Find linear fields on small nets that no wire of the walk has: shapes alone propose which rows are added to which.

Complex layers by hand, hypernetworks or bilinear maps of a map itself mix rows of different parameters. A parameter is
unfolded: some of its axes are rows, the others the rest. Unknowns are a constant for each entry, and a matrix for each
two unfoldings with the same rest. Charges at generic points leave the Lie algebra of those that are symmetries.
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
"""Unknowns that are solved for at most: a second or two of linear algebra."""
_MOST = 1_600
"""Pairs of rows with one rest, up to which all of them are unknowns."""
_FEW = 16
"""Rows that several axes make together are added to others if they are no more."""
_SAME, _APART = 1e-8, 1e-6
"""Relative: what is smaller is rounding; what is larger is a direction of its own."""


@dataclass(frozen=True, eq=False)
class Unfolding:
    """Hold rows of parameters that share a rest: entries (rows, rest), and which is added to which, (2, unknowns)."""

    entries: Tensor
    into: Tensor
    of: Tensor

    def kept(self, some: Tensor) -> Unfolding:
        """Return this with some of the unknowns."""
        return Unfolding(self.entries, self.into[some], self.of[some])


def unfoldings(shapes: Sequence[torch.Size]) -> Iterator[Unfolding]:
    """Yield the unfoldings of each rest.

    Rows are added to rows of the same unfolding, if they are one axis or few, to and from single rows and at the same
    place of others of as many rows, and to all others where these are not too many pairs. Every entry is scaled: so a
    row is added to itself already.
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
    """Number the unknowns, constants first, and compute their charges and fields, as `Unknowns` does for wires.

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
            if part.entries.shape[1] > 1:  # else: sums of unknowns that are there already
                self.parts[k] = part.kept(~single[part.entries[part.into], part.entries[part.of]].all(1))
        self.size = sum(shape.numel() for shape in shapes.values())
        self.count = self.size + sum(len(part.into) for part in self.parts)

    @property
    def groups(self) -> list[Tensor]:
        """Return all unknowns as one set that is solved for together."""
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
        """Return the unknowns as matrices [M c]: which unknown, which entry is changed, and by which other."""
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
        """Return the changes of theta (P, k) by columns of unknowns."""
        unknown, changed, by = self.index
        x = torch.cat([theta, theta.new_ones(1)])[by]
        made = csr_matrix((x.numpy(), (changed.numpy(), unknown.numpy())), shape=(self.size, self.count))
        return torch.from_numpy(made @ basis.numpy())

    def split(self, theta: Tensor) -> Params:
        """Return weights in a row by name."""
        parts = theta.split([shape.numel() for shape in self.shapes.values()])
        return {name: w.view(shape) for (name, shape), w in zip(self.shapes.items(), parts, strict=True)}

    def distinct(self, basis: Tensor, generator: torch.Generator) -> Tensor:
        """Return as many columns of unknowns as there are fields among them: several unknowns may make the same."""
        points = torch.randn(2 + basis.shape[1] // self.size, self.size, generator=generator, dtype=torch.float64)
        _, s, Vh = torch.linalg.svd(torch.cat([self.fields(theta, basis) for theta in points]), full_matrices=False)
        return basis @ Vh[s > _SAME].T

    def constants(self, basis: Tensor, generator: torch.Generator) -> Tensor:
        """Return the combinations of columns of unknowns whose fields are the same at all weights."""
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
    """Hold what was found beyond other symmetries. largest, smallest: as in `Kernel`."""

    symmetries: tuple[Linear | Charted, ...] = ()
    largest: float = 0.0
    smallest: float = float("inf")

    def and_(self, other: Rest) -> Rest:
        """Return this and more."""
        gap = max(self.largest, other.largest), min(self.smallest, other.smallest)
        return Rest((*self.symmetries, *other.symmetries), *gap)

    def beside(self, read: Readings, missing: int) -> Readings:
        """Return what was found before, and this, and in how many directions nothing was."""
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
    """Return linear fields that move the weights theta in directions beyond known ones, columns (P, k).

    One symmetry for each connected set of parameters, a Lie algebra, as brackets of symmetries are symmetries. kernel:
    all directions at theta that no gradient has.
    """
    unknowns = Unfoldings(shapes, open_to(kernel, known))
    X, *gap = fields(unknowns, draw, theta, known, generator)
    return Rest(tuple(by_parameters(unknowns.shapes, X)), *gap)


def open_to(kernel: Tensor, known: Tensor) -> Tensor:
    """Return which entries (P,) a kernel, columns, moves in more ways than are known.

    A kernel at generic weights that is a sum of parts on sets of entries is so at all weights, and what a symmetry does
    to one of these sets is a symmetry: sets on which the kernel is known have no others.
    """
    K, Q = spanned(kernel), spanned(known)
    both = K @ K.T
    part = torch.from_numpy(connected_components(csr_matrix((both.abs() > _APART).numpy()), directed=False)[1]).long()
    more = (both.diagonal() - Q.square().sum(1)).clamp(min=0)
    return (torch.zeros(len(part), dtype=torch.float64).index_add(0, part, more) > _APART)[part]


def fields(
    unknowns: Unfoldings, draw: Callable[[], Point], theta: Tensor, known: Tensor, generator: torch.Generator
) -> tuple[Tensor, float, float]:
    """Return a Lie algebra of linear fields (k, P + 1, P + 1) that moves theta beyond known directions.

    And the largest charge that was kept, and the smallest pivot.
    """
    made = [torch.zeros(0, unknowns.size + 1, unknowns.size + 1, dtype=torch.float64)]
    if unknowns.count > LARGEST:
        return made[0], 0.0, float("inf")
    kernel = solve(unknowns, draw)
    N = unknowns.distinct(kernel.basis, generator)
    for some in (unknowns.constants(N, generator), N):  # else c theta_q is taken in place of a free constant c
        some = sparse(some, some)
        moved = unknowns.fields(theta, some)
        new = beyond(moved, known)
        made.append(unknowns.matrices(some[:, new]))
        known = torch.cat([known, moved[:, new]], 1)
    return closed(torch.cat(made), generator), kernel.largest, kernel.smallest


def closed(X: Tensor, generator: torch.Generator) -> Tensor:
    """Return a sparse basis of the Lie algebra that matrices (k, n, n) generate, of no more than 2 k + 16.

    Where that is not enough, their flows are symmetries, but not all products of flows are flows.
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
    """Yield symmetries for matrices [M c; 0 0] that have no parameter in common."""
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
    """Return the tangents of all generators at parameters, columns (P, k) over all of them."""
    made = [torch.zeros(sum(w.numel() for w in params.values()), 0, dtype=torch.float64)]
    for each in symmetries:
        E = torch.eye(math.prod(each.shape), dtype=torch.float64).view(-1, *each.shape)
        along = each.tangent(params, each.algebra.project(E) if isinstance(each, Gauge) else E)
        parts = [along.get(name, w.new_zeros(len(E), *w.shape)).reshape(len(E), -1) for name, w in params.items()]
        made.append(torch.cat(parts, 1).T)
    return torch.cat(made, 1)


def spanned(D: Tensor) -> Tensor:
    """Return orthonormal columns that span those of D, each taken at length 1."""
    norms = D.norm(dim=0)
    D = D[:, norms > _SAME * norms.max().clamp(1e-300)] if D.shape[1] else D
    U, s, _ = torch.linalg.svd(D / D.norm(dim=0), full_matrices=False)
    return U[:, s > _SAME]


def beyond(D: Tensor, known: Tensor) -> Tensor:
    """Return which columns of D, the fewest, span what all of them do beyond the columns of another matrix."""
    Q, norms = spanned(known), D.norm(dim=0)
    rest = torch.where(norms > _SAME * norms.max().clamp(1e-300), D / norms.clamp(1e-300), 0.0) if D.shape[1] else D
    for _ in range(2):
        rest = rest - Q @ (Q.T @ rest)
    if not rest.shape[1]:
        return torch.zeros(0, dtype=torch.long)
    R, order = scipy.linalg.qr(rest.numpy(), mode="r", pivoting=True)
    return torch.from_numpy(order[: int((np.abs(np.diagonal(R)) > _APART).sum())].astype(np.int64)).sort()[0]
