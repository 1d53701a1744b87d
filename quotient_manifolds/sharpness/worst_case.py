"""Measure how the loss increases around a model: at worst in a ball [paper, Eq. 3], on average, per unit of length."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, final

import numpy as np
from torch import nn

from quotient_manifolds.geometry import Geometry, as_geometry
from quotient_manifolds.messages import Progress
from quotient_manifolds.sharpness.ascent import Ascent, AscentMethod, AutoPGD
from quotient_manifolds.sharpness.ball import BALLS
from quotient_manifolds.sharpness.caution import takes_instead, warned
from quotient_manifolds.sharpness.full_steps import FullStepAPGD
from quotient_manifolds.sharpness.losses import Loss
from quotient_manifolds.sharpness.measure import Measure, counted
from quotient_manifolds.sharpness.objective import BatchObjective
from quotient_manifolds.sharpness.prepared_model import PreparedModel
from quotient_manifolds.sharpness.result import BatchResult, Result, Setting, mean_and_error, nested
from quotient_manifolds.sharpness.vector import absolute_sum, norm, scale

ASCENTS: dict[str, type[AscentMethod]] = {each.__name__: each for each in (FullStepAPGD, AutoPGD)}


@final
@dataclass(frozen=True)
class WorstCase(Measure):
    """Hold the settings of `worst_case_sharpness`, which documents them."""

    name: ClassVar[str] = "worst-case sharpness"

    radius: float
    steps: int = 20
    restarts: int = 0
    seed: int = 0
    ascent: type[AscentMethod] = field(default=FullStepAPGD, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ascent not in ASCENTS.values():
            raise TypeError(f"ascent must be one of the classes {', '.join(ASCENTS)}. Found {self.ascent!r}")

    @property
    def settings(self) -> dict[str, Setting]:
        """Return all fields except geometry and progress; the ascent by its name."""
        return {**super().settings, "ascent": self.ascent.__name__}

    @property
    def ticks(self) -> int:
        return (1 + self.restarts) * (self.steps + 1)

    def compute(self, objective: BatchObjective, before: list[Ascent] | None = None) -> BatchResult:
        """Compute the measure by an ascent that starts from the point in `before`; then keep the better one there."""
        before = [] if before is None else before
        best = self.ascent(self.steps, self.restarts).maximise(
            objective,
            self.radius,
            objective.generator(self.seed),
            norm=objective.space.norm,
            start=before[0].z if before else None,
        )
        if not before and best.change == 0 and not best.critical_start:
            # No step changed even the last digit of the loss: the sharpness would be 0 for lack of digits.
            raise ValueError(
                f"The loss on batch {objective.index} has a gradient, yet stays at {best.base!r} to its last digit "
                f"within radius {self.radius:g}: the steps are lost in rounding; take a larger radius, or float64"
            )
        if before:
            best = replace(best, slope=before[0].slope)  # the one gradient at z = 0, which not every ascent computes
        # Only one point is kept, because it is as large as the model.
        before[:] = [best if not before or best.loss >= before[0].loss else before[0]]
        space = objective.space
        return BatchResult(
            best.loss - best.base,
            best.base,
            best.forward_passes,
            best.backward_passes,
            losses=best.losses,
            # The length of what was reached; |z| is larger if the geodesic ends before t = 1.
            norm=BALLS[space.norm](self.radius).length(space.reached(best.z)),
            critical_start=best.critical_start,
            reach=space.reach(best.z),
            spacing=objective.spacing(best.base),
            gap=best.gap,
            multiplier=best.multiplier,
            promise=best.promise,
            inner_radius=best.inner_radius,
            change=best.change,
        )


def worst_case_sharpness(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    geometry: Geometry | str | float,
    radius: float,
    steps: int = 20,
    restarts: int = 0,
    seed: int = 0,
    *,
    progress: Progress | None = None,
    ascent: type[AscentMethod] = FullStepAPGD,
) -> Result:
    """Measure how much the loss can increase in a ball around the model's weights w, batch by batch.

    With L the loss on a batch, this is max { L(gamma(1)) - L(w) : gamma a geodesic from w of length <= radius }. An
    ascent finds a lower bound of it, in units of the loss. `Result.mean` is the mean over batches. The value is
    invariant along the orbit in a quotient geometry with eps = 0; restarts only in distribution if singular values of a
    pair coincide. Euclidean and adaptive sharpness are not invariant.

    loss(model, batch) returns a scalar tensor; a batch is anything that the loss accepts (`cross_entropy` takes
    (inputs, targets) and dicts with "labels"). The loss is maximized on each batch separately, from the model itself
    and from `restarts` random points of the sphere, which batch i draws with seed + i. The model must be in eval mode
    and deterministic, and is never modified. Parameters with requires_grad=False stay fixed.

    geometry: defines the ball: `Euclidean()`, `Adaptive()`, `Quotient(...)`, or a name, such as "inv" for
    Quotient("inv"). Radii of different geometries are not comparable. steps: the largest number of steps of one run.
    ascent: `FullStepAPGD`, which ends when it has converged, or `AutoPGD` as published, which takes all steps.

    Issues a `TruncationWarning` if truncated geodesics are followed beyond their reach (`BatchResult.reach`), and a
    `RoundingWarning` if rounding decides the digits. Issues a `ConvergenceWarning` if the gap exceeds 1 % of the
    increase (`Result.relative_gap`), or if the increase on a batch is below half of radius times gradient norm
    (`Result.promise_kept`). progress(what, done, total) is called after every forward pass, steps + 1 times a run.

    Raises ValueError or TypeError, with one sentence, for anything that cannot be measured. This includes given
    symmetries along which the loss changes, and a loss or gradient that is not finite somewhere in the ball.

    Source: da Silva, Dangel and Oore, arXiv 2505.05409, Eq. 3 and Algorithm 1.
    """
    made = WorstCase(as_geometry(geometry), radius, steps, restarts, seed, progress=progress, ascent=ascent)
    return warned(made.of(model, loss, batches))


def worst_case_profile(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    geometry: Geometry | str | float,
    *,
    radii: Iterable[float],
    progress: Progress | None = None,
    **settings: Any,
) -> tuple[Result, ...]:
    """Measure `worst_case_sharpness` at several ascending radii; return one result for each.

    Each ascent starts from the best point of the smaller radii, scaled to the larger ball. That point is kept if the
    ascent ends lower, so on every batch the sharpness never decreases with the radius. Other arguments, checks,
    warnings and errors are as for `worst_case_sharpness`.
    """
    if isinstance(radii, (int, float)):
        raise TypeError(f"radii must be a list. Found {radii}; give radii=[{radii}]")
    ascending: list[float] = np.asarray([*radii]).tolist()
    if not ascending:
        raise ValueError("There must be at least one radius. Found none")
    resolved = as_geometry(geometry)
    chain = [WorstCase(resolved, radius, **settings) for radius in ascending]
    if not all(smaller < larger for smaller, larger in pairwise(ascending)):
        raise ValueError(f"Radii must ascend. Found {', '.join(map(repr, ascending))}")

    def measured(prepared: PreparedModel) -> list[list[BatchResult]]:
        n = len(prepared.batches)
        tick = counted(progress, f"{WorstCase.name}, {resolved.name}", n * sum(measure.ticks for measure in chain))
        profiles = []
        for index in range(n):
            before: list[Ascent] = []  # the best of the smaller radii
            ascents = [each.on(prepared, index, tick, partial(each.compute, before=before)) for each in chain]
            profiles.append(nested(ascending, ascents))
        return profiles

    found = PreparedModel.of(model, loss, batches, resolved).settled(measured)
    profile = []
    for place, (measure, batches_) in enumerate(zip(chain, zip(*found, strict=True), strict=True)):
        result = measure.result(batches_)
        after = {"after": ", ".join(map(repr, ascending[:place]))} if place else {}
        profile.append(warned(replace(result, settings={**result.settings, **after})))
    return tuple(profile)


@final
@dataclass(frozen=True)
class AverageCase(Measure):
    """Hold the settings of `average_case_sharpness`, which documents them."""

    name: ClassVar[str] = "average-case sharpness"
    has_gradient: ClassVar[bool] = False

    sigma: float
    samples: int = 32
    seed: int = 0

    @property
    def ticks(self) -> int:
        return 2 * self.samples + 1

    def compute(self, objective: BatchObjective) -> BatchResult:
        base = objective.value(objective.zero())
        generator = objective.generator(self.seed)
        rises, reaches = [], []
        for _ in range(self.samples):
            z = objective.sample(generator)
            scale(z, self.sigma)
            there = objective.value(z)
            scale(z, -1.0)
            rises.append((there + objective.value(z)) / 2 - base)
            reaches.append(objective.space.reach(z))
        mean, error = mean_and_error(rises)
        reach = max((reach for reach in reaches if reach is not None), default=None)
        passes, spacing = (2 * self.samples + 1, 0), objective.spacing(base)
        return BatchResult(mean, base, *passes, standard_error=error, reach=reach, spacing=spacing)


@takes_instead(radius="sigma, the standard deviation per coordinate,")
def average_case_sharpness(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    geometry: Geometry | str | float,
    sigma: float,
    samples: int = 32,
    seed: int = 0,
    *,
    progress: Progress | None = None,
) -> Result:
    """Estimate the mean increase in loss at random points around the model's weights w.

    This is E[L(gamma_z(1)) - L(w)] over z = sigma * N(0, I) in orthonormal coordinates of the tangent space (of its
    horizontal part in a quotient geometry), with gamma_z the geodesic of initial velocity z. Each of `samples`
    directions is used with both signs, which cancels the odd orders of the loss. Batch i draws them with seed + i.

    sigma is the standard deviation per coordinate, not a radius: |z| is about sigma * sqrt(dimension). In the adaptive
    geometry the weights change by the N(0, sigma^2 diag(w^2)) of Andriushchenko et al. (arXiv 2302.07011). In a
    geometry with norm "linf", z is uniform in the box |z_i| <= sigma instead.

    The value is invariant along the orbit in a quotient geometry with eps = 0: draw by draw, or in distribution if
    singular values of a pair coincide. Euclidean and adaptive averages are not invariant. A geodesic that leaves the
    manifold counts with its last point.

    Model, loss, batches, checks, warnings and errors are as for `worst_case_sharpness`; progress counts forward passes.
    """
    made = AverageCase(as_geometry(geometry), sigma, samples, seed, progress=progress)
    return warned(made.of(model, loss, batches), above=1)


@final
@dataclass(frozen=True)
class GradientNorm(Measure):
    """Hold the settings of `gradient_norm`, which documents them."""

    name: ClassVar[str] = "gradient norm"

    def compute(self, objective: BatchObjective) -> BatchResult:
        base, gradient = objective.value_and_gradient(objective.zero())
        # For a box this is the dual norm, the sum of |g_i|.
        value = norm(gradient) if objective.space.norm == "l2" else absolute_sum(gradient)
        return BatchResult(value, base, forward_passes=1, backward_passes=1)


def gradient_norm(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    geometry: Geometry | str | float,
    *,
    progress: Progress | None = None,
) -> Result:
    """Measure the norm of the loss's gradient in the metric: worst-case sharpness per radius, for small radii.

    With g the gradient in the weights w, this is |g| in the Euclidean geometry, |w g| in the adaptive one, and the norm
    of the Riemannian gradient in a quotient geometry. For an linf ball it is the dual norm, the sum of |g| or |w g|
    over all weights. `Result.mean` averages the norms; it is not the norm of the mean gradient. The value is invariant
    along the orbit in a quotient geometry with eps = 0 only.

    Model, loss, batches, checks and errors are as for `worst_case_sharpness`.
    """
    made = GradientNorm(as_geometry(geometry), progress=progress)
    return warned(made.of(model, loss, batches))
