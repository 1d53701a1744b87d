r"""Rotate the channels of wires to the principal axes of their second moments, and fix the signs of the axes.

The second moment of a wire is M = sum of V V^T over its slots, in the wire's units; a rotation R maps it to R M R^T.
If all rotations of the channels are symmetries, R makes R M R^T diagonal, in descending order. In a smaller group, R
maximizes <R M R^T, L> for a fixed L. The signs of axes remain: they are chosen such that the sum of cubes of the
entries on each axis, over slots with weights 1, 1/2, ..., is positive.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quotient_manifolds.symmetries.groups import (
    GL,
    SO,
    Algebra,
    CenteredSO,
    Complex,
    FromSum,
    Gauge,
    IntoMean,
    Params,
    Pattern,
    Slot,
)
from quotient_manifolds.symmetries.groups.rows import Draft
from quotient_manifolds.symmetries.least_norm import Point, in_units, moments

_DISTINCT = 1e-7
"""Smallest gap between eigenvalues of distinct axes, relative to the largest eigenvalue."""
_ALIVE = 1e-10
"""Eigenvalues below this, relative to the largest, belong to axes without entries."""
_SMALL = 1e-8
"""Entries below this, relative to the largest, count as 0 when signs are chosen."""
_CLEAR, _LEAST = 1e-3, 1e-6
"""Sums of cubes, relative to sums of absolute cubes: the sign is clear above the first, rounding below the second."""
_STARTS, _STEPS = 12, 60
_TURNING = (GL, SO, CenteredSO, Complex, IntoMean, FromSum, Pattern)
"""Algebras whose rotations, if they have any, are determined by the axes of the second moment."""


@dataclass(frozen=True, eq=False)
class Frame:
    """Hold the orthonormal vectors of the axes of a wire's channels, and the sign changes that are still open.

    vectors: (n, r), or int64 (r,) if each is along a channel. axis: (r,), ascending, the axis of each vector; vectors
    of one axis change sign together. turns: bool (t, axes), the axes that change sign under each of t generators of
    order two; or bool (axes,), the axes that may change sign independently.
    """

    gauge: Gauge
    vectors: Tensor
    axis: Tensor
    turns: Tensor

    @property
    def open(self) -> Tensor:
        """Return which axes have an open sign, bool (axes,)."""
        return self.turns if self.turns.ndim == 1 else self.turns.any(0)

    def along(self, slot: Slot, params: Mapping[str, Tensor]) -> Tensor:
        """Return a slot's rows by axis (axes, k, columns): coordinates, or projections if axes have several vectors."""
        V = in_units(slot, params)
        if self.vectors.ndim == 1:
            if not torch.equal(slot.channels, self.vectors):
                V = torch.cat([V, V.new_zeros(1, V.shape[1])])[self._rows(slot)]
            several = len(self.axis) // len(self.open)
            return V.reshape(len(self.open), several, -1)
        U = self.vectors[slot.channels]
        if len(self.axis) == len(self.open):
            return (U.mT @ V)[:, None]
        every = torch.zeros(len(self.open), len(self.axis), dtype=torch.float64)
        every[self.axis, torch.arange(len(self.axis))] = 1.0
        return torch.einsum("ar,ir,jr,jc->aic", every, U, U, V)

    def changed(self, slot: Slot, params: Mapping[str, Tensor], factors: Tensor) -> Tensor:
        """Return the rows of a slot with the part along each axis multiplied by 1 - factors (axes,)."""
        V, x = slot.rows.read(params), factors[self.axis]
        if self.vectors.ndim == 1:
            rows = self._rows(slot)
            return V.index_put((rows[rows >= 0],), (1 - x)[rows >= 0][:, None] * V[rows[rows >= 0]])
        u = slot.units(params)[:, None]
        u, U = u if slot.writes else 1 / u, self.vectors[slot.channels]
        return V - u * ((U * x) @ (U.mT @ (V / u)))

    def flipped(self, axes: Tensor) -> Tensor:
        """Return the group element that changes the signs of these axes, bool (axes,)."""
        some = axes[self.axis]
        if self.vectors.ndim == 2:
            U = self.vectors[:, some]
            return _exact(self.gauge, torch.eye(len(U), dtype=torch.float64) - 2 * U @ U.mT)
        signs = torch.ones(self.gauge.wire.channels, dtype=torch.float64)
        signs[self.vectors[some]] = -1.0
        return self.gauge.composed([signs[channels].diag_embed() for channels, _ in self.gauge.algebra.summands])

    def _rows(self, slot: Slot) -> Tensor:
        """Return the row of each vector's channel in a slot, -1 if the slot does not cover it."""
        rows = torch.full((self.gauge.wire.channels,), -1)
        return rows.index_copy(0, slot.channels, torch.arange(len(slot.channels)))[self.vectors]

    def settled(self, cubes: Tensor, margin: Tensor, least: float) -> tuple[Tensor, Frame]:
        """Return the axes that must change sign to make clear sums of cubes positive, and the frame with open signs."""
        clear = margin >= least
        if self.turns.ndim == 1:
            return clear & (cubes < 0), replace(self, turns=self.turns & ~clear)
        turns, flips = self.turns.clone(), torch.zeros_like(clear)
        for a in margin.argsort(descending=True)[: int(clear.sum())]:
            having = torch.nonzero(turns[:, a])[:, 0]
            if len(having):  # elimination: one generator fixes the axis, the others no longer change it
                one = turns[having[0]].clone()
                flips = flips ^ one if bool((cubes[a] < 0) ^ flips[a]) else flips
                turns[having] ^= one
        return flips, replace(self, turns=turns)


