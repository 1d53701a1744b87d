"""Compute exact geodesics of the pair (G, H): closed forms of `inv` and of one column, and an ODE for all others.

For all others the displacement is rest turn + basis bend, with rest = z - basis inside and inside = left^T z. The
second-order displacement has the same form, with z in place of rest. Here the h x h matrices turn and bend come from an
ODE (`integrate`). It depends on z only through `inside` and the Gram matrix of rest, so its size does not involve n, m.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from quotient_manifolds.derivatives import differentiated
from quotient_manifolds.linalg import apart, solve
from quotient_manifolds.manifolds.horizontal import GeodesicError, all_finite, some
from quotient_manifolds.manifolds.runge_kutta import FLOOR, follow, invert
from quotient_manifolds.manifolds.second_order import Both, Pairing, cores, plus, slope, split, times

_CACHED = 2**16
"""Numbers of a state that are processed at a time: half a megabyte."""
_LENGTHS = 1e8
"""Largest ratio of squared column lengths whose products, with float64 rounding, are accurate to 1e-8."""
_CONDITION = 1e5
"""Largest condition number of Gram matrices whose inverses are used; the errors stay below the error of a step."""
_RANGE = 16.0
"""Bounds the exponent 2 |t|, so that squared radii stay far from overflow."""


def inv_exponential(left: Tensor, a: Tensor) -> Tensor:
    r"""Compute expm(Om) left expm(M^T), Om = a left^T - left a^T: the exact geodesic of `inv`, one factor, t = 1.

    The Lagrangian tr((G^T G)^{-1} G'^T G') / 2 is invariant under O(n) from the left and GL(h) from the right. The two
    conserved momenta are Om = xi_G (G^T G)^{-1} G^T - transpose and C = (G^T G)^{-1} xi_G^T G, and
    G(t) = expm(t Om) G expm(t C) solves the geodesic equation: G' = Om G + G C with both momenta constant.

    Om acts on the span of left and Y = a - left M, M = left^T a, where in the basis (left, Y / c) it is
    [[M - M^T, -Y^T Y / c], [c I, 0]] for any c > 0; so one 2h x 2h and one h x h exponential suffice, and
    no velocity that may be 0 is in a denominator. Shapes (..., n, h).

    For square G this is the geodesic of the right-invariant metric on GL(n), a product of two exponentials, on which
    Vandereycken, Absil and Vandewalle (IMA J. Numer. Anal. 33, 2013) build that of semidefinite matrices of fixed rank.
    """
    h = a.shape[-1]
    M = left.mT @ a
    Y = a - left @ M
    gram = Y.mT @ Y
    c = torch.linalg.matrix_norm(gram.detach()).sqrt().clamp_min(torch.finfo(a.dtype).eps)[..., None, None]
    eye = torch.eye(h, dtype=a.dtype, device=a.device).expand_as(M)
    rows = torch.cat([M - M.mT, -gram / c], dim=-1), torch.cat([c * eye, torch.zeros_like(eye)], dim=-1)
    rotation = torch.linalg.matrix_exp(torch.cat(rows, dim=-2))[..., :h]
    return (left @ rotation[..., :h, :] + Y @ (rotation[..., h:, :] / c)) @ torch.linalg.matrix_exp(M.mT)


def rank_one(t: float, left: Tensor, right: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""Compute the geodesic of t != 0 from unit vectors left, right with velocities a, b: ends of both, and the time.

    With G = r u, H = q w (u, w of length 1), s = r q and p = log(r / q), the metric is

        s^2t ((ds / s)^2 / 2 + dp^2 / 2 + |du|^2 + |dw|^2).

    Horizontal means dp = 0, so p is constant. With theta the arc length on the product of both spheres and rho = s^t,
    the metric is (drho^2 + rho^2 dphi^2) / 2 t^2 for phi = sqrt(2) t theta: a flat cone, on which geodesics are
    straight lines. From rho = 1, with growth g = t s' / s and turn b = sqrt(2) t theta', the line is rho e^(i phi) = 1
    + g tau + i b tau. So at time tau the product has grown by |1 + g tau + i b tau|^(1/t). The arc is theta = phi /
    (sqrt(2) t), of which u and w cover constant shares.

    The geodesic is followed to time 1, or until the product has changed by the factor `FLOOR` or its inverse. A
    vertical part left by rounding acts along the orbit, and must not bend a line that ends in the apex. Derivatives of
    any order in all arguments are finite; for a stopped geodesic they are taken at its end at fixed time. Everything is
    in float64, in closed form. Shapes: left, a (..., n, 1), right, b (..., m, 1), time (...).
    """
    left, right, a, b = (x.double() for x in (left, right, a, b))
    radial = [(x * v).sum(-2, keepdim=True) for x, v in ((left, a), (right, b))]  # r' / r and q' / q
    tangent = a - radial[0] * left, b - radial[1] * right
    growth, vertical = t * (radial[0] + radial[1]), radial[0] - radial[1]
    arcs = [(y * y).sum(-2, keepdim=True) for y in tangent]  # |u'|^2 and |w'|^2
    turn = 2 * t * t * (arcs[0] + arcs[1])  # b^2
    time = _end(growth.detach(), turn.detach(), t).clamp_max(1.0)

    growth, turn = growth * time, turn * time * time
    log_size, pace = _on_cone(growth, turn, t)
    pace = pace * time  # theta / theta' at the start
    ends = []
    for x, y, arc, sign in zip((left, right), tangent, arcs, (1, -1), strict=True):
        cosine, sinc = circle(pace * pace * arc)
        ends.append(((log_size + sign * vertical * time) / 2).exp() * (cosine * x + pace * sinc * y))
    return ends[0], ends[1], time[..., 0, 0]


