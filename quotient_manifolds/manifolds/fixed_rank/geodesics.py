"""Follow exact geodesics of the pair (G, H), in the singular frame of G H^T.

In that frame a point is (left, right) with orthonormal columns, the core s its singular values, and a velocity is
relative: a = xi_G to_left, b = xi_H to_right. All formulas are the paper's after this change of basis.
"""

from __future__ import annotations

import abc
import math
from typing import NamedTuple, final

import torch
from torch import Tensor

from quotient_manifolds.linalg import apart
from quotient_manifolds.manifolds.horizontal import GeodesicError
from quotient_manifolds.manifolds.runge_kutta import invert, require_constant, solve

_CACHED = 2**16
"""How many numbers of a state are worked on at a time: half a megabyte."""
_CONDITION = 1e5
"""Up to which condition number of Gram matrices their inverses serve: errors stay below those of a step."""


class Slope(NamedTuple):
    """Say how the weights of the metric change with the Gram matrices: dW_G = own * V_G + other * V_H, entry by entry.

    W_G = (G^T G)^-1 #_t H^T H in the frame, where it is diag(s^2t), and V = a^T left + left^T a, alike for H.
    """

    own: Tensor  # (..., h, h)
    other: Tensor  # (..., h, h)


def slope(s: Tensor, t: float) -> Slope:
    r"""Compute (m^t sinh((t - 1) d) / sinh d, m^t sinh(t d) / sinh d), m = s_i s_j, d = log(s_i / s_j).

    The derivative of the weighted geometric mean A #_t B at A = I, B = diag(s)^2, by the Daletskii-Krein formula: the
    divided difference of x^t between s_i^2 and s_j^2 is m^(t-1) sinh(t d) / sinh d. For t = 0 (inv) the two are -1 and
    0, for t = 1 (mix) 0 and s_i s_j.
    """
    d = s.log()[..., :, None] - s.log()[..., None, :]
    power = (s[..., :, None] * s[..., None, :]) ** t
    return Slope(power * _sinh_ratio(t - 1, d), power * _sinh_ratio(t, d))


def _sinh_ratio(k: float, d: Tensor) -> Tensor:
    """Compute sinh(k d) / sinh d, with its limit k at d = 0."""
    small = d.abs() < 1e-4
    safe = torch.where(small, 1.0, d)
    return torch.where(small, k * (1 + (k * k - 1) * d * d / 6), torch.sinh(k * safe) / torch.sinh(safe))


Both = tuple[Tensor, Tensor]  # one tensor for G, one for H


