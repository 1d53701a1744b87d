r"""Turn the channels of wires to the principal axes of their second moments, with signs.

The second moment of a wire is M = sum of V V^T over its slots, in the wire's units; a rotation R makes it R M R^T.
Channels all of whose rotations are free are turned so that R M R^T is diagonal, in descending order. In a smaller
group, R is the one of largest <R M R^T, L> for a fixed L. Signs of axes are left: the sum of cubes of the entries
on an axis, slot by slot with weights 1, 1/2, ..., is positive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from quotient_manifolds.symmetries.groups import (
    GL,
    SO,
    Algebra,
    CenteredSO,
    Complex,
    DirectSum,
    FromSum,
    Gauge,
    IntoMean,
    Params,
    Pattern,
    Slot,
)
from quotient_manifolds.symmetries.least_norm import Point

_DISTINCT = 1e-7
"""Of the largest eigenvalue: how far apart others must be for axes to be told from one another."""
_ALIVE = 1e-10
"""Of the largest eigenvalue: axes on which nothing stands."""
_SMALL = 1e-8
"""Of the largest entry: what counts as 0 where signs are chosen."""
_CLEAR, _LEAST = 1e-3, 1e-6
"""Of the sum of absolute cubes: a sum of cubes whose sign is clear, and one whose sign is rounding."""
_STARTS, _STEPS = 12, 60
_TINY = 1e-12


@dataclass(frozen=True, eq=False)
class Frame:
    """Hold orthonormal vectors (n, r) along which the channels of a wire stand, and which signs are free.

    axis: (r,), of which axis each vector is; those of one axis change sign together. single: by axis, whether it may
    change its sign alone. group: by axis, with which others it may change its sign at once, two of them.
    """

    gauge: Gauge
    vectors: Tensor
    axis: Tensor
    single: Tensor
    group: Tensor

    @cached_property
    def mixed(self) -> bool:
        """Return whether vectors have several channels."""
        return bool(((self.vectors.abs() > _TINY).sum(0) > 1).any())

    @cached_property
    def support(self) -> Tensor:
        """Return which channels each axis has, (axes, n)."""
        axes = torch.zeros(len(self.single), len(self.vectors), dtype=torch.float64)
        return axes.index_add_(0, self.axis, (self.vectors.mT.abs() > _TINY).double())

    def moved(self, todo: Tensor) -> Tensor:
        """Return which channels some of the axes have, bool (n,)."""
        return self.support[todo].sum(0) > 0

    def along(self, V: Tensor) -> Tensor:
        """Return rows (n, columns) by axis, (axes, k, columns): coordinates, or projections."""
        if len(self.single) == len(self.axis):
            return (self.vectors.mT @ V if self.mixed else V[self.vectors.argmax(0)])[:, None]
        every = torch.zeros(len(self.single), len(self.axis), dtype=torch.float64)
        every[self.axis, torch.arange(len(self.axis))] = 1.0
        return torch.einsum("ar,ir,jr,jc->aic", every, self.vectors, self.vectors, V)


def turned(point: Point, gauges: Sequence[Gauge]) -> tuple[Point, list[str]]:
    """Return the point with all channels along principal axes, and a sentence for each wire without distinct ones."""
    doubts: list[str] = []
    frames: list[Frame] = []
    for gauge in gauges:
        eye = torch.eye(gauge.wire.channels, dtype=torch.float64)
        A, sets, several = eye, list(_sets(gauge)), len(frames)
        M = _moment(gauge, point.params)
        for vectors, kind, _ in sets:
            if kind and vectors.shape[1] > 1:
                R, distinct = _turn(vectors, kind, M)
                A = R if A is eye else R @ A
                if not distinct:
                    doubts.append(f"Principal axes must be distinct. Found some that coincide, of {_named(gauge)}.")
        if sets:
            frames.append(_frame(gauge, sets))
        for R, frame in _by_half_turns(gauge, M):
            A = R @ A
            frames.append(frame)
        if len(frames) > several and A is not eye:
            point = point.acted(gauge, _exact(gauge, A))
    return _signed(point, frames, doubts)


def _frame(gauge: Gauge, sets: Sequence[tuple[Tensor, str, bool]]) -> Frame:
    """Return all sets of vectors of a gauge as one frame: planes change the signs of both vectors at once."""
    axis: list[int] = []
    single: list[bool] = []
    group: list[int] = []
    for k, (vectors, kind, free) in enumerate(sets):
        count = 1 if kind == "plane" else vectors.shape[1]
        axis += [len(single) + (0 if kind == "plane" else i) for i in range(vectors.shape[1])]
        single += [free or kind == "plane"] * count
        group += [k] * count
    vectors = torch.cat([each for each, *_ in sets], 1)
    return Frame(gauge, vectors, torch.tensor(axis), torch.tensor(single), torch.tensor(group))


def _exact(gauge: Gauge, A: Tensor) -> Tensor:
    """Return a matrix without rounding where a slot forbids it."""
    return A.where(gauge.wire.possible | torch.eye(len(A), dtype=torch.bool), 0.0)


def _named(gauge: Gauge) -> str:
    return "the wire of " + ", ".join(gauge.names)


def _moment(gauge: Gauge, params: Params) -> Tensor:
    """Return the sum of V V^T over slots (n, n)."""
    M = torch.zeros(gauge.shape, dtype=torch.float64)
    for slot in gauge.wire.slots:
        V = slot.in_wire(params, params)[0]
        M[slot.channels[:, None], slot.channels] += V @ V.mT
    return M


def _sets(gauge: Gauge) -> Iterator[tuple[Tensor, str, bool]]:
    """Yield vectors (n, r) all of whose rotations are free, with what turns them, and whether one may change sign."""
    bits = gauge.reflections
    bits = torch.zeros(gauge.algebra.components, dtype=torch.bool) if bits is None else bits
    eye = torch.eye(gauge.wire.channels, dtype=torch.float64)
    for channels, algebra, single in _blocks(gauge.algebra, torch.arange(gauge.wire.channels), bits):
        E, m = eye[:, channels], len(channels)
        if isinstance(algebra, (GL, SO)):
            yield E, "axes", single
        elif isinstance(algebra, CenteredSO) and m > 1:
            yield E @ centred(m), "axes", single
        elif isinstance(algebra, Complex):
            yield E, "plane", True
        elif isinstance(algebra, (IntoMean, FromSum)) and single:
            yield E.sum(1, keepdim=True) / m**0.5, "", True


def _blocks(algebra: Algebra, channels: Tensor, bits: Tensor) -> Iterator[tuple[Tensor, Algebra, bool]]:
    """Yield channels with the algebra on them, and whether it has a reflection."""
    if isinstance(algebra, DirectSum):
        for sets, part in algebra.parts:
            for each in sets:
                yield from _blocks(part, channels[each], bits[: part.components])
                bits = bits[part.components :]
    elif isinstance(algebra, Pattern):
        mixed = algebra.mask & algebra.mask.mT
        firsts = torch.nonzero(algebra.mask.diagonal() & (mixed.int().argmax(1) == torch.arange(algebra.n)))[:, 0]
        for first, bit in zip(firsts.tolist(), bits.tolist(), strict=True):
            block = channels[mixed[first]]
            yield block, GL(len(block)), bit
    else:
        yield channels, algebra, bool(bits.any())


def centred(n: int) -> Tensor:
    """Return an orthonormal basis (n, n - 1) of the vectors orthogonal to 1, of a reflection."""
    v = torch.full((n,), n**-0.5, dtype=torch.float64)
    v[0] += 1.0
    return (torch.eye(n, dtype=torch.float64) - 2 * torch.outer(v, v) / (v @ v))[:, 1:]


def _turn(U: Tensor, kind: str, M: Tensor) -> tuple[Tensor, bool]:
    """Return the rotation (n, n) that makes U^T M U diagonal, in descending order; whether that is one."""
    eye = torch.eye(len(M), dtype=torch.float64)
    values, V = torch.linalg.eigh(U.mT @ M @ U)
    values, V = values.flip(0), V.flip(1)
    if float(torch.linalg.det(V)) < 0:
        V = torch.cat([V[:, :1], -V[:, 1:2], V[:, 2:]], 1)
    near = values[:-1] - values[1:] <= _DISTINCT * values[0]
    return eye + U @ (V.mT - eye[: len(V), : len(V)]) @ U.mT, not bool((near & (values[1:] > _ALIVE * values[0])).any())


# Groups of fewer rotations


def _by_half_turns(gauge: Gauge, M: Tensor) -> Iterator[tuple[Tensor, Frame]]:
    """Yield the rotation to the largest <R M R^T, L> of groups of fewer rotations, with axes that half turns change."""
    n = gauge.wire.channels
    for channels, algebra in gauge.algebra.summands:
        if isinstance(algebra, (GL, SO, CenteredSO, Complex, IntoMean, FromSum, Pattern)):
            continue
        for c in channels:
            K = _skew(algebra)
            if not len(K):
                continue
            P, eye = _symmetric(K), torch.eye(n, dtype=torch.float64)
            own, order = (
                torch.einsum("kij,kab,ab->ij", P, P, each)
                for each in (M[c[:, None], c], torch.arange(len(c), 0, -1).double().diag())
            )
            R, whole = _largest(K, own, order), eye.clone()
            whole[c[:, None], c] = R
            yield whole, _half_turned(gauge, K, R @ own @ R.mT, eye[:, c])


def _skew(algebra: Algebra) -> Tensor:
    """Return an orthonormal basis (k, n, n) of the skew matrices of an algebra."""
    E = torch.eye(algebra.n**2, dtype=torch.float64).view(-1, algebra.n, algebra.n)
    values, Q = torch.linalg.eigh((algebra.project(E) + (E - E.mT) / 2).flatten(1) / 2)
    return Q[:, values > 1 - 1e-9].mT.reshape(-1, algebra.n, algebra.n)


def _symmetric(K: Tensor) -> Tensor:
    """Return an orthonormal basis (k, n, n) of what products of two skew matrices span, where it is symmetric."""
    products = torch.einsum("aij,bjk->abik", K, K)
    products = (products + products.mT).flatten(2).flatten(0, 1)
    values, Q = torch.linalg.eigh(products.mT @ products)
    return Q[:, values > 1e-12 * values[-1]].mT.reshape(-1, *K.shape[1:])


def _largest(K: Tensor, M: Tensor, L: Tensor) -> Tensor:
    """Return the R of the group of skew matrices K for which <R M R^T, L> is largest."""
    n, generator = len(M), torch.Generator().manual_seed(0)
    best, found = -float("inf"), torch.eye(n, dtype=torch.float64)
    for _ in range(_STARTS):
        X = torch.randn(len(K), generator=generator, dtype=torch.float64)
        R = torch.matrix_exp(torch.einsum("k,kij->ij", X, K))
        for _ in range(_STEPS):
            N = R @ M @ R.mT
            g = torch.einsum("kij,ij->k", K, N @ L - L @ N) * -1
            if float(g.norm()) <= 1e-14 * float(M.norm()) * n:
                break
            bracket = K @ N - N @ K
            H = torch.einsum("kij,lij->kl", L @ K - K @ L, bracket)
            values, Q = torch.linalg.eigh((H + H.mT) / 2)
            values = values.abs().clamp(min=1e-9 * float(values.abs().max().clamp(min=1e-300)))
            step = Q @ ((Q.mT @ g) / values)
            step = step * min(1.0, 1.0 / float(step.norm()))
            now = float((N * L).sum())
            for _ in range(12):
                turn = torch.matrix_exp(torch.einsum("k,kij->ij", step, K))
                if float((turn @ N @ turn.mT * L).sum()) >= now - 1e-14 * abs(now):
                    break
                step = step / 4
            R = turn @ R
        if (value := float((R @ M @ R.mT * L).sum())) > best + 1e-12 * abs(value):
            best, found = value, R
    return found


def _half_turned(gauge: Gauge, K: Tensor, M: Tensor, E: Tensor) -> Frame:
    """Return axes, two of which at once change their sign in a half turn that leaves M as it is."""
    n, turns = len(M), []
    bracket = (K @ M - M @ K).flatten(1)
    _, Q = torch.linalg.eigh(bracket @ bracket.mT)
    for X in torch.einsum("lk,lij->kij", Q, K):
        H = torch.matrix_exp(torch.pi * X / torch.linalg.matrix_norm(X, 2))
        if (
            float((H @ M - M @ H).norm()) <= 1e-7 * float(M.norm())
            and float((H @ H - torch.eye(n).double()).norm()) < 1e-7
        ):
            turns.append(H)
    weights = torch.randn(len(turns), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mixed = sum((w * H for w, H in zip(weights, turns, strict=True)), torch.zeros(n, n, dtype=torch.float64))
    values, V = torch.linalg.eigh((mixed + mixed.mT) / 2)
    axis = torch.cat([torch.zeros(1, dtype=torch.int64), (values.diff() > 1e-6).cumsum(0)])
    count = int(axis[-1]) + 1
    return Frame(gauge, E @ V, axis, torch.zeros(count, dtype=torch.bool), torch.zeros(count, dtype=torch.int64))


# Signs


def _signed(point: Point, frames: list[Frame], doubts: list[str]) -> tuple[Point, list[str]]:
    """Return the point with positive sums of cubes, of those first that no open sign changes."""
    small = _SMALL * max((float(w.abs().max()) for w in point.vector.split(1 << 20)), default=0.0)
    todo = [_alive(frame, point.params, small) for frame in frames]
    while any(bool(each.any()) for each in todo):
        count = _open(point, frames, todo)
        found = [_cubes(point.params, k, frames, todo, count, small) for k in range(len(frames))]
        best = max(float(margin.max()) if len(margin) else 0.0 for _, margin in found)
        if best < _LEAST:
            break
        for k, (frame, (cubes, margin)) in enumerate(zip(frames, found, strict=True)):
            now = margin >= (_CLEAR if best >= _CLEAR else _LEAST)
            flips = now & (cubes < 0)
            for group in frame.group[now & ~frame.single].unique():  # an even number, without the least certain
                at = torch.nonzero(frame.group == group)[:, 0]
                if int(flips[at].sum()) % 2:
                    least = at[torch.where(now[at], margin[at], torch.inf).argmin()]
                    flips[least] = ~flips[least]
            todo[k] = todo[k] & ~now
            if bool(flips.any()):
                U = frame.vectors[:, flips[frame.axis]]
                A = torch.eye(len(U), dtype=torch.float64) - 2 * U @ U.mT
                point = point.acted(frame.gauge, _exact(frame.gauge, A))
    left = sum(int(each.sum()) for each in todo)
    return point, [*doubts, f"Sums of cubes must not vanish. Found {left} axes whose sign is open."] if left else doubts


def _alive(frame: Frame, params: Params, small: float) -> Tensor:
    """Return the axes (axes,) with a sign that is free and changes something."""
    n, alive = len(frame.vectors), torch.zeros(len(frame.single), dtype=torch.bool)
    for slot in frame.gauge.wire.slots:
        alive |= (frame.along(_rows(slot, params, n, small)).abs() > small).flatten(1).any(1)
    sizes = torch.bincount(frame.group, minlength=int(frame.group.max()) + 1 if len(frame.group) else 0)
    return alive & (frame.single | (sizes[frame.group] > 1))


def _rows(slot: Slot, params: Params, n: int, small: float) -> Tensor:
    """Return the rows of a slot on all channels of its wire (n, columns)."""
    V = slot.in_wire(params, params)[0]
    return V.new_zeros(n, V.shape[1]).index_copy(0, slot.channels, V.where(V.abs() > small, 0.0))


def _open(point: Point, frames: list[Frame], todo: list[Tensor]) -> Params:
    """Return how many sides of each entry have an open sign."""
    count = {name: torch.zeros(at.numel(), dtype=torch.int64) for name, at in point.zero.items()}
    for k, frame in enumerate(frames):
        for slot in frame.gauge.wire.slots:
            at = slot.places[frame.moved(todo[k])[slot.channels]].flatten()
            count[slot.name].index_add_(0, at, torch.ones_like(at))
    return count


def _beside(k: int, slot: Slot, frames: list[Frame], todo: list[Tensor]) -> Tensor:
    """Return how many other frames change the sign of each entry of a slot on the same side, but not along these axes.

    As a mean and what is orthogonal to it.
    """
    found = torch.zeros(slot.places.shape, dtype=torch.int64)
    own = frames[k].vectors[slot.channels]
    for j, other in enumerate(frames):
        if j == k or not bool(todo[j].any()) or not (other.mixed or frames[k].mixed):
            continue
        for each in other.gauge.wire.slots:
            same = each.name == slot.name and torch.equal(each.places, slot.places)
            if same and float((own.mT @ other.vectors[each.channels]).abs().max()) < 1e-9:
                found += other.moved(todo[j])[each.channels][:, None].long()
    return found


def _cubes(
    params: Params, k: int, frames: list[Frame], every: list[Tensor], count: Params, small: float
) -> tuple[Tensor, Tensor]:
    """Return the sum of cubes on each axis, and that over the sum of absolute ones, of what nothing else changes."""
    frame, todo, n = frames[k], every[k], len(frames[k].vectors)
    cubes = total = torch.zeros(len(todo), dtype=torch.float64)
    if not bool(todo.any()):
        return cubes, total
    for number, slot in enumerate(frame.gauge.wire.slots, 1):  # of weights of their own: balanced ones cancel
        sides = count[slot.name][slot.places] - _beside(k, slot, frames, every)
        others = torch.zeros(n, slot.rows.columns, dtype=torch.float64)
        others[slot.channels] = (sides > frame.moved(todo)[slot.channels][:, None].long()).double()
        free = (frame.support @ others == 0) if frame.mixed else others[frame.vectors.argmax(0)] == 0
        if len(free) != len(todo):
            free = frame.support @ others == 0
        V = frame.along(_rows(slot, params, n, small)) * free[:, None]
        cubes, total = cubes + V.pow(3).sum((1, 2)) / number, total + V.abs().pow(3).sum((1, 2)) / number
    margin = torch.where(todo & (total > 0), cubes.abs() / total.clamp(min=1e-300), 0.0)
    for group in frame.group[todo & ~frame.single].unique():  # all of them, or none
        at = todo & (frame.group == group)
        margin[at] = margin[at] * float(margin[at].min() >= _LEAST)
        margin[at] = margin[at].clamp(min=float(margin[at].max() > 0) * _CLEAR)
    return cubes, margin