def turned(point: Point, gauges: Sequence[Gauge]) -> tuple[Point, list[str]]:
    """Return the point with all channels along principal axes, and a sentence for each reason why it is not unique."""
    doubts: list[str] = []
    frames: list[Frame] = []
    point = replace(point, directions=point.directions[:0])
    for gauge in gauges:
        turns, found, distinct = _axes(gauge, point.params)
        if not distinct:
            named = ", ".join(gauge.names)
            doubts.append(f"Principal axes must be distinct. Found some that coincide, of the wire of {named}.")
        if any(each is not None for each in turns):
            point = point.acted(gauge, _composed(gauge, turns))
        frames += found
    return _signed(point, frames, doubts)


def _composed(gauge: Gauge, turns: Sequence[Tensor | None]) -> Tensor:
    """Return the element with blocks (k, m, m) of summands, 1 for None, with exact zeros where slots require it."""
    blocks = []
    for (channels, _), turn in zip(gauge.algebra.summands, turns, strict=True):
        eye = torch.eye(channels.shape[1], dtype=torch.float64)
        whole = eye.expand(len(channels), -1, -1) if turn is None else turn
        blocks.append(whole.where(gauge.wire.possible_on(channels) | (eye > 0), 0.0))
    return gauge.composed(blocks)


def _exact(gauge: Gauge, A: Tensor) -> Tensor:
    """Return a matrix with exact zeros where slots require them."""
    return A.where(gauge.wire.possible | torch.eye(len(A), dtype=torch.bool), 0.0)


