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

AGREE = 0.01  # relative, of two products: rounding explains less
ROUNDED = 8  # times what rounding alone makes of a difference
SHORTER = (1, 1 / 8, 1 / 64)
"""Parts of the step e |v| = (float precision)^(1/3) of a difference of gradients, tried until two products agree.

The cube root balances the error of the difference, step^2, against that of rounding, precision / step. Shorter steps
cross fewer kinks.
"""


@final
class Hessian:
    """Apply H v = d/de grad_z L(gamma_z(1)) at z = e v, e = 0: symmetric, and 0 on coordinates that do not move.

    Second-order and exact geodesics agree to the order that counts, so both give the Riemannian Hessian; first-order
    ones leave the bend of the geodesics out.

    A product differentiates twice through network and geodesic, one forward for all of them, whose graph is kept. Some
    operations have no second derivative, some a wrong one, such as torch's weight_norm. So a product counts if two
    computations of it agree: autograd and a difference of gradients, (grad(e v) - grad(-e v)) / 2e, or differences of
    two steps, in float64 on a replica and then in the model's own precision. One random product decides: if differences
    deny autograd, they are taken for all products, with a warning. ValueError if no two agree.
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
            self.__dict__.pop("_wide", None)  # twice as large as the model, and needed no more

    def _fault(self) -> str:
        """Say what is wrong with a random product by autograd; "" if a difference of gradients agrees with it."""
        counts, v = (self.forward_passes, self.backward_passes), self.space.sample(torch.Generator().manual_seed(0))
        failed, exact = "", None
        try:
            exact = self.times(v)
        except RuntimeError as error:  # of an operation that has none, or of memory
            failed = f"fails ({first_line(error)})"
        agreed = self._by_differences(v, exact)
        self.forward_passes, self.backward_passes = counts  # the measure's own, without its checks
        if failed or exact is None or agreed is exact:
            return failed
        return f"is off by {apart(agreed, exact) / (norm(agreed) or norm(exact)):.0%}"

    def _differentiated(self) -> tuple[float, Callable[[Params], Params]]:
        leaves = {key: block.requires_grad_() for key, block in self.space.zero().items()}
        with attention_by_formula():  # the other kernels of attention have no second derivative
            # Exact geodesics agree with second-order ones at z = 0 up to third derivatives, which take no part here.
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

        In float64 first; ValueError if no two agree in the model's own precision either.
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
        """Yield (grad(e v) - grad(-e v)) / 2e in the precision of v, and how much of it rounding explains.

        Nothing if the model takes no float64; and no step that is lost in what the model rounds inside, where the loss
        does not change as its gradient says.
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
        """Return the objective in float64: coordinates, what moves, and all else in the replica."""
        return self.objective.double()


def apart(x: Params, y: Params) -> float:
    """Return |x - y|."""
    return norm({key: x[key] - y[key] for key in x})


def check_hessian(measure: str, geometry: Geometry) -> None:
    """Raise ValueError for a geometry whose ball is no ellipsoid: it has no inner product."""
    if isinstance(geometry, Euclidean | Adaptive) and geometry.norm != "l2":
        raise ValueError(f"The {measure} needs an inner product, which {geometry.name} has none of; use norm='l2'")


Vector = np.ndarray[Any, np.dtype[np.float64]]


@final
@dataclass(frozen=True)
class HessianTrace(Measure):
    """Hold the settings of `hessian_trace`, which says what they mean."""

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
        hessian = Hessian(replace(objective, tick=idle))  # products tick here, not passes
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
    """Estimate the trace of the loss's Hessian: the sum of its curvatures over all directions of the geometry.

    It is the mean of <v, H v> over `samples` random v = N(0, I) in orthonormal coordinates of the tangent space (in a
    quotient geometry of its horizontal part); batch i draws them from the seed + i. H is the Riemannian Hessian for a
    quotient geometry; with first-order geodesics it lacks their bend. To second order in sigma, average-case sharpness
    is sigma^2 / 2 times this trace. Invariant along the orbit as `average_case_sharpness` is.

    Model, loss, batches, checks and errors as for `worst_case_sharpness`; progress counts directions.
    """
    made = HessianTrace(as_geometry(geometry), samples, seed, progress=progress)
    return warned(made.of(model, loss, batches))


@final
@dataclass(frozen=True)
class TopEigenvalue(Measure):
    """Hold the settings of `top_eigenvalue`, which says what they mean."""

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
        hessian = Hessian(replace(objective, tick=idle))  # a batch ticks once, not every pass
        value, residual = self._largest(hessian, objective)
        objective.tick()
        return BatchResult(value, hessian.base, hessian.forward_passes, hessian.backward_passes, residual=residual)

    def _largest(self, hessian: Hessian, objective: BatchObjective) -> tuple[float, float]:
        """Return the eigenvalue and its residual, by Lanczos from a horizontal start."""
        start = objective.sample(objective.generator(self.seed))
        first = _flat(start)
        first /= max(float(np.linalg.norm(first)), np.finfo(np.float64).tiny)
        image = _flat(hessian.times(_unflat(first, start)))
        rayleigh, size = float(first @ image), float(np.linalg.norm(image))
        if size == 0 or first.size == 1:
            return rayleigh, 0.0
        # ARPACK sees all coordinates, also those that do not move, where H is 0: with a negative definite H that 0
        # would be the largest eigenvalue. So they get one that is below a Rayleigh quotient of H, hence never largest.
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

    It is max <v, H v> over v of length 1 (in a quotient geometry horizontal ones); not the eigenvalue that is largest
    in size, which may be negative. H and its invariance as for `hessian_trace`. `BatchResult.residual` is |H v - lambda
    v|, |v| = 1; an eigenvalue lies within that distance. tolerance: ARPACK's, relative to the eigenvalue. restarts: of
    Lanczos, which keeps 20 vectors in float64; ValueError if it has not converged by then.

    Model, loss, batches, checks and errors as for `worst_case_sharpness`; progress counts batches.
    """
    made = TopEigenvalue(as_geometry(geometry), tolerance, restarts, seed, progress=progress)
    return warned(made.of(model, loss, batches))


def _flat(z: Params) -> Vector:
    return torch.cat([block.detach().reshape(-1).double().cpu() for block in z.values()]).numpy()


def _unflat(v: Vector, like: Params) -> Params:
    parts = torch.from_numpy(np.ascontiguousarray(v)).split([block.numel() for block in like.values()])
    return {key: part.reshape(like[key].shape).to(like[key]) for key, part in zip(like, parts, strict=True)}
