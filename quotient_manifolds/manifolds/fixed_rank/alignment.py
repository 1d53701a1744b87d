r"""Bring two points of the fixed-rank quotient near each other along their orbits, and bound their distance by a curve.

Both points are given by the thin SVDs of their products, left diag(s) right^T. Of the second one the singular vectors
are first turned into the bases nearest to those of the first (principal angles); its product is then left core right^T.
What remains of the group is a choice: matrices P_G, P_H with P_G diag(s) P_H^T = core, for s of the first point, say at
which representative of the second one a curve ends, measured at the representative (left, right) of the first.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from quotient_manifolds.linalg import SingularFrame
from quotient_manifolds.manifolds.fixed_rank.geodesics import Both

REFINEMENTS = 3
"""Steps of Newton's method towards a horizontal curve: the first order in the distance takes one or two."""

PIECES = 32


class Matched(NamedTuple):
    """Hold a second point in the bases nearest to those of a first."""

    left: Tensor  # (..., n, h), orthonormal
    right: Tensor  # (..., m, h)
    core: Tensor  # (..., h, h), of positive determinant where the points are connected
    angles: Tensor  # (..., 2h), between the spans, on the way that these bases go
    connected: Tensor  # (...,): whether a curve leads from one to the other


def match(here: SingularFrame, there: SingularFrame) -> Matched:
    """Turn the bases of `there` into those nearest to the bases of `here`.

    A curve of invertible cores keeps the sign of their determinant. Where it differs, one span is reached from the
    other side, through the complement of its largest angle; square pairs have no complement and are not connected.
    """
    turns = [_nearest(a, b) for a, b in ((here.left, there.left), (here.right, there.right))]
    core = turns[0].basis.mT @ (there.s[..., :, None] * turns[1].basis)
    opposite = torch.linalg.slogdet(core).sign < 0
    h = core.shape[-1]
    free = [basis.shape[-2] > h for basis in (here.left, here.right)]
    first = turns[0].angles[..., -1] >= turns[1].angles[..., -1]
    flips = [opposite & free[0] & (first | (not free[1])), opposite & free[1] & (~first | (not free[0]))]
    (W_G, angles_G), (W_H, angles_H) = (turn.flipped(where) for turn, where in zip(turns, flips, strict=True))
    core = W_G.mT @ (there.s[..., :, None] * W_H)
    connected = ~opposite | any(free)
    return Matched(there.left @ W_G, there.right @ W_H, core, torch.cat([angles_G, angles_H], dim=-1), connected)


class _Turn(NamedTuple):
    basis: Tensor  # (..., h, h), orthogonal
    angles: Tensor  # (..., h), ascending
    last: Tensor  # (..., h, h), what the largest angle adds to the basis

    def flipped(self, where: Tensor) -> tuple[Tensor, Tensor]:
        """Go the other way round through the largest angle."""
        last = torch.where(where, math.pi - self.angles[..., -1], self.angles[..., -1])
        angles = torch.cat([self.angles[..., :-1], last[..., None]], dim=-1)
        return self.basis - torch.where(where[..., None, None], 2 * self.last, 0.0), angles


def _nearest(here: Tensor, there: Tensor) -> _Turn:
    """Find the orthogonal W that brings there @ W nearest to `here`, and the principal angles."""
    U, cosines, Vh = torch.linalg.svd(there.mT @ here)
    # Of small angles a cosine has lost half the digits; the part outside the span is their sine.
    rest = there - here @ (here.mT @ there)
    sines = torch.linalg.svdvals(rest - here @ (here.mT @ rest)).flip(-1)
    return _Turn(U @ Vh, torch.atan2(sines, cosines), U[..., :, -1:] * Vh[..., -1:, :])


