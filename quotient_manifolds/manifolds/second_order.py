"""Compute second-order geodesics of the pair (G, H), a quadratic map of the coordinates z, with its adjoint.

Geodesics are stationary for the energy (tr(W_G xi_G^T xi_G) + tr(W_H xi_H^T xi_H)) / 2, whose weights change by dW_G,
dW_H along the way, as the Gram matrices of both factors do. That makes xi_G' = -Gamma_G with

    Gamma_G = (xi_G dW_G - G (own N_G + other N_H)) W_G^-1,    N = xi^T xi,

the first term from differentiating W_G xi_G in time, the second from the gradient of the energy in G, which lies in the
column span of G because the energy depends on G through its Gram matrix alone. [paper, Eq. 11, 12] are t = 0 and 1.

In the singular frame W_G is diagonal, and dW_G an entrywise product (`Slope`). There the step xi_G - Gamma_G / 2 is
z_G turn_G + left bend_G with turn affine in z, bend quadratic, both h x h. Products with tall matrices take most of the
time, and only these two remain. The same holds for H.

Tall matrices are one tensor (..., n + m, h), the rows of G first, or two factors (`Both`). h x h matrices of both
factors are in one tensor (..., 2, h, h), G first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quotient_manifolds.derivatives import in_no_graph
from quotient_manifolds.linalg import SingularFrame

Both = tuple[Tensor, Tensor]
"""One matrix for G and one for H."""


def split(x: Tensor, like: Both) -> Both:
    """Return the rows of G and those of H."""
    n = like[0].shape[-2]
    return x[..., :n, :], x[..., n:, :]


def times(x: Both, on: Tensor) -> Tensor:
    """Compute x_G on_G stacked on x_H on_H."""
    on_G, on_H = on.unbind(-3)
    if x[0].ndim != 3 or not in_no_graph(*x, on) or not _one_batch(x, on):
        return torch.cat([x[0] @ on_G, x[1] @ on_H], dim=-2)
    out = x[0].new_empty(len(on), x[0].shape[-2] + x[1].shape[-2], on.shape[-1])
    for part, a, b in zip(split(out, x), x, (on_G, on_H), strict=True):
        torch.bmm(a, b, out=part)  # joining two results would be another pass over tall matrices
    return out


def plus(x: Tensor, a: Both, on: Tensor, *, mine: bool = False) -> Tensor:
    """Compute x + (a_G on_G stacked on a_H on_H), in place if x is `mine` and nothing is differentiated."""
    if not in_no_graph(x, *a, on) or not _one_batch((x, *a), on):
        return x + times(a, on)
    x = x if mine else x.clone(memory_format=torch.contiguous_format)
    for part, b, c in zip(split(x, a), a, on.unbind(-3), strict=True):
        part.baddbmm_(b, c) if part.ndim == 3 else part.add_(b @ c)
    return x


def cores(x: Both, y: Both) -> Tensor:
    """Compute x_G^T y_G and x_H^T y_H."""
    return torch.stack([x[0].mT @ y[0], x[1].mT @ y[1]], dim=-3)


def _one_batch(tall: tuple[Tensor, ...], on: Tensor) -> bool:
    return all(x.shape[:-2] == on.shape[:-3] and x.dtype == on.dtype for x in tall)


class Slope(NamedTuple):
    """Hold the derivative of the metric's weights in the Gram matrices: dW_G = own * V_G + other * V_H, entrywise.

    W_G = (G^T G)^-1 #_t H^T H in the frame, where it is diag(s^2t), and V = a^T left + left^T a, alike for H.
    """

    own: Tensor  # (..., h, h)
    other: Tensor  # (..., h, h)

    def change(self, V: Tensor) -> Tensor:
        """Compute how the weights of G and of H change with the Gram matrices of both: flip exchanges G and H."""
        return self.own * V + self.other * V.flip(-3)

    def adjoint(self, W: Tensor) -> Tensor:
        """Apply the adjoint of `change`."""
        return self.own * W + (self.other * W).flip(-3)


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


class Pairing(NamedTuple):
    """Hold what depends on the point alone: G = left from_left, xi_G = z_G diag(unit) from_left; for H alike."""

    basis: Both  # left (..., n, h), right (..., m, h)
    back: Tensor  # from_left, from_right (..., 2, h, h)
    unit: Tensor  # s^-t, a row (..., 1, 1, h)
    along: Slope  # diag(unit) dW_G W_G^-1 / 2 for a change of the Gram matrices (..., 1, h, h)
    across: Slope  # dW_G W_G^-1 / 2 for the Gram matrices of z instead of velocities

    @staticmethod
    def of(frame: SingularFrame, s: Tensor, t: float) -> Pairing:
        """Prepare the second-order geodesics of metric t; s are the singular values in float64, for their slopes."""
        dtype = frame.left.dtype
        own, other = (part[..., None, :, :] for part in slope(s, t))
        unit = s[..., None, None, :] ** -t
        half, outer = unit.mT * unit**2 / 2, unit.mT * unit**3 / 2
        back = torch.stack([frame.from_left, frame.from_right], dim=-3)
        along, across = (Slope((own * w).to(dtype), (other * w).to(dtype)) for w in (half, outer))
        return Pairing((frame.left, frame.right), back, unit.to(dtype), along, across)


class Step(NamedTuple):
    """Hold what is computed at one z, for both factors (..., 2, h, h): z moves the point by z turn + basis bend."""

    turn: Tensor
    bend: Tensor
    inside: Tensor  # left^T z_G, right^T z_H
    square: Tensor  # z_G^T z_G, z_H^T z_H

    def way(self, at: Pairing, z: Both) -> Tensor:
        """Compute the displacement of the point."""
        return plus(times(z, self.turn), at.basis, self.bend, mine=True)


class Adjoint(NamedTuple):
    """Represent tall + basis core, with inside = basis^T tall where the basis is orthonormal, for both factors."""

    tall: Tensor  # (..., n + m, h)
    core: Tensor  # (..., 2, h, h)
    inside: Tensor  # (..., 2, h, h)


def expand(at: Pairing, z: Both) -> Step:
    """Prepare the step xi - Gamma(xi, xi) / 2 of one z: all of it that is h x h."""
    # Turn and bend depend only on products of z with left, right and itself, so all matrices below are h x h.
    inside = cores(at.basis, z)
    M = inside * at.unit  # left^T a: the velocity within the span of the point, and M + M^T that of its Gram matrix
    turn = at.unit.mT * at.back - at.along.change(M + M.mT) @ at.back
    square = cores(z, z)
    return Step(turn, at.across.change(square) @ at.back, inside, square)


def adjoint(at: Pairing, z: Both, step: Step, grad: Both) -> Adjoint:
    """Apply the adjoint of the derivative at z to the gradient at the point that was reached."""
    # The product rule, backwards: z stands in front of turn, in turn (through M, linear), and in bend (through N,
    # quadratic, whence the sum with the transpose). Gradients flow from turn and bend through the flipped Slope, for a
    # change of one factor's Gram matrix moves the weights of both.
    below, turn = cores(at.basis, grad), step.turn.mT
    along = at.along.adjoint(cores(z, grad) @ at.back.mT)
    across = at.across.adjoint(below @ at.back.mT)
    square = across + across.mT
    tall = plus(times(grad, turn), z, square, mine=True)
    return Adjoint(tall, (along + along.mT) * -at.unit, below @ turn + step.inside @ square)