def _end(g: Tensor, b2: Tensor, t: float) -> Tensor:
    """Compute the first time at which |1 + g tau + i b tau|^2 leaves (FLOOR^2t, FLOOR^-2t), or infinity."""
    exponent = min(2 * abs(t), _RANGE) * math.log(FLOOR)
    fall, rise, speed = -math.expm1(exponent), math.expm1(-exponent), g * g + b2  # 1 - lower, upper - 1
    discriminant = g * g * math.exp(exponent) - b2 * fall
    falls = (g < 0) & (discriminant >= 0)
    inward = torch.where(falls, fall / (discriminant.clamp_min(0.0).sqrt() - g), torch.inf)
    root = (g * g + speed * rise).sqrt()
    outward = torch.where(g < 0, (root - g) / speed, rise / (root + g))
    return torch.minimum(inward, outward)


def _on_cone(g: Tensor, b2: Tensor, t: float) -> tuple[Tensor, Tensor]:
    """Compute log|1 + g + i b| / t and arg(1 + g + i b) / b, both smooth functions of b^2."""
    lower = math.exp(min(2 * abs(t), _RANGE) * math.log(FLOOR))
    forward = 1 + g
    # A line into the apex is stopped before it; rounding must not carry it there.
    least = (lower - b2.detach()).clamp_min(0.0).sqrt()
    forward = forward + torch.where(least > 0, (least - forward.detach()).clamp_min(0.0), 0.0)
    squared = forward * forward + b2
    far = squared > 0.5
    change = torch.where(far, g * (2 + g) + b2, 0.0)
    log = torch.where(far, change.log1p(), torch.where(far, 1.0, squared).log()) / (2 * t)

    flat = (forward > 0) & (b2 < 1e-2 * forward * forward)
    ahead = torch.where(flat, forward, 1.0)
    x = torch.where(flat, b2, 0.0) / (ahead * ahead)
    series = sum((-1) ** k * x**k / (2 * k + 1) for k in range(1, 9)) + 1  # atan(sqrt x) / sqrt x
    b = torch.where(flat, 1.0, b2).sqrt()
    return log, torch.where(flat, series / ahead, torch.atan2(b, forward) / b)


def circle(squared: Tensor) -> tuple[Tensor, Tensor]:
    """Compute cos(a) and sin(a) / a from a^2, smooth at a = 0."""
    small = squared < 1e-4
    angle = torch.where(small, 1.0, squared).sqrt()
    cosine = torch.where(small, 1 - squared / 2 * (1 - squared / 12 * (1 - squared / 30)), angle.cos())
    return cosine, torch.where(small, 1 - squared / 6 * (1 - squared / 20 * (1 - squared / 42)), angle.sin() / angle)