def procrustes(s: Tensor, core: Tensor) -> Tensor:
    """Find P_G, of positive determinant, from balanced factors of the core, turned nearest to those of diag(s)."""
    U, sigma, Vh = torch.linalg.svd(core)
    root, sigma = s.sqrt()[..., None, :], sigma.sqrt()
    U_Q, _, V_Q = torch.linalg.svd(sigma[..., :, None] * (U.mT + Vh) * root)
    sign = torch.linalg.det(U @ U_Q @ V_Q).sign()
    U_Q = torch.cat([U_Q[..., :-1], U_Q[..., -1:] * sign[..., None, None]], dim=-1)
    return (U * sigma[..., None, :]) @ (U_Q @ V_Q) / root


def other_factor(P_G: Tensor, s: Tensor, core: Tensor) -> Tensor:
    """Solve P_G diag(s) P_H^T = core for P_H."""
    return (torch.linalg.solve(P_G, core) / s[..., :, None]).mT


def horizontal(P_G: Tensor, s: Tensor, core: Tensor, t: float) -> Tensor:
    """Move P_G, of metric t, so that (P_G - I, P_H - I) is horizontal: up to the square of its size for near points."""
    row, column = s[..., :, None], s[..., None, :]
    eye = torch.eye(s.shape[-1], dtype=s.dtype, device=s.device)
    for _ in range(REFINEMENTS):
        A, B = P_G - eye, other_factor(P_G, s, core) - eye
        # Minimises |A + k|^2 + |B - s k^T s^-1|^2 with the columns weighted by s^2t, entry by entry.
        ratio = (row / column) ** (2 * t)
        k = (ratio * (column / row) * B.mT - A) / (1 + ratio * (column / row) ** 2)
        # Far from the minimum a full step may overshoot.
        k = k / torch.linalg.matrix_norm(k)[..., None, None].clamp_min(1.0)
        P_G = P_G @ torch.linalg.matrix_exp(k)
    return P_G


def alignment_length(here: SingularFrame, there: SingularFrame, t: float) -> Tensor:
    """Compute the length of the shortest of a few explicit curves between two points, for `inv` (0) or `mix` (1).

    Curves from either point to the other, for the gauge of Procrustes and for the horizontal one. Shape (...,).
    """
    bounds = []
    for a, b in ((here, there), (there, here)):
        to = match(a, b)
        P = procrustes(a.s, to.core)
        for P_G in (P, horizontal(P, a.s, to.core, t)):
            P_H = other_factor(P_G, a.s, to.core)
            length = inv_length(to.angles, P_G, P_H) if t == 0 else mix_length(a, to, P_G, P_H)
            bounds.append(torch.where(to.connected, length, torch.inf))
    if t != 0:
        apex = torch.linalg.vector_norm(torch.stack(torch.broadcast_tensors(here.s, there.s)), dim=-1).sum(0)
        bounds.append(torch.where(to.connected, apex / math.sqrt(2), torch.inf))
    return torch.stack(bounds).amin(0)


def inv_length(angles: Tensor, P_G: Tensor, P_H: Tensor) -> Tensor:
    r"""Compute the length, in `inv`, of the curve on which spans turn, and P = O E goes by powers of O and of E.

    For one factor G(tau) = Q(tau) P(tau), with Q' orthogonal to Q, as on a geodesic of spans, the square of the speed
    is |Q'|^2 + |P' P^-1|^2, where P = O^tau E^tau has P' P^-1 = log O + O^tau (log E) O^-tau: a skew part, a symmetric
    part. All three lengths are constant.
    """
    squares = (angles**2).sum(-1)
    for P in (P_G, P_H):
        U, stretch, Vh = torch.linalg.svd(P)
        turn = torch.linalg.eigvals(U @ Vh).angle()
        squares = squares + (stretch.log() ** 2).sum(-1) + (turn**2).sum(-1)
    return squares.sqrt()


