"""Show our manifolds to pymanopt: a view its solvers run on, and one function that runs them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quotient_manifolds.manifolds import DiagonalQuotient, FixedRankQuotient, HorizontalSpace, QuotientManifold

__all__ = ["SOLVERS", "Minimum", "as_pymanopt", "minimize"]

Array = Any  # a float64 numpy array, or the tuple of them that is a point of some of pymanopt's own manifolds

SOLVERS: Mapping[str, str] = {
    "trust-regions": "TrustRegions",
    "conjugate-gradient": "ConjugateGradient",
    "steepest-descent": "SteepestDescent",
}
"""Solvers of `minimize`: our names, and pymanopt's."""


def as_pymanopt(manifold: QuotientManifold, shape: tuple[int, ...]) -> Any:
    """Return a `pymanopt.manifolds.manifold.Manifold` of the points of `shape`, one point at a time, in float64.

    A point is one array (`point_layout` 1), a representative of its orbit; tangent vectors are horizontal lifts.
    `retraction` is the second-order geodesic, `exp` the exact one; `log`, `dist` and `pair_mean`, the middle of a
    geodesic, exist where the manifold has logarithms, and exp(x, log(x, y)) lies on the orbit of y. Random points and
    vectors come from torch's global generator.

    Raises ValueError for a shape that is not one point, ImportError where pymanopt is not installed.

    >>> view = as_pymanopt(FixedRankQuotient(6, 4, "mix"), (10, 2))
    >>> view.dim, view.point_layout
    (16, 1)
    >>> x = view.random_point()
    >>> y = view.retraction(x, 0.1 * view.random_tangent_vector(x))
    >>> y.shape, y.dtype
    ((10, 2), dtype('float64'))
    """
    if not isinstance(manifold, QuotientManifold):
        raise TypeError(f"manifold should be one of quotient_manifolds; found {manifold!r}")
    if not isinstance(shape, (tuple, list)) or not all(isinstance(k, int) for k in shape):
        raise TypeError(f"shape should be a tuple of integers, that of one point; found {shape!r}")
    base = _pymanopt().manifolds.manifold.Manifold
    if len(shape) != manifold.ndim:
        raise ValueError(f"shape should be that of one point, with {manifold.ndim} dimensions; found {tuple(shape)}")
    ok, reason = manifold._check_shape(tuple(shape), "x")
    if not ok:
        raise ValueError(reason)
    return type("PymanoptView", (_View, base), {})(manifold, tuple(shape))


