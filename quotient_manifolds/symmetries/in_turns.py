"""Go to the least |w| of one group after another, in closed form, whatever the width of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quotient_manifolds.symmetries.groups import (
    GL,
    Complex,
    Gauge,
    Part,
    Rows,
    Sparse,
    Symmetry,
    Translation,
    Wire,
    blocks,
)
from quotient_manifolds.symmetries.least_norm import DONE, Free, Point, moments

_SWEEPS = 30
_REGULAR = 1e-15
"""Of the mean second moment of a block: added to it, so that what is of lower rank has an inverse."""
_STEPS = 40
_ZERO = 1e-12


class Numbers(NamedTuple):
    """Hold a part of a translation as it is at some parameters."""

    rows: Rows
    left: Tensor | None
    right: Tensor | None


def without_constants(point: Point, translations: Sequence[Translation]) -> tuple[Point, dict[str, Tensor]]:
    """Return the point after translations, in turns, before anything else moves the weights they hold at.

    Also which entries are 0 there, by parameter.
    """
    names = [{*each.names} for each in translations]
    todo, visits = dict.fromkeys(range(len(translations))), 0
    while todo and visits < _SWEEPS * len(translations):
        k, visits = next(iter(todo)), visits + 1
        del todo[k]
        point, change = _projected(point, translations[k])
        if change > DONE:
            todo |= dict.fromkeys(j for j in range(len(names)) if j != k and names[j] & names[k])
    zeros: dict[str, Tensor] = {}
    for part in (part for each in translations for part in each.parts if part.rows.columns == 1):
        name, at = part.rows.name, part.rows.places[:, 0]
        if float((point.params[name].flatten()[at]).abs().max()) <= _ZERO:
            zeros[name] = torch.cat([zeros.get(name, at), at]).unique()
    return point, zeros


def joined(symmetries: Sequence[Symmetry]) -> list[Symmetry]:
    """Return symmetries with those gauges as one that are alike, but for which rows of the same parameters they have.

    As the heads of a layer.
    """
    alike: dict[Any, list[Gauge]] = {}
    result: list[Symmetry] = []
    for each in symmetries:
        slots = each.wire.slots if isinstance(each, Gauge) else ()
        plain = all(s.constant is None and not s.gains and s.rows.plain for s in slots)
        if isinstance(each, Gauge) and isinstance(each.algebra, GL) and plain and not each.wire.constants.every:
            own = tuple((s.name, s.writes, s.dual, s.use, s.rows.columns, *s.channels.tolist()) for s in slots)
            bits = () if each.reflections is None else tuple(each.reflections.tolist())
            alike.setdefault((each.algebra.n, bits, own), []).append(each)
        else:
            result.append(each)
    for gauges in alike.values():
        result += [_beside(gauges)] if len(gauges) > 1 and _disjoint(gauges) else gauges
    return result


def _disjoint(gauges: Sequence[Gauge]) -> bool:
    """Return whether no entry is in slots of two gauges."""
    places: dict[str, list[Tensor]] = {}
    for gauge in gauges:
        own: dict[str, list[Tensor]] = {}
        for slot in gauge.wire.slots:
            own.setdefault(slot.name, []).append(slot.places.flatten())
        for name, each in own.items():
            places.setdefault(name, []).append(torch.cat(each).unique())
    return all(int(torch.bincount(torch.cat(each)).max()) == 1 for each in places.values())


def _beside(gauges: Sequence[Gauge]) -> Gauge:
    """Return gauges of GL(n) on disjoint entries as one, of blocks."""
    n, count = gauges[0].wire.channels, len(gauges)
    slots = []
    for same in zip(*(gauge.wire.slots for gauge in gauges), strict=True):
        rows = Rows.at(same[0].name, same[0].rows.shape, torch.cat([slot.places for slot in same]))
        channels = torch.cat([k * n + slot.channels for k, slot in enumerate(same)])
        slots.append(replace(same[0], rows=rows, channels=channels))
    flips = [gauge.reflections for gauge in gauges if gauge.reflections is not None]
    algebra = blocks(n * count, torch.arange(n * count).view(count, n))
    return Gauge(Wire(tuple(slots), n * count), algebra, torch.cat(flips) if flips else None)


def in_turns(point: Point, groups: Sequence[Symmetry], tori: Sequence[Free]) -> tuple[Point, float]:
    """Return the point after each group has gone to its least |w| in turns, and the largest relative charge left.

    A group that shares no parameter with others is done after its turn.
    """
    counts = Counter(name for each in (*groups, *(free.symmetry for free in tori)) for name in each.names)
    gauges = [each for each in groups if isinstance(each, Gauge)]
    for _ in range(_SWEEPS):
        left = 0.0
        for each in gauges:
            point, change = _balanced(point, each)
            left = max(left, change)
        for log_scales in tori:
            point, change = _scaled(point, log_scales)
            left = max(left, change)
        gauges = [each for each in gauges if any(counts[name] > 1 for name in each.names)]
        if left <= DONE or not (gauges or tori):
            return point, 0.0
    return point, left


def _projected(point: Point, translation: Translation) -> tuple[Point, float]:
    """Return the point of least |w| along a translation: where constants are 0 as far as they can be, by parameter."""
    (a, b), moved = translation.shape, [Numbers(part.rows, *part.at(point.params)) for part in translation.parts]
    if len(moved) == 1:
        part = moved[0]
        z = -part.rows.read(point.params)
        z = z if part.left is None else torch.linalg.pinv(part.left) @ z
        z = z if part.right is None else z @ torch.linalg.pinv(part.right)
    elif b == 1:
        columns = [torch.eye(a).double() if part.left is None else part.left for part in moved]
        # What is moved as it is comes before what makes up for it: no reader's weights have to be inverted.
        names, direct = list(point.params), [_is_direct(part) for part in translation.parts]
        order = sorted(range(len(moved)), key=lambda k: (not direct[k], names.index(moved[k].rows.name)))
        basis, z = torch.eye(a, dtype=torch.float64), torch.zeros(a, 1, dtype=torch.float64)
        for k in order:
            part = moved[k]
            right = torch.ones(1, part.rows.columns, dtype=torch.float64) if part.right is None else part.right
            wanted = -(part.rows.read(point.params) @ right.mT / right.square().sum() + columns[k] @ z)
            if part.left is None and len(basis) == basis.shape[1]:
                z = wanted + z
                break
            U, s, Vh = torch.linalg.svd(columns[k] @ basis)
            rank = int((s > 1e-9 * columns[k].norm()).sum())
            z = z + basis @ (Vh[:rank].mT @ ((U[:, :rank].mT @ wanted) / s[:rank, None]))
            basis = basis @ Vh[rank:].mT
            if not basis.shape[1]:
                break
    elif all(part.right is None for part in moved):
        columns = [torch.eye(a).double() if part.left is None else part.left for part in moved]
        gram = sum((c.mT @ c for c in columns), torch.zeros(a, a, dtype=torch.float64))
        z = -torch.linalg.pinv(gram, hermitian=True) @ sum(
            (c.mT @ p.rows.read(point.params) for c, p in zip(columns, moved, strict=True)), torch.zeros(a, b).double()
        )
    else:
        return point, 0.0
    norms = [float(point.params[part.rows.name].norm()) for part in moved]
    size = max(_length(part, z) for part in moved) / max(*norms, 1e-300)
    return (point, 0.0) if size <= DONE else (point.acted(translation, z), size)


def _is_direct(part: Part) -> bool:
    """Return whether a part is moved by z in units, and not by what weights make of z."""
    return part.left is None or isinstance(part.left, Sparse)


def _length(part: Numbers, z: Tensor) -> float:
    """Return the length of left @ z @ right, which is not formed."""
    z = z if part.left is None else part.left @ z
    return float(z.norm() if part.right is None else (torch.linalg.qr(part.right.mT, mode="r")[1] @ z.mT).norm())


def _balanced(point: Point, gauge: Gauge) -> tuple[Point, float]:
    """Return the point where second moments of writers and readers agree by blocks, and how far apart they were."""
    A, far = torch.eye(gauge.wire.channels, dtype=torch.float64), 0.0
    for channels, algebra in gauge.algebra.summands:
        if not isinstance(algebra, (GL, Complex)):
            continue
        M, N = moments(point.params, gauge, channels)
        m = channels.shape[1]
        if isinstance(algebra, Complex):
            M, N = (torch.eye(2).double() * each.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] for each in (M, N))
        sizes = M.flatten(1).norm(dim=1) + N.flatten(1).norm(dim=1)
        alive = (M.flatten(1).norm(dim=1) > 0) & (N.flatten(1).norm(dim=1) > 0)
        if not bool(alive.any()):
            continue
        channels, M, N = channels[alive], M[alive], N[alive]
        far = max(far, float(((M - N).flatten(1).norm(dim=1) / sizes[alive]).max()))
        A[channels[:, :, None], channels[:, None]] = _between(M, N, m)
    return (point, 0.0) if far <= DONE else (point.acted(gauge, A), far)


def _between(M: Tensor, N: Tensor, m: int) -> Tensor:
    """Return symmetric A with A M A = A^-1 N A^-1: A^2 = M^-1 # N, the geometric mean."""
    eye = torch.eye(m, dtype=torch.float64)
    M, N = (each + _REGULAR * each.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * eye for each in (M, N))
    L = torch.linalg.cholesky(M)
    e, V = torch.linalg.eigh(L.mT @ N @ L)
    P = torch.linalg.solve(L.mT, (V * e.clamp(min=0).sqrt()[:, None]) @ V.mT) @ torch.linalg.inv(L)
    e, V = torch.linalg.eigh((P + P.mT) / 2)
    return (V * e.clamp(min=1e-300).sqrt()[:, None]) @ V.mT


