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

MAX_STEPS = 10_000
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
    """Where a geodesic got: the factors in the frame (G = left @ from_left) at time `reached` <= 1."""

    left: Tensor
    right: Tensor
    reached: Tensor
    drift: Tensor  # of the energy, relative


def integrate(metric: str, s: Tensor, left: Tensor, right: Tensor, a: Tensor, b: Tensor, relaxed: bool) -> Flow:
    """The exact geodesic at t = 1 by an adaptive Runge-Kutta method of order 8 (torchdiffeq), in float64.

    Hamilton's equations of the kinetic energy, whose right-hand sides stay milder than accelerations where a singular
    value nears 0: with momenta P_G = xi_G W_G, W_G = H^T H (mix) or (G^T G)^-1 (inv), alike for H,

    - mix: G' = P_G (H^T H)^-1, P_G' = G (G^T G)^-1 P_H^T P_H (G^T G)^-1,
    - inv: G' = P_G G^T G, P_G' = -G P_G^T P_G.

    Everything multiplies (left, a) from the right, so G(t) = B c(t) with B a basis of their columns and c (2h, h), and
    n and m do not matter.
    An entry of the batch whose smallest Gram eigenvalue falls to the square root of machine precision is stopped there,
    at the end of its domain, and `reached` tells when. With `relaxed` the Gram matrices are those of left and right
    plus the constants that make them the identity at t = 0.
    """
    s, left, right, a, b = (x.double() for x in (s, left, right, a, b))
    s = s / s[..., :1]  # a change of the unit of energy
    h = a.shape[-1]
    bases, starts = zip(*(_basis(x, v) for x, v in ((left, a), (right, b))), strict=True)
    grams = [B.mT @ B for B in bases]  # (..., 2h, 2h)
    eye = torch.eye(h, dtype=a.dtype, device=a.device)
    ridge = [eye - g[..., :h, :h] if relaxed else torch.zeros_like(eye) for g in grams]
    column = s[..., None, :]

    def gram(c: list[Tensor]) -> list[Tensor]:
        return [x.mT @ g @ x + e for x, g, e in zip(c, grams, ridge, strict=True)]

    def velocities(c: list[Tensor], p: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        if metric == "inv":
            return [q @ g for q, g in zip(p, gram(c), strict=True)], []
        K = [torch.linalg.inv(g) for g in gram(c)]
        return [p[0] @ K[1] / column, p[1] @ K[0] / column], K

    def motion(_: Tensor, state: Tensor) -> Tensor:
        c, p = _unpack(state, h)
        d, K = velocities(c, p)
        if metric == "inv":
            forces = [-c[i] @ (p[i].mT @ grams[i] @ p[i]) for i in (0, 1)]
            alive = torch.ones_like(state[..., -1:])
        else:
            forces = [c[i] * column @ (d[1 - i].mT @ grams[1 - i] @ d[1 - i]) for i in (0, 1)]
            spread = torch.maximum(*(k.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True) for k in K))
            alive = (spread * math.sqrt(torch.finfo(a.dtype).eps) < 1).to(state.dtype)
        return alive * _pack(d, forces, torch.ones_like(alive))

    def energy(c: list[Tensor], p: list[Tensor]) -> Tensor:
        d, _ = velocities(c, p)
        weight = 1.0 if metric == "inv" else column
        return sum(((p[i] * weight) * (grams[i] @ d[i])).sum((-2, -1)) for i in (0, 1))

    upper = torch.cat([eye, torch.zeros_like(eye)]).expand_as(grams[0][..., :h])
    momenta = list(starts) if metric == "inv" else [v * column for v in starts]
    start = _pack([upper, upper], momenta, torch.zeros_like(s[..., :1]))
    times = torch.tensor([0.0, 1.0], dtype=a.dtype, device=a.device)
    options = {"norm": lambda x: x.abs().max(), "step_t": times[1:], "max_num_steps": MAX_STEPS}
    end = odeint(motion, start, times, rtol=TOLERANCE, atol=TOLERANCE, method="dopri8", options=options)[-1]
    c, p = _unpack(end, h)
    with torch.no_grad():
        first = energy([upper, upper], momenta)
        drift = (energy(c, p) - first).abs() / first.clamp_min(torch.finfo(first.dtype).tiny)
    reached = torch.where(
        end[..., -1] > 1 - TOLERANCE, 1.0, end[..., -1]
    )  # a clock that ran on sums to 1 but for rounding
    return Flow(bases[0] @ c[0], bases[1] @ c[1], reached, drift)


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


def _pack(c: list[Tensor], p: list[Tensor], clock: Tensor) -> Tensor:
    return torch.cat([x.flatten(-2) for x in (*c, *p)] + [clock], dim=-1)


def _unpack(state: Tensor, h: int) -> tuple[list[Tensor], list[Tensor]]:
    blocks = state[..., :-1].unflatten(-1, (4, 2 * h, h)).unbind(-3)
    return [blocks[0], blocks[1]], [blocks[2], blocks[3]]
