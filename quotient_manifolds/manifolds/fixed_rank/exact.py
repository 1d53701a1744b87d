"""Compute exact geodesics of the pair (G, H) where they have no closed form, with the adjoint of their derivative.

The way to their ends is rest_G turn_G + left bend_G, alike for H, as that of second order with z in place of its rest
z - left left^T z. Here turn and bend, all h x h, come from an ODE (`geodesics.integrate`), which z enters by `inside`,
left^T z, and by `square`, the Gram matrix of the rest. That makes adjoints a matter of h x h too: only turn and bend
are differentiated by autograd, as functions of these two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quotient_manifolds.manifolds.fixed_rank.geodesics import Both, integrate
from quotient_manifolds.manifolds.fixed_rank.second_order import Adjoint, Pairing, Step, add, cores, plus
from quotient_manifolds.manifolds.horizontal import GeodesicError

_CONDITION = 1e8
"""How much longer squared lengths of columns may be than those that products tell, free of rounding, to 1e-8."""


def expand(at: Pairing, s: Tensor, t: float, z: Both, relaxed: bool) -> tuple[Both, Step, Tensor]:
    """Follow the exact geodesic of metric t: the rest of z, the step that it takes, and the time reached. (...)

    s: the singular values in float64. With `relaxed`, left and right are not orthonormal.
    """
    rest, inside = _rest(at, z)
    return rest, *_expand(at, s, t, inside, cores(rest, rest), rest, relaxed)


def linearise(at: Pairing, s: Tensor, t: float, z: Both, relaxed: bool) -> tuple[Both, Step, Tensor]:
    """Compute the same, with turn and bend in a graph that begins at `inside` and `square`."""
    rest, inside = _rest(at, z)
    with torch.enable_grad():
        leaves = inside.requires_grad_(), cores(rest, rest).requires_grad_()
        return rest, *_expand(at, s, t, *leaves, rest, relaxed)


def adjoint(at: Pairing, rest: Both, step: Step, grad: Both, relaxed: bool) -> Adjoint:
    """Apply the adjoint of the derivative at z to the gradient at the point that was reached; once for a step."""
    # The product rule, backwards: the rest stands in front of turn and, twice, in `square`.
    left = at.left, at.right
    below, beside = cores(left, grad), cores(rest, grad)
    along, square = torch.autograd.grad((step.bend, step.turn), (step.inside, step.square), (below, beside))
    turn, square = step.turn.detach().mT, square + square.mT
    (turn_G, turn_H), (square_G, square_H) = turn.unbind(-3), square.unbind(-3)
    tall = plus(grad[0] @ turn_G, rest[0], square_G), plus(grad[1] @ turn_H, rest[1], square_H)
    within = below @ turn  # left^T tall
    if relaxed:  # where left^T rest is not 0
        inside = step.inside.detach()
        within = within + (inside - cores(left, left) @ inside) @ square
    return Adjoint(tall, along - within, within)  # from the rest to z: less left left^T


def _rest(at: Pairing, z: Both) -> tuple[Both, Tensor]:
    """Compute z - left inside, which must not come from a difference of Gram matrices.

    Where a geodesic goes straight to the end of its domain, what rounding left would turn it aside.
    """
    inside = cores((at.left, at.right), z)
    in_G, in_H = inside.unbind(-3)
    return (add(z[0], at.left, -in_G), add(z[1], at.right, -in_H)), inside


def _expand(
    at: Pairing, s: Tensor, t: float, inside: Tensor, square: Tensor, rest: Both, relaxed: bool
) -> tuple[Step, Tensor]:
    unit, back, M = (x.double() for x in (at.unit, at.back, inside))
    products = unit.mT * square.double() * unit
    basis, start, clear = _orthonormal(products, M * unit)
    gram = None if clear and not relaxed and not products.requires_grad else basis.mT @ products @ basis
    if gram is not None and (relaxed or not clear):
        gram = _whole_gram(at, M, gram, unit.mT * basis, None if clear else rest, relaxed)
    c, reached = integrate(t, s, torch.cat([M * unit, start], dim=-2), gram, relaxed)
    on_point, on_rest = c.tensor_split(2, dim=-2)
    turn = unit.mT * (basis @ on_rest)
    bend = on_point - torch.eye(s.shape[-1], dtype=c.dtype, device=c.device)
    turn, bend, reached = (x.to(at.back.dtype) for x in (turn @ back, bend @ back, reached))
    return Step(turn, bend, inside, square), reached


def _orthonormal(products: Tensor, along: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Return a basis that makes columns of these products with each other orthonormal, its inverse, and if they are.

    Where columns are short beside the whole velocity, rounding is what they are made of: they may get any length then.
    The basis takes no part in differentiation: no geodesic depends on it, and so a velocity of 0 has a gradient.
    Without it, columns in the span of left would spoil the solver's errors. along: the other part of the velocity.
    """
    if not bool(products.isfinite().all()):
        raise GeodesicError("a geodesic must start with a velocity of finite length. Found NaN or infinity in it")
    with torch.no_grad():
        size = (products.diagonal(dim1=-2, dim2=-1) + along.square().sum(-2)).amax(-1)[..., None]
        size = torch.where(size > 0, size, 1.0)
        lam, E = torch.linalg.eigh(products / size[..., None])
        root = (lam.clamp_min(torch.finfo(lam.dtype).eps ** 2) * size).sqrt()
        return E / root[..., None, :], root[..., :, None] * E.mT, bool((lam * _CONDITION > 1).all())


def _whole_gram(at: Pairing, M: Tensor, lower: Tensor, basis: Tensor, rest: Both | None, relaxed: bool) -> Tensor:
    """Compute the Gram matrix of left and rest basis, of which `lower` is known; to the last digit if rest is given."""
    left = at.left.double(), at.right.double()
    own = cores(left, left) if relaxed else torch.eye(M.shape[-1], dtype=M.dtype, device=M.device).expand_as(lower)
    across = (M - own @ M) @ basis
    if rest is not None:
        with torch.no_grad():
            columns = rest[0].double() @ basis[..., 0, :, :], rest[1].double() @ basis[..., 1, :, :]
            errors = cores(left, columns) - across, cores(columns, columns) - lower
        across, lower = across + errors[0], lower + errors[1]
    rows = torch.cat([own.expand_as(lower), across], dim=-1), torch.cat([across.mT, lower], dim=-1)
    return torch.cat(rows, dim=-2)
