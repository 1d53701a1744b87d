"""Geodesics of the pair (G, H), in the singular frame of G H^T.

In that frame a point is (left, right) with orthonormal columns, the core s its singular values, and a velocity is
relative: a = xi_G to_left, b = xi_H to_right. All formulas are the paper's after this change of basis.
"""

from __future__ import annotations

import abc
from typing import NamedTuple, final

import torch
from torch import Tensor

from quotient_manifolds.manifolds.horizontal import GeodesicError
from quotient_manifolds.manifolds.rank_one import FLOOR
from quotient_manifolds.manifolds.runge_kutta import MAX_STEPS, StepsError, solve

ENERGY_TOLERANCE = 1e-6


class Slope(NamedTuple):
    """How the weights of the metric change with the Gram matrices: dW_G = own * V_G + other * V_H, entry by entry.

    W_G = (G^T G)^-1 #_t H^T H in the frame, where it is diag(s^2t), and V = a^T left + left^T a, alike for H.
    """

    own: Tensor  # (..., h, h)
    other: Tensor  # (..., h, h)


def slope(s: Tensor, t: float) -> Slope:
    r"""(m^t sinh((t - 1) d) / sinh d, m^t sinh(t d) / sinh d), m = s_i s_j, d = log(s_i / s_j).

    The derivative of the weighted geometric mean A #_t B at A = I, B = diag(s)^2, by the Daletskii-Krein formula: the
    divided difference of x^t between s_i^2 and s_j^2 is m^(t-1) sinh(t d) / sinh d. For t = 0 (inv) the two are -1 and
    0, for t = 1 (mix) 0 and s_i s_j.
    """
    d = s.log()[..., :, None] - s.log()[..., None, :]
    power = (s[..., :, None] * s[..., None, :]) ** t
    return Slope(power * _sinh_ratio(t - 1, d), power * _sinh_ratio(t, d))


def _sinh_ratio(k: float, d: Tensor) -> Tensor:
    """sinh(k d) / sinh d, with its limit k at d = 0."""
    small = d.abs() < 1e-4
    safe = torch.where(small, 1.0, d)
    return torch.where(small, k * (1 + (k * k - 1) * d * d / 6), torch.sinh(k * safe) / torch.sinh(safe))


Both = tuple[Tensor, Tensor]  # one tensor for G, one for H


def weigh(slope: Slope, V: Both) -> Both:
    """The changes (dW_G, dW_H) of the weights when the Gram matrices change by V = (V_G, V_H)."""
    return slope.own * V[0] + slope.other * V[1], slope.own * V[1] + slope.other * V[0]


def inv_exponential(left: Tensor, a: Tensor) -> Tensor:
    r"""expm(Om) left expm(M^T), Om = a left^T - left a^T: the exact geodesic of `inv`, one factor, t = 1.

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


class Flow(NamedTuple):
    """Where a geodesic got: the factors in the frame (G = left @ from_left) at time `reached` <= 1."""

    left: Tensor
    right: Tensor
    reached: Tensor


def integrate(t: float, s: Tensor, left: Tensor, right: Tensor, a: Tensor, b: Tensor, relaxed: bool) -> Flow:
    """Follow the exact geodesic to time 1 by a Runge-Kutta method of order 8 (`runge_kutta`), in float64.

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
    batch, h = torch.broadcast_shapes(s.shape[:-1], a.shape[:-2], b.shape[:-2]), a.shape[-1]
    left, right, a, b = (x.double().expand(*batch, -1, -1).reshape(-1, *x.shape[-2:]) for x in (left, right, a, b))
    s = s.double().expand(*batch, h).reshape(-1, h)
    s = s / s[..., :1]  # a change of the unit of energy
    speed = torch.cat([a, b], dim=-2).detach().abs().amax((-2, -1), keepdim=True)
    speed = torch.where(speed > 0, speed, 1.0)
    bases, starts = zip(*(_basis(x, v / speed) for x, v in ((left, a), (right, b))), strict=True)
    grams = torch.stack([B.mT @ B for B in bases], dim=1)  # (batch, 2, 2h, 2h)
    system = _System(t, s, grams, speed, relaxed)
    upper = torch.eye(2 * h, h, dtype=a.dtype, device=a.device).expand(len(a), -1, -1)
    start = _pack((upper, upper), starts)
    try:
        end, reached = solve(lambda rows: system.of(rows).motion, start)
    except StepsError as error:
        raise GeodesicError(
            f"a geodesic should end within {MAX_STEPS} steps, and one came no further than t = {error.reached:.3g}: "
            "take a shorter vector, metric='inv', whose geodesics are closed forms, or a smaller h"
        ) from error
    system.require_energy(start, end)
    left, right = (B @ c for B, c in zip(bases, _unpack(end, h)[0], strict=True))
    return Flow(*(x.reshape(batch + x.shape[1:]) for x in (left, right, reached)))


