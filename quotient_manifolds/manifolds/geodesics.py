"""Geodesics of the pair (G, H), in the singular frame of G H^T.

In that frame a point is (left, right) with orthonormal columns, the core s its singular values, and a velocity is
relative: a = xi_G to_left, b = xi_H to_right. All formulas are the paper's after this change of basis.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torchdiffeq import odeint

TOLERANCE = 1e-10
"""Relative and absolute tolerance of the ODE solver, on a state whose entries start at 0 and 1."""


class Christoffel(NamedTuple):
    """Gamma_G(xi, xi) = a @ along + left @ across, in the frame, for one factor."""

    along: Tensor  # (..., h, h)
    across: Tensor  # (..., h, h)


def christoffel(
    metric: str, s: Tensor, V: tuple[Tensor, Tensor], N: tuple[Tensor, Tensor], K: tuple[Tensor, Tensor]
) -> tuple[Christoffel, Christoffel]:
    """Gamma(xi, xi) of [paper, Eq. 11] (inv) and [paper, Eq. 12] (mix), for G and H.

    V = (a^T left + left^T a, alike for H), N = (a^T a, b^T b), K the inverses of the Gram matrices of left and right
    (the identity at the point the frame belongs to); s the singular values there. All (..., h, h), s (..., h).
    """
    if metric == "inv":
        return Christoffel(-K[0] @ V[0], K[0] @ N[0]), Christoffel(-K[1] @ V[1], K[1] @ N[1])
    row, column = s[..., :, None], s[..., None, :]
    mixed = [(row * V[j] @ K[j] / column, -row * N[j] @ K[j] / column) for j in (1, 0)]
    return Christoffel(*mixed[0]), Christoffel(*mixed[1])


def inv_exponential(left: Tensor, a: Tensor) -> Tensor:
    r"""expm(Om) left expm(M^T), Om = a left^T - left a^T: the exact geodesic of `inv`, one factor, t = 1.

    The Lagrangian tr((G^T G)^{-1} G'^T G') / 2 is invariant under O(n) from the left and GL(h) from the right. The two
    conserved momenta are Om = xi_G (G^T G)^{-1} G^T - transpose and C = (G^T G)^{-1} xi_G^T G, and
    G(t) = expm(t Om) G expm(t C) solves the geodesic equation: G' = Om G + G C with both momenta constant.

    Om acts on the span of left and Y = a - left M, M = left^T a, where in the basis (left, Y / c) it is
    [[M - M^T, -Y^T Y / c], [c I, 0]] for any c > 0; so one 2h x 2h and one h x h exponential suffice, and nothing is
    divided by the norm of a velocity that may be 0. Shapes (..., n, h).
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
    """Where a geodesic got: G = left @ at_left + a @ along_left, H alike, at time `reached` <= 1."""

    at_left: Tensor
    along_left: Tensor
    at_right: Tensor
    along_right: Tensor
    reached: Tensor
    drift: Tensor  # of the energy, relative


def integrate(metric: str, s: Tensor, left: Tensor, right: Tensor, a: Tensor, b: Tensor, ridge: bool) -> Flow:
    """The exact geodesic at t = 1 by an adaptive Runge-Kutta method of order 8 (torchdiffeq), in float64.

    The acceleration -Gamma multiplies (left, a) from the right only, so G(t) = [left, a] c(t) with c (2h, h): the
    problem does not see n and m. Every batch entry's clock slows down smoothly once its smallest Gram eigenvalue falls
    to the square root of machine precision, so it stops at the end of its domain, and `reached` tells where; the curve
    itself is the geodesic throughout. `ridge` marks the relaxed metric, whose Gram matrices are those of the frame
    plus the constant that makes them the identity at t = 0.
    """
    s, left, right, a, b = (x.double() for x in (s, left, right, a, b))
    h = a.shape[-1]
    bases = [torch.cat([left, a], dim=-1), torch.cat([right, b], dim=-1)]
    grams = [B.mT @ B for B in bases]  # (..., 2h, 2h)
    eye = torch.eye(h, dtype=a.dtype, device=a.device)
    shift = [eye - g[..., :h, :h] if ridge else torch.zeros_like(eye) for g in grams]
    floor = math.sqrt(torch.finfo(a.dtype).eps) / h

    def gram_inverses(c: list[Tensor]) -> tuple[Tensor, Tensor]:
        K = [torch.linalg.inv(x.mT @ g @ x + e) for x, g, e in zip(c, grams, shift, strict=True)]
        return K[0], K[1]

    def motion(_: Tensor, state: Tensor) -> Tensor:
        c, d = _unpack(state, h)
        products = [(d[i].mT @ grams[i] @ c[i], d[i].mT @ grams[i] @ d[i]) for i in (0, 1)]
        V = (products[0][0] + products[0][0].mT, products[1][0] + products[1][0].mT)
        N = (products[0][1], products[1][1])
        K = gram_inverses(c)
        gamma = christoffel(metric, s, V, N, K)
        acceleration = [-(d[i] @ gamma[i].along + c[i] @ gamma[i].across) for i in (0, 1)]
        smallest = 1 / torch.maximum(*(k.diagonal(dim1=-2, dim2=-1).sum(-1) for k in K))
        clock = (smallest / floor - 1).clamp(0, 1)[..., None]
        return clock * _pack(d, acceleration, torch.ones_like(smallest))

    def energy(c: list[Tensor], d: list[Tensor]) -> Tensor:
        K = gram_inverses(c)
        N = [d[i].mT @ grams[i] @ d[i] for i in (0, 1)]
        if metric == "inv":
            return (K[0] * N[0]).sum((-2, -1)) + (K[1] * N[1]).sum((-2, -1))
        weight = s[..., :, None] * s[..., None, :]
        mixed = torch.linalg.inv(K[1]) * N[0] + torch.linalg.inv(K[0]) * N[1]
        return (weight * mixed).sum((-2, -1))

    half = torch.cat([eye, torch.zeros_like(eye)]).expand_as(grams[0][..., :h])
    other = torch.cat([torch.zeros_like(eye), eye]).expand_as(half)
    start = _pack([half, half], [other, other], torch.zeros(half.shape[:-2], dtype=a.dtype, device=a.device))
    times = torch.tensor([0.0, 1.0], dtype=a.dtype, device=a.device)
    options = {"norm": lambda x: x.abs().max()}
    end = odeint(motion, start, times, rtol=TOLERANCE, atol=TOLERANCE, method="dopri8", options=options)[-1]
    c, d = _unpack(end, h)
    with torch.no_grad():
        first = energy([half, half], [other, other])
        drift = (energy(c, d) - first).abs() / first.clamp_min(torch.finfo(first.dtype).tiny)
    return Flow(c[0][..., :h, :], c[0][..., h:, :], c[1][..., :h, :], c[1][..., h:, :], end[..., -1], drift)


def _pack(c: list[Tensor], d: list[Tensor], clock: Tensor) -> Tensor:
    return torch.cat([x.flatten(-2) for x in (*c, *d)] + [clock[..., None]], dim=-1)


def _unpack(state: Tensor, h: int) -> tuple[list[Tensor], list[Tensor]]:
    blocks = state[..., :-1].unflatten(-1, (4, 2 * h, h)).unbind(-3)
    return [blocks[0], blocks[1]], [blocks[2], blocks[3]]
