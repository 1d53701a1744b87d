"""The two abstract types of the package: a horizontal space at a point, and a quotient manifold made of them."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from typing import NamedTuple

import geoopt
import torch
from geoopt.manifolds.base import ScalingInfo
from torch import Tensor

METRICS = {"inv": 0.0, "mix": 1.0}
"""The metrics of [paper, Eq. 5, 6, 9, 10] as members of a family: a metric is a number t, and these have names."""

Metric = str | float
"""A name in `METRICS`, or a number t: the weights of the metric are the 2t-th powers of the singular values."""

GEODESICS = ("first", "second", "exact")
"""How far a geodesic is followed: its Taylor polynomial of degree 1 or 2 ([paper, Eq. 4]), or the curve itself."""


class Estimate(NamedTuple):
    """A mean over random samples and its standard error."""

    mean: float
    standard_error: float


class GeodesicError(ValueError):
    """A geodesic leaves the manifold before the time asked for."""


class HorizontalSpace(abc.ABC):
    """The horizontal space H_x = V_x^perp at a point x of the total space, factored once; immutable.

    Every tangent vector eta has *orthonormal coordinates* z, a tensor of the same shape with |z|_F = |eta|_x. In them
    the metric is the Frobenius product, so a whole model's tangent space is one Euclidean space.

    Leading dimensions of the point are a batch; vectors broadcast against it.
    """

    def __init__(self, point: Tensor, ndim: int = 2) -> None:
        self.point = point
        self.dims = tuple(range(-ndim, 0))  # the dimensions of one point; those before are the batch

    @abc.abstractmethod
    def coordinates(self, eta: Tensor) -> Tensor:
        """Orthonormal coordinates z of a tangent vector eta: |z|_F = |eta|_x. Same shape."""

    @abc.abstractmethod
    def vector(self, z: Tensor) -> Tensor:
        """The tangent vector with coordinates z; the inverse of `coordinates`."""

    @abc.abstractmethod
    def covector(self, egrad: Tensor) -> Tensor:
        """Coordinates of the Riemannian gradient from the Euclidean one: the adjoint of `vector`."""

    @abc.abstractmethod
    def horizontal(self, z: Tensor) -> Tensor:
        """Coordinates of the horizontal part: the orthogonal projection off the vertical space."""

    @abc.abstractmethod
    def follow(self, z: Tensor, order: str) -> tuple[Tensor, Tensor]:
        """The geodesic with horizontal initial velocity z, followed to t = 1 or to where it leaves the manifold.

        Returns the point (differentiable in z) and the time reached, in (0, 1], shape (...,).
        """

    def move(self, z: Tensor, order: str = "second") -> Tensor:
        """The point gamma_z(1), or the last point of the geodesic if it leaves the manifold earlier.

        The geodesic ball [paper, Eq. 3] holds only points that are reached, and this map is onto it.
        """
        return self.follow(z, _checked_order(order))[0]

    def inner(self, eta: Tensor, zeta: Tensor) -> Tensor:
        """The metric <eta, zeta>_x at the point. Shape (...,)."""
        return (self.coordinates(eta) * self.coordinates(zeta)).sum(dim=self.dims)

    def norm(self, eta: Tensor) -> Tensor:
        """|eta|_x, with gradient 0 (not NaN) at eta = 0. Shape (...,)."""
        return torch.linalg.vector_norm(self.coordinates(eta), dim=self.dims)

    def project(self, eta: Tensor) -> Tensor:
        """The horizontal projection of a tangent vector.

        The vertical part is removed twice: the second pass takes away what rounding left of it at a badly conditioned
        representative of the orbit.
        """
        for _ in range(2):
            z = self.coordinates(eta)
            eta = eta - self.vector(z - self.horizontal(z))
        return eta

    def gradient(self, egrad: Tensor) -> Tensor:
        """The horizontal Riemannian gradient: <gradient, xi>_x = egrad . xi for every horizontal xi."""
        return self.vector(self.horizontal(self.covector(egrad)))

    def geodesic(self, xi: Tensor, t: float | Tensor = 1.0, order: str = "second") -> Tensor:
        """The point gamma_xi(t) of the geodesic through the point with horizontal velocity xi.

        Vectors that are not horizontal are projected first. `t` is a number, or broadcasts against the batch: with
        leading dimensions of its own it gives the points at many times at once.
        Raises `GeodesicError` if the exact geodesic leaves the manifold before t.
        """
        time = torch.as_tensor(t, dtype=self.point.dtype, device=self.point.device)
        z = _unsqueeze(time, len(self.dims)) * self.horizontal(self.coordinates(xi))
        y, reached = self.follow(z, _checked_order(order))
        short = reached < 1
        if bool(short.any()):
            earliest = reached[short].argmin()
            wanted = float(time.expand_as(reached)[short][earliest])
            end = wanted * float(reached[short][earliest])
            raise GeodesicError(
                f"the geodesic should reach t = {wanted:g} but leaves the manifold at t = {end:.6g}, "
                "where a singular value reaches 0: take a shorter vector, or metric='inv', whose geodesics never end"
            )
        return y

    def hessian(self, egrad: Tensor, ehess: Tensor, xi: Tensor) -> Tensor:
        """The Riemannian Hessian along xi, from the Euclidean gradient and the Euclidean Hessian times xi.

        It is the Euclidean Hessian of f along the second-order geodesics, H f(gamma_z) at z = 0: that of f itself in
        coordinates, plus egrad . D^2 gamma. Horizontal, self-adjoint on horizontal vectors.
        [Boumal 2023, Prop. 5.44, Sec. 9.12]
        """
        z = self.horizontal(self.coordinates(xi)).detach().requires_grad_()
        first = self.covector(egrad)
        with (
            torch.enable_grad()
        ):  # the bend of the geodesic is quadratic in z, so its gradient at z is its Hessian times z
            (bend,) = torch.autograd.grad((egrad.detach() * self.move(z)).sum(), z)
        return self.vector(self.horizontal(self.covector(ehess) + bend - first))

    def hessian_product(self, loss: Callable[[Tensor], Tensor], xi: Tensor) -> Tensor:
        """The Riemannian Hessian of a twice differentiable loss (point -> scalar) along xi, by autograd."""
        with torch.enable_grad():
            z = torch.zeros_like(self.point, requires_grad=True)
            (slope,) = torch.autograd.grad(loss(self.move(self.horizontal(z))), z, create_graph=True)
            (product,) = torch.autograd.grad(slope, z, self.horizontal(self.coordinates(xi)))
        return self.vector(product)

    def hessian_trace(
        self, loss: Callable[[Tensor], Tensor], samples: int = 64, generator: torch.Generator | None = None
    ) -> Estimate:
        """The trace of the Riemannian Hessian on the horizontal space, summed over the batch: Hutchinson's estimator.

        Mean and standard error of <v, Hess v> over standard Gaussian horizontal v.
        """
        if samples < 2:
            raise ValueError(f"a standard error needs at least 2 samples; found samples = {samples}")
        draws = [self.sample(generator) for _ in range(samples)]
        values = torch.stack([self.inner(v, self.hessian_product(loss, v)).sum() for v in draws])
        return Estimate(float(values.mean()), float(values.std() / math.sqrt(samples)))

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """A standard Gaussian vector of the horizontal space, in the metric at the point."""
        x = self.point
        z = torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generator)
        return self.vector(self.horizontal(z))


class QuotientManifold(geoopt.Manifold, abc.ABC):
    """A manifold M / G given by points of the total space M; tangent vectors are horizontal lifts.

    What geoopt asks of a manifold is written here once, on top of `at(x)`. Subclasses say what is particular: the group
    action, the metric and the geodesics.
    """

    __scaling__ = geoopt.Manifold.__scaling__.copy()
    ndim = 2
    reversible = False

    def __init__(self, metric: Metric) -> None:
        super().__init__()
        self.metric = metric
        self.t = _power(metric)

    @abc.abstractmethod
    def at(self, x: Tensor) -> HorizontalSpace:
        """The horizontal space at x, factored: keep it to do many things at one point."""

    @abc.abstractmethod
    def action(self, A: Tensor, x: Tensor) -> Tensor:
        """The group element A applied to the point (or, the action being linear, to a tangent vector) x."""

    @abc.abstractmethod
    def balance(self, x: Tensor) -> Tensor:
        """The canonical representative of the orbit of x: the same tensor for every point of the orbit."""

    @abc.abstractmethod
    def same_orbit(self, x: Tensor, y: Tensor, *, rtol: float | None = None) -> Tensor:
        """Whether x and y represent the same point of the quotient, to relative tolerance `rtol`. Shape (...,)."""

    @property
    @abc.abstractmethod
    def vertical_equation(self) -> str:
        """The equation a horizontal vector satisfies, for messages."""

    # geoopt's interface

    def inner(self, x: Tensor, u: Tensor, v: Tensor | None = None, *, keepdim: bool = False) -> Tensor:
        """<u, v>_x; |u|_x^2 without v. Shape (...,), or (..., 1, 1) with `keepdim`."""
        space = self.at(x)
        result = space.inner(u, u if v is None else v)
        return _unsqueeze(result, self.ndim) if keepdim else result

    def norm(self, x: Tensor, u: Tensor, *, keepdim: bool = False) -> Tensor:
        """|u|_x, with gradient 0 at u = 0. Shape (...,), or (..., 1, 1) with `keepdim`."""
        result = self.at(x).norm(u)
        return _unsqueeze(result, self.ndim) if keepdim else result

    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        """The horizontal projection of u at x."""
        return self.at(x).project(u)

    def egrad2rgrad(self, x: Tensor, u: Tensor) -> Tensor:
        """The horizontal Riemannian gradient at x from the Euclidean gradient u [paper, App. B.5]."""
        return self.at(x).gradient(u)

    @__scaling__(ScalingInfo.NotCompatible)
    def ehess2rhess(self, x: Tensor, egrad: Tensor, ehess: Tensor, u: Tensor) -> Tensor:
        """The horizontal Riemannian Hessian along u, from the Euclidean gradient and the Euclidean Hessian times u."""
        return self.at(x).hessian(egrad, ehess, u)

    def retr(self, x: Tensor, u: Tensor) -> Tensor:
        """The second-order geodesic x + u - Gamma(u, u) / 2 [paper, Eq. 4]."""
        return self.at(x).geodesic(u)

    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        """The exact geodesic at t = 1. Raises `GeodesicError` if it leaves the manifold earlier."""
        return self.at(x).geodesic(u, order="exact")

    def transp(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Vector transport from x to y by horizontal projection at y."""
        return self.at(y).project(v)

    def mean(self, x: Tensor, *, steps: int = 50, tolerance: float = 1e-8) -> Tensor:
        """The Karcher mean of points x (k, ...): where the logarithms of all add up to 0.

        Fixed-point iteration y <- Exp_y(mean of Log_y(x_i)) from the first point, until the step is at most `tolerance`
        times the largest logarithm. Raises `GeodesicError` if that takes more than `steps`. Shape (...).
        """
        y = x[0]
        for _ in range(steps):
            space = self.at(y)
            logs = self.logmap(y.expand_as(x), x)
            step = logs.mean(dim=0)
            if bool((space.norm(step) <= tolerance * space.norm(logs).amax(dim=0)).all()):
                return y
            y = space.geodesic(step, order="exact")
        raise GeodesicError(f"the mean of points should settle within {steps} steps and did not: give it nearer points")

    @__scaling__(ScalingInfo(u=-1))
    def geodesic(self, x: Tensor, u: Tensor, t: float | Tensor = 1.0, order: str = "second") -> Tensor:
        """The point at time t of the geodesic from x with velocity u; `order` as in `GEODESICS`."""
        return self.at(x).geodesic(u, t, order)

    def _check_vector_on_tangent(
        self, x: Tensor, u: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5
    ) -> tuple[bool, str | None]:
        """A vector is horizontal if its vertical part is small relative to it in the metric; `atol` plays no part."""
        if u.shape[-self.ndim :] != x.shape[-self.ndim :]:
            return False, f"a vector at a point of shape {tuple(x.shape)} has its shape; found {tuple(u.shape)}"
        if not bool(torch.isfinite(u).all()):
            return False, "the entries of a vector are finite; found NaN or infinity"
        space = self.at(x)
        z = space.coordinates(u)
        vertical = torch.linalg.vector_norm(z - space.horizontal(z), dim=space.dims)
        residual = float((vertical / torch.linalg.vector_norm(z, dim=space.dims).clamp_min(_tiny(z))).max())
        if residual <= max(rtol, math.sqrt(torch.finfo(u.dtype).eps)):
            return True, None
        return False, f"{self.vertical_equation} fails: relative vertical part {residual:.3g}"

    def extra_repr(self) -> str:
        return f"metric={self.metric!r}"


