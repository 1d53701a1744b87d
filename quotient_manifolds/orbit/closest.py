"""Find, for each symmetry by itself, the group element that brings parameters nearest to those of another model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from quotient_manifolds.orbit.group import Group, Record, Steps, copied, names_of
from quotient_manifolds.orbit.path import distance
from quotient_manifolds.symmetries import Gauge, Params, Permutation, Scaling, Shift, SymmetricPair
from quotient_manifolds.symmetries.wires.constants import FreeDirections

WEIGHTS = 1e-2  # of what weights say of a rotation beside activations
TINY = 1e-14  # relative, of second moments: what is smaller has no inverse
Names = Collection[str]
CONJUGATE, INEXACT, HALVINGS = 200, 1e-3, 10  # steps of conjugate gradients, relative error of the slope; of a step


def closest(record: Record, params: Params, target: Params, condition: float, *, moving: Names | None = None) -> Tensor:
    """Return the element of a record's group that brings parameters nearest to the target, at least on one orbit.

    condition: bound of its condition number. moving: parameters whose units may still change places; where it is given,
    only weights are taken whose other side nothing moves, if they suffice. Permutations and rotations are found by
    `closest_order` and `rotation`.
    """
    if isinstance(record, SymmetricPair):
        return _of_pair(record, record.read(params).double(), record.read(target).double(), condition)
    if isinstance(record, Scaling):
        here, there = (copied(each, record.names) for each in (params, target))
        return torch.as_tensor(record.to_place(here) - record.to_place(there))
    if isinstance(record, (Shift, FreeDirections)):
        return record.toward(params, target)
    assert isinstance(record, Gauge)
    if record.acts == "linear":
        A = _mixing(record, params, target, condition, moving)
        return A / torch.linalg.det(A).abs().pow(1 / record.n)
    R, R1 = (sides(record, each)[1] for each in (params, target))  # of a mean: what is written may be unread beyond it
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
    return _invertible(R[None], W[None], R1[None], W1[None], condition, sign=True)[0]


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
    """Return the A of a gauge that is orthogonal whose rotation R of all vectors b is nearest to a, in least squares.

    It is that of M = sum of a b^T, in coordinates in which the group is orthogonal. Reflections count, too. moving: as
    for `sides`. seen: M of activations, beside which that of weights counts little.
    [Schönemann, the orthogonal Procrustes problem, 1966]
    """
    n, S = gauge.n, gauge.weights
    (W, D), (W1, D1) = (sides(gauge, each, moving=moving) for each in (params, target))
    M = (W1 * S).mT @ (W * S) + (D1 / S).mT @ (D / S)
    if seen is not None:
        M = unit(seen) + WEIGHTS * unit(M)
    if gauge.acts == "complex":
        angle = torch.atan2(M[1, 0] - M[0, 1], M[0, 0] + M[1, 1])
        R = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()]).reshape(2, 2)
    else:
        B = gauge.basis()
        U, _, V = torch.linalg.svd(B.mT @ M @ B)
        R = B @ U @ V @ B.mT + torch.eye(n, dtype=S.dtype) - B @ B.mT
    return R * S / S[:, None]


def unit(moment: Tensor) -> Tensor:
    """Return a matrix of length 1, or 0."""
    return moment / torch.linalg.matrix_norm(moment).clamp_min(torch.finfo(moment.dtype).tiny)


def closest_order(record: Permutation, params: Params, target: Params, pairs: Sequence[SymmetricPair]) -> Tensor:
    """Return the order of units with the least sum of squared distances to the units of a target.

    Of a pair whose heads are units the products G H^T are compared, which its group does not change.
    [Ainsworth et al., Git Re-Basin, 2209.04836, for neurons]
    """
    labels, features = _labels(record, params), list[tuple[Tensor, Tensor]]()
    touched = [pair for pair in pairs if not set(pair.names).isdisjoint(record.names)]
    here, there = (copied(each, names_of([record, *touched])) for each in (params, target))
    alike = defaultdict[object, list[SymmetricPair]](list)  # heads may have a pair each
    for pair in touched:
        alike[pair.kind, pair.n, pair.m, pair.h].append(pair)
        for each in (here, there):
            pair.write(each, torch.zeros(pair.heads, pair.n + pair.m, pair.h))
    for several in alike.values():
        mark = torch.cat([pair.read(labels)[..., 0] for pair in several])
        features += zip(*(_products(several, each, mark, record.size) for each in (params, target)), strict=True)
    plain = [part for part in record.parts if any(params[each.name].ndim > 1 for each in part.entries)]
    rest = replace(record, parts=tuple(plain) or record.parts)  # less biases, which shifts may have moved
    cost = torch.zeros(record.size, record.size, dtype=torch.float64)
    for rows, other in (*features, (rest.matrices(here), rest.matrices(there))):
        size = float(other.square().sum(1).mean())
        if size > 0:
            cost += torch.cdist(rows, other).square() / size
    return torch.from_numpy(linear_sum_assignment(cost.numpy())[1]).argsort()


def _labels(record: Permutation, params: Params) -> Params:
    """Return for each number of each parameter of units the unit that it belongs to, from 1, and 0 for none."""
    labels = {name: torch.zeros(w.shape, dtype=torch.float64) for name, w in params.items()}
    for part in record.parts:
        for unit in range(record.size):
            entries = part.entries[unit % len(part.entries)]
            places = entries.index() if part.rows is None else entries.index()[:, part.rows[unit]]
            places = places if part.columns is None else places[:, :, part.columns[unit]]
            labels[entries.name].view(-1)[places.reshape(-1)] = unit + 1.0
    return labels


def _products(pairs: Sequence[SymmetricPair], params: Params, mark: Tensor, units: int) -> Iterator[Tensor]:
    """Yield products G H^* of heads, or of the rows of one factor, that are units, as (units, features).

    mark: the unit to which a row (heads, n + m) belongs, from 1, and 0 for none.
    """
    pair, x, moving = pairs[0], torch.cat([each.read(params).double() for each in pairs]), mark.any(1)
    if not bool(moving.any()):
        return
    x, mark = x[moving], mark[moving]  # other heads of the pair hold no unit
    G, H = (torch.view_as_complex(x)[..., None] if pair.acts == "GL(1, C)" else x).split([pair.n, pair.m], 1)
    products = G @ H.mH
    if products.is_complex():
        products, mark = torch.cat([products.real, products.imag]), mark.repeat(2, 1)
    own, other = mark.split([pair.n, pair.m], 1)
    if bool((mark == mark[:, :1]).all()) and mark[:, 0].unique().tolist() == [*range(1, units + 1)]:
        yield products[mark[:, 0].argsort(stable=True)].reshape(units, -1)
        return
    for each, unit, fixed in ((products, own, other), (products.mT, other, own)):
        count = int((unit[0] == 1).sum())
        if count and bool((unit == unit[0]).all()) and not bool(fixed.any()):
            places = unit[0].argsort(stable=True)[-count * units :].view(units, count)
            yield each[:, places].movedim(1, 0).flatten(1)


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
    """Return A that brings (G A^-1, H A^T) near (G1, H1): where balanced factors are nearest by a rotation.

    It is exact for two points of one orbit, up to rounding. Of numbers the sign may be fixed.
    """
    first, last = _balancing(G, H), _balancing(G1, H1)
    Gb, Gb1 = (torch.linalg.solve(A, each, left=False) for A, each in ((first, G), (last, G1)))
    N = Gb.mT @ Gb1 + (H @ first.mT).mT @ (H1 @ last.mT)
    U, _, V = torch.linalg.svd(N)
    R = (U @ V).mT if sign else torch.ones_like(N)
    return _bounded(torch.linalg.solve(last, R @ first), condition)


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


def _bounded(A: Tensor, condition: float) -> Tensor:
    """Return A with its smallest singular values raised to what the condition number allows."""
    U, s, V = torch.linalg.svd(A)
    least = s[..., :1] / condition
    return torch.where((s < least).any(-1)[..., None, None], U * torch.maximum(s, least)[..., None, :] @ V, A)
