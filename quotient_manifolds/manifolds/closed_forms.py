"""Follow exact geodesics that have closed forms: of `inv`, and of pairs (G, H) of one column in every metric."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quotient_manifolds.manifolds.runge_kutta import FLOOR

_RANGE = 16.0  # caps the exponent 2 |t|, so that squared radii stay far from overflow


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


def rank_one(t: float, left: Tensor, right: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""Compute the geodesic of t != 0 from unit vectors left, right with velocities a, b: both ends, and the time.

    With G = r u, H = q w (u, w of length 1), s = r q and p = log(r / q), the metric is

        s^2t ((ds / s)^2 / 2 + dp^2 / 2 + |du|^2 + |dw|^2).

    Horizontal is dp = 0, and p stays. With theta the arc length on the product of both spheres and rho = s^t, that is
    (drho^2 + rho^2 dphi^2) / 2 t^2 for phi = sqrt(2) t theta: a flat cone, on which geodesics are straight lines. From
    rho = 1, with growth g = t s' / s and turn b = sqrt(2) t theta', the line is rho e^(i phi) = 1 + g tau + i b tau. So
    at time tau the product has grown by |1 + g tau + i b tau|^(1/t), and u and w have gone theta = phi / (sqrt(2) t),
    each its constant share of it.

    Followed to time 1 or to where the product has changed by the factor `FLOOR` or its inverse, whichever is first.
    What rounding left of a vertical part moves along the orbit: it must not bend a line that ends in the apex.
    Derivatives of any order in all arguments are finite, those of a stopped geodesic are taken at its end at fixed
    time. In float64, nothing is integrated. Shapes: left, a (..., n, 1), right, b (..., m, 1), time (...).
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
