"""Compute second-order geodesics of the pair (G, H), a quadratic map of the coordinates z, with its adjoint.

Geodesics are stationary for the energy (tr(W_G xi_G^T xi_G) + tr(W_H xi_H^T xi_H)) / 2, whose weights change by dW_G,
dW_H along the way, as the Gram matrices of both factors do. That makes xi_G' = -Gamma_G with

    Gamma_G = (xi_G dW_G - G (own N_G + other N_H)) W_G^-1,    N = xi^T xi,

the first term from differentiating W_G xi_G in time, the second from the gradient of the energy in G, which lies in the
column span of G because the energy depends on G through its Gram matrix alone. [paper, Eq. 11, 12] are t = 0 and 1.

In the singular frame W_G is diagonal, and dW_G an entrywise product (`Slope`). There the step xi_G - Gamma_G / 2 is
z_G turn_G + left bend_G with turn affine in z, bend quadratic, both h x h: of products with tall matrices, which is
what takes time, only these two are left. For H alike. What is h x h is held for both factors in one tensor, G first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quotient_manifolds.linalg import SingularFrame, in_no_graph
from quotient_manifolds.manifolds.arguments import has_values, some
from quotient_manifolds.manifolds.fixed_rank.geodesics import Both, Slope, slope

FASTEST = 1.0
"""The relative speed up to which an optimizer's step follows the second-order geodesic."""


class Pairing(NamedTuple):
    """Hold what depends on the point alone: G = left from_left, xi_G = z_G diag(unit) from_left; for H alike."""

    left: Tensor  # (..., n, h)
    right: Tensor  # (..., m, h)
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
        return Pairing(frame.left, frame.right, back, unit.to(dtype), along, across)


class Step(NamedTuple):
    """Hold what is computed at one z, for both factors (..., 2, h, h)."""

    turn: Tensor
    bend: Tensor
    inside: Tensor  # left^T z_G, right^T z_H
    square: Tensor  # z_G^T z_G, z_H^T z_H


class StraightWay(NamedTuple):
    """Hold xi_G = z_G on_G, for both factors (..., 2, h, h), and for which of the batch it is meant."""

    on: Tensor
    where: Tensor


class Adjoint(NamedTuple):
    """Represent tall_G + left core_G, with inside_G = left^T tall_G where left is orthonormal; for H alike."""

    tall: Both  # (..., n, h), (..., m, h)
    core: Tensor  # (..., 2, h, h)
    inside: Tensor  # (..., 2, h, h)


def expand(at: Pairing, z: Both) -> Step:
    """Prepare the step xi - Gamma(xi, xi) / 2 of one z: all of it that is h x h."""
    # z enters by its products with left, right and itself alone: all that follows is h x h, however tall G and H are.
    inside = cores((at.left, at.right), z)
    M = inside * at.unit  # left^T a: the velocity within the span of the point, and M + M^T that of its Gram matrix
    turn = at.unit.mT * at.back - _change(at.along, M + M.mT) @ at.back
    square = cores(z, z)
    return Step(turn, _change(at.across, square) @ at.back, inside, square)


def apply(at: Pairing, z: Both, step: Step, start: Both | None = None, writable: bool = False) -> Both:
    """Compute the step in G and in H, or where it leads from `start`; in `start` where that is `writable`."""
    (turn_G, turn_H), (bend_G, bend_H) = step.turn.unbind(-3), step.bend.unbind(-3)
    if start is None:
        way = z[0] @ turn_G, z[1] @ turn_H
    elif writable:
        way = plus(start[0], z[0], turn_G), plus(start[1], z[1], turn_H)
    else:
        way = add(start[0], z[0], turn_G), add(start[1], z[1], turn_H)
    return plus(way[0], at.left, bend_G), plus(way[1], at.right, bend_H)


def shorter(at: Pairing, step: Step) -> StraightWay | None:
    r"""Prepare a straight and shorter way for steps of relative speed above 1; None where there are none.

    With a, b the velocities relative to the point, G = left from_left, and M = I + a^T a + b^T b, it leads to
    (left + a M^(-1/4)) from_left, and alike for H: an invariant rule, equal to x + xi to the second order. Near lower
    rank relative speeds have no bound, nor has the parabola. This has: with X the product and z the velocity in
    coordinates, the spectral norm of the new product is at most 4 (|X| + |z|) in `mix`, as
    s^(1/2) M^(1/2) s^(1/2) <= (s^2 + |z|^2 I)^(1/2) for s = diag(s): the square root is operator monotone.
    """
    gram = (at.unit.mT * step.square * at.unit).double().sum(-3)
    if has_values(gram) and not some(gram.diagonal(dim1=-2, dim2=-1).sum(-1) > FASTEST**2):
        return None
    squares, E = torch.linalg.eigh(gram)
    root = (E * (1 + squares.clamp_min(0.0))[..., None, :] ** -0.25 @ E.mT).to(at.back.dtype)
    return StraightWay(at.unit.mT * (root[..., None, :, :] @ at.back), squares[..., -1] > FASTEST**2)


def adjoint(at: Pairing, z: Both, step: Step, grad: Both) -> Adjoint:
    """Apply the adjoint of the derivative at z to the gradient at the point that was reached."""
    # The product rule, backwards: z stands in front of turn, in turn (through M, linear), and in bend (through N,
    # quadratic, whence the sum with the transpose). Gradients flow from turn and bend through the flipped Slope, for a
    # change of one factor's Gram matrix moves the weights of both.
    below, turn = cores((at.left, at.right), grad), step.turn.mT
    along = _adjoint_change(at.along, cores(z, grad) @ at.back.mT)
    across = _adjoint_change(at.across, below @ at.back.mT)
    square = across + across.mT
    (turn_G, turn_H), (square_G, square_H) = turn.unbind(-3), square.unbind(-3)
    tall = plus(grad[0] @ turn_G, z[0], square_G), plus(grad[1] @ turn_H, z[1], square_H)
    return Adjoint(tall, (along + along.mT) * -at.unit, below @ turn + step.inside @ square)


def add(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Compute x + a @ b."""
    return torch.baddbmm(x, a, b) if _one_batch(x, a, b) else x + a @ b


def plus(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Compute x + a @ b, in x, which must be the caller's own, where nothing is to be differentiated."""
    if not in_no_graph(x, a, b):  # the Hessian differentiates the step itself
        return x + a @ b
    return x.baddbmm_(a, b) if _one_batch(x, a, b) else x.add_(a @ b)


def _one_batch(x: Tensor, a: Tensor, b: Tensor) -> bool:
    return x.ndim == a.ndim == b.ndim == 3 and len(x) == len(a) == len(b)


def _change(weights: Slope, V: Tensor) -> Tensor:
    """Compute how the weights of G and of H change with the Gram matrices of both: flip exchanges G and H."""
    return weights.own * V + weights.other * V.flip(-3)


def _adjoint_change(weights: Slope, W: Tensor) -> Tensor:
    return weights.own * W + (weights.other * W).flip(-3)


def cores(x: Both, y: Both) -> Tensor:
    """Compute x_G^T y_G and x_H^T y_H."""
    return torch.stack([x[0].mT @ y[0], x[1].mT @ y[1]], dim=-3)
