"""Wrap the manifolds for the solvers of pymanopt."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from quotient_manifolds.check import needs
from quotient_manifolds.manifolds import HorizontalSpace, QuotientManifold

__all__ = ["as_pymanopt"]

Array = Any  # a float64 numpy array


def as_pymanopt(manifold: QuotientManifold, shape: int | tuple[int, ...]) -> Any:
    """Return a `pymanopt.manifolds.manifold.Manifold` of the points of `shape`, one point at a time, in float64.

    A point is one array (`point_layout` 1), a representative of its orbit; tangent vectors are horizontal lifts.
    `retraction` is the second-order geodesic, `exp` the exact one. `log`, `dist` and `pair_mean` (the midpoint of a
    geodesic) exist if the manifold has logarithms; exp(x, log(x, y)) lies on the orbit of y. Random points and vectors
    come from torch's global generator.

    Raises ValueError unless `shape` is the shape of one point, and ImportError if pymanopt is not installed.

    >>> view = as_pymanopt(FixedRankQuotient(6, 4, "mix"), (10, 2))
    >>> view.dim, view.point_layout
    (16, 1)
    >>> x = view.random_point()
    >>> y = view.retraction(x, 0.1 * view.random_tangent_vector(x))
    >>> y.shape, y.dtype
    ((10, 2), dtype('float64'))
    """
    if not isinstance(manifold, QuotientManifold):
        raise TypeError(f"manifold must be a QuotientManifold. Found {manifold!r}")
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if len(shape) != manifold.ndim:
        raise ValueError(f"shape must be that of one point, with {manifold.ndim} dimensions. Found {shape}")
    manifold._require_shape(shape)
    with needs("The view of a manifold", "pymanopt", "pymanopt"):
        import pymanopt
    return type("PymanoptView", (_View, pymanopt.manifolds.manifold.Manifold), {})(manifold, shape)


class _View:
    """Implement the methods of the view. `as_pymanopt` adds pymanopt's abstract class, which may not be installed.

    Solvers use one point several times and transport vectors between two, so the manifold caches its last two spaces.
    """

    def __init__(self, manifold: QuotientManifold, shape: tuple[int, ...]) -> None:
        super().__init__(f"{manifold} of shape {shape}", _dimension(manifold, shape))  # type: ignore[call-arg]
        self._manifold, self._shape = manifold, shape

    def _at(self, point: Array) -> HorizontalSpace:
        return self._manifold._at(_tensor(point))

    @property
    def typical_dist(self) -> float:
        """Return |x|_x at a random point x: for `inv` sqrt(2 h), for `mix` sqrt(2) |G H^T|.

        TrustRegions bounds its steps by it, unless `Delta_bar` is given; give it if points have another size.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            x = self.random_point()
        return self.norm(x, x)

    def inner_product(self, point: Array, tangent_vector_a: Array, tangent_vector_b: Array) -> float:
        return float(self._at(point).inner(_tensor(tangent_vector_a), _tensor(tangent_vector_b)))

    def norm(self, point: Array, tangent_vector: Array) -> float:
        return float(self._at(point).norm(_tensor(tangent_vector)))

    def projection(self, point: Array, vector: Array) -> Array:
        return _array(self._at(point).proju(_tensor(vector)))

    to_tangent_space = projection

    def random_point(self) -> Array:
        return _array(self._manifold.random(*self._shape, dtype=torch.float64).as_subclass(Tensor))

    def random_tangent_vector(self, point: Array) -> Array:
        vector = _array(self._at(point).sample())
        return vector / self.norm(point, vector)

    def zero_vector(self, point: Array) -> Array:
        return np.zeros(self._shape)

    def euclidean_to_riemannian_gradient(self, point: Array, euclidean_gradient: Array) -> Array:
        return _array(self._at(point).gradient(_tensor(euclidean_gradient)))

    def euclidean_to_riemannian_hessian(
        self, point: Array, euclidean_gradient: Array, euclidean_hessian: Array, tangent_vector: Array
    ) -> Array:
        given = (_tensor(x) for x in (euclidean_gradient, euclidean_hessian, tangent_vector))
        return _array(self._at(point).hessian(*given))

    def retraction(self, point: Array, tangent_vector: Array) -> Array:
        return _array(self._at(point).geodesic(_tensor(tangent_vector)))

    def exp(self, point: Array, tangent_vector: Array) -> Array:
        return _array(self._at(point).geodesic(_tensor(tangent_vector), order="exact"))

    def transport(self, point_a: Array, point_b: Array, tangent_vector_a: Array) -> Array:
        return self.projection(point_b, tangent_vector_a)

    def log(self, point_a: Array, point_b: Array) -> Array:
        return _array(self._manifold.logmap(_tensor(point_a), _tensor(point_b)))

    def pair_mean(self, point_a: Array, point_b: Array) -> Array:
        """Return the midpoint of the geodesic from a to the orbit of b, if the manifold has logarithms."""
        return self.exp(point_a, self.log(point_a, point_b) / 2)

    def dist(self, point_a: Array, point_b: Array) -> float:
        return float(self._manifold.dist(_tensor(point_a), _tensor(point_b)))


def _dimension(manifold: QuotientManifold, shape: tuple[int, ...]) -> int:
    """Return the dimension of the quotient: the rank of many random horizontal vectors at a random point."""
    generator = torch.Generator().manual_seed(0)
    x = manifold.random(*shape, dtype=torch.float64, generator=generator).as_subclass(Tensor)
    z = torch.randn(2 * x.numel(), *shape, dtype=torch.float64, generator=generator)
    return int(torch.linalg.matrix_rank(manifold.at(x).project(z).flatten(1)))


def _tensor(array: Array) -> Tensor:
    """Return a float64 tensor. Raises TypeError for other than real arrays, whose imaginary part would be dropped."""
    if not isinstance(array, (np.ndarray, np.generic)) or array.dtype.kind not in "fiu":
        found = getattr(array, "dtype", type(array).__name__)
        raise TypeError(f"points and vectors must be numpy arrays of real numbers. Found {found}")
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float64))


def _array(tensor: Tensor) -> Array:
    return tensor.detach().numpy()
