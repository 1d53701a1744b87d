"""The horizontal space at a point: the one tangent space that everything else is built on."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quotient_manifolds.manifolds.arguments import broadcast, has_values, some

METRICS = {"inv": 0.0, "mix": 1.0}
"""The metrics of [paper, Eq. 5, 6, 9, 10] as members of a family: a metric is a number t, and these have names."""

Metric = str | float
"""A name in `METRICS`, or a number t: the weights of the metric are the 2t-th powers of the singular values."""

GEODESICS = ("first", "second", "exact")
"""How far a geodesic is followed: its Taylor polynomial of degree 1 or 2 ([paper, Eq. 4]), or the curve itself."""


Rows = Sequence[Tensor]
"""A point whose rows lie in several tensors, (..., k, h) each, as the weights of a network do."""

PullBack = Callable[[Rows, Tensor], None]
"""Writes into the second argument the horizontal gradient in z, from the Euclidean one at the point moved to."""


class Estimate(NamedTuple):
    """A mean over random samples and its standard error."""

    mean: float
    standard_error: float


class GeodesicError(ValueError):
    """A geodesic leaves the manifold before the time asked for, or cannot be followed in floating point."""


class HorizontalSpace(abc.ABC):
    """The horizontal space H_x = V_x^perp at a point x of the total space, factored once; immutable.

    Every tangent vector eta has *orthonormal coordinates* z, a tensor of the same shape with |z|_F = |eta|_x. In them
    the metric is the Frobenius product, so a whole model's tangent space is one Euclidean space.

    Leading dimensions of the point are a batch; vectors broadcast against it.

    The examples below use `manifold = DiagonalQuotient("inv")`, `x = torch.tensor([[1.0, 2.0], [4.0, 8.0]])` and
    `space = manifold.at(x)`.
    """

    def __init__(self, point: Tensor, ndim: int = 2) -> None:
        self.point = point.clone()  # later writes to the caller's tensor would part it from what was factored
        self.dims = tuple(range(-ndim, 0))  # the dimensions of one point; those before are the batch

    @abc.abstractmethod
    def coordinates(self, eta: Tensor) -> Tensor:
        """Orthonormal coordinates z of a tangent vector eta: |z|_F = |eta|_x. Same shape.

        >>> space.coordinates(x)
        tensor([[1., 1.],
                [1., 1.]])
        """

    @abc.abstractmethod
    def vector(self, z: Tensor) -> Tensor:
        """The tangent vector with coordinates z; the inverse of `coordinates`.

        >>> space.vector(torch.ones(2, 2))
        tensor([[1., 2.],
                [4., 8.]])
        """

    @abc.abstractmethod
    def covector(self, egrad: Tensor) -> Tensor:
        """Coordinates of the Riemannian gradient from the Euclidean one: the adjoint of `vector`.

        >>> space.covector(torch.ones(2, 2))
        tensor([[1., 2.],
                [4., 8.]])
        """

    @abc.abstractmethod
    def horizontal(self, z: Tensor) -> Tensor:
        """Coordinates of the horizontal part: the orthogonal projection off the vertical space.

        >>> space.horizontal(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        tensor([[2., 3.],
                [2., 3.]])
        """

    @abc.abstractmethod
    def follow(self, z: Tensor, order: str) -> tuple[Tensor, Tensor]:
        """The geodesic with horizontal initial velocity z, followed to t = 1 or to where it leaves the manifold.

        Returns the point (differentiable in z) and the time reached, in (0, 1], shape (...,).

        >>> space = DiagonalQuotient("mix").at(x)
        >>> point, reached = space.follow(space.coordinates(-x), "exact")
        >>> f"{float(reached):.3f}"
        '0.500'
        """

    @abc.abstractmethod
    def linearise(self, z: Tensor, order: str, out: Rows) -> PullBack:
        """Writes the rows of move(z, order) into `out`; returns the adjoint of the derivative there, made horizontal.

        Nothing is in any graph. z is kept, not copied: it must not change while the pull-back is in use.

        >>> u, v, gradient = torch.empty(1, 2), torch.empty(1, 2), torch.empty(2, 2)
        >>> pull_back = space.linearise(torch.zeros(2, 2), "second", (u, v))
        >>> v
        tensor([[4., 8.]])
        >>> pull_back((torch.ones(1, 2), torch.ones(1, 2)), gradient)
        >>> torch.equal(gradient, space.horizontal(space.covector(torch.ones(2, 2))))
        True
        """

    @abc.abstractmethod
    def relative_speed(self, z: Tensor) -> Tensor:
        """How fast the point changes at the start of the geodesic with velocity z, relative to itself. Shape (...,).

        An invariant of the orbit, in float64. Where it is small, a Taylor polynomial is near the geodesic at t = 1: of
        degree 1 up to its square, of degree 2 up to its cube.

        >>> space.relative_speed(space.coordinates(torch.tensor([[0.1, -0.6], [0.4, -2.4]])))
        tensor(0.3000, dtype=torch.float64)
        """

    def move(self, z: Tensor, order: str = "second") -> Tensor:
        """The point gamma_z(1), or the last point of the geodesic if it leaves the manifold earlier.

        The geodesic ball [paper, Eq. 3] holds only points that are reached, and this map is onto it.

        >>> space.move(0.5 * torch.ones(2, 2), "second")
        tensor([[ 1.6250,  3.2500],
                [ 6.5000, 13.0000]])
        """
        return self.follow(z, _checked_order(order))[0]

    def inner(self, eta: Tensor, zeta: Tensor) -> Tensor:
        """The metric <eta, zeta>_x at the point. Shape (...,).

        >>> space.inner(x, 2 * x)
        tensor(8.)
        """
        return (self.coordinates(eta) * self.coordinates(zeta)).sum(dim=self.dims)

    def norm(self, eta: Tensor) -> Tensor:
        """|eta|_x, with gradient 0 (not NaN) at eta = 0. Shape (...,).

        >>> space.norm(x)
        tensor(2.)
        """
        return torch.linalg.vector_norm(self.coordinates(eta), dim=self.dims)

    def project(self, eta: Tensor) -> Tensor:
        """The horizontal projection of a tangent vector.

        The vertical part is removed twice: the second pass takes away what rounding left of it at a badly conditioned
        representative of the orbit.

        >>> space.project(torch.tensor([[2.0, 2.0], [0.0, 0.0]]))
        tensor([[1., 1.],
                [4., 4.]])
        """
        for _ in range(2):
            z = self.coordinates(eta)
            eta = eta - self.vector(z - self.horizontal(z))
        return eta

    def gradient(self, egrad: Tensor) -> Tensor:
        """The horizontal Riemannian gradient: <gradient, xi>_x = egrad . xi for every horizontal xi.

        >>> loss = lambda p: (p[0] * p[1]).sum()
        >>> manifold.at(x).gradient(torch.func.grad(loss)(x)) / x  # relative changes u v, equal for both
        tensor([[ 4., 16.],
                [ 4., 16.]])
        """
        return self.vector(self.horizontal(self.covector(egrad)))

    def geodesic(self, xi: Tensor, t: float | Tensor = 1.0, order: str = "second") -> Tensor:
        """The point gamma_xi(t) of the geodesic through the point with horizontal velocity xi.

        Vectors that are not horizontal are projected first. `t` is a number, or broadcasts against the batch: with
        leading dimensions of its own it gives the points at many times at once.
        Raises `GeodesicError` if the exact geodesic leaves the manifold before t.

        >>> space.geodesic(x, torch.tensor([0.0, 1.0]), "exact")[:, 0]
        tensor([[1.0000, 2.0000],
                [2.7183, 5.4366]])
        """
        z = self.horizontal(self.coordinates(xi))
        if some(~torch.isfinite(z)):
            raise ValueError(
                "the velocity of a geodesic should be finite; found NaN or infinity: where an optimizer steps, its "
                "gradient was not finite, after steps that were too long or for a loss that overflows"
            )
        time = self._time(t, xi)
        z = unsqueeze(time, len(self.dims)) * z
        y, reached = self.follow(z, _checked_order(order))
        short = reached < 1
        if some(short):
            earliest = reached[short].argmin()
            wanted = float(time.expand_as(reached)[short][earliest])
            end = wanted * float(reached[short][earliest])
            raise GeodesicError(
                f"the geodesic should reach t = {wanted:g} but leaves the manifold at t = {end:.6g}, "
                "where its metric degenerates: take a shorter vector, or metric='inv', whose geodesics never end"
            )
        return y

    def _time(self, t: float | Tensor, xi: Tensor) -> Tensor:
        """t as a tensor like the point. Raises TypeError or ValueError unless it is real and goes with the batch."""
        if not isinstance(t, (int, float, Tensor)) or isinstance(t, bool):
            raise TypeError(f"t should be a real number or a tensor of them; found {t!r}")
        time = t if isinstance(t, Tensor) else torch.tensor(t, dtype=self.point.dtype)
        batches = [x.shape[: x.ndim - len(self.dims)] for x in (self.point, xi)]
        if time.is_complex() or not all(broadcast(time.shape, batch) for batch in batches):
            raise ValueError(
                f"t should be real and broadcast against the batch; found {time.dtype} of shape {tuple(time.shape)} "
                f"at points of shape {tuple(self.point.shape)}"
            )
        return time.to(self.point)

    def hessian(self, egrad: Tensor, ehess: Tensor, xi: Tensor) -> Tensor:
        """The Riemannian Hessian along xi, from the Euclidean gradient and the Euclidean Hessian times xi.

        It is the Euclidean Hessian of f along the second-order geodesics, H f(gamma_z) at z = 0: that of f itself in
        coordinates, plus egrad . D^2 gamma. Horizontal, self-adjoint on horizontal vectors.
        [Boumal 2023, Prop. 5.44, Sec. 9.12]

        >>> f = lambda p: (p[0] * p[1]).log().sum()  # linear along the geodesics of inv
        >>> egrad, ehess = torch.func.jvp(torch.func.grad(f), (x,), (x,))
        >>> bool(manifold.at(x).hessian(egrad, ehess, x).norm() < 1e-5)
        True
        """
        z = self.horizontal(self.coordinates(xi)).detach().requires_grad_()
        first = self.covector(egrad)
        with (
            torch.enable_grad()
        ):  # the bend of the geodesic is quadratic in z, so its gradient at z is its Hessian times z
            (bend,) = torch.autograd.grad((egrad.detach() * self.move(z)).sum(), z)
        return self.vector(self.horizontal(self.covector(ehess) + bend - first))

    def hessian_product(self, loss: Callable[[Tensor], Tensor], xi: Tensor) -> Tensor:
        """The Riemannian Hessian of a twice differentiable loss (point -> scalar) along xi, by autograd.

        >>> f = lambda p: ((p[0] * p[1]).log() ** 2).sum() / 8
        >>> manifold.at(x).hessian_product(f, x) / x
        tensor([[0.5000, 0.5000],
                [0.5000, 0.5000]])
        """
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

        >>> f = lambda p: ((p[0] * p[1]).log() ** 2).sum() / 4  # half the squared distance to 1
        >>> estimate = manifold.at(x).hessian_trace(f, samples=100, generator=torch.Generator().manual_seed(0))
        >>> abs(estimate.mean - 2) < 4 * estimate.standard_error
        True
        """
        if samples < 2:
            raise ValueError(f"a standard error needs at least 2 samples; found samples = {samples}")
        draws = [self.sample(generator) for _ in range(samples)]
        values = torch.stack([self.inner(v, self.hessian_product(loss, v)).sum() for v in draws])
        return Estimate(float(values.mean()), float(values.std() / math.sqrt(samples)))

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """A standard Gaussian vector of the horizontal space, in the metric at the point.

        >>> xi = manifold.at(x).sample(torch.Generator().manual_seed(0))
        >>> torch.allclose(xi[0] / x[0], xi[1] / x[1])
        True
        """
        x = self.point
        device = x.device if generator is None else generator.device
        z = torch.randn(x.shape, dtype=x.dtype, device=device, generator=generator).to(x)
        return self.vector(self.horizontal(z))


def linearised(space: HorizontalSpace, z: Tensor, order: str, out: Rows) -> PullBack:
    """`HorizontalSpace.linearise` by autograd."""
    with torch.enable_grad():
        leaf = z.detach().requires_grad_()
        image = space.move(leaf, order)
    write_rows(image.detach(), out)

    def pull_back(egrad: Rows, into: Tensor) -> None:
        into.copy_(space.horizontal(torch.autograd.grad(image, leaf, join_rows(egrad, image))[0]))

    return pull_back


def require_followed(y: Tensor, reached: Tensor) -> None:
    """Raise GeodesicError unless the ends y of exact geodesics are finite and got beyond t = 0."""
    if not (has_values(y) and has_values(reached)):
        return
    lost = int((~(reached > 0)).sum())
    if lost or not bool(torch.isfinite(y).all()):
        raise GeodesicError(
            f"a geodesic should end at finite entries of {y.dtype} beyond t = 0; found "
            f"{f'{lost} that could not start' if lost else 'NaN or infinity'}: take a shorter vector of finite entries"
        )


def write_rows(x: Tensor, out: Rows) -> None:
    """The rows of x (..., rows, h) into several tensors."""
    for part, rows in zip(out, x.split([part.shape[-2] for part in out], dim=-2), strict=True):
        part.copy_(rows)


def join_rows(parts: Rows, like: Tensor) -> Tensor:
    """The tensors as one (..., rows, h), in the dtype of `like`; a single one is not copied."""
    return (torch.cat(list(parts), dim=-2) if len(parts) > 1 else parts[0]).to(like.dtype)


def power(metric: Metric) -> float:
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


def unsqueeze(x: Tensor, ndim: int) -> Tensor:
    return x.reshape(x.shape + (1,) * ndim)