def expand(at: Pairing, s: Tensor, t: float, z: Both, relaxed: bool) -> tuple[Tensor, Tensor]:
    """Compute the displacement of the point along the exact geodesic of metric t, and the time reached (...).

    s: the singular values in float64. With `relaxed`, left and right are not orthonormal.
    """
    inside = cores(at.basis, z)
    # A difference of Gram matrices would leave rounding, which deflects a geodesic straight to the end of its domain.
    rest = split(plus(torch.cat(z, dim=-2), at.basis, -inside, mine=True), z)
    unit, back, M = (x.double() for x in (at.unit, at.back, inside))
    products = unit.mT * cores(rest, rest).double() * unit
    basis, start, clear = _orthonormal(products, M * unit)
    gram = None if clear and not relaxed and not differentiated(products) else basis.mT @ products @ basis
    if gram is not None and (relaxed or not clear):
        gram = _whole_gram(at, M, gram, unit.mT * basis, None if clear else rest, relaxed)
    c, reached = integrate(t, s, torch.cat([M * unit, start], dim=-2), gram, relaxed)
    on_point, on_rest = c.tensor_split(2, dim=-2)
    turn = unit.mT * (basis @ on_rest)
    bend = on_point - torch.eye(s.shape[-1], dtype=c.dtype, device=c.device)
    turn, bend, reached = (x.to(at.back.dtype) for x in (turn @ back, bend @ back, reached))
    return plus(times(rest, turn), at.basis, bend, mine=True), reached


