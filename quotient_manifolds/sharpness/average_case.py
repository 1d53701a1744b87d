"""Estimate average-case sharpness in any geometry."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch import nn

from quotient_manifolds.geometry import Geometry, as_geometry
from quotient_manifolds.progress import Progress
from quotient_manifolds.sharpness.losses import Loss
from quotient_manifolds.sharpness.measure import KnownAscents, Measure, warned
from quotient_manifolds.sharpness.objective import BatchObjective
from quotient_manifolds.sharpness.result import BatchResult, MeasureResult, mean_and_error
from quotient_manifolds.sharpness.vector import scale


@final
@dataclass(frozen=True)
class AverageCase(Measure):
    """Estimate E[L(gamma_z(1)) - L(w)] over z = sigma * noise, see `average_case_sharpness`."""

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
        return BatchResult(
            value=mean,
            base_loss=base,
            forward_passes=2 * self.samples + 1,
            backward_passes=0,
            standard_error=error,
            reach=max((reach for reach in reaches if reach is not None), default=None),
            reach_limit=objective.space.reach_limit,
            spacing=objective.spacing(base),
        )


def average_case_sharpness(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    *,
    geometry: Geometry | str | float,
    sigma: float,
    samples: int = 32,
    seed: int = 0,
    progress: Progress | None = None,
) -> MeasureResult:
    """Estimate the mean rise of the loss at random points around the model's weights w.

    That is E[L(gamma_z(1)) - L(w)] over z = sigma * N(0, I) in orthonormal coordinates of the tangent space (in a
    quotient geometry of its horizontal part), gamma_z the geodesic that sets out in the direction z.

    sigma is the standard deviation per coordinate, no radius: |z| is about sigma * sqrt(dimension), far outside a worst
    case's ball of that radius. In the adaptive geometry z is the N(0, sigma^2 diag(w^2)) of Andriushchenko et al.
    (arXiv 2302.07011). In a geometry with norm "linf" z is uniform in the box |z_i| <= sigma instead. Each of `samples`
    directions is used with both signs, which cancels the odd orders of the loss; batch i draws its own from the
    seed + i.

    Invariant along the orbit in a quotient geometry with eps = 0 (in distribution, and so as a measure, where singular
    values of a pair tie; else draw by draw); Euclidean and adaptive averages are not. A geodesic that leaves the
    manifold counts with its last point.

    Other arguments, checks, warnings and errors as for `worst_case_sharpness`; progress counts forward passes.
    """
    measure = AverageCase(as_geometry(geometry), sigma, samples, seed)
    return warned(measure.of(model, loss, batches, progress))
