"""A quotient manifold made of horizontal spaces, with what geoopt asks of a manifold."""

from __future__ import annotations

import abc
import math

import geoopt
import torch
from geoopt.manifolds.base import ScalingInfo
from torch import Tensor

from quotient_manifolds.manifolds.horizontal import (
    GeodesicError,
    HorizontalSpace,
    Metric,
    power,
    require_vector,
    unsqueeze,
)


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
        self.t = power(metric)

    @abc.abstractmethod
    def at(self, x: Tensor) -> HorizontalSpace:
        """The horizontal space at x, factored: keep it to do many things at one point.

        >>> from quotient_manifolds.manifolds import DiagonalQuotient
        >>> manifold, x = DiagonalQuotient("inv"), torch.tensor([[1.0, 2.0], [4.0, 8.0]])
        >>> manifold.at(x).norm(x)
        tensor(2.)
        """

    @abc.abstractmethod
    def action(self, A: Tensor, x: Tensor) -> Tensor:
        """The group element A applied to the point (or, the action being linear, to a tangent vector) x.

        >>> from quotient_manifolds.manifolds import DiagonalQuotient
        >>> manifold, x = DiagonalQuotient("inv"), torch.tensor([[1.0, 2.0], [4.0, 8.0]])
        >>> manifold.action(torch.tensor([2.0, 2.0]), x)
        tensor([[ 0.5000,  1.0000],
                [ 8.0000, 16.0000]])
        """

    @abc.abstractmethod
    def balance(self, x: Tensor) -> Tensor:
        """The canonical representative of the orbit of x: the same tensor for every point of the orbit.

        >>> from quotient_manifolds.manifolds import DiagonalQuotient
        >>> manifold, x = DiagonalQuotient("inv"), torch.tensor([[1.0, 2.0], [4.0, 8.0]])
        >>> manifold.balance(x)
        tensor([[2., 4.],
                [2., 4.]])
        """

    @abc.abstractmethod
    def same_orbit(self, x: Tensor, y: Tensor, *, rtol: float | None = None) -> Tensor:
        """Whether x and y represent the same point of the quotient, to relative tolerance `rtol`. Shape (...,).

        >>> from quotient_manifolds.manifolds import DiagonalQuotient
        >>> manifold, x = DiagonalQuotient("inv"), torch.tensor([[1.0, 2.0], [4.0, 8.0]])
        >>> manifold.same_orbit(x, manifold.balance(x))
        tensor(True)
        """

    @property
    @abc.abstractmethod
    def vertical_equation(self) -> str:
        """The equation a horizontal vector satisfies, for messages."""

    # geoopt's interface

    def inner(self, x: Tensor, u: Tensor, v: Tensor | None = None, *, keepdim: bool = False) -> Tensor:
        """<u, v>_x; |u|_x^2 without v. Shape (...,), or (..., 1, 1) with `keepdim`.

        >>> from quotient_manifolds.manifolds import DiagonalQuotient
        >>> manifold, x = DiagonalQuotient("inv"), torch.tensor([[1.0, 2.0], [4.0, 8.0]])
        >>> manifold.inner(x, x, keepdim=True)
        tensor([[4.]])
        """
        space = self.at(x)
        result = space.inner(u, u if v is None else v)
        return unsqueeze(result, self.ndim) if keepdim else result

    def norm(self, x: Tensor, u: Tensor, *, keepdim: bool = False) -> Tensor:
        """|u|_x, with gradient 0 at u = 0. Shape (...,), or (..., 1, 1) with `keepdim`.

        >>> from quotient_manifolds.manifolds import DiagonalQuotient
        >>> manifold, x = DiagonalQuotient("inv"), torch.tensor([[1.0, 2.0], [4.0, 8.0]])
        >>> manifold.norm(x, x)
        tensor(2.)
        """
        result = self.at(x).norm(u)
        return unsqueeze(result, self.ndim) if keepdim else result

    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        """The horizontal projection of u at x.

        >>> from quotient_manifolds.manifolds import DiagonalQuotient
        >>> manifold, x = DiagonalQuotient("inv"), torch.tensor([[1.0, 2.0], [4.0, 8.0]])
        >>> manifold.proju(x, torch.tensor([[2.0, 2.0], [0.0, 0.0]]))
        tensor([[1., 1.],
                [4., 4.]])
        """
        return self.at(x).project(u)

    def egrad2rgrad(self, x: Tensor, u: Tensor) -> Tensor:
        """The horizontal Riemannian gradient at x from the Euclidean gradient u [paper, App. B.5].

        >>> from quotient_manifolds.manifolds import DiagonalQuotient
        >>> manifold, x = DiagonalQuotient("inv"), torch.tensor([[1.0, 2.0], [4.0, 8.0]])
        >>> manifold.egrad2rgrad(x, torch.tensor([[4.0, 8.0], [1.0, 2.0]]))
        tensor([[  4.,  32.],
                [ 16., 128.]])
        """
        return self.at(x).gradient(u)

    @__scaling__(ScalingInfo.NotCompatible)
    def ehess2rhess(self, x: Tensor, egrad: Tensor, ehess: Tensor, u: Tensor) -> Tensor:
        """The horizontal Riemannian Hessian along u, from the Euclidean gradient and the Euclidean Hessian times u.

        >>> from quotient_manifolds.manifolds import DiagonalQuotient
        >>> manifold, x = DiagonalQuotient("inv"), torch.tensor([[1.0, 2.0], [4.0, 8.0]])
        >>> f = lambda p: (p[0] * p[1]).log().sum()
        >>> egrad, ehess = torch.func.jvp(torch.func.grad(f), (x,), (x,))
        >>> bool(manifold.ehess2rhess(x, egrad, ehess, x).norm() < 1e-5)
        True
        """
        return self.at(x).hessian(egrad, ehess, u)

    def retr(self, x: Tensor, u: Tensor) -> Tensor:
        """The second-order geodesic x + u - Gamma(u, u) / 2 [paper, Eq. 4].

        >>> from quotient_manifolds.manifolds import DiagonalQuotient
        >>> manifold, x = DiagonalQuotient("inv"), torch.tensor([[1.0, 2.0], [4.0, 8.0]])
        >>> manifold.retr(x, 0.5 * x)
        tensor([[ 1.6250,  3.2500],
                [ 6.5000, 13.0000]])
        """
        return self.at(x).geodesic(u)

    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        """The exact geodesic at t = 1. Raises `GeodesicError` if it leaves the manifold earlier.

        >>> from quotient_manifolds.manifolds import DiagonalQuotient
        >>> manifold, x = DiagonalQuotient("inv"), torch.tensor([[1.0, 2.0], [4.0, 8.0]])
        >>> manifold.expmap(x, x)
        tensor([[ 2.7183,  5.4366],
                [10.8731, 21.7463]])
        """
        return self.at(x).geodesic(u, order="exact")

    def transp(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Vector transport from x to y by horizontal projection at y.

        >>> from quotient_manifolds.manifolds import DiagonalQuotient
        >>> manifold, x = DiagonalQuotient("inv"), torch.tensor([[1.0, 2.0], [4.0, 8.0]])
        >>> manifold.transp(x, 2 * x, x)
        tensor([[1., 2.],
                [4., 8.]])
        """
        return self.at(y).project(v)

    def mean(self, x: Tensor, *, steps: int = 50, tolerance: float = 1e-8) -> Tensor:
        """The Karcher mean of points x (k, ...): where the logarithms of all add up to 0.

        Fixed-point iteration y <- Exp_y(mean of Log_y(x_i)) from the first point, until the step is at most `tolerance`
        times the largest logarithm. Raises `GeodesicError` if that takes more than `steps`. Shape (...).

        >>> from quotient_manifolds.manifolds import DiagonalQuotient
        >>> manifold, x = DiagonalQuotient("inv"), torch.tensor([[1.0, 2.0], [4.0, 8.0]])
        >>> manifold.balance(manifold.mean(torch.stack([x, 4 * x])))
        tensor([[4., 8.],
                [4., 8.]])
        """
        if len(x) == 0:
            raise ValueError("a mean needs at least one point; found none")
        if x.dtype != torch.float64:
            return self.mean(x.double(), steps=steps, tolerance=tolerance).to(x.dtype)
        y = x[0]
        for _ in range(steps):
            space = self.at(y)
            logs = self.logmap(y.expand_as(x), x)
            step = logs.mean(dim=0)
            spread = torch.maximum(space.norm(logs).amax(dim=0), 1e-6 * space.norm(y))  # rounding is no spread
            if bool((space.norm(step) <= tolerance * spread).all()):
                return y
            y = space.geodesic(step, order="exact")
        raise GeodesicError(f"the mean of points should settle within {steps} steps and did not: give it nearer points")

    @__scaling__(ScalingInfo(u=-1))
    def geodesic(self, x: Tensor, u: Tensor, t: float | Tensor = 1.0, order: str = "second") -> Tensor:
        """The point at time t of the geodesic from x with velocity u; `order` as in `GEODESICS`.

        >>> from quotient_manifolds.manifolds import DiagonalQuotient
        >>> manifold, x = DiagonalQuotient("inv"), torch.tensor([[1.0, 2.0], [4.0, 8.0]])
        >>> manifold.geodesic(x, x, 0.5)
        tensor([[ 1.6250,  3.2500],
                [ 6.5000, 13.0000]])
        """
        return self.at(x).geodesic(u, t, order)

    def _require_pair(self, x: Tensor, y: Tensor) -> None:
        """Raise ValueError unless x and y are points of one trailing shape and one dtype."""
        for point in (x, y):
            ok, reason = self.check_point_on_manifold(point, explain=True)
            if not ok:
                raise ValueError(reason)
        require_vector(x, y, self.ndim, "two points")

    def _check_vector_on_tangent(
        self, x: Tensor, u: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5
    ) -> tuple[bool, str | None]:
        """A vector is horizontal if its vertical part is small relative to it in the metric; `atol` plays no part."""
        if u.shape[-self.ndim :] != x.shape[-self.ndim :]:
            return False, f"a vector at a point of shape {tuple(x.shape)} has its shape; found {tuple(u.shape)}"
        if u.numel() == 0:
            return True, None
        if not bool(torch.isfinite(u).all()):
            return False, "the entries of a vector are finite; found NaN or infinity"
        space = self.at(x)
        z = space.coordinates(u)
        vertical = torch.linalg.vector_norm(z - space.horizontal(z), dim=space.dims)
        residual = float(
            (vertical / torch.linalg.vector_norm(z, dim=space.dims).clamp_min(torch.finfo(z.dtype).tiny)).max()
        )
        if residual <= max(rtol, math.sqrt(torch.finfo(u.dtype).eps)):
            return True, None
        return False, f"{self.vertical_equation} fails: relative vertical part {residual:.3g}"

    def extra_repr(self) -> str:
        return f"metric={self.metric!r}"
