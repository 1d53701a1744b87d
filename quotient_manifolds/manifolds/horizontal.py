"""Define the horizontal space at a point: the tangent space that everything else is built on."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from quotient_manifolds.check import check_integer, check_number, check_one_of
from quotient_manifolds.derivatives import differentiated, transformed, values
from quotient_manifolds.linalg import FullPrecision, full_precision, length

METRICS = {"inv": 0.0, "mix": 1.0}
"""The metrics of [paper, Eq. 5, 6, 9, 10] as members of a family: a metric is a number t, and these have names."""

Metric = str | float
"""A name in `METRICS`, or a number t: the weights of the metric are the 2t-th powers of the singular values."""

GEODESICS = ("first", "second", "exact")
"""How far a geodesic is followed: its Taylor polynomial of degree 1 or 2 ([paper, Eq. 4]), or the curve itself."""

TOO_LONG = "if steps of an optimizer led there, take a smaller learning rate (lr), which is a length in the metric"
NOT_FINITE = f"the entries of a point must be finite. Found NaN or infinity: {TOO_LONG}"

PRECISIONS = (torch.float32, torch.float64)

Rows = Sequence[Tensor]
"""A point whose rows lie in several tensors, (..., k, h) each, as the weights of a network do."""

PullBack = Callable[[Rows, Tensor], None]
"""Writes into the second argument the horizontal gradient in z, from the Euclidean one at the point moved to."""

Linearised = Callable[[Tensor, Rows], PullBack]
"""Writes the point that z moves to into the second argument, and returns the pull-back there."""


class GeodesicError(ValueError):
    """Report that a geodesic leaves the manifold before the time asked for, or cannot be followed in floating point."""


class HorizontalSpace(FullPrecision, abc.ABC):
    """Represent the horizontal space H_x = V_x^perp at a point x of the total space, factored once; immutable.

    Every tangent vector eta has *orthonormal coordinates* z, a tensor of the same shape with |z|_F = |eta|_x. In them
    the metric is the Frobenius product, so a whole model's tangent space is one Euclidean space. Leading dimensions of
    the point are a batch; vectors broadcast against it. Examples: `x = torch.tensor([[1.0, 2.0], [4.0, 8.0]])` and
    `space = DiagonalQuotient("inv").at(x)`.
    """

    def __init__(self, point: Tensor, ndim: int = 2) -> None:
        self.point = point.clone()  # later writes to the caller's tensor would part it from what was factored
        self.dims = tuple(range(-ndim, 0))  # the dimensions of one point; those before are the batch

    @abc.abstractmethod
    def coordinates(self, eta: Tensor) -> Tensor:
        """Compute orthonormal coordinates z of a tangent vector eta: |z|_F = |eta|_x. Same shape.

        >>> space.coordinates(x)
        tensor([[1., 1.],
                [1., 1.]])
        """

    @abc.abstractmethod
    def vector(self, z: Tensor) -> Tensor:
        """Return the tangent vector with coordinates z; the inverse of `coordinates`.

        >>> space.vector(torch.ones(2, 2))
        tensor([[1., 2.],
                [4., 8.]])
        """

    @abc.abstractmethod
    def covector(self, egrad: Tensor) -> Tensor:
        """Compute coordinates of the Riemannian gradient from the Euclidean one: the adjoint of `vector`.

        >>> space.covector(torch.ones(2, 2))
        tensor([[1., 2.],
                [4., 8.]])
        """

    @abc.abstractmethod
    def project(self, z: Tensor) -> Tensor:
        """Compute coordinates of the horizontal part: the orthogonal projection off the vertical space.

        >>> space.project(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        tensor([[2., 3.],
                [2., 3.]])
        """

    def from_balanced(self, z: Tensor) -> Tensor:
        """Convert coordinates at the balanced representative to coordinates here, of the same quotient vector.

        >>> bool((space.from_balanced(torch.ones(2, 2)) == 1).all())
        True
        """
        return z

    @abc.abstractmethod
    def _step(self, z: Tensor, order: str) -> Tensor:
        """Compute gamma_z(1) - x for the Taylor polynomial of degree 1, xi, or 2, xi - Gamma(xi, xi) / 2."""

    @abc.abstractmethod
    def _exact(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the end of the exact geodesic, and the time in (0, 1] that was reached, shape (...,)."""

    @abc.abstractmethod
    def relative_speed(self, z: Tensor) -> Tensor:
        """Compute the initial speed of the geodesic with velocity z, relative to the point. Shape (...,).

        It is an invariant of the orbit, in float64. If it is small, Taylor polynomials are near the geodesic at t = 1:
        degree 1 up to its square, degree 2 up to its cube.

        >>> space.relative_speed(space.coordinates(torch.tensor([[0.1, -0.6], [0.4, -2.4]])))
        tensor(0.3000, dtype=torch.float64)
        """

    def follow(self, z: Tensor, order: str = "second") -> tuple[Tensor, Tensor]:
        """Follow the geodesic with horizontal initial velocity z to t = 1, or to where it leaves the manifold.

        Returns the point (differentiable in z) and the time reached, in (0, 1], shape (...,). The geodesic ball
        [paper, Eq. 3] holds only points that are reached. Raises `GeodesicError` where floating point cannot follow.

        >>> space = DiagonalQuotient("mix").at(x)
        >>> point, reached = space.follow(space.coordinates(-x), "exact")
        >>> f"{float(reached):.3f}"
        '0.500'
        """
        check_one_of("order of the geodesic", order, GEODESICS)
        if order != "exact":
            y = self.point + self._step(z, order)
            return y, torch.ones(y.shape[: y.ndim - len(self.dims)], dtype=y.dtype, device=y.device)
        y, reached = self._exact(z)
        require_reached(values(reached), values(y).detach())
        return y, reached

    def linearised(self, order: str) -> Linearised:
        """Prepare to follow many geodesics of one order from here, each with the adjoint of its derivative.

        What depends on the point alone is computed here, once. Returns a function (z, out) -> pull-back that writes the
        rows of follow(z, order) into `out`; z must not change while the pull-back is in use. Nothing is in any graph.

        >>> u, v, gradient = torch.empty(1, 2), torch.empty(1, 2), torch.empty(2, 2)
        >>> pull_back = space.linearised("second")(torch.zeros(2, 2), (u, v))
        >>> v
        tensor([[4., 8.]])
        >>> pull_back((torch.ones(1, 2), torch.ones(1, 2)), gradient)
        >>> torch.equal(gradient, space.project(space.covector(torch.ones(2, 2))))
        True
        """

        @full_precision
        def linearise(z: Tensor, out: Rows) -> PullBack:
            with torch.enable_grad():
                leaf = z.detach().requires_grad_()
                image = self.follow(leaf, order)[0]
            for part, rows in zip(out, image.detach().split([part.shape[-2] for part in out], dim=-2), strict=True):
                part.copy_(rows)

            @full_precision
            def pull_back(egrad: Rows, into: Tensor) -> None:
                into.copy_(self.project(torch.autograd.grad(image, leaf, join_rows(egrad, image))[0]))

            return pull_back

        return linearise

    def inner(self, eta: Tensor, zeta: Tensor) -> Tensor:
        """Compute the metric <eta, zeta>_x at the point. Shape (...,).

        >>> space.inner(x, 2 * x)
        tensor(8.)
        """
        z = self.coordinates(eta)
        w = z if zeta is eta else self.coordinates(zeta)
        return (z.double() * w).sum(dim=self.dims).to(z.dtype)

    def norm(self, eta: Tensor) -> Tensor:
        """Compute |eta|_x, with gradient 0 (not NaN) at eta = 0. Shape (...,).

        >>> space.norm(x)
        tensor(2.)
        """
        return length(self.coordinates(eta), self.dims)

    def proju(self, eta: Tensor) -> Tensor:
        """Project a tangent vector horizontally.

        It projects twice: the second pass removes the vertical part that rounding left at an ill-conditioned point.

        >>> space.proju(torch.tensor([[2.0, 2.0], [0.0, 0.0]]))
        tensor([[1., 1.],
                [4., 4.]])
        """
        for _ in range(2):
            z = self.coordinates(eta)
            # eta less its vertical part, not the vector of project(z): a horizontal eta comes back to the last digit
            eta = eta - self.vector(z - self.project(z))
        return eta

    def gradient(self, egrad: Tensor) -> Tensor:
        """Compute the horizontal Riemannian gradient: <gradient, xi>_x = egrad . xi for every horizontal xi.

        >>> loss = lambda p: (p[0] * p[1]).sum()
        >>> manifold.at(x).gradient(torch.func.grad(loss)(x)) / x  # relative changes u v, equal for both
        tensor([[ 4., 16.],
                [ 4., 16.]])
        """
        return self.vector(self.project(self.covector(egrad)))

    def geodesic(self, xi: Tensor, t: float | Tensor = 1.0, order: str = "second") -> Tensor:
        """Compute the point gamma_xi(t) of the geodesic through the point with horizontal velocity xi.

        Vectors that are not horizontal are projected first. `t` is a number, or broadcasts against the batch, so that
        there may be many times at once. Raises `GeodesicError` if the exact geodesic leaves the manifold before t.

        >>> space.geodesic(x, torch.tensor([0.0, 1.0]), "exact")[:, 0]
        tensor([[1.0000, 2.0000],
                [2.7183, 5.4366]])
        """
        z = self.project(self.coordinates(xi))
        require_finite_velocity(z)
        time = torch.as_tensor(t, dtype=z.dtype, device=z.device)
        if isinstance(t, Tensor) or t != 1:
            z = unsqueeze(time, len(self.dims)) * z
        y, reached = self.follow(z, order)
        if some(reached < 1):
            # sums of the same two are in the same shape under torch.func.vmap
            share, times = (values(x).detach().flatten() for x in (reached + 0 * time, 0 * reached + time))
            earliest = share.argmin()
            wanted = float(times[earliest])
            end = wanted * float(share[earliest])
            raise GeodesicError(
                f"the geodesic must reach t = {wanted:g}. Found that it leaves the manifold at t = {end:.6g}, "
                "where its metric degenerates: take a shorter vector, or metric='inv', whose geodesics never end"
            )
        return y

    def _retract(self, xi: Tensor) -> Tensor:
        """Compute the end of an optimizer's step: along the second-order geodesic, shortened if that is too fast."""
        return self.geodesic(xi)

    def hessian(self, egrad: Tensor, ehess: Tensor, xi: Tensor) -> Tensor:
        """Apply the Riemannian Hessian to xi, from the Euclidean gradient and the Euclidean Hessian times xi.

        It is the Euclidean Hessian of f(gamma_z) at z = 0 along second-order geodesics: that of f itself in
        coordinates, plus egrad . D^2 gamma. Horizontal, self-adjoint on horizontal vectors. [Boumal 2023, Prop. 5.44,
        Sec. 9.12]

        >>> f = lambda p: (p[0] * p[1]).log().sum()  # linear along the geodesics of inv
        >>> egrad, ehess = torch.func.jvp(torch.func.grad(f), (x,), (x,))
        >>> bool(manifold.at(x).hessian(egrad, ehess, x).norm() < 1e-5)
        True
        """
        first = self.covector(egrad)  # the part of the slope that does not come from the geodesic's bend
        # the bend is quadratic in z, so its gradient at z is its Hessian times z
        z = self.project(self.coordinates(xi))

        def paired(z: Tensor) -> Tensor:
            return (egrad * self.follow(z)[0]).sum()

        if transformed() or differentiated(self.point, egrad, xi):
            slope = torch.func.grad(paired)(z)
        else:  # sooner
            with torch.enable_grad():
                (slope,) = torch.autograd.grad(paired(z := z.detach().requires_grad_()), z)
        return self.vector(self.project(self.covector(ehess) + (slope - first)))

    def hessian_product(self, loss: Callable[[Tensor], Tensor], xi: Tensor) -> Tensor:
        """Apply the Riemannian Hessian of a twice differentiable loss (point -> scalar) to xi, by autograd.

        >>> f = lambda p: ((p[0] * p[1]).log() ** 2).sum() / 8
        >>> manifold.at(x).hessian_product(f, x) / x
        tensor([[0.5000, 0.5000],
                [0.5000, 0.5000]])
        """
        way, again = self.project(self.coordinates(xi)), differentiated(self.point, xi)

        def lifted(z: Tensor) -> Tensor:
            return loss(self.follow(self.project(z))[0])

        if transformed():  # where graphs alone would miss what is mapped
            (product,) = torch.func.vjp(torch.func.grad(lifted), torch.zeros_like(self.point))[1](way)
        else:  # a loss may do what torch.func cannot
            with torch.enable_grad():
                z = torch.zeros_like(self.point, requires_grad=True)
                (slope,) = torch.autograd.grad(lifted(z), z, create_graph=True)
                (product,) = torch.autograd.grad(slope, z, way, create_graph=again)
        return self.vector(product)

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw a standard Gaussian vector of the horizontal space, in the metric at the point.

        >>> xi = manifold.at(x).sample(torch.Generator().manual_seed(0))
        >>> torch.allclose(xi[0] / x[0], xi[1] / x[1])
        True
        """
        x = self.point
        device = x.device if generator is None else generator.device
        z = torch.randn(x.shape, dtype=x.dtype, device=device, generator=generator).to(x)
        return self.vector(self.project(z))


def join_rows(parts: Rows, like: Tensor) -> Tensor:
    """Join tensors into one (..., rows, h), in the dtype of `like`; a single one is not copied."""
    return (torch.cat(list(parts), dim=-2) if len(parts) > 1 else parts[0]).to(like.dtype)


def power(metric: Metric) -> float:
    """Return the number t of a metric."""
    if isinstance(metric, (int, float)) and not isinstance(metric, bool) and math.isfinite(metric):
        return float(metric)
    check_one_of("metric", metric, METRICS, " or a finite number")
    return METRICS[str(metric)]


def require_reached(reached: Tensor, y: Tensor) -> None:
    """Raise GeodesicError unless geodesics started, and end at finite entries."""
    lost = int((~(reached > 0)).sum())
    if lost or not bool(y.isfinite().all()):
        found = f"{lost} that could not start" if lost else "NaN or infinity"
        raise GeodesicError(
            f"a geodesic must end at finite entries of {y.dtype} beyond t = 0. Found {found}: take a shorter vector"
        )


def require_finite_velocity(z: Tensor) -> None:
    """Raise ValueError if an entry is NaN or infinite."""
    if not all_finite(z):
        raise ValueError(f"the velocity of a geodesic must be finite. Found NaN or infinity: {TOO_LONG}")


def unsqueeze(x: Tensor, ndim: int) -> Tensor:
    """Append `ndim` dimensions of size 1."""
    return x.reshape(x.shape + (1,) * ndim)


def require_sizes(n: Any, m: Any, eps: Any) -> None:
    """Raise ValueError unless n and m are integers of at least 1, and eps a finite number >= 0."""
    for name, k in (("n", n), ("m", m)):
        check_integer(f"{name}, a number of rows,", k, 1)
    check_number("eps", eps)


def require_tensor(x: Any, name: str, complex_too: bool = False) -> None:
    """Raise TypeError unless x is a tensor, ValueError unless its entries are of single or double precision."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch tensor. Found {type(x).__name__}")
    if x.dtype not in PRECISIONS and not (complex_too and x.is_complex()):
        raise ValueError(f"{name} must be in float32 or float64. Found {x.dtype}: cast it, e.g. with .float()")


def some(condition: Tensor) -> bool:
    """Return whether any entry is True, of all that is mapped over."""
    return bool(values(condition).any())


def all_finite(x: Tensor) -> bool:
    """Return whether no entry is NaN or infinite, of all that is mapped over."""
    x = values(x).detach()
    # A sum of finite entries can overflow, so only a finite one decides: one pass instead of several.
    return bool(x.sum().isfinite()) or bool(torch.isfinite(x).all())


def require_vector(x: Tensor, eta: Tensor, ndim: int = 2, what: str = "vector and point") -> None:
    """Raise ValueError unless eta has the trailing shape, dtype and device of the point x and broadcasts against it."""
    require_tensor(eta, "a vector")
    shapes = f"Found shape {tuple(eta.shape)} at {tuple(x.shape)}"
    if eta.ndim < ndim or eta.shape[-ndim:] != x.shape[-ndim:]:
        raise ValueError(f"{what} must end in one shape, {tuple(x.shape[-ndim:])}. {shapes}")
    if (eta.dtype, eta.device) != (x.dtype, x.device):
        found = f"{eta.dtype} on {eta.device} at a point of {x.dtype} on {x.device}"
        raise ValueError(f"{what} must have one dtype and one device. Found {found}: cast or move one")
