"""The largest eigenvalue of the loss's Hessian in any geometry, by Lanczos (ARPACK)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np
import torch
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh
from torch import nn

from quotient_manifolds.geometry import Geometry, TangentSpace, as_geometry
from quotient_manifolds.progress import Progress
from quotient_manifolds.sharpness.hessian import Hessian, Products, check_products
from quotient_manifolds.sharpness.losses import Loss
from quotient_manifolds.sharpness.measure import Measure, PreparedModel, Tick, check_inner_product, check_whole
from quotient_manifolds.sharpness.result import BatchResult, MeasureResult
from quotient_manifolds.sharpness.vector import Blocks

Vector = np.ndarray[Any, np.dtype[np.float64]]


@final
@dataclass(frozen=True)
class TopEigenvalue(Measure):
    """max <v, Hess L v> over unit v, see `top_eigenvalue`."""

    name: ClassVar[str] = "top Hessian eigenvalue"

    tolerance: float = 1e-4
    restarts: int = 30
    products: Products = "exact"
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole("seed", self.seed, 0)
        number = isinstance(self.tolerance, (int, float)) and not isinstance(self.tolerance, bool)
        if not number or not 0 < self.tolerance < 1:
            raise ValueError(f"tolerance must be a number between 0 and 1. Found {self.tolerance!r}")
        check_whole("restarts", self.restarts, 1)
        check_products(self.products)
        check_inner_product(self.name, self.geometry)

    def ticks(self, subject: PreparedModel) -> int:
        return 1

    def on(self, subject: PreparedModel, index: int, tick: Tick) -> BatchResult:
        hessian = Hessian(subject.objective(index, lambda: None), self.products)
        start = subject.space.sample(torch.Generator().manual_seed(self.seed + index))
        value, residual = _largest(hessian.times, subject.space, start, self.tolerance, self.restarts, index)
        tick()
        return BatchResult(value, hessian.base, hessian.forward_passes, hessian.backward_passes, residual=residual)


def top_eigenvalue(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    *,
    geometry: Geometry | str | float,
    tolerance: float = 1e-4,
    restarts: int = 30,
    products: Products = "exact",
    seed: int = 0,
    progress: Progress | None = None,
) -> MeasureResult:
    """Compute the largest eigenvalue of the loss's Hessian: the curvature in the sharpest direction of the geometry.

    It is max <v, H v> over v of length 1 (in a quotient geometry horizontal ones); not the eigenvalue that is largest
    in size, which may be negative. H is Riemannian for a quotient geometry (without the bend of the geodesics if they
    are of first order), where it is invariant along the orbit with eps = 0; in the others it is not. errors: the
    residuals |H v - lambda v|, |v| = 1; an eigenvalue lies within that distance. tolerance: ARPACK's, relative to the
    eigenvalue. restarts: of Lanczos; ValueError if it has not converged by then.

    products: how H v is found, see `Hessian`. Lanczos keeps 20 vectors in float64. Arguments, checks and errors as for
    `worst_case_sharpness`; progress counts batches.
    """
    measure = TopEigenvalue(as_geometry(geometry), tolerance=tolerance, restarts=restarts, products=products, seed=seed)
    return measure.of(model, loss, batches, progress)


def _largest(
    times: Callable[[Blocks], Blocks],
    space: TangentSpace,
    start: Blocks,
    tolerance: float,
    restarts: int,
    index: int,
) -> tuple[float, float]:
    """The eigenvalue and its residual, from a horizontal start."""
    first = _flat(start)
    first /= max(float(np.linalg.norm(first)), np.finfo(np.float64).tiny)
    image = _flat(times(_blocks(first, start)))
    rayleigh, size = float(first @ image), float(np.linalg.norm(image))
    if size == 0 or first.size == 1:
        return rayleigh, 0.0
    # What does not move gets an eigenvalue below a Rayleigh quotient, so never the largest, negative definite H or not.
    below = rayleigh - size

    def product(v: Vector) -> Vector:
        v = v.ravel()
        blocks = _blocks(v, start)
        moving = space.project(blocks)
        return _flat(times(moving)) + below * (v - _flat(moving))

    operator = LinearOperator((first.size, first.size), matvec=product, dtype=np.float64)
    try:
        (value,), vectors = eigsh(operator, k=1, which="LA", v0=first, tol=tolerance, maxiter=restarts)
    except ArpackNoConvergence:
        raise ValueError(
            f"Lanczos must converge. It has not on batch {index} after {restarts} restarts at tolerance "
            f"{tolerance:g}; raise restarts or tolerance, or use float64"
        ) from None
    v = vectors[:, 0]
    return float(value), float(np.linalg.norm(product(v) - value * v))


def _flat(z: Blocks) -> Vector:
    return torch.cat([block.detach().reshape(-1).double().cpu() for block in z.values()]).numpy()


def _blocks(v: Vector, like: Blocks) -> Blocks:
    parts = torch.from_numpy(np.ascontiguousarray(v)).split([block.numel() for block in like.values()])
    return {key: part.reshape(like[key].shape).to(like[key]) for key, part in zip(like, parts, strict=True)}