def require_vector(x: Tensor, eta: Tensor, ndim: int = 2) -> None:
    """Raise ValueError unless eta has the trailing shape and the dtype of the point x."""
    if eta.shape[-ndim:] != x.shape[-ndim:]:
        raise ValueError(
            f"a tangent vector at a point of shape {tuple(x.shape)} should end in {tuple(x.shape[-ndim:])}; "
            f"found shape {tuple(eta.shape)}"
        )
    if eta.dtype != x.dtype:
        raise ValueError(f"vector and point should have one dtype; found {eta.dtype} at a point of {x.dtype}: cast one")


def _power(metric: Metric) -> float:
    """The number t of a metric."""
    if isinstance(metric, str) and metric in METRICS:
        return METRICS[metric]
    if isinstance(metric, (int, float)) and not isinstance(metric, bool) and math.isfinite(metric):
        return float(metric)
    raise ValueError(f"metric should be {' or '.join(map(repr, METRICS))} or a finite number; found {metric!r}")


def _checked_order(order: str) -> str:
    if order not in GEODESICS:
        raise ValueError(f"order of the geodesic should be one of {', '.join(map(repr, GEODESICS))}; found {order!r}")
    return order


def _unsqueeze(x: Tensor, ndim: int) -> Tensor:
    return x.reshape(x.shape + (1,) * ndim)


def _tiny(z: Tensor) -> float:
    return torch.finfo(z.dtype).tiny