class _System:
    """Hamilton's equations of a batch, from what is constant along each geodesic."""

    def __init__(self, t: float, s: Tensor, grams: Tensor, speed: Tensor, relaxed: bool) -> None:
        self.t, self.s, self.grams, self.speed, self.relaxed = t, s, grams, speed, relaxed
        self.h = s.shape[-1]
        self.kinetic = {0.0: _Inv, 1.0: _Mix}.get(t, _Mean)(t, s)
        self.weight = s[:, None, :] ** (2 * t) * speed
        eye = torch.eye(self.h, dtype=s.dtype, device=s.device)
        self.ridge = (
            eye - grams[..., : self.h, : self.h] if relaxed else torch.zeros_like(grams[..., : self.h, : self.h])
        )

    def of(self, rows: Tensor) -> _System:
        """The same for some entries of the batch."""
        return _System(self.t, self.s[rows], self.grams[rows], self.speed[rows], self.relaxed)

    def motion(self, state: Tensor) -> Tensor:
        """The velocity of a state, NaN where it is outside the domain."""
        c, v = _unpack(state, self.h)
        at = self._gram(c)
        inside = _inside(at)
        eye = torch.eye(self.h, dtype=state.dtype, device=state.device)
        at = torch.where(inside, at[0], eye), torch.where(inside, at[1], eye)
        d = self.kinetic.velocity(at, self._momenta(v))
        force = self.kinetic.force(at, (d[0].mT @ self.grams[:, 0] @ d[0], d[1].mT @ self.grams[:, 1] @ d[1]))
        change = c[0] @ force[0] / self.weight, c[1] @ force[1] / self.weight
        return torch.where(inside[..., 0], _pack(d, change), torch.nan)

    def energy(self, state: Tensor) -> Tensor:
        """tr(P_G xi_G^T + P_H xi_H^T), which is constant. Shape (batch,)."""
        c, v = _unpack(state, self.h)
        p = self._momenta(v)
        d = self.kinetic.velocity(self._gram(c), p)
        return sum(((p[i] * (self.grams[:, i] @ d[i])).sum((-2, -1)) for i in (0, 1)), start=torch.zeros(()).to(state))

    @torch.no_grad()
    def require_energy(self, start: Tensor, end: Tensor) -> None:
        """Raise GeodesicError unless the energy is the same at both states."""
        first = self.energy(start)
        drift = (self.energy(end) - first).abs() / first.clamp_min(torch.finfo(first.dtype).tiny)
        if not bool((drift <= ENERGY_TOLERANCE).all()):
            raise GeodesicError(
                f"the energy of a geodesic should be constant and drifts by {float(drift.max()):.3g} of itself, for "
                "the singular values of G H^T spread too far: take a smaller h, eps > 0 or metric='inv'"
            )

    def _momenta(self, v: Both) -> Both:
        return v[0] * self.weight, v[1] * self.weight

    def _gram(self, c: Both) -> Both:
        G, H = (c[i].mT @ self.grams[:, i] @ c[i] + self.ridge[:, i] for i in (0, 1))
        return G, H


class _Kinetic(abc.ABC):
    """Velocity d = p W^-1 and force, the gradient (from the right) of tr(W_G N_G + W_H N_H) / 2 in G, alike for H."""

    def __init__(self, t: float, s: Tensor) -> None:
        self.t, self.s = t, s

    @abc.abstractmethod
    def velocity(self, gram: Both, p: Both) -> Both: ...

    @abc.abstractmethod
    def force(self, gram: Both, N: Both) -> Both: ...


