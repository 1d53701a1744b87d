"""Find, for each symmetry by itself, the group element that brings parameters nearest to those of another model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from quotient_manifolds.orbit.group import Record
from quotient_manifolds.symmetries import Gauge, Params, Permutation, Scaling, Shift, SymmetricPair
from quotient_manifolds.symmetries.wires.constants import FreeDirections
from quotient_manifolds.symmetries.wires.gauges import Part

TINY = 1e-14  # relative, of second moments: what is smaller has no inverse
Names = Collection[str]
SWEEPS, SETTLED = 30, 1e-15


def closest(
    record: Record, params: Params, target: Params, condition: float, *, moving: Names | None = None
) -> Tensor | None:
    """Return the element of a record's group that brings parameters nearest to the target, at least on one orbit.

    condition: bound of its condition number. moving: parameters whose units may still change places; where it is given,
    only weights are taken whose other side nothing moves, if they suffice. None for a record that has no closed form.
    Permutations and rotations are found by `closest_order` and `rotation`.
    """
    if isinstance(record, SymmetricPair):
        return _of_pair(record, record.read(params).double(), record.read(target).double(), condition)
    if isinstance(record, Scaling):
        here, there = ({**each, **{name: each[name].clone() for name in record.names}} for each in (params, target))
        return torch.as_tensor(record.to_place(here) - record.to_place(there))
    if isinstance(record, (Shift, FreeDirections)):
        return record.toward(params, target)
    if isinstance(record, Gauge) and record.acts == "linear":
        A = _mixing(record, params, target, condition, moving)
        return A / torch.linalg.det(A).abs().pow(1 / record.n)
    if isinstance(record, Gauge) and record.acts == "mean":
        W, W1 = sides(record, params)[0], sides(record, target)[0]
        w = torch.linalg.lstsq(W, ((W1 - W) * record.weights).mean(1, keepdim=True), driver="gelsd").solution
        return torch.eye(record.n, dtype=W.dtype) + torch.outer(1 / record.weights, w[:, 0])
    return None


def _mixing(gauge: Gauge, params: Params, target: Params, condition: float, moving: Names | None) -> Tensor:
    """Return the invertible A nearest to what leads from one to the other."""
    if moving is not None:
        fixed = [sides(gauge, each, moving=moving) for each in (params, target)]
        for (b, a), dual in zip(zip(*fixed, strict=True), (False, True), strict=True):
            if len(b) >= gauge.n and torch.linalg.matrix_rank(b) == torch.linalg.matrix_rank(a) == gauge.n:
                A = torch.linalg.lstsq(b, a).solution.mT
                return _bounded(torch.linalg.inv(A).mT if dual else A, condition)
    (W, R), (W1, R1) = (sides(gauge, each) for each in (params, target))
    return _invertible(R[None], W[None], R1[None], W1[None], condition, sign=True)[0]


def told(gauge: Gauge, moving: Names | None) -> list[Part]:
    """Return the parts of a gauge that tell how it has turned: no biases, which shifts move, but where that is all.

    moving: parameters whose units may still change places. Where it is given, parts whose other side nothing moves are
    preferred.
    """
    chosen = [part for part in gauge.parts if not part.constant] or [*gauge.parts]
    if moving is None:
        return chosen
    alone = [part for part in chosen if part.alone] or chosen
    return [part for part in alone if part.entries.name not in moving] or alone


def sides(gauge: Gauge, params: Mapping[str, Tensor], *, moving: Names | None = None) -> tuple[Tensor, Tensor]:
    """Return the vectors that A turns, and those that the transpose of its inverse turns, as rows (m, n)."""
    found: dict[bool, list[Tensor]] = {dual: [torch.zeros(0, gauge.n, dtype=torch.float64)] for dual in (False, True)}
    for part in told(gauge, moving):
        for rows, dual in part.vectors(params):
            found[dual].append(rows)
    return torch.cat(found[False]), torch.cat(found[True])


def rotation(gauge: Gauge, moment: Tensor) -> Tensor:
    """Return the A of a gauge that is orthogonal whose rotation R of all vectors b is nearest to a, in least squares.

    moment: the sum of a b^T, in coordinates in which the group is orthogonal. Reflections count, too.
    [Schönemann, the orthogonal Procrustes problem, 1966]
    """
    n, S = gauge.n, gauge.weights
    if gauge.acts == "complex":
        angle = torch.atan2(moment[1, 0] - moment[0, 1], moment[0, 0] + moment[1, 1])
        R = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()]).reshape(2, 2)
    else:
        B = gauge.basis()
        U, _, V = torch.linalg.svd(B.mT @ moment @ B)
        R = B @ U @ V @ B.mT + torch.eye(n, dtype=S.dtype) - B @ B.mT
    return R * S / S[:, None]


def weight_moment(gauge: Gauge, params: Params, target: Params, moving: Names | None) -> Tensor:
    """Return the sum of a b^T over rows of the weights of both models that `told` says."""
    total = torch.zeros(gauge.n, gauge.n, dtype=torch.float64)
    for part in told(gauge, moving):
        for (b, dual), (a, _) in zip(part.vectors(params), part.vectors(target), strict=True):
            S = 1 / gauge.weights if dual else gauge.weights
            total += (a * S).mT @ (b * S)
    return total


def closest_order(record: Permutation, params: Params, target: Params, pairs: Sequence[SymmetricPair]) -> Tensor:
    """Return the order of units with the least sum of squared distances to the units of a target.

    Of a pair whose heads are units the products G H^T are compared, which its group does not change.
    [Ainsworth et al., Git Re-Basin, 2209.04836, for neurons]
    """
    cost = torch.zeros(record.size, record.size, dtype=torch.float64)
    touched = [pair for pair in pairs if not set(pair.names).isdisjoint(record.names)]
    names = {*record.names, *(name for pair in touched for name in pair.names)}
    here, there = ({**each, **{name: each[name].clone() for name in names}} for each in (params, target))
    labels = _labels(record, params)
    features = list[tuple[Tensor, Tensor]]()
    for pair in touched:
        mark = pair.read(labels)
        heads = mark.flatten(1)[:, 0]
        if bool((mark == heads[:, None, None]).all()) and bool((heads > 0).all()):
            units = torch.argsort(heads, stable=True).view(record.size, -1)
            cost += _distances(*(_products(pair, each, units) for each in (params, target)))
        else:
            features += zip(*(_rows(pair, each, mark[..., 0], record.size) for each in (params, target)), strict=True)
        for each in (here, there):
            pair.write(each, torch.zeros(pair.heads, pair.n + pair.m, pair.h))
    plain = [part for part in record.parts if any(params[each.name].ndim > 1 for each in part.entries)]
    alike = replace(record, parts=tuple(plain) or record.parts)  # less biases, which shifts may have moved
    for rows, other in (*features, (alike.matrices(here), alike.matrices(there))):
        size = float(other.square().sum(1).mean())
        if size > 0:
            cost += torch.cdist(rows, other).square() / size
    own, place = linear_sum_assignment(cost.numpy())
    order = torch.empty(record.size, dtype=torch.long)
    order[torch.from_numpy(place)] = torch.from_numpy(own)
    return order


def _labels(record: Permutation, params: Params) -> Params:
    """Return for each number of each parameter of units the unit that it belongs to, from 1, and 0 for none."""
    labels = {name: torch.zeros(w.shape, dtype=torch.float64) for name, w in params.items()}
    for part in record.parts:
        for number, entries in enumerate(part.entries):
            W = entries.read(labels)
            for unit in range(record.size) if len(part.entries) == 1 else (number,):
                rows = torch.arange(W.shape[1]) if part.rows is None else part.rows[unit]
                columns = torch.arange(W.shape[2]) if part.columns is None else part.columns[unit]
                W[:, rows[:, None], columns] = unit + 1.0
            entries.write(labels, W)
    return labels


def _rows(pair: SymmetricPair, params: Params, mark: Tensor, units: int) -> Iterator[Tensor]:
    """Yield products G H^T, or H G^T, of the rows of one factor that are units, as (units, features)."""
    x = pair.read(params).double()
    if pair.acts == "GL(1, C)":
        return
    parts = ((x[:, : pair.n], mark[:, : pair.n]), (x[:, pair.n :], mark[:, pair.n :]))
    for (own, unit), (other, fixed) in (parts, parts[::-1]):
        count = int((unit[0] == 1).sum())
        if count and bool((unit == unit[0]).all()) and not bool(fixed.any()):
            places = torch.argsort(unit[0], stable=True)[-count * units :].view(units, count)
            yield (own @ other.mT)[:, places].movedim(1, 0).flatten(1)


def _products(pair: SymmetricPair, params: Params, units: Tensor) -> tuple[Tensor, Tensor]:
    x = pair.read(params).double()
    G, H = x[:, : pair.n], x[:, pair.n :]
    if pair.acts == "GL(1, C)":
        G, H = (torch.complex(each[..., :1].contiguous(), each[..., 1:].contiguous()) for each in (G, H))
    return G[units], H[units]  # (units, k, n, h)


def _distances(here: tuple[Tensor, Tensor], there: tuple[Tensor, Tensor]) -> Tensor:
    """Return |G_i H_i^* - G_j H_j^*|^2 of all units of the one and of the other, relative to how large these are."""

    def inner(x: tuple[Tensor, Tensor], y: tuple[Tensor, Tensor]) -> Tensor:
        G, H = (torch.einsum("iknh,jkng->ijkhg", a.conj(), b) for a, b in zip(x, y, strict=True))
        return (G * H.conj()).sum((2, 3, 4)).real

    own, other = (inner(each, each).diagonal() for each in (here, there))
    return (own[:, None] + other - 2 * inner(here, there)) / other.mean().clamp_min(torch.finfo(other.dtype).tiny)


def _of_pair(pair: SymmetricPair, x: Tensor, y: Tensor, condition: float) -> Tensor:
    n = pair.n
    if pair.acts == "GL(1, C)":
        (g, k), (g1, k1) = ((each[:, :n], each[:, n:]) for each in map(torch.view_as_complex, (x, y)))
        ratio = [torch.linalg.vector_norm(a, dim=1) / torch.linalg.vector_norm(b, dim=1) for a, b in ((g, k), (g1, k1))]
        r = (ratio[0] / ratio[1]).sqrt().nan_to_num(1.0, 1.0).clamp(condition**-0.5, condition**0.5)
        turned = (g * g1.conj()).sum(1) / r + r * (k * k1.conj()).sum(1)
        return torch.polar(r, turned.angle())
    return _invertible(x[:, :n], x[:, n:], y[:, :n], y[:, n:], condition, sign=pair.acts == "GL(h)")


def _invertible(G: Tensor, H: Tensor, G1: Tensor, H1: Tensor, condition: float, *, sign: bool) -> Tensor:
    """Return A with the least |G A^-1 - G1|^2 + |H A^T - H1|^2 near where balanced factors meet by a rotation.

    The start is exact for two points of one orbit, up to rounding; Newton's method on the squares (Gauss-Newton) goes
    on from there: for A (I + D) it is a Sylvester equation in D. Of numbers the sign may be fixed.
    """
    first, last = _balancing(G, H), _balancing(G1, H1)
    N = _divided(G, first).mT @ _divided(G1, last) + (H @ first.mT).mT @ (H1 @ last.mT)
    U, _, V = torch.linalg.svd(N)
    R = (U @ V).mT if sign else torch.ones_like(N)
    A = _bounded(torch.linalg.solve(last, R @ first), condition)

    def distance(A: Tensor) -> Tensor:
        return (_divided(G, A) - G1).square().sum((1, 2)) + (H @ A.mT - H1).square().sum((1, 2))

    least, eye = distance(A), torch.eye(G.shape[-1], dtype=G.dtype)
    for _ in range(SWEEPS):
        Ga, Ha = _divided(G, A), H @ A.mT
        (p, P), (q, Q) = torch.linalg.eigh(Ga.mT @ Ga), torch.linalg.eigh(Ha.mT @ Ha)
        right = P.mT @ (Ga.mT @ (Ga - G1) - (Ha - H1).mT @ Ha) @ Q
        total = (p[:, :, None] + q[:, None, :]).clamp_min(torch.finfo(G.dtype).tiny)
        D = P @ (right / total) @ Q.mT
        better, t = torch.zeros(len(G), dtype=torch.bool), torch.ones(len(G), 1, 1, dtype=G.dtype)
        for _ in range(8):
            tried = _bounded((eye + t * D) @ A, condition)
            value = distance(tried).nan_to_num(torch.inf)
            better = (value < least) & (sign | (tried > 0).all(2).all(1))
            if bool(better.all()):
                break
            t = torch.where(better[:, None, None], t, t / 2)
        A = torch.where(better[:, None, None], tried, A)
        gained = torch.where(better, least - value, 0.0)
        least = torch.where(better, value, least)
        if bool((gained <= SETTLED * (least + gained)).all()):
            break
    return A


def _balancing(G: Tensor, H: Tensor) -> Tensor:
    """Return A with A^-T G^T G A^-1 = A H^T H A^T: the root of S with S H^T H S = G^T G."""
    P, Q = (_regular(each.mT @ each) for each in (G, H))
    root, inverse = _power(Q, 0.5), _power(Q, -0.5)
    return _power(inverse @ _power(root @ P @ root, 0.5) @ inverse, 0.5)


def _regular(P: Tensor) -> Tensor:
    size = P.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    return P + torch.where(size > 0, TINY * size, 1.0) * torch.eye(P.shape[-1], dtype=P.dtype)


def _power(P: Tensor, p: float) -> Tensor:
    values, V = torch.linalg.eigh((P + P.mT) / 2)
    least = TINY * values[..., -1:]
    return V * torch.maximum(values, least).pow(p)[..., None, :] @ V.mT


def _divided(G: Tensor, A: Tensor) -> Tensor:
    return torch.linalg.solve(A, G, left=False)


def _bounded(A: Tensor, condition: float) -> Tensor:
    """Return A with its smallest singular values raised to what the condition number allows."""
    U, s, V = torch.linalg.svd(A)
    least = s[..., :1] / condition
    return torch.where((s < least).any(-1)[..., None, None], U * torch.maximum(s, least)[..., None, :] @ V, A)
