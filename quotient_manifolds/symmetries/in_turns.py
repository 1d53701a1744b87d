"""Go to the least |w| of one group after another, in closed form, whatever the width of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quotient_manifolds.symmetries.groups import GL, Complex, Gauge, Params, Symmetry, Translation
from quotient_manifolds.symmetries.groups.rows import Draft
from quotient_manifolds.symmetries.least_norm import DONE, Free, Point

_SWEEPS = 30
_REGULAR = 1e-15
"""Of the mean second moment of a block: added to it, so that what is of lower rank has an inverse."""
_STEPS = 40


def without_constants(point: Point, translations: Sequence[Translation]) -> Point:
    """Return the point after translations, in turns, before anything else moves the weights they hold at."""
    todo = list(translations)
    for _ in range(_SWEEPS):
        again: dict[str, None] = {}
        for translation in todo:
            point, change = _projected(point, translation)
            again |= dict.fromkeys(translation.names if change > DONE else ())
        shared = [name for name in again if sum(name in each.names for each in translations) > 1]
        todo = [each for each in translations if {*each.names} & {*shared}]
        if not todo:
            break
    return point


def in_turns(point: Point, groups: Sequence[Symmetry], tori: Sequence[Free]) -> tuple[Point, float]:
    """Return the point after each group has gone to its least |w| in turns, and the largest relative charge left."""
    left = 0.0
    for _ in range(_SWEEPS):
        left = 0.0
        for each in groups:
            if isinstance(each, Gauge):
                point, change = _balanced(point, each)
                left = max(left, change)
        for log_scales in tori:
            point, change = _scaled(point, log_scales)
            left = max(left, change)
        if left <= DONE:
            break
    return point, left


def _projected(point: Point, translation: Translation) -> tuple[Point, float]:
    """Return the point of least |w| along a translation: where constants are 0 as far as they can be, by parameter."""
    moved, (a, b) = translation.parts, translation.shape
    if len(moved) == 1:
        part = moved[0]
        z = -part.rows.read(point.params)
        z = z if part.left is None else torch.linalg.pinv(part.left) @ z
        z = z if part.right is None else z @ torch.linalg.pinv(part.right)
    elif b == 1:
        columns = [torch.eye(a).double() if part.left is None else part.left for part in moved]
        order = sorted(range(len(moved)), key=lambda k: list(point.params).index(moved[k].rows.name))
        basis, z = torch.eye(a, dtype=torch.float64), torch.zeros(a, 1, dtype=torch.float64)
        for k in order:
            part = moved[k]
            right = torch.ones(1, part.rows.columns, dtype=torch.float64) if part.right is None else part.right
            wanted = -(part.rows.read(point.params) @ right.mT / right.square().sum() + columns[k] @ z)
            if part.left is None and len(basis) == basis.shape[1]:
                z = wanted + z
                break
            U, s, Vh = torch.linalg.svd(columns[k] @ basis)
            rank = int((s > 1e-9 * s[:1]).sum())
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
    size = max(float(part.change(z).norm() / point.params[part.rows.name].norm().clamp(min=1e-300)) for part in moved)
    return (point, 0.0) if size <= DONE else (point.acted(translation, z), size)


def _balanced(point: Point, gauge: Gauge) -> tuple[Point, float]:
    """Return the point where second moments of writers and readers agree by blocks, and how far apart they were."""
    A, far = torch.eye(gauge.wire.channels, dtype=torch.float64), 0.0
    for channels, algebra in gauge.algebra.summands:
        if not isinstance(algebra, (GL, Complex)):
            continue
        M, N = _moments(point.params, gauge, channels)
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
    return (point, 0.0) if far <= DONE else (_acted(point, gauge, A), far)


def _between(M: Tensor, N: Tensor, m: int) -> Tensor:
    """Return symmetric A with A M A = A^-1 N A^-1: A^2 = M^-1 # N, the geometric mean."""
    eye = torch.eye(m, dtype=torch.float64)
    M, N = (each + _REGULAR * each.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * eye for each in (M, N))
    L = torch.linalg.cholesky(M)
    e, V = torch.linalg.eigh(L.mT @ N @ L)
    P = torch.linalg.solve(L.mT, (V * e.clamp(min=0).sqrt()[:, None]) @ V.mT) @ torch.linalg.inv(L)
    e, V = torch.linalg.eigh((P + P.mT) / 2)
    return (V * e.clamp(min=1e-300).sqrt()[:, None]) @ V.mT


def _moments(params: Params, gauge: Gauge, channels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the second moments (k, m, m) of blocks of channels, of slots in which A acts, and of others."""
    k, m = channels.shape
    found = [torch.zeros(k, m, m, dtype=torch.float64) for _ in range(2)]
    for slot in gauge.wire.slots:
        V = slot.in_wire(params, params)[0]
        place = torch.full((gauge.wire.channels,), -1)
        place[slot.channels] = torch.arange(len(V))
        at = place[channels]
        inside = (at >= 0).all(1)
        blocks = V[at[inside]]
        found[not slot.covariant][inside] += blocks @ blocks.mT
    return found[0], found[1]


def _acted(point: Point, gauge: Gauge, A: Tensor) -> Point:
    """Return the point after an element of a gauge, block by block."""
    blocks = [(c, A[c[:, :, None], c[:, None]]) for c, _ in gauge.algebra.summands]
    if any(c.shape[1] == gauge.wire.channels for c, _ in blocks) or len({s.name for s in gauge.wire.slots}) < len(
        gauge.wire.slots
    ):
        return point.acted(gauge, A)
    draft = Draft(point.params)
    for slot in gauge.wire.slots:
        s = slot.units(point.params)[:, None]
        s = s if slot.writes else 1 / s
        V = slot.rows.read(draft) / s
        place = torch.full((gauge.wire.channels,), -1)
        place[slot.channels] = torch.arange(len(V))
        for channels, each in blocks:
            at = place[channels]
            inside = (at >= 0).all(1)
            block = each[inside] if slot.covariant else torch.linalg.inv(each[inside]).mT
            V[at[inside]] = block @ V[at[inside]]
        draft.write(slot.rows, s * V)
    return replace(point, params=draft.finished(), steps=(*point.steps, (gauge, A)))


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
