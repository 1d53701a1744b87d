"""Measure the curvature of the loss in any geometry: the trace of its Hessian and its largest eigenvalue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import numpy as np
import torch
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh
from torch import nn

from quotient_manifolds.sharpness.ascent import check_whole
from quotient_manifolds.sharpness.hessian import Hessian, Products, check_hessian
from quotient_manifolds.sharpness.measure import KnownAscents, Measure, measuring
from quotient_manifolds.sharpness.objective import BatchObjective, idle
from quotient_manifolds.sharpness.result import BatchResult, mean_and_error
from quotient_manifolds.sharpness.vector import dot
from quotient_manifolds.symmetries import Params

Vector = np.ndarray[Any, np.dtype[np.float64]]


@final
@dataclass(frozen=True)
class HessianTrace(Measure):
    """Estimate the trace of the loss's Hessian: the sum of its curvatures over all directions of the geometry.

    It is the mean of <v, H v> over `samples` random v = N(0, I) in orthonormal coordinates of the tangent space (in a
    quotient geometry of its horizontal part). H is the Riemannian Hessian for a quotient geometry; with first-order
    geodesics it lacks their bend. To second order in sigma, average-case sharpness is sigma^2 / 2 times this
    trace. Invariant along the orbit in a quotient geometry with eps = 0 (in distribution where singular values of a
    pair tie, else draw by draw), in the others not. Batch i draws its directions from the seed + i.

    products: how H v is found, see `Hessian`. Model, loss, batches, checks and errors as for `WorstCase`; progress
    counts directions.
    """

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


hessian_trace = measuring(HessianTrace, "hessian_trace")
"""Estimate the trace of the loss's Hessian, see `HessianTrace`."""


@final
@dataclass(frozen=True)
class TopEigenvalue(Measure):
    """Compute the largest eigenvalue of the loss's Hessian: the curvature in the sharpest direction of the geometry.

    It is max <v, H v> over v of length 1 (in a quotient geometry horizontal ones); not the eigenvalue that is largest
    in size, which may be negative. H is Riemannian for a quotient geometry (without the bend of the geodesics if they
    are of first order), where it is invariant along the orbit with eps = 0; in the others it is not. errors: the
    residuals |H v - lambda v|, |v| = 1; an eigenvalue lies within that distance. tolerance: ARPACK's, relative to the
    eigenvalue. restarts: of Lanczos; ValueError if it has not converged by then.

    products: how H v is found, see `Hessian`. Lanczos keeps 20 vectors in float64. Model, loss, batches, checks and
    errors as for `WorstCase`; progress counts batches.
    """

    name: ClassVar[str] = "top Hessian eigenvalue"

    tolerance: float = 1e-4
    restarts: int = 30
    products: Products = "exact"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        number = isinstance(self.tolerance, (int, float)) and not isinstance(self.tolerance, bool)
        if not number or not 0 < self.tolerance < 1:
            raise ValueError(f"tolerance must be a number between 0 and 1. Found {self.tolerance!r}")
        check_whole("restarts", self.restarts, 1)
        check_hessian(self.name, self.geometry, self.products)

    def ticks(self, model: nn.Module) -> int:
        return 1

    def compute(self, objective: BatchObjective, ascents: KnownAscents) -> BatchResult:
        hessian = Hessian(replace(objective, tick=idle), self.products)  # a batch ticks once, not every pass
        start = objective.sample(objective.generator(self.seed))
        value, residual = self._largest(hessian.times, objective, start)
        objective.tick()
        return BatchResult(value, hessian.base, hessian.forward_passes, hessian.backward_passes, residual=residual)

    def _largest(
        self, times: Callable[[Params], Params], objective: BatchObjective, start: Params
    ) -> tuple[float, float]:
        """Return the eigenvalue and its residual, by Lanczos from a horizontal start."""
        first = _flat(start)
        first /= max(float(np.linalg.norm(first)), np.finfo(np.float64).tiny)
        image = _flat(times(_unflat(first, start)))
        rayleigh, size = float(first @ image), float(np.linalg.norm(image))
        if size == 0 or first.size == 1:
            return rayleigh, 0.0
        # ARPACK sees all coordinates, also those that do not move, where H is 0: with a negative definite H that 0
        # would be the largest eigenvalue. So they get one that is below a Rayleigh quotient of H, hence never largest.
        below = rayleigh - size

        def product(v: Vector) -> Vector:
            v = v.ravel()
            moving = objective.space.project(_unflat(v, start))
            return _flat(times(moving)) + below * (v - _flat(moving))

        operator = LinearOperator((first.size, first.size), matvec=product, dtype=np.float64)
        try:
            (value,), vectors = eigsh(operator, k=1, which="LA", v0=first, tol=self.tolerance, maxiter=self.restarts)
        except ArpackNoConvergence:
            raise ValueError(
                f"Lanczos must converge. It has not on batch {objective.index} after {self.restarts} restarts at "
                f"tolerance {self.tolerance:g}; raise restarts or tolerance, or use float64"
            ) from None
        v = vectors[:, 0]
        return float(value), float(np.linalg.norm(product(v) - value * v))


top_eigenvalue = measuring(TopEigenvalue, "top_eigenvalue")
"""Compute the largest eigenvalue of the loss's Hessian, see `TopEigenvalue`."""


def _flat(z: Params) -> Vector:
    return torch.cat([block.detach().reshape(-1).double().cpu() for block in z.values()]).numpy()


def _unflat(v: Vector, like: Params) -> Params:
    parts = torch.from_numpy(np.ascontiguousarray(v)).split([block.numel() for block in like.values()])
    return {key: part.reshape(like[key].shape).to(like[key]) for key, part in zip(like, parts, strict=True)}
