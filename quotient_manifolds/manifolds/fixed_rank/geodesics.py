"""Follow exact geodesics of the pair (G, H), in the singular frame of G H^T.

In that frame a point is (left, right) with orthonormal columns, the core s its singular values, and a velocity is
relative: a = xi_G to_left, b = xi_H to_right. All formulas are the paper's after this change of basis.
"""

from __future__ import annotations

import abc
from typing import NamedTuple, final

import torch
from torch import Tensor

from quotient_manifolds.linalg import apart
from quotient_manifolds.manifolds.horizontal import GeodesicError
from quotient_manifolds.manifolds.runge_kutta import inside, require_constant, solve


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


def integrate(
    t: float, s: Tensor, left: Tensor, right: Tensor, a: Tensor, b: Tensor, relaxed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Follow the exact geodesic to time 1 by a Runge-Kutta method of order 8 (`runge_kutta`), in float64.

    Returns both factors in the frame (G = left from_left), and the time <= 1 that was reached.

    Hamilton's equations of the kinetic energy, whose right-hand sides stay milder than accelerations where a singular
    value nears 0: with momenta P_G = xi_G W_G and alike for H, G' = P_G W_G^-1 and P_G' is the gradient of the energy
    at fixed velocity; for `mix` that is P_G' = G (xi_H^T xi_H), for `inv` P_G' = -G P_G^T P_G.

    Everything multiplies (left, a) from the right, so G(t) = B c(t) with B a basis of their columns and c (2h, h), and
    n and m do not matter. Momenta are kept as velocities in units of the first, which the weights s^2t of the start
    turn into momenta, so that all of a state is about 1.
    An entry of the batch whose smallest Gram eigenvalue falls to the square root of machine precision (or whose largest
    grows to the inverse of that) is stopped there, at the end of its domain, and `reached` tells when. With `relaxed`
    the Gram matrices are those of left and right plus the constants that make them the identity at time 0.
    Raises GeodesicError. Shapes: s (..., h), left and a (..., n, h), right and b (..., m, h), which broadcast.
    """
    if not bool(a.isfinite().all() & b.isfinite().all()):
        raise GeodesicError("a geodesic should start with a finite velocity; found NaN or infinity in it")
    batch, h = torch.broadcast_shapes(s.shape[:-1], a.shape[:-2], b.shape[:-2]), a.shape[-1]
    left, right, a, b = (x.double().expand(*batch, -1, -1).reshape(-1, *x.shape[-2:]) for x in (left, right, a, b))
    s = s.double().expand(*batch, h).reshape(-1, h)
    s = s / s[..., :1]  # a change of the unit of energy
    # Of a batch some curves hardly move; without units of their own their momenta would drown in the tolerance.
    speed = torch.cat([a, b], dim=-2).detach().abs().amax((-2, -1))[:, None, None, None]
    speed = torch.where(speed > 0, speed, 1.0)
    bases, starts = zip(*(_basis(x, v / speed[:, 0]) for x, v in ((left, a), (right, b))), strict=True)
    grams = torch.stack([B.mT @ B for B in bases], dim=1)  # (batch, 2, 2h, 2h)
    block, eye = grams[..., :h, :h], torch.eye(2 * h, h, dtype=a.dtype, device=a.device)
    system = _System(t, s, grams, eye[:h] - block if relaxed else torch.zeros_like(block), speed)
    upper = eye.expand(*grams.shape[:-1], -1)
    start = torch.stack([upper, torch.stack(starts, dim=1)], dim=1).flatten(1)
    cure = "take a shorter vector, metric='inv', whose geodesics are closed forms, or a smaller h"
    end, reached = solve(lambda rows: system.of(rows).motion, start, cure)
    cure = "the singular values of G H^T spread too far; take a smaller h, eps > 0 or metric='inv'"
    require_constant(system.energy, start, end, cure)
    left, right = (B @ c for B, c in zip(bases, system.parts(end)[0].unbind(1), strict=True))
    left, right, reached = (x.reshape(batch + x.shape[1:]) for x in (left, right, reached))
    return left, right, reached


class _System:
    """Hold Hamilton's equations of a batch, from what each geodesic keeps; G and H in one dimension of size 2."""

    def __init__(self, t: float, s: Tensor, grams: Tensor, ridge: Tensor, speed: Tensor) -> None:
        self.t, self.s, self.grams, self.ridge, self.speed = t, s, grams, ridge, speed
        self.weight = s[:, None, None, :] ** (2 * t) * speed
        self.kinetic = {0.0: _Inv, 1.0: _Mix}.get(t, _Mean)

    def of(self, rows: Tensor) -> _System:
        """Return the same for some entries of the batch."""
        return _System(self.t, *(x[rows] for x in (self.s, self.grams, self.ridge, self.speed)))

    def motion(self, state: Tensor) -> Tensor:
        """Compute the velocity of a state, NaN where it is outside the domain."""
        c, v = self.parts(state)
        at = c.mT @ self.grams @ c + self.ridge
        within = inside(at).all(-1)[:, None, None, None]  # those of G and of H
        eye = torch.eye(at.shape[-1], dtype=state.dtype, device=state.device)
        kinetic = self.kinetic(self.t, self.s, torch.where(within, at, eye))
        # Velocities from momenta. Positions and momenta rather than accelerations: these hold W^-1 twice, and blow up
        # long before the curve does where a singular value nears 0.
        d = kinetic.velocity(v * self.weight)
        change = c @ kinetic.force(d.mT @ self.grams @ d) / self.weight
        # NaN tells the solver that a trial step left the domain: it then steps up to the boundary, and no further.
        return torch.where(within.flatten(1), torch.stack([d, change], dim=1).flatten(1), torch.nan)

    def energy(self, state: Tensor) -> Tensor:
        """Compute tr(P_G xi_G^T + P_H xi_H^T), which is constant. Shape (batch,)."""
        c, v = self.parts(state)
        p = v * self.weight
        d = self.kinetic(self.t, self.s, c.mT @ self.grams @ c + self.ridge).velocity(p)
        return (p * (self.grams @ d)).sum((-3, -2, -1))

    def parts(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return c and the velocity that stands for the momentum, (batch, 2, 2h, h) each."""
        h = self.s.shape[-1]
        c, v = state.unflatten(-1, (2, 2, 2 * h, h)).unbind(1)
        return c, v


class _Kinetic(abc.ABC):
    """Compute the velocity p W^-1 and the force, the gradient in G, from the right, of tr(W_G N_G + W_H N_H) / 2.

    For H alike. gram: those of G and of H, shape (batch, 2, h, h).
    """

    def __init__(self, t: float, s: Tensor, gram: Tensor) -> None:
        self.t, self.s, self.gram = t, s, gram

    @abc.abstractmethod
    def velocity(self, p: Tensor) -> Tensor: ...

    @abc.abstractmethod
    def force(self, N: Tensor) -> Tensor: ...


@final
class _Inv(_Kinetic):
    """Hold W_G = (G^T G)^-1."""

    def velocity(self, p: Tensor) -> Tensor:
        return p @ self.gram

    def force(self, N: Tensor) -> Tensor:
        K = torch.linalg.inv(self.gram)  # its condition number is bounded: `inside` stops the curve before
        return -K @ N @ K


@final
class _Mix(_Kinetic):
    """Hold W_G = S H^T H S in the frame."""

    def velocity(self, p: Tensor) -> Tensor:
        column = self.s[:, None, None, :]
        return torch.linalg.solve(self.gram.flip(1), p / column, left=False) / column

    def force(self, N: Tensor) -> Tensor:
        return self.s[:, None, :, None] * self.s[:, None, None, :] * N.flip(1)


@final
class _Mean(_Kinetic):
    """Hold W_G = (G^T G)^-1 #_t S H^T H S: in the singular frame of the moving point it is diagonal again."""

    def __init__(self, t: float, s: Tensor, gram: Tensor) -> None:
        super().__init__(t, s, gram)
        L = torch.linalg.cholesky(gram)
        U, self.now, Vh = torch.linalg.svd(apart(L[:, 0].mT * s[:, None, :] @ L[:, 1]))
        rotation = torch.stack([U, Vh.mT], dim=1)
        self.frame = torch.linalg.solve_triangular(L.mT, rotation, upper=True)
        self.back = rotation.mT @ L.mT  # the inverse of the frame

    def velocity(self, p: Tensor) -> Tensor:
        return p @ (self.back.mT * self.now[:, None, None, :] ** (-2 * self.t) @ self.back)

    def force(self, N: Tensor) -> Tensor:
        own, other = slope(self.now[:, None], self.t)
        V = self.frame.mT @ N @ self.frame
        return self.frame @ (own * V + other * V.flip(1)) @ self.frame.mT


def _basis(left: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Build a basis B (..., n, 2h) of the columns of left and a, left first, and c (..., 2h, h) with a = B c.

    The second half is orthonormalised by a matrix that takes no part in differentiation: what B c(t) is does not depend
    on it, and so a = 0 has a gradient. Without it, columns of a in the span of left would spoil the solver's errors.
    """
    M = left.mT @ a
    Y = a - left @ M
    with torch.no_grad():
        lam, E = torch.linalg.eigh(Y.mT @ Y)
        root = lam.clamp_min(torch.finfo(a.dtype).eps ** 2).sqrt()
    return torch.cat([left, Y @ (E / root[..., None, :])], dim=-1), torch.cat([M, root[..., :, None] * E.mT], dim=-2)
