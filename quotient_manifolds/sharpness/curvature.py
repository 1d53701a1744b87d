"""Measure the curvature of the loss in any geometry: products with its Hessian, their trace and largest eigenvalue."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, final

import numpy as np
import torch
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh
from torch import nn

from quotient_manifolds.check import check_integer
from quotient_manifolds.geometry import Adaptive, Euclidean, Geometry, as_geometry
from quotient_manifolds.messages import Progress, first_line
from quotient_manifolds.replica import attention_by_formula
from quotient_manifolds.sharpness.caution import warned
from quotient_manifolds.sharpness.losses import Loss
from quotient_manifolds.sharpness.measure import Measure
from quotient_manifolds.sharpness.objective import BatchObjective, idle
from quotient_manifolds.sharpness.result import BatchResult, Result, mean_and_error
from quotient_manifolds.sharpness.vector import combine, dot, norm
from quotient_manifolds.symmetries import Params
from quotient_manifolds.symmetries.outputs import RUN_ERRORS

AGREE = 0.01  # allowed relative difference of two products, more than rounding causes
ROUNDED = 8  # allowed multiple of the rounding error of a difference
SHORTER = (1, 1 / 8, 1 / 64)
"""Fractions of the step e |v| = (float precision)^(1/3) of a difference of gradients, tried until two products agree.

