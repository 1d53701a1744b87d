"""Measure without an ascent: the mean rise of the loss around a model, and the length of its gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from torch import nn

from quotient_manifolds.sharpness.measure import KnownAscents, Measure, measuring
from quotient_manifolds.sharpness.objective import BatchObjective
from quotient_manifolds.sharpness.result import BatchResult, mean_and_error
from quotient_manifolds.sharpness.vector import absolute_sum, norm, scale


@final
@dataclass(frozen=True)
class AverageCase(Measure):
    """Estimate the mean rise of the loss at random points around the model's weights w.

    That is E[L(gamma_z(1)) - L(w)] over z = sigma * N(0, I) in orthonormal coordinates of the tangent space (in a
    quotient geometry of its horizontal part), gamma_z the geodesic that sets out in the direction z. Each of `samples`
    directions is used with both signs, which cancels the odd orders of the loss; batch i draws its own from the
    seed + i.

    sigma is the standard deviation per coordinate, no radius: |z| is about sigma * sqrt(dimension). In the adaptive
    geometry z is the N(0, sigma^2 diag(w^2)) of Andriushchenko et al. (arXiv 2302.07011). In a geometry with norm
    "linf" z is uniform in the box |z_i| <= sigma instead.

    Invariant along the orbit in a quotient geometry with eps = 0 (in distribution, and so as a measure, where singular
    values of a pair tie; else draw by draw); Euclidean and adaptive averages are not. A geodesic that leaves the
    manifold counts with its last point.

    Model, loss, batches, checks, warnings and errors as for `WorstCase`; progress counts forward passes.
    """

    name: ClassVar[str] = "average-case sharpness"

    sigma: float
    samples: int = 32
    seed: int = 0

    def ticks(self, model: nn.Module) -> int:
        return 2 * self.samples + 1

    def compute(self, objective: BatchObjective, ascents: KnownAscents) -> BatchResult:
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


average_case_sharpness = measuring(AverageCase, "average_case_sharpness")
"""Estimate the mean rise of the loss at random points around the model's weights, see `AverageCase`."""


@final
@dataclass(frozen=True)
class GradientNorm(Measure):
    """Measure the length of the loss's gradient in the metric: worst-case sharpness per radius, for small radii.

    With g the gradient in the weights w: |g| in the Euclidean geometry, |w g| in the adaptive one, the length of the
    Riemannian gradient in a quotient geometry; for an linf ball the dual norm, the sum of |g| or |w g| over all
    weights. The mean over batches is that of norms, not the norm of the mean gradient. Invariant along the orbit in a
    quotient geometry with eps = 0, not in the others.

    Model, loss, batches, checks and errors as for `WorstCase`.
    """

    name: ClassVar[str] = "gradient norm"

    def ticks(self, model: nn.Module) -> int:
        return 1

    def compute(self, objective: BatchObjective, ascents: KnownAscents) -> BatchResult:
        base, gradient = objective.value_and_gradient(objective.zero())
        # For a box, the norm dual to that of the box.
        value = norm(gradient) if objective.space.norm == "l2" else absolute_sum(gradient)
        return BatchResult(value, base, forward_passes=1, backward_passes=1)


gradient_norm = measuring(GradientNorm, "gradient_norm")
"""Measure the length of the loss's gradient in the metric, see `GradientNorm`."""
