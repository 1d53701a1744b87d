"""Recognize groups in the null space of charges: matrices that act on wires, and log-scales of slices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import scipy.linalg
import torch
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from quotient_manifolds.symmetries.charges.frame import Port, Table
from quotient_manifolds.symmetries.charges.kernel import Kernel, Point, Unknowns, connected, null_space
from quotient_manifolds.symmetries.charges.uses import Gain
from quotient_manifolds.symmetries.groups import (
    GL,
    SO,
    Algebra,
    CenteredSO,
    Complex,
    FromSum,
    Gauge,
    IntoMean,
    Pattern,
    Slices,
    Span,
    Symmetry,
    Torus,
)
from quotient_manifolds.symmetries.groups.rows import Rows

_ZERO = 1e-8
"""Smaller coordinates of unit vectors are rounding."""
_STILL = 1e-5
"""Relative changes below this, by log-scales with largest entry 1, are rounding of sums that change nothing."""


Made = tuple[Algebra, Tensor, "Tensor | None", "Tensor | None"]
"""An algebra, its channels, their positions in the wire, and which are contragredients of their position."""


class Recognition:
    """Hold the symmetries in a kernel, and a sentence on all generators that form no known group.

    gauges: the groups on wires. scales: the log-scales outside of these, (unknowns, k), which `torus` makes a group.
    """

    def __init__(
        self, kernel: Kernel[Unknowns], point: Point, elsewhere: Callable[[], Point], generator: torch.Generator
    ) -> None:
        self.kernel, self.unknowns, self.frame = kernel, kernel.unknowns, kernel.unknowns.frame
        self.point, self.elsewhere, self.generator = point, elsewhere, generator
        self.gauges: list[Gauge] = []
        self.refused: list[str] = []
        self._diagonals: list[Tensor] = []
        if not kernel.parts:
            self.scales = torch.zeros(0, 0, dtype=torch.float64)
            return
        scales, *parts = kernel.parts
        self._alone = self._agreed(self._of_channels(scales))
        free = torch.zeros(len(self.unknowns.pairs), dtype=torch.bool)
        for part in parts:
            free |= self._gauges(part)
        self._patterns(self.unknowns.pairs[free])
        self._every = scales
        self.scales = self._independent(self._alone, scales)

    @property
    def symmetries(self) -> list[Symmetry]:
        """Return all groups, the torus last."""
        tori = [self.torus(self.scales, self._every)] if self.scales.shape[1] else []
        return [*self.gauges, *(torus for torus in tori if torus is not None)]

    # Log-scales

    def _of_channels(self, scales: Tensor) -> Tensor:
        """Return the combinations of log-scales that involve no slice, (unknowns, k)."""
        first = self.unknowns.first_slice
        return scales @ null_space(scales[first:])[0] if bool(scales[first:].any()) else scales

    def _independent(self, alone: Tensor, scales: Tensor) -> Tensor:
        """Return sparse log-scales whose actions are independent of each other and of the gauges' diagonals.

        alone: the log-scales of channels alone, which come first, as several sums of slices can have the same action.
        """
        known = list(self._diagonals)
        for some in (alone, scales) if scales.shape[1] else ():
            some = sparse(some, some)
            if not some.shape[1]:
                continue
            F = rest = self._fields @ some
            if known:
                U, s, _ = torch.linalg.svd(self._fields @ torch.stack(known, 1), full_matrices=False)
                Q = U[:, s > _ZERO * s[0].clamp(min=_ZERO)]
                rest = F - Q @ (Q.T @ F)
            known += some[:, _pivots(rest, F.norm(dim=0))].T
        kept = known[len(self._diagonals) :]
        return torch.stack(kept, 1) if kept else scales[:, :0]

    @cached_property
    def _fields(self) -> Tensor:
        """Return the relative change of theta by each unknown, (P, unknowns), with a floor on small entries."""
        return self._fields_at(self.point)

    def _fields_at(self, point: Point) -> Tensor:
        size = point.theta.abs().clamp(min=1e-3 * float(point.theta.abs().max()))
        return self.unknowns.fields(point) / size[:, None]

    def torus(self, scales: Tensor, every: Tensor) -> Torus | None:
        """Return the group of independent log-scales (unknowns, k); `refused` names the entries it cannot act on.

        every: all log-scales. If there are such entries, independent log-scales that leave them unchanged are taken
        from `every`, as many log-scales of channels or slices have the same action.
        """
        unknowns, frame = self.unknowns, self.frame
        slices: list[Slices] = []
        unable: list[Tensor] = []  # exponents, under all log-scales, of entries that no group acts on

        def add(rows: Rows, exponents: Tensor) -> None:
            slices.append(Slices.of(rows, torch.where(exponents.abs() > 1e-12, exponents, 0.0)))

        for port in frame.ports:
            if bool(((E := self._of_port(port, scales)).abs() > _ZERO).any()):
                try:
                    for piece in frame.by_parameter(replace(port, rows=torch.arange(len(port.rows)))):
                        for rows, each in self._shared(piece, E[piece.rows]):
                            add(rows, each)
                except ValueError as error:
                    unable.append(self._of_port(port, every))
                    self.refused.append(str(error))
        for gain in frame.walk.gains:
            if bool(((E := self._of_gain(gain, scales)).abs() > _ZERO).any()):
                alive = gain.entries >= 0
                index = torch.nonzero(alive)[:, 0]
                ends = torch.zeros(len(index), dtype=torch.long)
                tables = (Table.of(each[index, None]) for each in (gain.entries, gain.places))
                port = Port(-1, gain.memory, True, False, index, ends, ends, *tables)
                try:
                    owner = frame.owners(port.entries[:, 0])
                    for one in owner.unique():
                        for piece in _once(port.at(torch.nonzero(owner == one)[:, 0])):
                            share = frame.shares[piece.entries[:, 0]]
                            add(frame.rows(piece), E[piece.rows] / share[:, None])
                except ValueError as error:
                    unable.append(self._of_gain(gain, every))
                    self.refused.append(str(error))
        first = unknowns.first_slice
        for name, shape, axis in unknowns.slices:
            E = scales[first : first + shape[axis]]
            first += shape[axis]
            if bool((E.abs() > _ZERO).any()):
                add(Rows.along(name, tuple(shape), axis), E)
        if not unable:
            try:
                return frame.torus(slices, scales.shape[1])
            except ValueError as error:
                unable.append(every[unknowns.first_slice :] if bool(scales[unknowns.first_slice :].any()) else every)
                self.refused.append(str(error))
        left = every @ null_space(torch.cat(unable), _ZERO, 1.0)[0]
        kept = self._independent(self._agreed(self._of_channels(left)), left)
        return self.torus(kept, left) if kept.shape[1] else None

    def _of_port(self, port: Port, scales: Tensor) -> Tensor:
        """Return the exponents (rows, k) of a port's rows under log-scales."""
        at, turn = self.frame.scale_of(port.nodes)
        return (1.0 if port.writes else -1.0) * turn[:, None] * scales[self.unknowns.first_scale + at]

    def _of_gain(self, gain: Gain, scales: Tensor) -> Tensor:
        """Return the exponents (entries, k) of a gain under log-scales."""
        E = torch.zeros(len(gain.after), scales.shape[1], dtype=torch.float64)
        for nodes, way in ((gain.after, 1.0), (gain.before, -1.0)):
            at, turn = self.frame.scale_of(nodes.clamp(0))
            at = self.unknowns.first_scale + torch.where(nodes > 0, at, 0)
            E += torch.where(nodes > 0, way * turn * gain.power, 0.0)[:, None] * scales[at]
        return E

    def _shared(self, port: Port, E: Tensor) -> Iterator[tuple[Rows, Tensor]]:
        """Yield rows with their exponents, divided by the number of uses of each entry."""
        shares = self.frame.shares[port.entries]
        index = torch.arange(len(port.rows))
        if bool((shares == shares[:, :1]).all()):
            yield self.frame.rows(port), E / shares[:, :1]
            return
        for column in range(port.entries.shape[1]):
            yield self.frame.rows(port.at(index, torch.tensor([column]))), E / shares[:, column, None]

    # Matrices

    def _gauges(self, N: Tensor) -> Tensor:
        """Split the generators of one component into groups on wires; return which pairs are symmetries alone."""
        pairs = self.unknowns.pairs
        if not N.shape[1]:
            return torch.zeros(len(pairs), dtype=torch.bool)
        N = self._agreed(_orthonormal(N))
        P = N[: len(pairs)]
        alone = (P.square().sum(1) - 1).abs() < _ZERO
        N = torch.where(torch.cat([alone, torch.zeros(len(N) - len(alone), dtype=torch.bool)])[:, None], 0.0, N)
        _, s, Vh = torch.linalg.svd(N[: len(pairs)], full_matrices=False)
        N = self._acting(N @ Vh[s > _ZERO].T)
        N = self._without_gains(N)
        if N.shape[1]:
            N = sparse(N, N[: len(pairs)])
            X = self._matrices(N)
            T = self._alone @ null_space(self._gain_rows() @ self._alone, _ZERO, 1.0)[0]
            T = sparse(T, T)
            for columns in connected(X):
                self._block(N[:, columns], X[columns], T)
        return alone

    def _agreed(self, N: Tensor) -> Tensor:
        """Return the combinations of generators under which all uses of an entry change it alike."""
        return N @ null_space(self._tied @ N, _ZERO, 1.0)[0] if len(self._tied) and N.shape[1] else N

    @cached_property
    def _tied(self) -> Tensor:
        """Return rows that vanish on these combinations; there are more rows than generators in any component."""
        most = max(part.shape[1] for part in self.kernel.parts)
        return self.unknowns.agreement(self.point, most + 8, self.generator)

    def _acting(self, N: Tensor) -> Tensor:
        """Return the generators orthogonal to those that act trivially at all weights.

        At given weights, part of an algebra may act trivially, such as 1 w^T on more channels than columns. So other
        weights are added until the rank settles.
        """
        if not N.shape[1]:
            return N
        N = _orthonormal(N)
        F, before = self._fields @ N, -1
        while True:
            _, s, Vh = torch.linalg.svd(F, full_matrices=False)
            rank = int((s > _ZERO).sum())
            if rank in (before, N.shape[1]):
                return N @ Vh[:rank].T
            more = torch.cat([torch.linalg.qr(F, mode="r")[1], self._fields_at(self.elsewhere()) @ N])
            F, before = more, rank

    def _patterns(self, pairs: Tensor) -> None:
        """Add a gauge, by GL or a pattern, for each connected set of channels whose pairs are symmetries alone."""
        C = len(self.frame.roots)
        graph = coo_matrix((np.ones(len(pairs)), (pairs[:, 0].numpy(), pairs[:, 1].numpy())), (C, C))
        part = torch.from_numpy(connected_components(graph, directed=False)[1]).long()
        Q = _orthonormal(self._alone)
        for one in part[pairs[:, 0]].unique():
            channels = torch.nonzero(part == one)[:, 0]
            place = torch.full((C,), -1)
            place[channels] = torch.arange(len(channels))
            mask = torch.zeros(len(channels), len(channels), dtype=torch.bool)
            own = pairs[part[pairs[:, 0]] == one]
            mask[place[own[:, 0]], place[own[:, 1]]] = True
            diagonals = []
            for k, channel in enumerate(channels.tolist()):
                v = self._diagonal(channel)
                if float((Q.T @ v).square().sum()) > 1 - _ZERO:
                    mask[k, k] = True
                    diagonals.append(v)
            algebra = GL(len(mask)) if bool(mask.all()) else None
            try:
                self._add(algebra or Pattern(len(mask), mask), channels)
                self._diagonals += diagonals
            except ValueError as error:
                self.refused.append(str(error))

    def _diagonal(self, channel: int) -> Tensor:
        """Return the log-scale of one channel, in all of its units, as a unit vector of unknowns."""
        frame, v = self.frame, torch.zeros(self.unknowns.count, dtype=torch.float64)
        at = torch.nonzero(frame.channel_of[frame.scales] == channel)[:, 0]
        v[self.unknowns.first_scale + at] = 1 - 2 * frame.nodes.dual[frame.scales[at]].double()
        return v / v.norm()

    def _without_gains(self, N: Tensor) -> Tensor:
        """Subtract log-scales from generators, so that these change no gain and the least of the diagonal."""
        T, D = self._alone, self._gain_rows()
        if len(D) and N.shape[1]:
            N, left = _least(N, T, D)
            bad = left > _ZERO
            if bool(bad.any()):
                K = null_space(D @ N, _ZERO, 1.0)[0]
                self.refused.append(f"{int(N.shape[1] - K.shape[1])} generators mix channels and change their gains")
                N = N @ K
            T = T @ null_space(D @ T, _ZERO, 1.0)[0] if T.shape[1] else T
        some = torch.arange(self.unknowns.first_scale, self.unknowns.first_slice)
        select = torch.zeros(len(some), self.unknowns.count, dtype=torch.float64)
        select[torch.arange(len(some)), some] = 1.0
        return _least(N, T, select)[0]

    def _gain_rows(self) -> Tensor:
        """Return the changes of all gains by the unknowns, (gains, unknowns)."""
        rows, frame = [torch.zeros(0, self.unknowns.count, dtype=torch.float64)], self.frame
        for gain in frame.walk.gains:
            D = torch.zeros(len(gain.after), self.unknowns.count + 1, dtype=torch.float64)
            for nodes, way in ((gain.after, 1.0), (gain.before, -1.0)):
                at, turn = frame.scale_of(nodes.clamp(0))
                at = torch.where(nodes > 0, self.unknowns.first_scale + at, self.unknowns.count)
                D.scatter_add_(1, at[:, None], (way * turn)[:, None])
            rows.append(D[:, :-1])
        return torch.cat(rows)

    def _matrices(self, N: Tensor) -> Tensor:
        """Return generators as matrices on all channels, (k, C, C), with rounding set to 0."""
        frame, C = self.frame, len(self.frame.roots)
        X = torch.zeros(N.shape[1], C, C, dtype=torch.float64)
        i, j = self.unknowns.pairs.T
        X[:, i, j] = N[: len(i)].T
        at, turn = frame.scale_of(frame.roots)
        known = frame.scales[at.clamp(max=len(frame.scales) - 1)] == frame.nodes.scales[frame.roots]
        lam = torch.where(known[:, None], N[self.unknowns.first_scale + at.clamp(max=len(frame.scales) - 1)], 0.0)
        X.diagonal(dim1=1, dim2=2).copy_((turn[:, None] * lam).T)
        top = X.abs().amax((1, 2), keepdim=True)
        return torch.where(X.abs() > 1e-10 * top, X, 0.0)

    def _block(self, N: Tensor, X: Tensor, diagonal: Tensor) -> None:
        """Add gauges for generators on connected channels: on single wires, on several alike, or on all channels.

        diagonal: log-scales that change no gain; an algebra may need some of them to be closed.
        """
        touched = (X != 0).any(0)
        channels = torch.nonzero(touched.any(0) | touched.any(1))[:, 0]
        inside = torch.zeros(len(self.frame.roots), dtype=torch.bool).index_fill_(0, channels, True)
        outside = self._matrices(diagonal).diagonal(dim1=1, dim2=2)[:, ~inside].T
        diagonal = diagonal @ null_space(outside, _ZERO, 1.0)[0]
        here = self._matrices(diagonal).diagonal(dim1=1, dim2=2)[:, inside].T
        diagonal = sparse(diagonal, here)  # keep one of those that agree on these channels
        X, D = (each[:, channels[:, None], channels] for each in (X, self._matrices(diagonal)))
        kinds = self.unknowns.kind[channels]
        wires = [torch.nonzero(kinds == kind)[:, 0] for kind in kinds.unique()]
        problem = ""
        for more in (0, len(D)):
            every, unknowns = torch.cat([X, D[:more]]), torch.cat([N, diagonal[:, :more]], 1)
            try:
                made = self._taken_apart(every, channels, wires)
                if not more and len(D) and any(isinstance(each[0], Span) or each[0].n == 2 for each in made):
                    continue
                for each in made:
                    self._add(*each)
                self._diagonals += list(unknowns.T)
                return
            except ValueError as error:
                problem = str(error)
        self.refused.append(f"{len(X)} generators on {len(channels)} channels: {problem}")

    def _taken_apart(self, X: Tensor, channels: Tensor, wires: Sequence[Tensor]) -> list[Made]:
        """Return algebras with channels, positions and flips: on single wires, then on several wires alike."""
        made: list[Made] = []
        apart = [X[:0]]
        for wire in wires:
            outside = torch.ones(len(channels), len(channels), dtype=torch.bool)
            outside[wire[:, None], wire] = False
            K = null_space(X[:, outside].T, _ZERO, 1.0)[0]
            if K.shape[1]:
                apart.append(torch.einsum("kij,kl->lij", X, K))
                made.append((recognized(apart[-1][:, wire[:, None], wire]), channels[wire], None, None))
        single = torch.cat(apart)
        if len(single) < len(X):
            folded = self._folded(X, single, channels, wires)
            made = [(recognized(X), channels, None, None)] if folded is None else [*made, folded]
        return made

    def _folded(self, X: Tensor, single: Tensor, channels: Tensor, wires: Sequence[Tensor]) -> Made | None:
        """Return the algebra that acts on several wires alike, or by contragredients.

        None unless these generators and the orthogonal ones of single wires together span all generators.
        """
        names = self.frame.nodes.components[self.frame.roots[channels]]
        aligned = [wire[torch.argsort(names[wire])] for wire in wires]
        first = names[aligned[0]]
        if any(len(wire) != len(first) or not torch.equal(names[wire], first) for wire in aligned):
            return None
        inside = torch.zeros(X.shape[1:], dtype=torch.bool)
        for wire in aligned:
            inside[wire[:, None], wire] = True
        rows, flips = [X[:, ~inside].T], []
        lead = X[:, aligned[0][:, None], aligned[0]]
        for wire in aligned[1:]:
            block = X[:, wire[:, None], wire]
            ways = [(block - lead).flatten(1).T, (block + lead.mT).flatten(1).T]
            sizes = [null_space(way, _ZERO, 1.0)[0].shape[1] for way in ways]
            flips.append(sizes[1] > sizes[0])
            rows.append(ways[flips[-1]])
        rows.append(torch.einsum("lij,kij->lk", single, X))
        K = null_space(torch.cat(rows), _ZERO, 1.0)[0]
        if K.shape[1] != len(X) - len(single):
            return None
        algebra = recognized(torch.einsum("kij,kl->lij", lead, K))
        m, order = len(first), torch.cat(aligned)
        flipped = torch.tensor([False, *flips]).repeat_interleave(m)
        return algebra, channels[order], torch.arange(m).repeat(len(aligned)), flipped

    def _add(
        self, algebra: Algebra, channels: Tensor, positions: Tensor | None = None, flipped: Tensor | None = None
    ) -> None:
        self.gauges.append(Gauge(self.frame.wire(channels, positions, flipped), algebra))