class _View:
    """Implement the methods of the view. It is mixed with pymanopt's abstract class only when one is asked for.

    Solvers ask many things at one point, and vectors move between two: the manifold keeps its last two spaces.
    """

    def __init__(self, manifold: QuotientManifold, shape: tuple[int, ...]) -> None:
        super().__init__(f"{manifold} of shape {shape}", _dimension(manifold, shape))  # type: ignore[call-arg]
        self._manifold, self._shape = manifold, shape

    def _at(self, point: Array) -> HorizontalSpace:
        return self._manifold._at(_tensor(point))

    @property
    def typical_dist(self) -> float:
        """Return |x|_x at a random point x: for `inv` sqrt(2 h), for `mix` sqrt(2) |G H^T|.

        It bounds the steps of TrustRegions, unless `Delta_bar` is given: do that where points are of another size.
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
        """Return the middle of the geodesic from a to the orbit of b, where the manifold has logarithms."""
        return self.exp(point_a, self.log(point_a, point_b) / 2)

    def dist(self, point_a: Array, point_b: Array) -> float:
        return float(self._manifold.dist(_tensor(point_a), _tensor(point_b)))


@dataclass(frozen=True)
class Minimum:
    """Tell where a solver of pymanopt ended, why, and what it took."""

    point: Array
    cost: float
    reason: str
    seconds: float
    costs: int  # how often the cost was evaluated
    gradients: int
    hessians: int


def minimize(
    view: Any,
    start: Array,
    cost: Callable[..., float],
    gradient: Callable[..., Array],
    hessian: Callable[..., Array] | None = None,
    *,
    solver: str = "conjugate-gradient",
    target: float = -math.inf,
    riemannian: bool = False,
    run: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Minimum:
    """Minimise a cost on a pymanopt manifold with one of `SOLVERS`, until a cost of at most `target` is evaluated.

    The target is the one stopping rule that does not depend on the manifold's metric. `gradient(point)` and
    `hessian(point, vector)` are Euclidean, or Riemannian with `riemannian=True`; points of several arrays are spread
    over the arguments, as pymanopt does. `settings` go to the solver's constructor, `run` to its `run`.

    Raises ValueError for an unknown solver, or TrustRegions without a Hessian.
    """
    if solver not in SOLVERS:
        raise ValueError(f"solver should be one of {', '.join(map(repr, SOLVERS))}; found {solver!r}")
    if solver == "trust-regions" and hessian is None:
        raise ValueError("trust-regions needs the function `hessian`; give it, or use 'conjugate-gradient'")
    library = _pymanopt()
    counted = _Counted(cost, target)
    kind = "riemannian" if riemannian else "euclidean"
    numpy = library.function.numpy(view)
    functions = {f"{kind}_gradient": numpy(counted.count("gradients", gradient))}
    if hessian is not None:
        functions[f"{kind}_hessian"] = numpy(counted.count("hessians", hessian))
    problem = library.Problem(view, numpy(lambda *point: counted.cost(*point)), **functions)
    optimizer = getattr(library.optimizers, SOLVERS[solver])(**{"verbosity": 0, **settings})
    return counted.run(lambda: optimizer.run(problem, initial_point=start, **(run or {})))


class _Reached(Exception):
    """Report that the target was reached: the way out of a solver that knows no such stopping rule."""


class _Counted:
    """Wrap a cost: count evaluations of it and its derivatives, and stop the solver at the target."""

    def __init__(self, function: Callable[..., float], target: float) -> None:
        self._function, self._target = function, target
        self._best: tuple[float, Array] = (math.inf, None)
        self._counts = {"costs": 0, "gradients": 0, "hessians": 0}

    def cost(self, *point: Array) -> float:
        self._counts["costs"] += 1
        value = self._function(*point)
        if value < self._best[0]:
            self._best = value, point[0] if len(point) == 1 else point
        if value <= self._target:
            raise _Reached
        return value

    def count(self, name: str, function: Callable[..., Array]) -> Callable[..., Array]:
        def counted(*arguments: Array) -> Array:
            self._counts[name] += 1
            return function(*arguments)

        return counted

    def run(self, solve: Callable[[], Any]) -> Minimum:
        before = time.perf_counter()
        try:
            result = solve()
            point, cost, reason = result.point, float(result.cost), result.stopping_criterion
        except _Reached:
            (cost, point), reason = self._best, f"the cost reached the target {self._target:.3g}"
        return Minimum(point, cost, reason, time.perf_counter() - before, **self._counts)


def _dimension(manifold: QuotientManifold, shape: tuple[int, ...]) -> int:
    """Return the dimension of the quotient: closed forms, or the size of a point less the rank of its vertical part.

    That rank is found by applying the projection to more and more random vectors, until they are dependent.
    """
    size = math.prod(shape)
    if isinstance(manifold, FixedRankQuotient):
        return (shape[0] - shape[1]) * shape[1]
    if isinstance(manifold, DiagonalQuotient):
        return shape[1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        space = manifold.at(manifold.random(*shape, dtype=torch.float64).as_subclass(Tensor))
        probes = 8
        while True:
            z = torch.randn(probes, *shape, dtype=torch.float64)
            vertical = (z - space.project(z)).flatten(1)
            # relative to the probes, not to the largest vertical part: there may be no vertical vectors at all
            rank = int((torch.linalg.svdvals(vertical) > 1e-8 * torch.linalg.matrix_norm(z.flatten(1))).sum())
            if rank < min(probes, size):
                return size - rank
            probes = min(2 * probes, size + 1)


def _tensor(array: Array) -> Tensor:
    """Return a float64 tensor; TypeError for what is no array of real numbers: an imaginary part would be dropped."""
    kind = np.asarray(array).dtype if isinstance(array, (np.ndarray, np.generic)) else type(array).__name__
    if not isinstance(kind, np.dtype) or kind.kind not in "fiu":
        raise TypeError(f"points and vectors should be numpy arrays of real numbers; found {kind}")
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float64))


def _array(tensor: Tensor) -> Array:
    return tensor.detach().numpy()


def _pymanopt() -> ModuleType:
    try:
        import pymanopt
    except ImportError as error:
        raise ImportError(
            'the view of a manifold needs the pymanopt library: pip install "quotient-manifolds[pymanopt]".'
        ) from error
    return pymanopt
