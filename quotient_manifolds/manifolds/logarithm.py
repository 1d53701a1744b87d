"""Find the logarithm of the fixed-rank quotient by shooting: geodesics from x are corrected until they end at y.

Where the geodesic with velocity z ends, the vector to the nearest representative of y (orthogonal Procrustes, at the
balanced points) is what is missing, up to the square of its length. It is carried back to x by the rotations between
the singular frames of both points, and added to z. For near points this is a contraction. The accelerated step
[Anderson 1965; Walker and Ni 2011] goes where a linear model of the last steps has no miss, in a third of the steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quotient_manifolds.linalg import SingularFrame, product_gap, singular_frame
from quotient_manifolds.manifolds.fixed_rank_space import FixedRankSpace
from quotient_manifolds.manifolds.horizontal import GeodesicError

MAX_STEPS = 60
WINDOW = 8
"""How many of the last steps the accelerated one takes into account."""
LONGEST = 1.0
"""Relative speed of the longest step: further away the difference of two points says little of the way."""
SETTLED = 1e-10
"""Length of a step, relative to z, at which z is found."""
TOLERANCE = 1e-9
"""How near, relative to the product at y, the end of a geodesic has to come."""


def logarithms(n: int, t: float, x: Tensor, y: Tensor) -> Tensor:
    """Find horizontal vectors at x whose exact geodesics end on the orbits of y. Shapes (batch, n + m, h).

    A geodesic stays in the span of the columns of both points (it is fixed by an isometry, the reflection through that
    span), so the search runs in at most 2h + 2h rows. Raises GeodesicError where it does not settle.
    """
    here, there = (singular_frame(p[:, :n].double(), p[:, n:].double()) for p in (x, y))
    bases = common_span(here.left, there.left), common_span(here.right, there.right)
    start, end = (_reduced(frame, bases) for frame in (here, there))
    rows = bases[0].shape[-1]
    space = FixedRankSpace(start, rows, t, 0.0, start.dtype)
    a, b = space.vector(_shoot(space, rows, t, start, end)).split([rows, bases[1].shape[-1]], dim=-2)
    unroot = here.s[:, :, None] ** -0.5  # from the balanced representative in the bases back to x
    parts = bases[0] @ a @ (unroot * here.from_left), bases[1] @ b @ (unroot * here.from_right)
    return torch.cat(parts, dim=-2).to(x)


def _shoot(space: FixedRankSpace, n: int, t: float, x: Tensor, y: Tensor) -> Tensor:
    here, there = (singular_frame(p[:, :n], p[:, n:]) for p in (x, y))
    z, end, norm = torch.zeros_like(x), x, torch.linalg.matrix_norm
    rounding = 1e-13 * torch.linalg.vector_norm(here.s**t, dim=-1)
    past: list[tuple[Tensor, Tensor]] = []
    for _ in range(MAX_STEPS):
        miss, step = _aim(n, t, end, here, there)
        step = space.project(step)
        settled = (norm(step) <= SETTLED * norm(z) + rounding) & (miss <= TOLERANCE)
        if bool(settled.all()):
            return z
        past = [*past[1 - WINDOW :], (z, step)]
        z = torch.where(settled[:, None, None], z, z + step - _acceleration(past))
        end, reached = space.follow(z, "exact")
        while bool((left := reached < 1).any()):  # the geodesic leaves the manifold before it ends
            z, past = torch.where(left[:, None, None], 0.7 * z, z), []
            end, reached = space.follow(z, "exact")
    raise GeodesicError(
        f"the points must be near enough to find a geodesic from x to the orbit of y. Found none within {MAX_STEPS} "
        f"steps: the best one misses by {float(miss.max()):.2g} of the product at y"
    )


def _aim(n: int, t: float, end: Tensor, here: SingularFrame, there: SingularFrame) -> tuple[Tensor, Tensor]:
    """Return the miss at `end`, relative to y, and what is to be added to z at x."""
    now = singular_frame(end[:, :n], end[:, n:])
    miss = product_gap(now.left * now.s[:, None, :], now.right, there.left * there.s[:, None, :], there.right)
    relative = (nearest(now, there) - balanced(now)) / now.s.sqrt()[:, None, :]
    velocities = relative.split([n, end.shape[-2] - n], dim=-2)
    speed = torch.stack([torch.linalg.matrix_norm(v, 2) for v in velocities]).amax(0)
    weight = (now.s**t / (speed / LONGEST).clamp_min(1.0)[:, None])[:, None, :]
    turns = [polar(now.left.mT @ here.left), polar(now.right.mT @ here.right)]
    # inv acts on the columns of G as left does, mix as H does: there a change of xi_G H^T is carried as it is.
    turns = turns if t < 0.5 else turns[::-1]
    step = torch.cat([v * weight @ turn for v, turn in zip(velocities, turns, strict=True)], dim=-2)
    return miss / torch.linalg.vector_norm(there.s, dim=-1), step


def _acceleration(past: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Compute by how much the next z differs from the last one plus its step: least squares in differences."""
    if len(past) == 1:
        return torch.zeros_like(past[0][0])
    z, steps = (torch.stack(column, dim=-1).flatten(-3, -2) for column in zip(*past, strict=True))
    change_z, change = z.diff(dim=-1), steps.diff(dim=-1)
    size = torch.linalg.vector_norm(change, dim=-2, keepdim=True).clamp_min(torch.finfo(z.dtype).tiny)
    weights = torch.linalg.pinv(change / size, rtol=1e-10) @ steps[..., -1:]  # directions below are rounding's
    return ((change_z + change) / size @ weights)[..., 0].unflatten(-1, past[0][0].shape[-2:])


def balanced(frame: SingularFrame) -> Tensor:
    """Return the representative (left s^(1/2), right s^(1/2))."""
    return torch.cat([frame.left, frame.right], dim=-2) * frame.s.sqrt()[..., None, :]


def nearest(here: SingularFrame, there: SingularFrame) -> Tensor:
    """Return the rotation of the balanced representative of `there` that is nearest to that of `here`."""
    P, R = balanced(here), balanced(there)
    return R @ polar(R.mT @ P)


def polar(M: Tensor) -> Tensor:
    """Find the orthogonal polar factor of square matrices: the nearest rotation."""
    U, _, Vh = torch.linalg.svd(M)
    return U @ Vh


def common_span(here: Tensor, there: Tensor) -> Tensor:
    """Build an orthonormal basis (..., n, k), k <= 2h, of the columns of two (..., n, h) of orthonormal columns."""
    rest = there - here @ (here.mT @ there)
    rest = rest - here @ (here.mT @ rest)
    k = min(rest.shape[-1], here.shape[-2] - here.shape[-1])
    Q = torch.linalg.svd(rest, full_matrices=False).U[..., :k]
    return torch.linalg.qr(torch.cat([here, Q], dim=-1)).Q


def _reduced(frame: SingularFrame, bases: tuple[Tensor, Tensor]) -> Tensor:
    """Return the balanced representative in the bases."""
    return torch.cat([bases[0].mT @ frame.left, bases[1].mT @ frame.right], dim=-2) * frame.s.sqrt()[..., None, :]