The cube root balances the truncation error, step^2, against the rounding error, precision / step. Shorter steps cross
fewer kinks.
"""


@final
class Hessian:
    """Apply H v = d/de grad_z L(gamma_z(1)) at z = e v, e = 0: symmetric, and 0 on coordinates that do not move.

    Second-order and exact geodesics agree to second order, so both give the Riemannian Hessian; first-order ones omit
    the acceleration of the geodesics.

    A product differentiates twice through the network and the geodesic. One forward pass serves all products, so its
    graph is kept. Some operations have no second derivative, or a wrong one, such as torch's weight_norm. So a product
    is accepted only if two computations agree: autograd and a difference of gradients, (grad(e v) - grad(-e v)) / 2e,
    or two such differences. Differences are taken in float64 on a replica, then in the model's own precision. One
    random product is checked: if differences contradict autograd, they replace it in all products, with a warning.
    Raises ValueError if no two computations agree.
    """

    def __init__(self, objective: BatchObjective) -> None:
        self.objective, self.space = objective, objective.space
        self.forward_passes, self.backward_passes = 1, 1
        self.base, self.times = self._differentiated()
        if fault := self._fault():
            warnings.warn(
                f"The second derivative by autograd of the loss on batch {objective.index} {fault}; differences of "
                f"gradients are taken instead",
                stacklevel=2,
            )
            self.times = self._by_differences
        else:
            self.__dict__.pop("_wide", None)  # twice as large as the model, and no longer needed

    def _fault(self) -> str:
        """Return how autograd fails on a random product; "" if a difference of gradients agrees with it."""
        counts, v = (self.forward_passes, self.backward_passes), self.space.sample(torch.Generator().manual_seed(0))
        failed, exact = "", None
        try:
            exact = self.times(v)
        except RuntimeError as error:  # no second derivative, or out of memory
            failed = f"fails ({first_line(error)})"
        agreed = self._by_differences(v, exact)
        self.forward_passes, self.backward_passes = counts  # checks do not count
        if failed or exact is None or agreed is exact:
            return failed
        return f"is off by {apart(agreed, exact) / (norm(agreed) or norm(exact)):.0%}"

    def _differentiated(self) -> tuple[float, Callable[[Params], Params]]:
        leaves = {key: block.requires_grad_() for key, block in self.space.zero().items()}
        with attention_by_formula():  # the other kernels of attention have no second derivative
            # At z = 0, exact geodesics differ from second-order ones in third derivatives only, which H does not use.
            order = "second" if self.space.reach(self.space.zero()) is None else None
            value = self.objective.differentiable_loss(self.space.move(leaves, order=order))
            loss = self.objective.finite(value)
            slopes = torch.autograd.grad(value, tuple(leaves.values()), create_graph=True, materialize_grads=True)

        def times(v: Params) -> Params:
            pairs = [(slope, v[key]) for key, slope in zip(leaves, slopes, strict=True) if slope.requires_grad]
            if not pairs:  # the loss is linear along all geodesics
                return self.space.zero()
            along, directions = zip(*pairs, strict=True)
            self.backward_passes += 1
            graph: dict[str, Any] = {"retain_graph": True, "materialize_grads": True}
            with attention_by_formula():
                products = torch.autograd.grad(along, tuple(leaves.values()), directions, **graph)
            return self.space.project(dict(zip(leaves, products, strict=True)))

        return loss, times

    def _by_differences(self, v: Params, exact: Params | None = None) -> Params:
        """Return `exact` if a difference agrees with it, else the first of two differences that agree.

        Differences are taken in float64 first. Raises ValueError if no two agree in the model's own precision either.
        """
        length = norm(v)
        if length == 0:
            return self.space.zero() if exact is None else exact
        for double in (True, False):
            found: list[Params] = []
            agreed: Params | None = None
            for near, noise in self._differences(v, length, double):
                allowed = AGREE * norm(near) + noise
                if exact is not None and apart(exact, near) <= allowed:
                    return exact
                agreed = agreed or next((each for each in found if apart(each, near) <= allowed), None)
                if agreed is not None and exact is None:
                    break
                found.append(near)
            if agreed is not None:
                return agreed
        raise ValueError(
            f"A product with the Hessian must have two computations that agree to {AGREE:.0%}. Found none on batch "
            f"{self.objective.index}, of autograd and differences of gradients; let the model and the loss compute "
            f"in float64 if asked to, and by operations whose second derivatives are right"
        )

    def _differences(self, v: Params, length: float, double: bool) -> Iterator[tuple[Params, float]]:
        """Yield (grad(e v) - grad(-e v)) / 2e in the precision of v, and an estimate of its rounding error.

        Yields nothing in float64 if the model cannot compute in it. Skips steps at which the loss does not change as
        its gradient predicts, because rounding inside the model hides them.
        """
        objective = self._wide if double else self.objective
        directions = {key: block.double() for key, block in v.items()} if double else v
        unit = max(torch.finfo(block.dtype).eps for block in directions.values())
        unit = unit if double else max(unit, objective.precision)
        for part in SHORTER:
            e = part * unit ** (1 / 3) / length
            try:
                (high, after), (low, before) = (
                    objective.value_and_gradient({key: sign * e * block for key, block in directions.items()})
                    for sign in (1.0, -1.0)
                )
            except RUN_ERRORS:
                if double:
                    return
                raise
            self.forward_passes += 2
            self.backward_passes += 2
            rise = e * (dot(after, directions) + dot(before, directions))
            rounding = ROUNDED * unit * max(abs(high), abs(low))
            if abs(high - low - rise) <= AGREE * abs(rise) + rounding:
                noise = ROUNDED * unit * norm(after) / e
                combine([(0.5 / e, after), (-0.5 / e, before)], after)
                yield {key: block.to(v[key].dtype) for key, block in objective.space.project(after).items()}, noise

    @cached_property
    def _wide(self) -> BatchObjective:
        """Return the objective in float64: coordinates, moved parameters, and everything else in the replica."""
        return self.objective.double()


def apart(x: Params, y: Params) -> float:
    """Return |x - y|."""
    return norm({key: x[key] - y[key] for key in x})


def check_hessian(measure: str, geometry: Geometry) -> None:
    """Raise ValueError for a geometry without an inner product, whose ball is not an ellipsoid."""
    if isinstance(geometry, Euclidean | Adaptive) and geometry.norm != "l2":
        raise ValueError(f"The {measure} needs an inner product, which {geometry.name} has none of; use norm='l2'")


Vector = np.ndarray[Any, np.dtype[np.float64]]


@final
@dataclass(frozen=True)
class HessianTrace(Measure):
    """Hold the settings of `hessian_trace`, which documents them."""

    name: ClassVar[str] = "Hessian trace"
    has_gradient: ClassVar[bool] = False

    samples: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_hessian(self.name, self.geometry)

    @property
    def ticks(self) -> int:
        return self.samples

    def compute(self, objective: BatchObjective) -> BatchResult:
        hessian = Hessian(replace(objective, tick=idle))  # progress counts products, not passes
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
    geometry: Geometry | str | float,
    samples: int = 32,
    seed: int = 0,
    *,
    progress: Progress | None = None,
) -> Result:
    """Estimate the trace of the loss's Hessian: the sum of its curvatures over an orthonormal basis of directions.

    The estimate is the mean of <v, H v> over `samples` random v ~ N(0, I) in orthonormal coordinates of the tangent
    space (of its horizontal part in a quotient geometry). Batch i draws them with seed + i. H is the Riemannian Hessian
    in a quotient geometry; with first-order geodesics it omits their acceleration. To second order in sigma,
    average-case sharpness is sigma^2 / 2 times this trace. It is as invariant along orbits as `average_case_sharpness`.

    Model, loss, batches, checks and errors are as for `worst_case_sharpness`; progress counts directions.
    """
    made = HessianTrace(as_geometry(geometry), samples, seed, progress=progress)
    return warned(made.of(model, loss, batches))


@final
@dataclass(frozen=True)
class TopEigenvalue(Measure):
    """Hold the settings of `top_eigenvalue`, which documents them."""

    name: ClassVar[str] = "top Hessian eigenvalue"
    has_gradient: ClassVar[bool] = False

    tolerance: float = 1e-4
    restarts: int = 30
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.tolerance, (int, float)) or not 0 < self.tolerance < 1:
            raise ValueError(f"tolerance must be a number between 0 and 1. Found {self.tolerance!r}")
        check_integer("restarts", self.restarts, 1)
        check_hessian(self.name, self.geometry)

    def compute(self, objective: BatchObjective) -> BatchResult:
        hessian = Hessian(replace(objective, tick=idle))  # progress counts batches, not passes
        value, residual = self._largest(hessian, objective)
        objective.tick()
        return BatchResult(value, hessian.base, hessian.forward_passes, hessian.backward_passes, residual=residual)

    def _largest(self, hessian: Hessian, objective: BatchObjective) -> tuple[float, float]:
        """Return the eigenvalue and its residual, by Lanczos from a horizontal vector."""
        start = objective.sample(objective.generator(self.seed))
        first = _flat(start)
        first /= max(float(np.linalg.norm(first)), np.finfo(np.float64).tiny)
        image = _flat(hessian.times(_unflat(first, start)))
        rayleigh, size = float(first @ image), float(np.linalg.norm(image))
        if size == 0 or first.size == 1:
            return rayleigh, 0.0
        # ARPACK works in all coordinates, also those that do not move, on which H is 0. For a negative definite H,
        # this 0 would be the largest eigenvalue. So they get a value below a Rayleigh quotient of H, never the largest.
        below = rayleigh - size

        def product(v: Vector) -> Vector:
            v = v.ravel()
            moving = objective.space.project(_unflat(v, start))
            return _flat(hessian.times(moving)) + below * (v - _flat(moving))

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


def top_eigenvalue(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    geometry: Geometry | str | float,
    tolerance: float = 1e-4,
    restarts: int = 30,
    seed: int = 0,
    *,
    progress: Progress | None = None,
) -> Result:
    """Compute the largest eigenvalue of the loss's Hessian: the curvature in the sharpest direction of the geometry.

    This is max <v, H v> over unit vectors v (horizontal ones in a quotient geometry). The eigenvalue of largest
    magnitude may be negative, and is then another one. H and its invariance are as for `hessian_trace`.
    `BatchResult.residual` is |H v - lambda v| for |v| = 1; an eigenvalue lies within that distance of lambda.

    tolerance: ARPACK's tolerance, relative to the eigenvalue. restarts: the largest number of restarts of Lanczos,
    which keeps 20 vectors in float64. Raises ValueError if it has not converged by then.

    Model, loss, batches, checks and errors are as for `worst_case_sharpness`; progress counts batches.
    """
    made = TopEigenvalue(as_geometry(geometry), tolerance, restarts, seed, progress=progress)
    return warned(made.of(model, loss, batches))


def _flat(z: Params) -> Vector:
    return torch.cat([block.detach().reshape(-1).double().cpu() for block in z.values()]).numpy()


def _unflat(v: Vector, like: Params) -> Params:
    parts = torch.from_numpy(np.ascontiguousarray(v)).split([block.numel() for block in like.values()])
    return {key: part.reshape(like[key].shape).to(like[key]) for key, part in zip(like, parts, strict=True)}
