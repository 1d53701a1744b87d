"""Build quotient manifolds from horizontal spaces, with the interface of geoopt's manifolds."""

from __future__ import annotations

import abc
import math
from typing import Any

import geoopt
import torch
from geoopt.manifolds.base import ScalingInfo
from torch import Tensor

from quotient_manifolds.derivatives import has_values, in_no_graph
from quotient_manifolds.linalg import FullPrecision, full_precision, length
from quotient_manifolds.manifolds.distance import Distance
from quotient_manifolds.manifolds.horizontal import (
    NOT_FINITE,
    HorizontalSpace,
    all_finite,
    require_tensor,
    require_vector,
    unsqueeze,
)

REMEMBERED = 2
"""Number of cached spaces, for the start and the end of an optimizer's step; the next step starts at the end."""

Answer = tuple[bool, str | None]
"""Whether a check is passed, and the reason if not."""


class QuotientManifold(FullPrecision, geoopt.Manifold, abc.ABC):
    """Represent a manifold M / G given by points of the total space M; tangent vectors are horizontal lifts.

    What geoopt asks of a manifold is written here, on top of `at(x)`; subclasses give the spaces and the action, and
    say which shapes and which values are points, `_misfit` and `_fault`.

    Leading dimensions of a point are a batch. geoopt's methods (`inner`, `retr`, `transp`, ...) keep the factorisations
    of the last two points, so that a step of an optimizer factors each point once. Under `torch.func.vmap` points are
    not checked to lie on the manifold. Autocast, which is for networks, is off inside, also in given functions.
    Manifolds of one class with the same parameters are equal. The examples use `manifold = DiagonalQuotient("inv")` and
    `x = torch.tensor([[1.0, 2.0], [4.0, 8.0]])`.
    """

    __scaling__ = geoopt.Manifold.__scaling__.copy()
    ndim = 2
    reversible = False
    vertical_equation: str
    """The equation that a horizontal vector satisfies, for messages."""
    settings: tuple[str, ...] = ()
    """The names of the parameters that a manifold is made with."""
    complex_group = False
    """Whether group elements may be complex."""
    passes_lower_rank = False
    """Whether training may begin at, and pass, what is in the closure of the manifold only."""
    t = 0.0
    """The number of the metric in its family, where there is one."""

    def __init__(self) -> None:
        super().__init__()
        self._recent: tuple[HorizontalSpace, ...] = ()  # replaced as a whole: threads can at worst lose an entry

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_recent": ()}  # copies and pickles begin empty

    def _key(self) -> tuple[Any, ...]:
        """Return a key that is equal for equal manifolds of one class."""
        return tuple(self.t if name == "metric" else getattr(self, name) for name in self.settings)

    def extra_repr(self) -> str:
        shown = [name for name in self.settings if name != "eps" or getattr(self, name)]
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash((type(self), self._key()))

    @abc.abstractmethod
    def _misfit(self, shape: tuple[int, ...]) -> str | None:
        """Say which shape the points of which manifold must have; None where `shape` is one."""

    def _fault(self, x: Tensor) -> str | None:
        """Say which equation a finite tensor of the right shape fails; None where it is a point."""
        return None

    @abc.abstractmethod
    def _space(self, x: Tensor, dtype: torch.dtype) -> HorizontalSpace:
        """Return `at(x)`."""

    def _element(self, x: Tensor) -> tuple[int, ...]:
        """Return the shape of a group element that acts on one point."""
        return ()

    @abc.abstractmethod
    def _act(self, A: Tensor, x: Tensor) -> Tensor:
        """Return `action(A, x)`."""

    @abc.abstractmethod
    def _balanced(self, x: Tensor) -> Tensor:
        """Return `balance(x)`."""

    def _orbit_gap(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor | float]:
        """Measure how far apart is what the orbits determine, and the size that its rounding is relative to. (...,)"""
        p, q = self.balance(x).flatten(-self.ndim), self.balance(y).flatten(-self.ndim)
        return length(p - q, -1), length(p, -1)

    def at(self, x: Tensor, *, dtype: torch.dtype | None = None) -> HorizontalSpace:
        """Return the horizontal space at x, factored: keep it to do many things at one point.

        Factored as x is given, rounded to `dtype`, by default that of x. Raises ValueError unless x is a point; a
        `FixedRankQuotient` takes pairs of lower rank, too.

        >>> manifold.at(x).norm(x)
        tensor(2.)
        """
        (self._require_finite if self.passes_lower_rank else self._require_points)(x=x)
        return self._space(x, dtype or x.dtype)

    def action(self, A: Tensor, x: Tensor) -> Tensor:
        """Apply the group element A to the point (or, where the action is linear, to a tangent vector) x.

        Shapes: x (..., *shape of a point), A as the class says, for each point or for all.

        >>> manifold.action(torch.tensor([2.0, 2.0]), x)
        tensor([[ 0.5000,  1.0000],
                [ 8.0000, 16.0000]])
        """
        self._require(x=x)
        require_tensor(A, "A, an element of the group,", self.complex_group)
        shape = self._element(x)
        if tuple(A.shape[A.ndim - len(shape) :]) != shape:
            wanted = ", ".join(["...", *map(str, shape)])
            raise ValueError(f"A, an element of the group, must have shape ({wanted}). Found {tuple(A.shape)}")
        return self._act(A, x)

    def balance(self, x: Tensor) -> Tensor:
        """Return the canonical representative of the orbit of x: the same tensor for every point of the orbit.

        >>> manifold.balance(x)
        tensor([[2., 4.],
                [2., 4.]])
        """
        (self._require_finite if self.passes_lower_rank else self._require_points)(x=x)
        return self._balanced(x)

    def same_orbit(self, x: Tensor, y: Tensor, *, rtol: float | None = None) -> Tensor:
        """Return whether x and y represent the same point of the quotient. Shape (...,).

        Compares what orbits determine: u v, G H^T, g k^H, a direction, a centred vector, or the canonical
        representative. It may differ by `rtol` (by default 64 machine epsilons) of what the entries of x and y allow.

        >>> manifold.same_orbit(x, manifold.balance(x))
        tensor(True)
        """
        self._require(x=x, y=y)
        gap, size = self._orbit_gap(*torch.broadcast_tensors(x, y))
        return gap <= (64 * torch.finfo(x.dtype).eps if rtol is None else rtol) * size

    def projx(self, x: Tensor) -> Tensor:
        """Return x itself, as a tensor off the manifold has no nearest point along orbits.

        >>> torch.equal(manifold.projx(x), x)
        True
        """
        self._require(x=x)
        return x

    def _at(self, x: Tensor) -> HorizontalSpace:
        """Return `at(x)`, or the space kept of an equal point; neither it nor its memory may be handed out."""
        self._require(x=x)
        if not lasts(x):
            return self.at(x)
        # Comparing values costs one pass over the point, little against a factorisation, and cannot be stale whoever
        # wrote to the tensor in whatever way. A space is of a private copy of the point and in no graph.
        for space in self._recent:
            if (space.point.dtype, space.point.device) == (x.dtype, x.device) and torch.equal(space.point, x):
                return space
        space = self.at(x.detach().as_subclass(Tensor))
        self._recent = (space, *self._recent[: REMEMBERED - 1])
        return space

    # geoopt's interface

    def inner(self, x: Tensor, u: Tensor, v: Tensor | None = None, *, keepdim: bool = False) -> Tensor:
        """Compute <u, v>_x; |u|_x^2 without v. Shape (...,), or (..., 1, 1) with `keepdim`.

        >>> manifold.inner(x, x, keepdim=True)
        tensor([[4.]])
        """
        return unsqueeze(self._at(x).inner(u, u if v is None else v), self.ndim if keepdim else 0)

    def norm(self, x: Tensor, u: Tensor, *, keepdim: bool = False) -> Tensor:
        """Compute |u|_x, with gradient 0 at u = 0. Shape (...,), or (..., 1, 1) with `keepdim`.

        >>> manifold.norm(x, x)
        tensor(2.)
        """
        return unsqueeze(self._at(x).norm(u), self.ndim if keepdim else 0)

    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        """Project u horizontally at x.

        >>> manifold.proju(x, torch.tensor([[2.0, 2.0], [0.0, 0.0]]))
        tensor([[1., 1.],
                [4., 4.]])
        """
        return self._at(x).proju(u)

    def egrad2rgrad(self, x: Tensor, u: Tensor) -> Tensor:
        """Compute the horizontal Riemannian gradient at x from the Euclidean gradient u [paper, App. B.5].

        >>> manifold.egrad2rgrad(x, torch.tensor([[4.0, 8.0], [1.0, 2.0]]))
        tensor([[  4.,  32.],
                [ 16., 128.]])
        """
        return self._at(x).gradient(u)

    def retr(self, x: Tensor, u: Tensor) -> Tensor:
        """Follow the second-order geodesic, x + u - Gamma(u, u) / 2 [paper, Eq. 4].

        Steps that are too fast for it are shortened where the space has a rule for that.

        >>> manifold.retr(x, 0.5 * x)
        tensor([[ 1.6250,  3.2500],
                [ 6.5000, 13.0000]])
        """
        return self._at(x)._retract(u)

    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        """Follow the exact geodesic to t = 1. Raises `GeodesicError` if it leaves the manifold earlier.

        >>> manifold.expmap(x, x)
        tensor([[ 2.7183,  5.4366],
                [10.8731, 21.7463]])
        """
        return self._at(x).geodesic(u, order="exact")

    def transp(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Transport a vector from x to y by horizontal projection at y.

        >>> manifold.transp(x, 2 * x, x)
        tensor([[1., 2.],
                [4., 8.]])
        """
        self._require(x=x, y=y)
        return self._at(y).proju(v)

    def dist(self, x: Tensor, y: Tensor, *, keepdim: bool = False) -> Tensor:
        """Compute the length of the geodesic that `logmap` finds; NotImplementedError where there is no logarithm.

        Its gradients are -log_x(y) / dist and -log_y(x) / dist, and 0 where dist is 0. Second derivatives exist where
        `logmap` is differentiable.

        >>> manifold.dist(x, 2 * x)
        tensor(1.3863)
        """
        return unsqueeze(self._distance(x, y, 1), self.ndim if keepdim else 0)

    @__scaling__(ScalingInfo(2))
    def dist2(self, x: Tensor, y: Tensor, *, keepdim: bool = False) -> Tensor:
        """Compute the square of `dist`, with the gradients -2 log_x(y) and -2 log_y(x), also where it is 0.

        >>> manifold.dist2(x, 2 * x)
        tensor(1.9218)
        """
        return unsqueeze(self._distance(x, y, 2), self.ndim if keepdim else 0)

    def _distance(self, x: Tensor, y: Tensor, power: int) -> Tensor:
        if in_no_graph(x, y):
            distance = self.norm(x, self.logmap(x, y))
            return distance if power == 1 else distance**power
        self._require(x=x, y=y)
        flat = (p.flatten(0, -self.ndim - 1) for p in torch.broadcast_tensors(x[None], y[None]))
        batch = torch.broadcast_shapes(x.shape, y.shape)[: -self.ndim]
        return Distance.apply(self, power, *flat)[0].reshape(batch)

    def _departure(self, x: Tensor, y: Tensor, log: Tensor) -> Tensor:
        """Return log_x(y), which is known to be `log`, as a function of both points that may be differentiated."""
        return self.logmap(x, y)

    def _arrival(self, x: Tensor, y: Tensor, log: Tensor) -> Tensor:
        """Return log_y(x) of the geodesic that starts with `log` = log_x(y), likewise."""
        return self.logmap(y, x)

    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        """Find the horizontal vector at x whose geodesic reaches the orbit of y, or raise NotImplementedError.

        >>> manifold.logmap(x, 2 * x) / x
        tensor([[0.6931, 0.6931],
                [0.6931, 0.6931]])
        """
        raise NotImplementedError(f"{self.name} has no logarithm, and so no distance")

    @__scaling__(ScalingInfo(u=-1))
    def geodesic(self, x: Tensor, u: Tensor, t: float | Tensor = 1.0, order: str = "second") -> Tensor:
        """Compute the point at time t of the geodesic from x with velocity u; `order` as in `GEODESICS`.

        >>> manifold.geodesic(x, x, 0.5)
        tensor([[ 1.6250,  3.2500],
                [ 6.5000, 13.0000]])
        """
        return self._at(x).geodesic(u, t, order)

    def random(self, *size: Any, dtype: Any = None, device: Any = None, generator: Any = None) -> geoopt.ManifoldTensor:
        """Draw a point of independent standard Gaussians, of the shape `size` = (..., *shape of a point).

        >>> DiagonalQuotient().random(5, 2, 3, generator=torch.Generator().manual_seed(0)).shape
        torch.Size([5, 2, 3])
        """
        if len(size) == 1 and isinstance(size[0], tuple):  # as geoopt's ProductManifold calls it
            (size,) = size
        self._require_shape(size)
        return geoopt.ManifoldTensor(torch.randn(size, dtype=dtype, device=device, generator=generator), manifold=self)

    # checks

    def _check_shape(self, shape: tuple[int, ...], name: str) -> Answer:
        wanted = self._misfit(tuple(shape))
        return (True, None) if wanted is None else (False, f"'{name}' on {wanted}. Found {tuple(shape)}")

    def _require_shape(self, shape: tuple[int, ...], name: str = "x") -> None:
        """Raise ValueError unless points have this shape."""
        fits, reason = self._check_shape(tuple(shape), name)
        if not fits:
            raise ValueError(reason)

    @full_precision
    def _check_point_on_manifold(self, x: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5) -> Answer:
        require_tensor(x, "x")
        reason = self._fault(x) if bool(torch.isfinite(x).all()) else NOT_FINITE
        return reason is None, reason

    @full_precision
    def _check_vector_on_tangent(self, x: Tensor, u: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5) -> Answer:
        """Count a vector as horizontal if its vertical part is at most `rtol` of it in the metric."""
        require_vector(x, u, self.ndim)
        if not bool(torch.isfinite(u).all()):
            return False, "the entries of a vector must be finite. Found NaN or infinity"
        if u.numel() == 0:
            return True, None
        space = self.at(x)
        z = space.coordinates(u)
        vertical, size = (length(part, space.dims) for part in (z - space.project(z), z))
        residual = float((vertical / size.clamp_min(torch.finfo(z.dtype).tiny)).max())
        if residual <= max(rtol, math.sqrt(torch.finfo(u.dtype).eps)):
            return True, None
        return False, f"{self.vertical_equation} fails: relative vertical part {residual:.3g}"

    def _require(self, **tensors: Tensor) -> None:
        """Raise TypeError or ValueError unless all have the dtype and shape of points, and go together."""
        first, *others = tensors.values()
        for name, x in tensors.items():
            require_tensor(x, name)
            self._require_shape(tuple(x.shape), name)
        for x in others:
            require_vector(first, x, self.ndim, "two points")

    def _require_points(self, **points: Tensor) -> None:
        """Raise also unless all are finite and lie on the manifold, as far as values are known."""
        self._require_finite(**points)
        for x in points.values():
            if has_values(x) and (reason := self._fault(x)):
                raise ValueError(reason)

    def _require_finite(self, **points: Tensor) -> None:
        """Raise also unless all entries are finite, as far as they are known."""
        self._require(**points)
        if not all(map(all_finite, points.values())):
            raise ValueError(NOT_FINITE)


def lasts(x: Tensor) -> bool:
    """Return whether what is computed from x now may be used at another time: it is in no graph, under no transform."""
    return (
        type(x) in (Tensor, torch.nn.Parameter, geoopt.ManifoldTensor, geoopt.ManifoldParameter)
        and in_no_graph(x)
        and not (x.is_inference() or torch.is_inference_mode_enabled())
        and torch._C._len_torch_dispatch_stack() == 0
    )
