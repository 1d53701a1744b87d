"""Find, for each symmetry by itself, the group element that brings parameters nearest to those of another model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from quotient_manifolds.linalg import singular_frame
from quotient_manifolds.manifolds.fixed_rank import balanced, polar
from quotient_manifolds.orbit.group import Group, Record, Steps, copied, names_of
from quotient_manifolds.orbit.path import distance
from quotient_manifolds.symmetries import Gauge, Params, Permutation, Scaling, Shift, SymmetricPair
from quotient_manifolds.symmetries.wires.constants import FreeDirections

WEIGHTS = 1e-2  # of what weights say of a rotation beside activations
TINY = 1e-14  # relative, of second moments: what is smaller has no inverse
Names = Collection[str]
CONJUGATE, INEXACT, HALVINGS = 200, 1e-3, 10  # steps of conjugate gradients, relative error of the slope; of a step
TIE = 1e-3  # weight of what tells apart units that nothing else does


def closest(record: Record, params: Params, target: Params, condition: float, *, moving: Names | None = None) -> Tensor:
    """Return the element of a record's group that brings parameters nearest to the target, at least on one orbit.

    condition: bound of its condition number. moving: parameters whose units may still change places; where it is given,
    only weights are taken whose other side nothing moves, if they suffice. Permutations and rotations are found by
    `closest_order` and `rotation`.
    """
    if isinstance(record, SymmetricPair):
        factors = [record.read(each).double().split([record.n, record.m], 1) for each in (params, target)]
        A = _invertible(factors[0], factors[1], record.acts, condition)
        return torch.view_as_complex(A[:, 0].contiguous()) if record.acts == "GL(1, C)" else A
    if isinstance(record, Scaling):
        here, there = (copied(each, record.names) for each in (params, target))
        return torch.as_tensor(record.to_place(here) - record.to_place(there))
    if isinstance(record, (Shift, FreeDirections)):
        return record.toward(params, target)
    assert isinstance(record, Gauge)
    if record.acts == "linear":
        A = _mixing(record, params, target, condition, moving)
        return A / torch.linalg.det(A).abs().pow(1 / record.n)
    R, R1 = (sides(record, each)[1] for each in (params, target))
    # Of a mean, by readers alone: what is written may be unread beyond it
    along = R @ (1 / record.weights)
    v = (R1 - R).mT @ along / along.square().sum()
    return torch.linalg.inv(torch.eye(record.n, dtype=R.dtype) + torch.outer(1 / record.weights, v))


def _mixing(gauge: Gauge, params: Params, target: Params, condition: float, moving: Names | None) -> Tensor:
    """Return the invertible A nearest to what leads from one to the other."""
    if moving is not None:
        fixed = [sides(gauge, each, moving=moving) for each in (params, target)]
        for (b, a), dual in zip(zip(*fixed, strict=True), (False, True), strict=True):
            if len(b) >= gauge.n and torch.linalg.matrix_rank(b) == torch.linalg.matrix_rank(a) == gauge.n:
                A = torch.linalg.lstsq(b, a).solution.mT
                return _bounded(torch.linalg.inv(A).mT if dual else A, condition)
    (W, R), (W1, R1) = (sides(gauge, each) for each in (params, target))
    return _invertible((R[None], W[None]), (R1[None], W1[None]), gauge.acts, condition)[0]


def _invertible(here: Sequence[Tensor], there: Sequence[Tensor], acts: str, condition: float) -> Tensor:
    """Return A that brings (G A^-1, H A^T) near to another pair: where balanced factors are nearest by a rotation.

    It is exact for two points of one orbit, up to rounding. Of planes it is a multiple of a rotation.
    """
    (first, x), (last, y) = (_balancing(G, H, acts) for G, H in (here, there))
    A = _bounded(torch.linalg.solve(last, _orthogonal(y.mT @ x, acts) @ first), condition)
    return A.abs() if acts == "GL+(1)" else A


def _balancing(G: Tensor, H: Tensor, acts: str) -> tuple[Tensor, Tensor]:
    """Return A for which G A^-1 and H A^T have the same second moment, diagonal, or one length; and both, up to a size.

    Factors may lack rank, or be 0.
    """
    a, b = (torch.linalg.matrix_norm(each, keepdim=True) for each in (G, H))
    a, b = (torch.where(each > 0, each, 1.0) for each in (a, b))
    size = (a / b).sqrt()
    if acts == "GL(1, C)":
        return size * torch.eye(2, dtype=G.dtype), torch.cat([G / a, H / b], 1)
    frame = singular_frame(G / a, H / b, TINY)
    return size * frame.s.rsqrt()[..., None] * frame.from_left, balanced(frame)


def _bounded(A: Tensor, condition: float) -> Tensor:
    """Return A with its smallest singular values raised to what the condition number allows."""
    U, s, V = torch.linalg.svd(A)
    return U * torch.maximum(s, s[..., :1] / condition)[..., None, :] @ V


def _orthogonal(M: Tensor, acts: str) -> Tensor:
    """Return the R nearest to what is turned: of the sum M of a b^T that for which all R b are nearest to a.

    Reflections count, too, except in planes. [Schönemann, the orthogonal Procrustes problem, 1966]
    """
    if acts in ("complex", "GL(1, C)"):
        J = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=M.dtype)
        M = M - J @ M @ J
    return polar(M)


def sides(gauge: Gauge, params: Mapping[str, Tensor], *, moving: Names | None = None) -> tuple[Tensor, Tensor]:
    """Return the vectors that A turns, and those that the transpose of its inverse turns, as rows (m, n).

    Those of biases, which shifts move, only where that is all. moving: parameters whose units may still change places.
    Where it is given, parts whose other side nothing moves are preferred.
    """
    parts = [part for part in gauge.parts if not part.constant] or [*gauge.parts]
    if moving is not None:
        parts = [part for part in parts if part.alone] or parts
        parts = [part for part in parts if part.entries.name not in moving] or parts
    found: dict[bool, list[Tensor]] = {dual: [torch.zeros(0, gauge.n, dtype=torch.float64)] for dual in (False, True)}
    for part in parts:
        for rows, dual in part.vectors(params):
            found[dual].append(rows)
    return torch.cat(found[False]), torch.cat(found[True])


def rotation(
    gauge: Gauge, params: Params, target: Params, *, moving: Names | None = None, seen: Tensor | None = None
) -> Tensor:
    """Return the A of a gauge that is orthogonal which brings all vectors nearest to those of the target.

    moving: as for `sides`. seen: the sum of a b^T of activations b here and a there, in coordinates in which the group
    is orthogonal, beside which that of weights counts little.
    """
    S, B = gauge.weights, gauge.basis()
    (W, D), (W1, D1) = (sides(gauge, each, moving=moving) for each in (params, target))
    M = (W1 * S).mT @ (W * S) + (D1 / S).mT @ (D / S)
    if seen is not None:
        M = unit(seen) + WEIGHTS * unit(M)
    R = B @ _orthogonal(B.mT @ M @ B, gauge.acts) @ B.mT + torch.eye(gauge.n, dtype=S.dtype) - B @ B.mT
    return R * S / S[:, None]


def unit(moment: Tensor) -> Tensor:
    """Return a matrix of length 1, or 0."""
    return moment / torch.linalg.matrix_norm(moment).clamp_min(torch.finfo(moment.dtype).tiny)


def closest_order(record: Permutation, params: Params, target: Params, pairs: Sequence[SymmetricPair]) -> Tensor:
    """Return the order of units with the least sum of squared distances to the units of a target.

    Of pairs the products G H^* are compared, which their groups do not change.
    [Ainsworth et al., Git Re-Basin, 2209.04836, for neurons]
    """
    units, features = _units(record, params), list[tuple[Tensor, Tensor, float]]()
    touched = [pair for pair in pairs if not set(pair.names).isdisjoint(record.names)]
    here, there = (copied(each, names_of([record, *touched])) for each in (params, target))
    alike = defaultdict[object, list[SymmetricPair]](list)  # heads may have a pair each
    for pair in touched:
        alike[pair.kind, pair.n, pair.m, pair.h].append(pair)
    for several in alike.values():
        found = [[_products(each, at, units) for each in several] for at in (params, target)]
        (rows, unit, weights), (other, _, _) = (map(torch.cat, zip(*each, strict=True)) for each in found)
        count = unit.bincount(minlength=record.size + 1)
        if count[1] and bool((count[1:] == count[1]).all()):
            places = unit.argsort(stable=True)[count[0] :].view(record.size, -1)
            features.append((rows[places], other[places], float(weights.max())))
    for pair in touched:
        for each in (here, there):
            pair.write(each, torch.zeros(pair.heads, pair.n + pair.m, pair.h))
    plain = [part for part in record.parts if any(params[each.name].ndim > 1 for each in part.entries)]
    rest = replace(record, parts=tuple(plain) or record.parts)  # less biases, which shifts may have moved
    features.append((rest.matrices(here), rest.matrices(there), 1.0))
    cost = torch.zeros(record.size, record.size, dtype=torch.float64)
    for rows, other, weight in features:
        size = float(other.square().sum(1).mean())
        if size > 0:
            cost += weight * torch.cdist(rows, other).square() / size
    return torch.from_numpy(linear_sum_assignment(cost.numpy())[1]).argsort()


def _units(record: Permutation, params: Params) -> Params:
    """Return for each number of each parameter the unit that it belongs to, from 1, and 0 for none."""
    found = {name: torch.zeros(w.shape, dtype=torch.float64) for name, w in params.items()}
    for part in record.parts:
        for number, entries in enumerate(part.entries):
            W = entries.read(found)
            for unit in range(record.size) if len(part.entries) == 1 else (number,):
                rows = torch.arange(W.shape[1]) if part.rows is None else part.rows[unit]
                columns = torch.arange(W.shape[2]) if part.columns is None else part.columns[unit]
                W[:, rows[:, None], columns] = unit + 1.0
            entries.write(found, W)
    return found


def _products(pair: SymmetricPair, params: Params, units: Params) -> tuple[Tensor, Tensor, Tensor]:
    """Return all numbers of the products G H^*, the unit that each belongs to, and a weight.

    Units are heads, or rows of one factor; where they are rows of both, the diagonal of the sum over heads breaks ties.
    """
    x = pair.read(params).double()
    G, H = (torch.view_as_complex(x)[..., None] if pair.acts == "GL(1, C)" else x).split([pair.n, pair.m], 1)
    products = G @ H.mH
    products = torch.view_as_real(products) if products.is_complex() else products[..., None]
    row, column = (each[..., 0].long() for each in (pair.G.read(units), pair.H.read(units)))
    a, b = torch.broadcast_tensors(row[:, :, None], column[:, None])
    weight = 1.0
    if not (row.any() and column.any()):
        unit = a + b
    elif bool((a == b).all()):
        unit = a
    else:
        products, unit, weight = products.sum(0), a[0] * (a[0] == b[0]), TIE
    return products.flatten(), unit[..., None].expand(products.shape).flatten(), torch.tensor([weight])


def gauss_newton(group: Group, here: Params, there: Params) -> tuple[Params, Steps]:
    """Return parameters nearer to others by one step of Gauss-Newton at the identity of a group, and what acts.

    |J z - r| is minimized by conjugate gradients on J^T J; J z is the derivative of J^T u in u. [Björck, Numerical
    methods for least squares problems, 1996, 7.4]
    """

    def flat(params: Params) -> Tensor:
        return torch.cat([params[name].flatten() for name in group.names])

    numbers = group.zeros()
    with torch.enable_grad():
        moved = flat(group.element(numbers).apply(here))
        u = torch.zeros_like(moved, requires_grad=True)
        pulled = torch.autograd.grad(moved, numbers, u, create_graph=True)
    z, r = [torch.zeros_like(each) for each in numbers], flat(there) - moved.detach()
    p, first, last = z, 0.0, 1.0
    for number in range(CONJUGATE):
        slope = torch.autograd.grad(moved, numbers, r, retain_graph=True)
        square = sum(float(each.square().sum()) for each in slope)
        first = first or square
        if square <= INEXACT**2 * first:
            break
        p = [a + square / last * b for a, b in zip(slope, p, strict=True)] if number else [*slope]
        (q,) = torch.autograd.grad(pulled, u, p, retain_graph=True)
        t, last = square / float(q.square().sum()), square
        z, r = [a + t * b for a, b in zip(z, p, strict=True)], r - t * q
    before = distance(here, there)
    for halvings in range(HALVINGS):
        element = group.element([each * 0.5**halvings for each in z])
        if distance(found := element.apply(here), there) < before:
            return found, element.steps
    return here, ()