def inv_exponential(left: Tensor, a: Tensor) -> Tensor:
    r"""Compute expm(Om) left expm(M^T), Om = a left^T - left a^T: the exact geodesic of `inv`, one factor, t = 1.

    The Lagrangian tr((G^T G)^{-1} G'^T G') / 2 is invariant under O(n) from the left and GL(h) from the right. The two
    conserved momenta are Om = xi_G (G^T G)^{-1} G^T - transpose and C = (G^T G)^{-1} xi_G^T G, and
    G(t) = expm(t Om) G expm(t C) solves the geodesic equation: G' = Om G + G C with both momenta constant.

    Om acts on the span of left and Y = a - left M, M = left^T a, where in the basis (left, Y / c) it is
    [[M - M^T, -Y^T Y / c], [c I, 0]] for any c > 0; so one 2h x 2h and one h x h exponential suffice, and nothing is
    divided by the norm of a velocity that may be 0. Shapes (..., n, h).

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


def integrate(t: float, s: Tensor, velocity: Tensor, gram: Tensor | None, relaxed: bool) -> tuple[Tensor, Tensor]:
    """Follow the exact geodesic to time 1 by a Runge-Kutta method of order 8 (`runge_kutta`), in float64.

    Everything multiplies (left, a) from the right, so G(t) = B c(t) with B a basis of their columns, left first, and c
    (2h, h), and n and m do not matter. Returns c at the end, and the time <= 1 that was reached.

    Hamilton's equations of the kinetic energy, whose right-hand sides stay milder than accelerations where a singular
    value nears 0: with momenta P_G = xi_G W_G and alike for H, G' = P_G W_G^-1 and P_G' is the gradient of the energy
    at fixed velocity; for `mix` that is P_G' = G (xi_H^T xi_H), for `inv` P_G' = -G P_G^T P_G. Momenta are kept as
    velocities in units of the first, which the weights s^2t of the start turn into momenta, so that all of a state is
    about 1.
    An entry of the batch whose smallest Gram eigenvalue falls to the square root of machine precision (or whose largest
    grows to the inverse of that) is stopped there, at the end of its domain, and `reached` tells when. With `relaxed`
    the Gram matrices are those of left and right plus the constants that make them the identity at time 0.
    Raises GeodesicError.

    Shapes, which broadcast: s (..., h); velocity (..., 2, 2h, h), of both factors in their bases, that of G first; gram
    (..., 2, k, k), that of the last k columns of each basis, the others being orthonormal to them and to each other:
    None for 0, 2h for what is relaxed.
    """
    if not bool(velocity.isfinite().all()):
        raise GeodesicError("a geodesic must start with a finite velocity. Found NaN or infinity in it")
    h = s.shape[-1]
    given = [s[..., None, None, :], velocity, *(() if gram is None else (gram,))]
    batch = torch.broadcast_shapes(*(x.shape[:-3] for x in given))
    flat = (x.double().expand(*batch, *x.shape[-3:]).reshape(-1, *x.shape[-3:]) for x in given)
    # Entries do not depend on each other, and what a step works on should stay in a cache.
    pieces = zip(*(x.split(max(1, _CACHED // (8 * h * h))) for x in flat), strict=True)
    ends = (_integrate(t, relaxed, s[:, 0, 0], *rest) for s, *rest in pieces)
    c, reached = (torch.cat(parts) for parts in zip(*ends, strict=True))
    return c.reshape(*batch, 2, 2 * h, h), reached.reshape(batch)


def _integrate(
    t: float, relaxed: bool, s: Tensor, velocity: Tensor, gram: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    s = s / s[..., :1]  # a change of the unit of energy
    # Of a batch some curves hardly move; without units of their own their momenta would drown in the tolerance.
    speed = velocity.detach().abs().amax((-3, -2, -1), keepdim=True)
    speed = torch.where(speed > 0, speed, 1.0)
    system = _System(t, s, speed, gram, relaxed)
    here = torch.eye(*velocity.shape[-2:], dtype=s.dtype, device=s.device).expand_as(velocity)
    start = torch.stack([here, velocity / speed], dim=1).flatten(1)
    cure = "take a shorter vector, metric='inv', whose geodesics are closed forms, or a smaller h"
    end, reached = solve(lambda rows: system.of(rows).motion, start, cure)
    cure = "the singular values of G H^T spread too far; take a smaller h, eps > 0 or metric='inv'"
    require_constant(system.energy, start, end, cure)
    return system.parts(end)[0], reached


class _System:
    """Hold Hamilton's equations of a batch, from what each geodesic keeps; G and H in one dimension of size 2."""

    def __init__(self, t: float, s: Tensor, speed: Tensor, gram: Tensor | None, relaxed: bool) -> None:
        self.t, self.s, self.speed, self.gram, self.relaxed = t, s, speed, gram, relaxed
        self.weight = s[:, None, None, :] ** (2 * t) * speed
        self.kinetic = {0.0: _Inv, 1.0: _Mix}.get(t, _Mean)

    def of(self, rows: Tensor) -> _System:
        """Return the same for some entries of the batch, which are in order."""
        if len(rows) == len(self.s):
            return self
        gram = None if self.gram is None else self.gram[rows]
        return _System(self.t, self.s[rows], self.speed[rows], gram, self.relaxed)

    def motion(self, state: Tensor) -> Tensor:
        """Compute the velocity of a state, NaN where it is outside the domain."""
        c, v = self.parts(state)
        gram = self._gram(c)
        if state.requires_grad and torch.is_grad_enabled():  # a way that was gone before, all of it inside
            inverse = torch.linalg.inv_ex(gram).inverse
            norms = (torch.linalg.matrix_norm(x.detach()) for x in (gram, inverse))
            return self._motion(c, v, gram, inverse, math.prod(norms))
        inverse, condition, within = invert(gram)
        within = within.all(-1)  # those of G and of H
        if bool(within.all()):
            return self._motion(c, v, gram, inverse, condition)
        eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        gram, inverse = (torch.where(within[:, None, None, None], x, eye) for x in (gram, inverse))
        # NaN tells the solver that a trial step left the domain: it then steps up to the boundary, and no further.
        return torch.where(within[:, None], self._motion(c, v, gram, inverse, condition), torch.nan)

    def _motion(self, c: Tensor, v: Tensor, gram: Tensor, inverse: Tensor, condition: Tensor) -> Tensor:
        # Velocities from momenta. Positions and momenta rather than accelerations: these hold W^-1 twice, and blow up
        # long before the curve does where a singular value nears 0.
        kinetic = self.kinetic(self.t, self.s, self.weight, gram, inverse)
        d = v @ kinetic.from_momentum
        bad = (condition.amax(-1) > _CONDITION)[:, None, None, None]
        if bool(bad.any()):
            d = torch.where(bad, kinetic.velocity(v), d)
        change = c @ (kinetic.force(self._products(d, d)) / self.weight)
        return torch.stack([d, change], dim=1).flatten(1)

    def energy(self, state: Tensor) -> Tensor:
        """Compute tr(P_G xi_G^T + P_H xi_H^T), which is constant. Shape (batch,)."""
        c, v = self.parts(state)
        gram = self._gram(c)
        d = self.kinetic(self.t, self.s, self.weight, gram, torch.linalg.inv_ex(gram).inverse).velocity(v)
        return (self._products(v, d) * self.weight).diagonal(dim1=-2, dim2=-1).sum((-2, -1))

    def parts(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return c and the velocity that stands for the momentum, (batch, 2, 2h, h) each."""
        h = self.s.shape[-1]
        c, v = state.unflatten(-1, (2, 2, 2 * h, h)).unbind(1)
        return c, v

    def _gram(self, c: Tensor) -> Tensor:
        """Compute the Gram matrices of both factors, relaxed ones where the metric is."""
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


class _Kinetic(abc.ABC):
    """Compute velocities of G and H from momenta, and the force, the gradient in G of tr(W_G N_G + W_H N_H) / 2.

    The force multiplies G from the right; for H alike. weight: what turns velocities at the start into momenta. gram:
    those of G and of H, shape (batch, 2, h, h), with their inverses.
    """

    from_momentum: Tensor
    """What multiplies momenta v weight, given as v, from the right: diag(weight) W^-1."""

    @abc.abstractmethod
    def __init__(self, t: float, s: Tensor, weight: Tensor, gram: Tensor, inverse: Tensor) -> None: ...

    def velocity(self, v: Tensor) -> Tensor:
        """Compute the same where Gram matrices may be ill-conditioned."""
        return v @ self.from_momentum

    @abc.abstractmethod
    def force(self, N: Tensor) -> Tensor: ...


@final
class _Inv(_Kinetic):
    """Hold W_G = (G^T G)^-1."""

    def __init__(self, t: float, s: Tensor, weight: Tensor, gram: Tensor, inverse: Tensor) -> None:
        self.from_momentum, self._inverse = weight.mT * gram, inverse

    def force(self, N: Tensor) -> Tensor:
        return -self._inverse @ N @ self._inverse


@final
class _Mix(_Kinetic):
    """Hold W_G = S H^T H S in the frame."""

    def __init__(self, t: float, s: Tensor, weight: Tensor, gram: Tensor, inverse: Tensor) -> None:
        self._s, self._weight, self._gram = s[:, None, None, :], weight, gram.flip(1)
        self._outer = self._s.mT * self._s
        self.from_momentum = (weight.mT / self._outer) * inverse.flip(1)

    def velocity(self, v: Tensor) -> Tensor:
        # Unlike products with an inverse, to the last digits also where momenta are far from the largest p W^-1.
        return torch.linalg.solve(self._gram, v * (self._weight / self._s), left=False) / self._s

    def force(self, N: Tensor) -> Tensor:
        return self._outer * N.flip(1)


@final
class _Mean(_Kinetic):
    """Hold W_G = (G^T G)^-1 #_t S H^T H S: in the singular frame of the moving point it is diagonal again."""

    def __init__(self, t: float, s: Tensor, weight: Tensor, gram: Tensor, inverse: Tensor) -> None:
        L = torch.linalg.cholesky(gram)
        U, self._now, Vh = torch.linalg.svd(apart(L[:, 0].mT * s[:, None, :] @ L[:, 1]))
        rotation = torch.stack([U, Vh.mT], dim=1)
        self._t, self._frame = t, torch.linalg.solve_triangular(L.mT, rotation, upper=True)
        back = rotation.mT @ L.mT  # the inverse of the frame
        self.from_momentum = weight.mT * (back.mT * self._now[:, None, None, :] ** (-2 * t) @ back)

    def force(self, N: Tensor) -> Tensor:
        own, other = slope(self._now[:, None], self._t)
        V = self._frame.mT @ N @ self._frame
        return self._frame @ (own * V + other * V.flip(1)) @ self._frame.mT
