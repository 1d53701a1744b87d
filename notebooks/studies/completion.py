"""Low-rank matrix completion: a matrix of rank h from some of its entries, on the quotient of pairs (G, H) by GL(h).

The n x m matrix G H^T is never formed: only its known entries are, and the Euclidean gradient is a sparse matrix times
a factor. The metric `mix` makes every step the one of a well-scaled problem, whatever the singular values are.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pymanopt
import scipy.sparse
import scipy.sparse.linalg
import torch

from quotient_manifolds.linalg import product_gap
from quotient_manifolds.manifolds import FixedRankQuotient, Metric
from quotient_manifolds.pymanopt import as_pymanopt

Array = np.ndarray[Any, np.dtype[Any]]

SOLVERS = {
    "trust-regions": "TrustRegions",
    "conjugate-gradient": "ConjugateGradient",
    "steepest-descent": "SteepestDescent",
}
"""Solvers of pymanopt, and the names of their classes."""


@dataclass(frozen=True)
class Completion:
    """Hold the known entries of G H^T, row by row, and the factors (G, H) they come from."""

    known: scipy.sparse.csr_array  # (n, m)
    rows: Array  # (entries,), the row of each of known.data; columns are known.indices
    truth: Array  # (n + m, h)

    @property
    def n(self) -> int:
        return int(self.known.shape[0])

    @property
    def rank(self) -> int:
        return int(self.truth.shape[1])

    def entries(self, G: Array, H: Array) -> Array:
        """Compute (G H^T)_ij at the known places, in their order. Shapes: G (n, h), H (m, h)."""
        return np.einsum("ij,ij->i", G.take(self.rows, axis=0), H.take(self.known.indices, axis=0))

    def sparse(self, values: Array) -> scipy.sparse.csr_array:
        """Return the n x m matrix with these values at the known places."""
        return scipy.sparse.csr_array((values, self.known.indices, self.known.indptr), shape=self.known.shape)

    @property
    def share(self) -> float:
        """Return the share of entries that is known."""
        return float(self.known.nnz) / math.prod(self.known.shape)

    def residual(self, x: Array) -> Array:
        """Compute G H^T - X at the known places."""
        return self.entries(x[: self.n], x[self.n :]) - self.known.data

    def relative(self, cost: float) -> float:
        """Compute |P(G H^T - X)| / |P(X)| at a point of this cost."""
        return math.sqrt(2 * self.share * cost) / float(np.linalg.norm(self.known.data))

    def target(self, tolerance: float) -> float:
        """Return the cost at which `relative` is the tolerance."""
        return (tolerance * float(np.linalg.norm(self.known.data))) ** 2 / (2 * self.share)

    def cost(self, x: Array) -> float:
        """Compute |P(G H^T - X)|^2 / (2 share), P(X) the known entries, which estimates |G H^T - X|^2 / 2 over all."""
        residual = self.residual(x)
        return float(residual @ residual) / (2 * self.share)

    def gradient(self, x: Array) -> Array:
        """Return the Euclidean gradient (R H, R^T G), with R the sparse residual."""
        return self._times(self.residual(x), x)

    def hessian(self, x: Array, u: Array) -> Array:
        """Return the Euclidean Hessian times u, (R' H + R u_H, R'^T G + R^T u_G), R' the change of the residual."""
        n = self.n
        change = self.entries(u[:n], x[n:]) + self.entries(x[:n], u[n:])
        return self._times(change, x) + self._times(self.residual(x), u)

    def _times(self, values: Array, x: Array) -> Array:
        R = self.sparse(values / self.share)
        return np.concatenate([R @ x[self.n :], R.T @ x[: self.n]])

    def start(self) -> Array:
        """Return the best rank-h approximation of the known entries, scaled up by the share that is known."""
        U, s, Vh = scipy.sparse.linalg.svds(self.known, k=self.rank, v0=np.ones(min(self.known.shape)))
        root = np.sqrt(s / self.share)
        return np.concatenate([U * root, Vh.T * root])

    def error(self, x: Array) -> float:
        """Compute |G H^T - X| / |X| (Frobenius) over all entries, from the factors."""
        (G, H), (P, Q) = (torch.from_numpy(p).split([self.n, self.known.shape[1]]) for p in (x, self.truth))
        return float(product_gap(G, H, P, Q) / product_gap(torch.zeros_like(P), Q, P, Q))