@final
class _Inv(_Kinetic):
    """W_G = (G^T G)^-1."""

    def velocity(self, gram: Both, p: Both) -> Both:
        return p[0] @ gram[0], p[1] @ gram[1]

    def force(self, gram: Both, N: Both) -> Both:
        K = torch.linalg.inv(gram[0]), torch.linalg.inv(gram[1])
        return -K[0] @ N[0] @ K[0], -K[1] @ N[1] @ K[1]


@final
class _Mix(_Kinetic):
    """W_G = S H^T H S in the frame."""

    def velocity(self, gram: Both, p: Both) -> Both:
        column = self.s[..., None, :]
        return (
            torch.linalg.solve(gram[1], p[0] / column, left=False) / column,
            torch.linalg.solve(gram[0], p[1] / column, left=False) / column,
        )

    def force(self, gram: Both, N: Both) -> Both:
        outer = self.s[..., :, None] * self.s[..., None, :]
        return outer * N[1], outer * N[0]


@final
class _Mean(_Kinetic):
    """W_G = (G^T G)^-1 #_t S H^T H S: in the singular frame of the moving point it is diagonal again."""

    def velocity(self, gram: Both, p: Both) -> Both:
        s, T_G, T_H = self._frame(gram)
        unweight = s[..., None, :] ** (-2 * self.t)
        back = torch.linalg.inv(T_G), torch.linalg.inv(T_H)
        return p[0] @ back[0].mT * unweight @ back[0], p[1] @ back[1].mT * unweight @ back[1]

    def force(self, gram: Both, N: Both) -> Both:
        s, T_G, T_H = self._frame(gram)
        F = weigh(slope(s, self.t), (T_G.mT @ N[0] @ T_G, T_H.mT @ N[1] @ T_H))
        return T_G @ F[0] @ T_G.mT, T_H @ F[1] @ T_H.mT

    def _frame(self, gram: Both) -> tuple[Tensor, Tensor, Tensor]:
        L_G, L_H = torch.linalg.cholesky(gram[0]), torch.linalg.cholesky(gram[1])
        U, s, Vh = torch.linalg.svd(L_G.mT * self.s[..., None, :] @ L_H)
        return (
            s,
            torch.linalg.solve_triangular(L_G.mT, U, upper=True),
            torch.linalg.solve_triangular(L_H.mT, Vh.mT, upper=True),
        )


def _inside(gram: Both) -> Tensor:
    """Whether all Gram eigenvalues are between FLOOR and its inverse. Shape (..., 1, 1)."""
    both = torch.stack([g.detach() for g in gram])
    finite = both.isfinite().all(-1).all(-1)[..., None, None]
    eigenvalues = torch.linalg.eigvalsh(torch.where(finite, both, 0.0))
    return ((eigenvalues > FLOOR) & (eigenvalues < 1 / FLOOR)).all(-1).all(0)[..., None, None]


def _basis(left: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """A basis B (..., n, 2h) of the columns of left and a, beginning with left, and a in it: a = B @ (..., 2h, h).

    The second half is orthonormalised by a matrix that takes no part in differentiation: what B c(t) is does not depend
    on it, and so a = 0 has a gradient. Without it, columns of a in the span of left would spoil the solver's errors.
    """
    M = left.mT @ a
    Y = a - left @ M
    with torch.no_grad():
        lam, E = torch.linalg.eigh(Y.mT @ Y)
        root = lam.clamp_min(torch.finfo(a.dtype).eps ** 2).sqrt()
    return torch.cat([left, Y @ (E / root[..., None, :])], dim=-1), torch.cat([M, root[..., :, None] * E.mT], dim=-2)


def _pack(c: Both, v: Both) -> Tensor:
    return torch.cat([x.flatten(-2) for x in (*c, *v)], dim=-1)


def _unpack(state: Tensor, h: int) -> tuple[Both, Both]:
    blocks = state.unflatten(-1, (4, 2 * h, h)).unbind(-3)
    return (blocks[0], blocks[1]), (blocks[2], blocks[3])
