"""Repeat the ascent of the released adaptive-sharpness code (Andriushchenko et al., arXiv 2302.07011).

With x the perturbation, c = |w| + eta (adaptive) or 1, g the gradient of the loss:

    z     = P(x + step c g / |g|)  (l2)    or    P(x + step c sign(g))  (linf)
    x_new = 0.75 z + 0.25 x_old,   x_old the perturbation before x

The step begins at 2 radius. P is the Euclidean projection onto {|x / c| <= radius}. For adaptive l2 this is an
ellipsoid, and neither the preconditioner (c instead of c^2) nor the projection belongs to the metric. The step is
reconsidered in iterations ceil(p_j steps), counted from 0, with p the decimals of Auto-PGD. It is halved if fewer than
0.75 k of the k iterations since the last such one found a new best. Then the weights return to the best point but x
does not: the next gradient is the best point's, and the next step starts from x. Each iteration evaluates the loss
twice and the gradient once.

Checked against the code at commit 6d73be9 in 240 cases: equal to 1e-10 once its bisection for the multiplier of P is
made exact, to 1.1e-4 as released. Differences: no random starts (its initializer crashed), c = |w| + eta, P is exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, final

import torch
from scipy.optimize import brentq
from torch import nn

from quotient_manifolds.geometry import Adaptive, Euclidean, Geometry, ShardedSpace, TangentSpace, as_geometry
from quotient_manifolds.messages import Progress
from quotient_manifolds.sharpness.losses import Loss
from quotient_manifolds.sharpness.measure import Measure
from quotient_manifolds.sharpness.objective import BatchObjective
from quotient_manifolds.sharpness.result import BatchResult, Result
from quotient_manifolds.sharpness.vector import norm as l2_norm
from quotient_manifolds.symmetries import Params


@final
@dataclass(frozen=True)
class LegacyWorstCase(Measure):
    """Hold the settings of `legacy_sharpness`, which documents them."""

    name: ClassVar[str] = "legacy worst-case sharpness"

    radius: float
    steps: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.geometry, Euclidean | Adaptive):
            raise TypeError(
                f"geometry must be Euclidean() or Adaptive() for the released ascent. Found {self.geometry!r}"
            )

    @property
    def ticks(self) -> int:
        return 2 * self.steps

    def compute(self, objective: BatchObjective) -> BatchResult:
        space = objective.space
        if isinstance(space, ShardedSpace):
            raise ValueError("The released ascent takes whole models. Found a sharded one; take worst_case_sharpness")
        # One unit of a coordinate moves its weight by c.
        c = {name: torch.ones_like(space.point[name]) if c is None else c.abs() for name, c in space.scale.items()}
        ball = _Ball(c, float(self.radius), space.norm)
        # The released code takes its steps in the weights themselves, so the space is Euclidean.
        plain = replace(objective, space=TangentSpace(space.point, dict.fromkeys(space.point), ()))
        x, losses = _ascend(plain, ball, self.steps)
        numbers = max(losses) - losses[0], losses[0], 2 * self.steps, self.steps
        return BatchResult(*numbers, losses=losses, norm=ball.length(x), spacing=objective.spacing(losses[0]))


def legacy_sharpness(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    geometry: Geometry | str | float,
    radius: float,
    steps: int = 20,
    *,
    progress: Progress | None = None,
) -> Result:
    """Measure adaptive sharpness by the ascent that was released with it (Andriushchenko et al., 2023).

    This is the increase in loss that the ascent finds in {|x / c| <= radius}, with c = |w| + eta, or 1 if Euclidean. It
    is not comparable with the maximum of `worst_case_sharpness`, and not invariant along orbits.

    geometry: Euclidean() or Adaptive(), with their norm. `norm` in the result is |x / c| of the best point over weights
    with c > 0. One weight that is 0 makes the adaptive l2 norm 0 / 0, which disables the projection. Model, loss,
    batches, checks and errors are as for `worst_case_sharpness`; no warnings are issued.
    """
    made = LegacyWorstCase(as_geometry(geometry), radius, steps, progress=progress)
    return made.of(model, loss, batches)


def _ascend(objective: BatchObjective, ball: _Ball, steps: int) -> tuple[Params, tuple[float, ...]]:
    """Ascend from 0; return the best point, and the losses of all iterations, start first."""
    x = x_old = where = best_x = objective.zero()  # where: the point that the weights are set to
    step, checks = 2 * ball.radius, legacy_checkpoints(steps)
    last_check = new_bests = 0
    losses: list[float] = []
    for iteration in range(steps):
        loss, gradient = objective.value_and_gradient(where)
        losses = losses or [loss]
        z = ball.project(ball.step(x, gradient, step))
        x, x_old = {key: 0.75 * z[key] + 0.25 * x_old[key] for key in z}, x
        where = x
        losses.append(objective.value(x))
        if losses[-1] > max(losses[:-1]):
            best_x = x
            new_bests += 1
        if iteration in checks:
            if new_bests < 0.75 * (iteration - last_check):
                step /= 2
                where = best_x  # only the weights return: the next step still starts from x
            last_check, new_bests = iteration, 0
    return best_x, tuple(losses)


@final
@dataclass(frozen=True)
class _Ball:
    """Represent {x : |x / c| <= radius} in l2 or linf over all weights, with the released steps and projections."""

    c: Params
    radius: float
    norm: Literal["l2", "linf"]

    def step(self, x: Params, gradient: Params, step: float) -> Params:
        if self.norm == "linf":
            return {key: x[key] + step * self.c[key] * gradient[key].sign() for key in x}
        scaled = step / (l2_norm(gradient) or math.inf)
        return {key: x[key] + scaled * self.c[key] * gradient[key] for key in x}

    def project(self, x: Params) -> Params:
        """Return the nearest point of the ball; in l2 x itself if a c is 0, because the released norm is NaN then."""
        if self.norm == "linf":
            return {key: x[key].clamp(-self.radius * c, self.radius * c) for key, c in self.c.items()}
        if any(bool((c == 0).any()) for c in self.c.values()) or self.length(x) <= self.radius:
            return x

        def excess(mu: float) -> float:  # of |x c / (c^2 + mu)|: 0 at the Lagrange multiplier
            return l2_norm({key: x[key] * c / (c**2 + mu) for key, c in self.c.items()}) - self.radius

        upper = l2_norm({key: x[key] * c for key, c in self.c.items()}) / self.radius
        mu = float(brentq(excess, 0.0, upper, xtol=1e-12 * upper, rtol=1e-12))
        return {key: x[key] * (c**2 / (c**2 + mu)) for key, c in self.c.items()}

    def length(self, x: Params) -> float:
        """Return |x / c| over the weights with c > 0."""
        ratios = {key: torch.where(c > 0, x[key] / c, 0.0) for key, c in self.c.items()}
        if self.norm == "linf":
            return max(float(ratio.abs().max()) for ratio in ratios.values() if ratio.numel())
        return l2_norm(ratios)


def legacy_checkpoints(steps: int) -> tuple[int, ...]:
    """Return the iterations, from 0, after which the step is reconsidered: ceil(p_j steps) until one repeats."""
    earlier, p = 0.0, 0.22
    checks: list[int] = []
    while math.ceil(p * steps) < steps and math.ceil(p * steps) not in checks:
        checks.append(math.ceil(p * steps))
        earlier, p = p, p + max(p - earlier - 0.03, 0.06)
    return tuple(checks)