def _axes(gauge: Gauge, params: Params) -> tuple[list[Tensor | None], list[Frame], bool]:
    """Return the rotation of each summand of an algebra to its axes, the frames, and whether axes are distinct.

    A rotation is (k, m, m), None if the summand has none.
    """
    bits = gauge.reflections
    bits = torch.zeros(gauge.algebra.components, dtype=torch.bool) if bits is None else bits
    turns: list[Tensor | None] = []
    frames: list[Frame] = []
    alone: list[tuple[Tensor, int]] = []
    distinct = True
    for channels, algebra in gauge.algebra.summands:
        count = len(channels) * algebra.components
        own, bits = bits[:count].view(len(channels), -1), bits[count:]
        turn: Tensor | None = None
        for some, part, free in _blocks(algebra, channels, own):
            R, found = _by_axes(gauge, params, some, part)
            distinct &= found
            frames += _framed(gauge, some, part, free, alone)
            if R is not None and some.shape == channels.shape:
                turn = R
            elif R is not None:  # a diagonal block of a `Pattern`
                turn = torch.eye(channels.shape[1]).double().repeat(len(channels), 1, 1) if turn is None else turn
                at = torch.nonzero(torch.isin(channels[0], some[0]))[:, 0]
                turn[:, at[:, None], at] = R
        if turn is None and not isinstance(algebra, _TURNING):
            turn = _by_half_turns(gauge, params, channels, algebra, frames)
        turns.append(turn)
    for several in (1, 2):
        if sets := [channels.flatten() for channels, count in alone if count == several]:
            vectors = torch.cat(sets)
            axes = len(vectors) // several
            axis = torch.arange(axes).repeat_interleave(several)
            frames.append(Frame(gauge, vectors, axis, torch.ones(axes, dtype=torch.bool)))
    return turns, frames, distinct


def _by_axes(gauge: Gauge, params: Params, channels: Tensor, algebra: Algebra) -> tuple[Tensor | None, bool]:
    """Return rotations (k, m, m) of sets of channels to their axes, and whether these are distinct."""
    m = channels.shape[1]
    if m == 1 or not isinstance(algebra, (GL, SO, CenteredSO, Complex)):
        return None, True
    E = centred(m) if isinstance(algebra, CenteredSO) else torch.eye(m, dtype=torch.float64)
    if E.shape[1] < 2:
        return None, True
    return _turns(E, torch.stack(moments(params, gauge, channels)).sum(0))


def _framed(
    gauge: Gauge, channels: Tensor, algebra: Algebra, free: Tensor, alone: list[tuple[Tensor, int]]
) -> Iterator[Frame]:
    """Yield frames of sets of channels (k, m); append sets with vectors along channels to `alone`, with axis sizes.

    free: bool (k,), which sets have a reflection; in the others, axes change sign in pairs.
    """
    m = channels.shape[1]
    if isinstance(algebra, Complex):
        alone.append((channels, 2))
        return
    if isinstance(algebra, (GL, SO)):
        if bool(free.any()):
            alone.append((channels[free], 1))
        E, channels, free = torch.eye(m, dtype=torch.float64), channels[~free], free[~free]
    elif isinstance(algebra, (IntoMean, FromSum)):
        E = torch.full((m, 1), m**-0.5, dtype=torch.float64)
    elif isinstance(algebra, CenteredSO):
        E = centred(m)
    else:
        return
    if (r := E.shape[1]) < 2:
        channels, free = channels[free], free[free]
    pairs = torch.eye(r, dtype=torch.bool)
    for each, reflected in zip(channels, free.tolist(), strict=True):
        whole = torch.zeros(gauge.wire.channels, r, dtype=torch.float64)
        whole[each] = E
        yield Frame(gauge, whole, torch.arange(r), torch.ones(r).bool() if reflected else pairs[:-1] | pairs[1:])


def _blocks(algebra: Algebra, channels: Tensor, bits: Tensor) -> Iterator[tuple[Tensor, Algebra, Tensor]]:
    """Yield sets of channels (k, m) of a summand, the algebra on each, and which have a reflection, bool (k,)."""
    if isinstance(algebra, Pattern):
        mixed = algebra.mask & algebra.mask.mT
        firsts = torch.nonzero(algebra.mask.diagonal() & (mixed.int().argmax(1) == torch.arange(algebra.n)))[:, 0]
        for first, bit in zip(firsts.tolist(), bits.mT, strict=True):
            block = channels[:, mixed[first]]
            yield block, GL(block.shape[1]), bit
    else:
        yield channels, algebra, bits.any(1)


def centred(n: int) -> Tensor:
    """Return an orthonormal basis (n, n - 1) of the vectors orthogonal to 1, the columns of a reflection."""
    v = torch.full((n,), n**-0.5, dtype=torch.float64)
    v[0] += 1.0
    return (torch.eye(n, dtype=torch.float64) - 2 * torch.outer(v, v) / (v @ v))[:, 1:]