def recognized(X: Tensor) -> Algebra:
    """Return the algebra that matrices (k, n, n) span; raises ValueError if their span is no algebra."""
    n = X.shape[1]
    for algebra in (GL(n), SO(n), CenteredSO(n), IntoMean(n), FromSum(n), *([Complex()] if n == 2 else [])):
        if algebra.dimension == len(X) and bool(((algebra.project(X) - X).abs() < _ZERO * X.abs().max()).all()):
            return algebra
    return Span(n, X)


def sparse(B: Tensor, D: Tensor) -> Tensor:
    """Return combinations of columns of B that bring D, combined alike, to reduced echelon form, by largest pivots."""
    norms, n = D.norm(dim=0), len(D)
    M = ((D if B is D else torch.cat([D, B]))[:, norms > _ZERO] / norms[norms > _ZERO]).numpy()
    for k in range(M.shape[1]):
        row, column = np.unravel_index(np.abs(M[:n, k:]).argmax(), (n, M.shape[1] - k))
        if abs(M[row, k + column]) < _ZERO:
            M = M[:, :k]
            break
        M[:, [k, k + column]] = M[:, [k + column, k]]
        factor = M[row] / M[row, k]
        factor[k] = 0.0
        M -= M[:, k, None] * factor
    return _rounded(torch.from_numpy(M[-len(B) :]))


