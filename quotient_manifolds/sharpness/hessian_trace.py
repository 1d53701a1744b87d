"""Estimate the trace of the loss's Hessian in any geometry, by Hutchinson's estimator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

from torch import nn

from quotient_manifolds.geometry import Geometry, as_geometry
from quotient_manifolds.progress import Progress
from quotient_manifolds.sharpness.hessian import Hessian, Products, check_hessian
from quotient_manifolds.sharpness.losses import Loss
from quotient_manifolds.sharpness.measure import KnownAscents, Measure
from quotient_manifolds.sharpness.objective import BatchObjective, idle
from quotient_manifolds.sharpness.result import BatchResult, MeasureResult, mean_and_error
from quotient_manifolds.sharpness.vector import dot


@final
@dataclass(frozen=True)
class HessianTrace(Measure):
    """Estimate tr Hess L on the (horizontal) tangent space, see `hessian_trace`."""

    name: ClassVar[str] = "Hessian trace"

    samples: int = 32
    products: Products = "exact"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_hessian(self.name, self.geometry, self.products)

    def ticks(self, model: nn.Module) -> int:
        return self.samples

    def compute(self, objective: BatchObjective, ascents: KnownAscents) -> BatchResult:
        hessian = Hessian(replace(objective, tick=idle), self.products)  # products tick here, not passes
        generator = objective.generator(self.seed)
        curvatures = []
        for _ in range(self.samples):
            v = objective.sample(generator)
            curvatures.append(dot(v, hessian.times(v)))
            objective.tick()
        mean, error = mean_and_error(curvatures)
        return BatchResult(mean, hessian.base, hessian.forward_passes, hessian.backward_passes, standard_error=error)


def hessian_trace(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    *,
    geometry: Geometry | str | float,
    samples: int = 32,
    products: Products = "exact",
    seed: int = 0,
    progress: Progress | None = None,
) -> MeasureResult:
    """Estimate the trace of the loss's Hessian: the sum of its curvatures over all directions of the geometry.

    It is the mean of <v, H v> over `samples` random v = N(0, I) in orthonormal coordinates of the tangent space (in a
    quotient geometry of its horizontal part). H is the Riemannian Hessian for a quotient geometry; with first-order
    geodesics it lacks their bend. To second order in the radius, average-case sharpness is radius^2 / 2 times this
    trace. Its distribution is invariant along the orbit in a quotient geometry with eps = 0, in the others it is not.
    Batch i draws its directions from the seed + i.

    products: how H v is found, see `Hessian`. Arguments, checks and errors as for `worst_case_sharpness`; progress
    counts directions.
    """
    return HessianTrace(as_geometry(geometry), samples, products, seed).of(model, loss, batches, progress)