def random_completion(
    n: int = 1000, m: int = 1000, rank: int = 10, oversampling: float = 5, seed: int = 0
) -> Completion:
    """Return Gaussian factors, and entries of their product at places drawn without replacement. Its norm is about 1.

    The solvers' first steps have norm 1: matrices of another size are best divided by their norm.
    There are `oversampling` times as many entries as the manifold has dimensions, (n + m - h) h.
    Raises ValueError if that is more than the matrix has.
    """
    dimensions = (n + m - rank) * rank
    entries = round(oversampling * dimensions)
    if not 0 < entries <= n * m:
        raise ValueError(
            f"oversampling must leave between 1 and n m = {n * m} entries known. Found {oversampling:g} times "
            f"{dimensions} dimensions"
        )
    rng = np.random.default_rng(seed)
    truth = rng.standard_normal((n + m, rank))
    truth /= (n * m * rank) ** 0.25
    rows, columns = np.divmod(np.sort(rng.choice(n * m, entries, replace=False)), m)
    values = np.einsum("ij,ij->i", truth[rows], truth[n + columns])
    known = scipy.sparse.csr_array((values, (rows, columns)), shape=(n, m))
    return Completion(known, rows.astype(known.indices.dtype), truth)


@dataclass
class Minimum:
    """Hold the best point found, its cost, and what it took to find it."""

    point: Any = None
    cost: float = math.inf
    seconds: float = 0.0
    costs: int = 0
    gradients: int = 0
    hessians: int = 0


def complete(
    problem: Completion,
    *,
    solver: str = "conjugate-gradient",
    metric: Metric = "mix",
    tolerance: float = 2e-9,
    max_steps: int = 500,
) -> Minimum:
    """Complete a matrix from its spectral start until the relative residual over the known entries is `tolerance`.

    `solver` is one of `SOLVERS`.
    """
    manifold = FixedRankQuotient(problem.n, int(problem.known.shape[1]), metric)
    target = problem.target(tolerance)
    view = as_pymanopt(manifold, problem.truth.shape)
    settings: dict[str, Any] = {"max_iterations": max_steps, "min_gradient_norm": 0, "min_step_size": 0}
    derivatives = (problem.gradient, problem.hessian)
    return minimize(view, problem.start(), problem.cost, *derivatives, solver=solver, target=target, **settings)


def minimize(
    view: Any,
    start: Any,
    cost: Callable[..., float],
    gradient: Callable[..., Any],
    hessian: Callable[..., Array] | None = None,
    *,
    solver: str = "conjugate-gradient",
    target: float = -math.inf,
    riemannian: bool = False,
    **settings: Any,
) -> Minimum:
    """Run one of `SOLVERS` on a manifold of pymanopt until a cost of at most `target` is evaluated.

    The target is the one stopping rule that does not depend on the metric; pymanopt has none, so an exception ends it.
    """
    best = Minimum()
    numpy, kind = pymanopt.function.numpy(view), "riemannian" if riemannian else "euclidean"

    def evaluate(*point: Array) -> float:
        best.costs += 1
        value = cost(*point)
        if value < best.cost:
            best.cost, best.point = value, point[0] if len(point) == 1 else point
        if value <= target:
            raise StopIteration
        return value

    def slope(*point: Array) -> Any:
        best.gradients += 1
        return gradient(*point)

    def product(*arguments: Array) -> Array:
        assert hessian is not None
        best.hessians += 1
        return hessian(*arguments)

    functions = {f"{kind}_gradient": numpy(slope)} | ({} if hessian is None else {f"{kind}_hessian": numpy(product)})
    problem = pymanopt.Problem(view, numpy(evaluate), **functions)
    before = time.perf_counter()
    with contextlib.suppress(StopIteration):
        getattr(pymanopt.optimizers, SOLVERS[solver])(verbosity=0, **settings).run(problem, initial_point=start)
    best.seconds = time.perf_counter() - before
    return best