def _turns(U: Tensor, M: Tensor) -> tuple[Tensor, bool]:
    """Return rotations (k, m, m) that make U^T M U diagonal, in descending order, and whether they are unique."""
    eye = torch.eye(M.shape[-1], dtype=torch.float64)
    values, V = torch.linalg.eigh(U.mT @ M @ U)
    values, V = values.flip(-1), V.flip(-1)
    V = torch.cat([V[..., :1], V[..., 1:2] * torch.linalg.det(V).sign()[:, None, None], V[..., 2:]], -1)
    near = values[:, :-1] - values[:, 1:] <= _DISTINCT * values[:, :1]
    same = bool((near & (values[:, 1:] > _ALIVE * values[:, :1])).any())
    return eye + U @ (V.mT - eye[: U.shape[1], : U.shape[1]]) @ U.mT, not same


# Groups of fewer rotations


def _by_half_turns(
    gauge: Gauge, params: Params, channels: Tensor, algebra: Algebra, frames: list[Frame]
) -> Tensor | None:
    """Return the rotations R (k, m, m) of a smaller group that maximize <R M R^T, L>; append their frames."""
    K = algebra.skew()
    if not len(K):
        return None
    P, L = _symmetric(K), _generic(channels.shape[1])
    found = []
    for c, M in zip(channels, torch.stack(moments(params, gauge, channels)).sum(0), strict=True):
        own, order = (torch.einsum("kij,kab,ab->ij", P, P, each) for each in (M, L))
        R = _largest(K, own, order)
        found.append(R)
        E = torch.zeros(gauge.wire.channels, len(c), dtype=torch.float64)
        E[c, torch.arange(len(c))] = 1.0
        frames.append(_half_turned(gauge, K, R @ own @ R.mT, E))
    return torch.stack(found)