def _scaled(point: Point, free: Free) -> tuple[Point, float]:
    """Return the point of least |w| along log-scales, by Newton's method with conjugate gradients."""
    torus, N = free.symmetry, free.basis
    if not len(N):
        return point, 0.0
    first = 0.0
    for step in range(_STEPS):
        value, size = torus.charge(point.params, point.params)
        g = N @ value - free.target
        far = float((g.abs() / (abs(N) @ size).clamp(min=1e-300)).max())
        first = max(first, far)
        if far <= DONE or step == _STEPS - 1:
            break
        diagonal = ((N * N) @ size).clamp(min=1e-300)
        x, r = torch.zeros_like(g), -g
        z = r / diagonal
        p, rz = z, float(r @ z)
        for _ in range(50):
            d = torus.tangent(point.params, N.t() @ p)
            full = {name: d.get(name, torch.zeros_like(w)) for name, w in point.params.items() if name in torus.names}
            Hp = 2 * (N @ torus.charge(point.params, full).value)
            curve = float(p @ Hp)
            if curve <= 0:
                break
            x, r = x + rz / curve * p, r - rz / curve * Hp
            z = r / diagonal
            if (new := float(r @ z)) <= 1e-20 * float(g @ (g / diagonal)):
                break
            p, rz = z + new / rz * p, new
        x = x * min(1.0, 1.0 / max(1e-300, float(x.abs().max())))
        point = point.acted(torus, N.t() @ x)
    return point, first