def _orthonormal(products: Tensor, along: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Return a basis that makes columns with these products orthonormal, its inverse, and if no column is too short.

    Columns that are short compared to the whole velocity consist of rounding and may have any length in the basis.
    Geodesics do not depend on the basis, so it is constant in differentiation, and a velocity of 0 has a gradient.
    Without it, columns in the span of left would spoil the solver's error estimates. along: the other part of the
    velocity.
    """
    if not all_finite(products):
        raise GeodesicError("a geodesic must start with a velocity of finite length. Found NaN or infinity in it")
    products, along = products.detach(), along.detach()
    size = (products.diagonal(dim1=-2, dim2=-1) + along.square().sum(-2)).amax(-1)[..., None]
    size = torch.where(size > 0, size, 1.0)
    lam, E = torch.linalg.eigh(products / size[..., None])
    root = (lam.clamp_min(torch.finfo(lam.dtype).eps ** 2) * size).sqrt()
    return E / root[..., None, :], root[..., :, None] * E.mT, not some(lam * _LENGTHS <= 1)


def _whole_gram(at: Pairing, M: Tensor, lower: Tensor, basis: Tensor, rest: Both | None, relaxed: bool) -> Tensor:
    """Compute the Gram matrix of left and rest basis; its last block is `lower`, less its rounding if rest is given."""
    left: Both = at.basis[0].double(), at.basis[1].double()
    own = cores(left, left) if relaxed else torch.eye(M.shape[-1], dtype=M.dtype, device=M.device).expand_as(lower)
    across = (M - own @ M) @ basis
    if rest is not None:
        columns = split(times((rest[0].double(), rest[1].double()), basis.expand_as(lower)), left)
        # The exact products replace the values and correct rounding; derivatives are still of the first formula.
        across = across + (cores(left, columns) - across).detach()
        lower = lower + (cores(columns, columns) - lower).detach()
    rows = torch.cat([own.expand_as(lower), across], dim=-1), torch.cat([across.mT, lower], dim=-1)
    return torch.cat(rows, dim=-2)


def integrate(t: float, s: Tensor, velocity: Tensor, gram: Tensor | None, relaxed: bool) -> tuple[Tensor, Tensor]:
    """Follow the exact geodesic to time 1 by a Runge-Kutta method of order 8 (`runge_kutta`), in float64.

    All terms multiply (left, a) from the right. So G(t) = B c(t), with B a basis of their columns, left first, and
    c (2h, h); the cost does not depend on n and m. Returns c at the end, and the time <= 1 that was reached.

    The system is Hamilton's equations of the kinetic energy. With momenta P_G = xi_G W_G (likewise for H), G' = P_G
    W_G^-1 and P_G' is the gradient of the energy at fixed velocity; for `mix`, P_G' = G (xi_H^T xi_H). Momenta are
    stored as velocities in units of the initial speed, so that the entries of a state are about 1; the initial weights
    s^2t convert them. An entry of the batch is stopped, at the end of its domain, if its smallest Gram eigenvalue falls
    to the square root of machine precision, or its largest grows to the inverse; `reached` is the time of the stop.
    With `relaxed`, constants are added to the Gram matrices that make them the identity at time 0.

    Shapes, which broadcast: s (..., h); velocity (..., 2, 2h, h), of G and H in their bases; gram (..., 2, k, k), the
    Gram matrices of the last k columns of each basis, whose other columns are orthonormal and orthogonal to them.
    None stands for k = 0; the relaxed metric has k = 2h.
    """
    h = s.shape[-1]
    given = [s[..., None, None, :], velocity, *(() if gram is None else (gram,))]
    batch = torch.broadcast_shapes(*(x.shape[:-3] for x in given))
    flat = (x.double().expand(*batch, *x.shape[-3:]).reshape(-1, *x.shape[-3:]) for x in given)
    # Entries are independent, so the batch is split into pieces whose steps fit into a cache.
    pieces = zip(*(x.split(max(1, _CACHED // (8 * h * h))) for x in flat), strict=True)
    ends = (_integrate(t, relaxed, s[:, 0, 0], *rest) for s, *rest in pieces)
    c, reached = (torch.cat(parts) for parts in zip(*ends, strict=True))
    return c.reshape(*batch, 2, 2 * h, h), reached.reshape(batch)


def _integrate(
    t: float, relaxed: bool, s: Tensor, velocity: Tensor, gram: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    s = s / s[..., :1]  # a change of the unit of energy
    # Some curves of a batch hardly move. Without separate units, their momenta would be below the tolerance.
    speed = velocity.detach().abs().amax((-3, -2, -1), keepdim=True)
    speed = torch.where(speed > 0, speed, 1.0)
    here = torch.eye(*velocity.shape[-2:], dtype=s.dtype, device=s.device).expand_as(velocity)
    start = torch.stack([here, velocity / speed], dim=1).flatten(1)
    cures = (
        "take a shorter vector, metric='inv', whose geodesics are closed forms, or a smaller h",
        "the singular values of G H^T spread too far; take a smaller h, eps > 0 or metric='inv'",
    )
    end, reached = follow(partial(_System, t, relaxed), start, (s, speed, gram), cures)
    return _parts(end, s.shape[-1])[0], reached


def _parts(state: Tensor, h: int) -> tuple[Tensor, Tensor]:
    """Return c and the velocity that represents the momentum, (batch, 2, 2h, h) each."""
    c, v = state.unflatten(-1, (2, 2, 2 * h, h)).unbind(1)
    return c, v


class _System:
    """Hold Hamilton's equations of a batch, with constants of each geodesic; a dimension of size 2 is for G and H."""

    def __init__(self, t: float, relaxed: bool, s: Tensor, speed: Tensor, gram: Tensor | None) -> None:
        self.t, self.s, self.speed, self.gram, self.relaxed = t, s, speed, gram, relaxed
        self.weight = s[:, None, None, :] ** (2 * t) * speed  # turns velocities at the start into momenta
        self.kinetic = _Mix if t == 1 else _Mean

    def of(self, rows: Tensor) -> _System:
        """Return the equations of some entries of the batch, in order."""
        if len(rows) == len(self.s):
            return self
        gram = None if self.gram is None else self.gram[rows]
        return _System(self.t, self.relaxed, self.s[rows], self.speed[rows], gram)

    def motion(self, state: Tensor) -> Tensor:
        """Compute the velocity of a state inside the domain."""
        c, v = _parts(state, self.s.shape[-1])
        gram = self._gram(c)
        inverse = torch.linalg.inv_ex(gram).inverse
        norms = (torch.linalg.matrix_norm(x.detach()) for x in (gram, inverse))
        return self._motion(c, v, gram, inverse, math.prod(norms))

    def trial(self, state: Tensor) -> Tensor:
        """Compute the velocity of a state, NaN where it is outside the domain."""
        c, v = _parts(state, self.s.shape[-1])
        gram = self._gram(c)
        inverse, condition, within = invert(gram)
        within = within.all(-1)  # both for G and for H
        if bool(within.all()):
            return self._motion(c, v, gram, inverse, condition)
        eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        gram, inverse = (torch.where(within[:, None, None, None], x, eye) for x in (gram, inverse))
        # NaN tells the solver that a trial step left the domain: it then steps up to the boundary, and no further.
        return torch.where(within[:, None], self._motion(c, v, gram, inverse, condition), torch.nan)

    def _motion(self, c: Tensor, v: Tensor, gram: Tensor, inverse: Tensor, condition: Tensor) -> Tensor:
        # Velocities are computed from momenta. Accelerations would contain W^-1 twice, and blow up long before the
        # curve does if a singular value approaches 0.
        kinetic = self.kinetic(self.t, self.s, self.weight, gram, inverse)
        d = v @ kinetic.from_momentum
        bad = (condition.amax(-1) > _CONDITION)[:, None, None, None]
        if some(bad):
            d = torch.where(bad, kinetic.velocity(v), d)
        change = c @ (kinetic.force(self._products(d, d)) / self.weight)
        return torch.stack([d, change], dim=1).flatten(1)

    def energy(self, state: Tensor) -> Tensor:
        """Compute tr(P_G xi_G^T + P_H xi_H^T), which is constant. Shape (batch,)."""
        c, v = _parts(state, self.s.shape[-1])
        gram = self._gram(c)
        d = self.kinetic(self.t, self.s, self.weight, gram, torch.linalg.inv_ex(gram).inverse).velocity(v)
        return (self._products(v, d) * self.weight).diagonal(dim1=-2, dim2=-1).sum((-2, -1))

    def _gram(self, c: Tensor) -> Tensor:
        """Compute the Gram matrices of both factors, relaxed if the metric is."""
        if not self.relaxed or self.gram is None:
            return self._products(c, c)
        h = self.s.shape[-1]
        return self._products(c, c) + torch.eye(h, dtype=c.dtype, device=c.device) - self.gram[..., :h, :h]

    def _products(self, c: Tensor, d: Tensor) -> Tensor:
        """Compute (B c)^T B d."""
        if self.gram is None:
            return c.mT @ d
        k = c.shape[-2] - self.gram.shape[-1]
        return c[..., :k, :].mT @ d[..., :k, :] + c[..., k:, :].mT @ (self.gram @ d[..., k:, :])


class _Mix:
    """Hold W_G = S H^T H S in the frame: velocities from momenta, and forces.

    Momenta are v weight, given as v. The gradient of tr(W_G N_G + W_H N_H) / 2 in G is G times the force; likewise for
    H. gram, inverse: the Gram matrices of G and of H, (batch, 2, h, h), and their inverses.
    """

    def __init__(self, t: float, s: Tensor, weight: Tensor, gram: Tensor, inverse: Tensor) -> None:
        self._s, self._weight, self._gram = s[:, None, None, :], weight, gram.flip(1)
        self._outer = self._s.mT * self._s
        self.from_momentum = (weight.mT / self._outer) * inverse.flip(1)

    def velocity(self, v: Tensor) -> Tensor:
        # Unlike a product with the inverse, a solve is accurate also if p W^-1 is far below its bound |p| |W^-1|.
        return solve(self._gram, v * (self._weight / self._s), left=False) / self._s

    def force(self, N: Tensor) -> Tensor:
        return self._outer * N.flip(1)


class _Mean:
    """Hold W_G = (G^T G)^-1 #_t S H^T H S, as `_Mix`: in the singular frame of the moving point it is diagonal."""

    def __init__(self, t: float, s: Tensor, weight: Tensor, gram: Tensor, inverse: Tensor) -> None:
        L = torch.linalg.cholesky(gram)
        U, now, Vh = torch.linalg.svd(apart(L[:, 0].mT * s[:, None, :] @ L[:, 1]))
        rotation = torch.stack([U, Vh.mT], dim=1)
        self._slope, self._frame = slope(now[:, None], t), torch.linalg.solve_triangular(L.mT, rotation, upper=True)
        back = rotation.mT @ L.mT  # the inverse of the frame
        self.from_momentum = weight.mT * (back.mT * now[:, None, None, :] ** (-2 * t) @ back)

    def velocity(self, v: Tensor) -> Tensor:
        return v @ self.from_momentum

    def force(self, N: Tensor) -> Tensor:
        return self._frame @ self._slope.change(self._frame.mT @ N @ self._frame) @ self._frame.mT