def _rounded(B: Tensor) -> Tensor:
    """Scale columns to largest entry 1, and set rounding to 0."""
    B = B / B.abs().amax(0).clamp(min=1e-300)
    return torch.where(B.abs() > 1e-10, B, 0.0)


def _orthonormal(N: Tensor) -> Tensor:
    return torch.linalg.qr(N / N.norm(dim=0).clamp(min=1e-300))[0] if N.shape[1] else N


def _pivots(M: Tensor, sizes: Tensor) -> Tensor:
    """Return the indices of independent columns of M, relative to their `sizes`, by QR with pivoting."""
    if not M.shape[1]:
        return torch.zeros(0, dtype=torch.long)
    M = torch.where(sizes > _STILL, M / sizes.clamp(min=_STILL), 0.0)
    R, order = scipy.linalg.qr(M.numpy(), mode="r", pivoting=True, check_finite=False)
    return torch.from_numpy(np.sort(order[: int((np.abs(np.diagonal(R)) >= _STILL).sum())]).astype(np.int64))


def _least(N: Tensor, T: Tensor, D: Tensor) -> tuple[Tensor, Tensor]:
    """Return N + T y, with y chosen so that |D (N + T y)| is least, and the column norms of D (N + T y)."""
    if T.shape[1] and N.shape[1]:
        N = N - T @ (torch.linalg.pinv(D @ T, rtol=1e-10) @ (D @ N))
    return N, (D @ N).norm(dim=0)


def _once(port: Port) -> Iterator[Port]:
    """Split a port with one column into ports in which each entry occurs once."""
    left = torch.arange(len(port.rows))
    while len(left):
        order = torch.argsort(port.entries[left, 0], stable=True)
        e = port.entries[left[order], 0]
        fresh = torch.ones(len(left), dtype=torch.bool)
        fresh[1:] = e[1:] != e[:-1]
        yield port.at(left[order[fresh]])
        left = left[order[~fresh]].sort()[0]
