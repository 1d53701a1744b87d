"""Solve ordinary differential equations over a batch, each entry by steps of its own, differentiable in the start.

The explicit Runge-Kutta method of order 8 with errors of orders 5 and 3 by Dormand and Prince, with the coefficients of
`scipy.integrate.DOP853`. SciPy's own solver is not differentiable; torchdiffeq takes one step size for a whole batch,
so that one curve near the end of its domain slows all others down; torchode's methods are of order 5 at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from scipy.integrate import DOP853
from torch import Tensor

from quotient_manifolds.manifolds.horizontal import GeodesicError

MAX_STEPS = 1_000
TOLERANCE = 1e-10
"""Error of one step, relative and absolute: states should be scaled to entries about 1."""
RESOLUTION = 1e-14
"""Steps below this, on a way of length 1, are lost in rounding: the curve is at the end of its domain."""

ENERGY_TOLERANCE = 1e-6
"""By how much, relative to itself, the energy of a geodesic may change: that tells whether it was followed well."""
FLOOR = math.sqrt(torch.finfo(torch.float64).eps)
"""Where a geodesic is stopped: an eigenvalue, relative to the start, falls to this or grows to its inverse."""

Motion = Callable[[Tensor], Tensor]
"""The velocity (k, d) at the states (k, d) of some entries; NaN in the rows of states outside the domain."""


def solve(motion: Callable[[Tensor], Motion], start: Tensor, cure: str) -> tuple[Tensor, Tensor]:
    """Follow y' = f(y) from `start` (batch, d), float64, to time 1 or to where an entry leaves the domain of f.

    Returns the last states (batch, d), and the times at which they are (batch,): 1, or the end of the domain.
    motion(indices) returns f for these entries of the batch, given as rows in that order. An entry does not depend on
    the others. Steps are found without a graph; where one is asked for, the accepted ones are then taken again, their
    sizes and the times constants of differentiation: the graph then holds no rejected step, and no choice of a size.
    Raises GeodesicError, which ends in the `cure`, where a curve needs too many steps.
    """
    with torch.no_grad():
        state, reached, plan = _plan(motion, start.detach(), cure)
    if torch.is_grad_enabled() and start.requires_grad:
        state = start
        for rows, sizes in plan:
            f, y = motion(rows), state[rows]
            state = state.index_copy(0, rows, _step(f, y, f(y), sizes)[0])
    return state, reached


def inside(gram: Tensor) -> Tensor:
    """Return whether all eigenvalues of symmetric (..., k, k) lie between FLOOR and its inverse. Shape (...)."""
    with torch.no_grad():
        return invert(gram)[2]


def invert(gram: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute inverses of symmetric matrices, condition numbers (...) or more, and if they are `inside`.

    Not for derivatives.

    The norms of a matrix and of its inverse bound its eigenvalues, which are computed only near the ends of the domain.
    """
    finite = gram.isfinite().all(-1).all(-1)
    L, failed = torch.linalg.cholesky_ex(torch.where(finite[..., None, None], gram, 0.0))
    definite = finite & (failed == 0)
    inverse = torch.cholesky_inverse(L if bool(definite.all()) else torch.where(definite[..., None, None], L, 1.0))
    largest, least = torch.linalg.matrix_norm(gram), 1 / torch.linalg.matrix_norm(inverse)
    within = definite & (least > FLOOR) & (largest < 1 / FLOOR)
    near = definite & ~within
    if bool(near.any()):
        eigenvalues = torch.linalg.eigvalsh(gram[near])
        within[near] = ((eigenvalues > FLOOR) & (eigenvalues < 1 / FLOOR)).all(-1)
    return inverse, largest / least, within


def require_constant(energy: Callable[[Tensor], Tensor], start: Tensor, end: Tensor, cure: str) -> None:
    """Raise GeodesicError, which ends in the `cure`, unless the energy is the same at both states."""
    with torch.no_grad():
        first = energy(start)
        drift = (energy(end) - first).abs() / first.clamp_min(torch.finfo(first.dtype).tiny)
    if not bool((drift <= ENERGY_TOLERANCE).all()):
        raise GeodesicError(
            f"the energy of a geodesic must be constant. Found a drift by {float(drift.max()):.3g} of itself: {cure}"
        )


def _plan(
    motion: Callable[[Tensor], Motion], start: Tensor, cure: str
) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """Compute states and times, and which entries took steps of which sizes."""
    state, live = start.clone(), torch.arange(len(start), device=start.device)
    time = torch.zeros(len(start), dtype=start.dtype, device=start.device)
    size, wall = torch.ones_like(time), torch.full_like(time, torch.inf)  # wall: where it is known to be outside
    slope = motion(live)(start)
    plan: list[tuple[Tensor, Tensor]] = []
    for _ in range(MAX_STEPS):
        f, y, t, rest = motion(live), state[live], time[live], 1 - time[live]
        h = torch.minimum(size[live], rest)
        new, error = _step(f, y, slope[live], h)
        ahead = f(new)
        accurate, inside = error < 1, ahead.isfinite().all(dim=-1)
        taken = accurate & inside
        # An accurate step that ends outside tells where the boundary is: go half the way there, again and again, so
        # that the curve ends at the end of its domain, to `RESOLUTION`, and not where a step happened to fail.
        t = torch.where(taken, torch.where(h >= rest, 1.0, t + h), t)
        bound = torch.where(accurate & ~inside, t + h, wall[live])
        change = torch.where(error.isfinite(), 0.9 * error.clamp_min(1e-16) ** -0.125, 0.5).clamp(0.2, 5.0)
        h_next = torch.minimum(h * torch.where(taken, change, change.clamp_max(0.9)), (bound - t) / 2)
        rows = live[taken]
        state[rows], slope[rows], time[live], wall[live], size[live] = new[taken], ahead[taken], t, bound, h_next
        plan.append((rows, h[taken]))
        live = live[(t < 1) & (h_next > RESOLUTION)]
        if not len(live):
            return state, time, plan
    earliest = float(time[live].min())
    raise GeodesicError(
        f"a geodesic must end within {MAX_STEPS} steps. Found one that came no further than t = {earliest:.3g}: {cure}"
    )


def _step(f: Motion, y: Tensor, first: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the states after steps of sizes h, and their errors over the tolerance, NaN where a stage was outside.

    first: f(y), which the step before may have computed.
    """
    h, slopes = h[:, None], [first]
    for row in DOP853.A[1 : DOP853.n_stages]:
        slopes.append(f(torch.addcmul(y, _combined(slopes, row), h)))
    new = torch.addcmul(y, _combined(slopes, DOP853.B), h)
    with torch.no_grad():
        scale = h / (TOLERANCE * (1 + torch.maximum(y.abs(), new.abs())))
        fifth, third = (_combined(slopes, weights).mul_(scale).abs().amax(dim=-1) for weights in (DOP853.E5, DOP853.E3))
        error = fifth**2 / torch.hypot(fifth, 0.1 * third).clamp_min(torch.finfo(y.dtype).tiny)
    return new, error


def _combined(slopes: list[Tensor], weights: np.ndarray) -> Tensor:
    """Compute the sum of slopes by weights, many of which are 0."""
    terms = [(slope, float(weight)) for slope, weight in zip(slopes, weights, strict=False) if weight]
    total = terms[0][0] * terms[0][1]
    for slope, weight in terms[1:]:
        total = total.add_(slope, alpha=weight)
    return total