def mix_length(here: SingularFrame, to: Matched, P_G: Tensor, P_H: Tensor) -> Tensor:
    r"""Bound the length, in `mix`, of the straight line of both factors, by the root mean squared speeds of its pieces.

    With G(tau) = G + tau D and H(tau) = H + tau E the squared speed is |D H(tau)^T|^2 + |G(tau) E^T|^2, a quadratic
    polynomial. The root of its mean is at least the mean of its root, which is the length of a piece; for `PIECES` of
    them both agree to about 1e-4. The integral of the root has a closed form, too, which cancels where points are near.
    """
    root = here.s.sqrt()[..., None, :]
    G, H = here.left * root, here.right * root
    D, E = to.left @ P_G * root - G, to.right @ P_H * root - H
    dd, ee = D.mT @ D, E.mT @ E
    constant = ((dd + ee) * here.s.diag_embed()).sum((-2, -1))
    linear = 2 * (dd * (H.mT @ E) + ee * (G.mT @ D)).sum((-2, -1))
    square = 2 * (dd * ee).sum((-2, -1))
    length = torch.zeros_like(constant)
    for k in range(PIECES):
        middle, variance = (k + 0.5) / PIECES, 1 / (12 * PIECES**2)
        mean = constant + linear * middle + square * (middle**2 + variance)
        length = length + mean.clamp_min(0.0).sqrt() / PIECES
    return length


def first_log(here: SingularFrame, there: SingularFrame, t: float) -> Both:
    """Guess the logarithm: relative velocities a = xi_G to_left, b = xi_H to_right at the first point.

    For `inv` those of the curve of `inv_length`, exact for rank one; else the difference of the aligned factors. What
    is not horizontal in it is of second order in the distance.
    """
    to = match(here, there)
    P_G = horizontal(procrustes(here.s, to.core), here.s, to.core, t)
    P_H = other_factor(P_G, here.s, to.core)
    if t != 0:
        return to.left @ P_G - here.left, to.right @ P_H - here.right
    return (
        _span_velocity(here.left, there.left) + here.left @ _log_polar(P_G),
        _span_velocity(here.right, there.right) + here.right @ _log_polar(P_H),
    )


def carry(z: Tensor, start: Tensor, end: Tensor, turn: Tensor) -> Tensor:
    """Rotate the rows of z (..., n, h) by the least rotation of the span of `start` to that of `end`, and z by `turn`.

    That is the parallel transport of spans. `start` and `end` (..., n, h) have orthonormal columns.
    """
    U, cosines, Vh = torch.linalg.svd(start.mT @ end)
    p, q, c = start @ U, end @ Vh.mT, cosines[..., None, :]
    rest = q - p * c
    s = torch.linalg.vector_norm(rest, dim=-2, keepdim=True)
    r = torch.where(s > 1e-10, rest / s.clamp_min(1e-10), 0.0)
    return (z + (q - p) @ (p.mT @ z) + ((c - 1) * r - s * p) @ (r.mT @ z)) @ turn


def nearest_rotation(M: Tensor) -> Tensor:
    """Find the orthogonal polar factor of square matrices."""
    U, _, Vh = torch.linalg.svd(M)
    return U @ Vh


def _span_velocity(here: Tensor, there: Tensor) -> Tensor:
    """Compute the initial velocity of the shortest geodesic of spans, which reaches the nearest basis of `there`."""
    U, cosines, Vh = torch.linalg.svd(there.mT @ here)
    rest = there @ U - here @ (here.mT @ (there @ U))
    sines = torch.linalg.vector_norm(rest, dim=-2)
    stretch = torch.where(sines > 1e-8, torch.atan2(sines, cosines) / sines.clamp_min(1e-8), 1.0)
    return rest * stretch[..., None, :] @ Vh


def _log_polar(P: Tensor) -> Tensor:
    """Compute log O + log E for P = O E with a rotation O and a positive definite E.

    Symmetric and skew part of a rotation commute: log O is the skew part, stretched by angle / sine.
    """
    U, stretch, Vh = torch.linalg.svd(P)
    O = U @ Vh
    cosines, V = torch.linalg.eigh((O + O.mT) / 2)
    angle = torch.arccos(cosines.clamp(-1 + 1e-9, 1.0))
    ratio = torch.where(angle > 1e-4, angle / angle.sin().clamp_min(1e-9), 1.0)
    skew = V * ratio[..., None, :] @ V.mT @ (O - O.mT) / 2
    return skew + Vh.mT * stretch.log()[..., None, :] @ Vh
