"""Solve ordinary differential equations over a batch, with separate step sizes, differentiably in the initial state.

The explicit Runge-Kutta method of order 8 with errors of orders 5 and 3 by Dormand and Prince, with the coefficients of
`scipy.integrate.DOP853`. SciPy's own solver is not differentiable; torchdiffeq takes one step size for a whole batch,
so that one curve near the end of its domain slows all others down; torchode's methods are of order 5 at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from scipy.integrate import DOP853
from torch import Tensor

from quotient_manifolds.derivatives import differentiated, has_values, on_values
from quotient_manifolds.manifolds.horizontal import GeodesicError

MAX_STEPS = 1_000
TOLERANCE = 1e-10
"""Tolerance of a step, relative and absolute; the entries of states should be about 1."""
RESOLUTION = 1e-14
"""Steps below this size, of a unit time, are lost in rounding: the curve is at the end of its domain."""

ENERGY_TOLERANCE = 1e-6
"""Largest relative change of the energy of a geodesic, which shows whether it was followed accurately."""
FLOOR = math.sqrt(torch.finfo(torch.float64).eps)
"""Where a geodesic is stopped: an eigenvalue, relative to the start, falls to this or grows to its inverse."""

Motion = Callable[[Tensor], Tensor]
"""The velocity (k, d) at the states (k, d) of some entries."""


class System(Protocol):
    """Hold the equations y' = f(y) of a batch of independent curves."""

    def of(self, rows: Tensor) -> System:
        """Return the equations of some entries of the batch, in order."""

    def trial(self, state: Tensor) -> Tensor:
        """Compute f at states (k, d) that may be outside the domain, NaN there; from values, not for derivatives."""

    def motion(self, state: Tensor) -> Tensor:
        """Compute f at states (k, d) inside the domain: differentiable, and without a look at values."""

    def energy(self, state: Tensor) -> Tensor:
        """Compute what is constant along a curve (k,)."""


def follow(
    system: Callable[..., System], start: Tensor, given: tuple[Tensor | None, ...], cures: tuple[str, str]
) -> tuple[Tensor, Tensor]:
    """Follow y' = f(y) from `start` (batch, d), float64, to time 1 or until an entry leaves the domain of f.

    Returns the last states (batch, d) and their times (batch,): 1, or the end of the domain. system(*given) depends
    only on tensors (batch, ...). Steps are chosen on values. If a derivative is taken, the accepted steps are repeated
    with constant sizes and times, so that no rejected step and no choice of a size is differentiated.
    Raises GeodesicError with the first of the `cures` if a curve needs too many steps, and with the second if the
    energy at its end differs.
    """
    again = differentiated(start, *given)
    end, reached, sizes = _followed(system, cures, again, start, *given)
    if not again:
        return end, reached
    equations, state = system(*given), start
    for h in sizes.unbind(-1):
        if has_values(h):
            rows = h.nonzero()[:, 0]
            f, y = equations.of(rows).motion, state[rows]
            state = state.index_copy(0, rows, _step(f, y, f(y), h[rows])[0])
        else:  # the same step for all that is mapped; one of size 0 leads nowhere
            state = _step(equations.motion, state, equations.motion(state), h)[0]
    return state, reached


def inside(gram: Tensor) -> Tensor:
    """Return whether all eigenvalues of symmetric (..., k, k) lie between FLOOR and its inverse. Shape (...)."""
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


def _require_constant(energy: Callable[[Tensor], Tensor], start: Tensor, end: Tensor, cure: str) -> None:
    """Raise GeodesicError, which ends in the `cure`, unless the energy is the same at both states."""
    first = energy(start)
    drift = (energy(end) - first).abs() / first.clamp_min(torch.finfo(first.dtype).tiny)
    if not bool((drift <= ENERGY_TOLERANCE).all()):
        raise GeodesicError(
            f"the energy of a geodesic must be constant. Found a drift by {float(drift.max()):.3g} of itself: {cure}"
        )


@on_values()
def _followed(
    system: Callable[..., System], cures: tuple[str, str], sized: bool, start: Tensor, *given: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute states, times, and if `sized` the sizes of each entry's steps (batch, steps), in which 0 is no step."""
    equations, cure = system(*given), cures[0]
    end, reached, plan = _plan(equations, start, cure)
    _require_constant(equations.energy, start, end, cures[1])
    if not sized:
        return end, reached, start.new_empty(len(start), 0)
    taken = torch.zeros_like(reached, dtype=torch.long)
    sizes = start.new_zeros(len(start), len(plan))
    for rows, h in plan:
        sizes[rows, taken[rows]] = h
        taken[rows] += 1
    return end, reached, sizes[:, : int(taken.amax()) if len(start) else 0]


def _plan(equations: System, start: Tensor, cure: str) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """Compute states and times, and which entries took steps of which sizes."""
    state, live = start.clone(), torch.arange(len(start), device=start.device)
    time = torch.zeros(len(start), dtype=start.dtype, device=start.device)
    size, wall = torch.ones_like(time), torch.full_like(time, torch.inf)  # wall: where it is known to be outside
    slope = equations.trial(start)
    plan: list[tuple[Tensor, Tensor]] = []
    for _ in range(MAX_STEPS):
        f, y, t, rest = equations.of(live).trial, state[live], time[live], 1 - time[live]
        h = torch.minimum(size[live], rest)
        new, slopes = _step(f, y, slope[live], h)
        error = _error(slopes, y, new, h)
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


def _step(f: Motion, y: Tensor, first: Tensor, h: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Compute the states after steps of sizes h, and the velocities of the stages.

    first: f(y), which the step before may have computed.
    """
    h, slopes = h[:, None], [first]
    for row in DOP853.A[1 : DOP853.n_stages]:
        slopes.append(f(torch.addcmul(y, _combined(slopes, row), h)))
    new = torch.addcmul(y, _combined(slopes, DOP853.B), h)
    return new, slopes


def _error(slopes: list[Tensor], y: Tensor, new: Tensor, h: Tensor) -> Tensor:
    """Compute the errors of a step over the tolerance, NaN where a stage was outside."""
    scale = h[:, None] / (TOLERANCE * (1 + torch.maximum(y.abs(), new.abs())))
    fifth, third = (_combined(slopes, weights).mul_(scale).abs().amax(dim=-1) for weights in (DOP853.E5, DOP853.E3))
    return fifth**2 / torch.hypot(fifth, 0.1 * third).clamp_min(torch.finfo(y.dtype).tiny)


def _combined(slopes: list[Tensor], weights: np.ndarray) -> Tensor:
    """Compute the sum of slopes by weights, many of which are 0."""
    terms = [(slope, float(weight)) for slope, weight in zip(slopes, weights, strict=False) if weight]
    total = terms[0][0] * terms[0][1]
    for slope, weight in terms[1:]:
        total = total.add_(slope, alpha=weight)
    return total