def _generic(n: int) -> Tensor:
    """Return a generic symmetric matrix L (n, n), near diag(n, ..., 1), by which axes are put in order.

    A diagonal L commutes with half turns H of a product of rotation groups. If R maximizes <R M R^T, L>, so does H R,
    and which of the two is found depends on the basis.
    """
    S = torch.randn(n, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.arange(n, 0, -1).double().diag() + (S + S.mT) / 4


def _symmetric(K: Tensor) -> Tensor:
    """Return an orthonormal basis (k, n, n) of the span of the symmetric parts of products of two skew matrices."""
    products = torch.einsum("aij,bjk->abik", K, K)
    products = (products + products.mT).flatten(2).flatten(0, 1)
    values, Q = torch.linalg.eigh(products.mT @ products)
    return Q[:, values > 1e-12 * values[-1]].mT.reshape(-1, *K.shape[1:])


def _largest(K: Tensor, M: Tensor, L: Tensor) -> Tensor:
    """Maximize <R M R^T, L> over R in the group of skew matrices K, by Newton's method from random starts."""
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
    """Return the frame of axes that change sign under half turns that commute with M."""
    n, turns = len(M), []
    bracket = (K @ M - M @ K).flatten(1)
    _, Q = torch.linalg.eigh(bracket @ bracket.mT)
    for X in torch.einsum("lk,lij->kij", Q, K):
        H = torch.matrix_exp(torch.pi * X / torch.linalg.matrix_norm(X, 2))
        still = float((H @ M - M @ H).norm()) <= 1e-7 * float(M.norm())
        if still and float((H @ H - torch.eye(n).double()).norm()) < 1e-7:
            turns.append((H + H.mT) / 2)
    weights = torch.randn(len(turns), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mixed = sum((w * H for w, H in zip(weights, turns, strict=True)), torch.zeros(n, n, dtype=torch.float64))
    values, V = torch.linalg.eigh(mixed)
    axis = torch.cat([torch.zeros(1, dtype=torch.int64), (values.diff() > 1e-6).cumsum(0)])
    signs = torch.zeros(len(turns), int(axis[-1]) + 1, dtype=torch.bool)
    for own, H in zip(signs, turns, strict=True):
        own[axis] = (V * (H @ V)).sum(0) < 0
    return Frame(gauge, E @ V, axis, signs)


# Signs


def _signed(point: Point, frames: list[Frame], doubts: list[str]) -> tuple[Point, list[str]]:
    """Return the point with positive sums of cubes, beginning with sums that depend on no other open sign."""
    small = _SMALL * max((_largest_entry(w) for name, w in point.params.items() if name in point.zero), default=0.0)
    frames = [_alive(frame, point.params, small) for frame in frames]
    while any(bool(frame.turns.any()) for frame in frames):
        found = [_cubes(point.params, k, frames, small) for k in range(len(frames))]
        best = max(float(margin.max()) if len(margin) else 0.0 for _, margin, _ in found)
        if best < _LEAST:
            break
        for k, (cubes, margin, alone) in enumerate(found):
            flips, frames[k] = frames[k].settled(cubes, margin, _CLEAR if best >= _CLEAR and not alone else _LEAST)
            if bool(flips.any()):
                point = point.acted(frames[k].gauge, frames[k].flipped(flips))
    left = sum(int(_alive(frame, point.params, small).open.sum()) for frame in frames)
    return point, [*doubts, f"Sums of cubes must not vanish. Found {left} axes whose sign is open."] if left else doubts


def _largest_entry(w: Tensor) -> float:
    low, high = w.aminmax()
    return max(-float(low), float(high))


def _alive(frame: Frame, params: Mapping[str, Tensor], small: float) -> Frame:
    """Return a frame without the signs of axes without entries, and without turns that change no other axes."""
    alive, params = torch.zeros_like(frame.open), frame.gauge.wire.constants.included(params)
    for slot in frame.gauge.wire.slots:
        alive |= (frame.along(slot, params).abs() > small).flatten(1).any(1)
    if frame.turns.ndim == 2:
        return replace(frame, turns=frame.turns[(frame.turns & alive).any(1)])
    return replace(frame, turns=frame.turns & alive)


def _cubes(params: Mapping[str, Tensor], k: int, frames: list[Frame], small: float) -> tuple[Tensor, Tensor, bool]:
    """Return the sum of cubes on each axis, its ratio to the sum of absolute cubes, and whether all entries count.

    Entries that another open sign changes do not count. If all do, no sign has to wait for others.
    """
    frame, cubes, alone = frames[k], torch.zeros(len(frames[k].open), dtype=torch.float64), True
    if not bool(frame.turns.any()):
        return cubes, cubes, alone
    total, params = cubes, frame.gauge.wire.constants.included(params)
    for number, slot in enumerate(frame.gauge.wire.slots, 1):  # with different weights, as balanced slots could cancel
        V = frame.along(slot, params)
        if (other := _beside(params, k, slot, frames)) is not None:
            V, alone = V.where((frame.along(slot, other) - V).abs() <= small, 0.0), False
        cube = V * V * V
        cube = cube.where(V.abs() > small, 0.0)
        cubes, total = cubes + cube.sum((1, 2)) / number, total + cube.abs().sum((1, 2)) / number
    return cubes, torch.where(frame.open & (total > 0), cubes.abs() / total.clamp(min=1e-300), 0.0), alone


def _beside(params: Mapping[str, Tensor], k: int, slot: Slot, frames: list[Frame]) -> Draft | None:
    """Return parameters with the entries of a slot changed along all other open axes; None if there are none."""
    generator, draft = torch.Generator().manual_seed(0), None
    for j, frame in enumerate(frames):
        for each in frame.gauge.wire.slots if bool(frame.turns.any()) else ():
            tied = j == k and (each is slot or each.use != slot.use)
            if each.name == slot.name and not tied:
                x = 0.5 + torch.rand(len(frame.open), generator=generator, dtype=torch.float64)
                draft = Draft(params) if draft is None else draft
                draft.write(each.rows, frame.changed(each, draft, x.where(frame.open, 0.0)))
    return draft
