"""The view of our manifolds in pymanopt, against pymanopt's own manifolds and against differences."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pymanopt
import pytest
import torch
from pymanopt.manifolds import Euclidean, Positive
from pymanopt.manifolds.manifold import Manifold
from pymanopt.optimizers.optimizer import OptimizerResult
from torch import Tensor

from quotient_manifolds.manifolds import DiagonalQuotient, FixedRankQuotient, TranslationQuotient
from quotient_manifolds.pymanopt import as_pymanopt
from tests.cases import INVARIANT, Case

small = [case for case in INVARIANT if case.dimension > 1]
every_case = pytest.mark.parametrize("case", small, ids=str)
Array = np.ndarray
SOLVERS = {"TrustRegions": "mix", "ConjugateGradient": "inv", "SteepestDescent": 0.5}


class Fit:
    """|product(x) - target|^2 / 2, with Euclidean derivatives by torch's autograd."""

    def __init__(self, product: Callable[[Tensor], Tensor], target: Tensor) -> None:
        self.loss = lambda x: ((product(x) - target) ** 2).sum() / 2

    def cost(self, x: Array) -> float:
        return float(self.loss(torch.from_numpy(x)))

    def gradient(self, x: Array) -> Array:
        return torch.func.grad(self.loss)(torch.from_numpy(x)).numpy()

    def hessian(self, x: Array, u: Array) -> Array:
        return torch.func.jvp(torch.func.grad(self.loss), (torch.from_numpy(x),), (torch.from_numpy(u),))[1].numpy()


def fit(case: Case) -> Fit:
    return Fit(case.product, 1.5 * case.product(case.point(1)))


def minimize(view: Manifold, start: object, problem: Fit, solver: str, **settings: float) -> OptimizerResult:
    numpy = pymanopt.function.numpy(view)
    derivatives = {"euclidean_gradient": numpy(problem.gradient), "euclidean_hessian": numpy(problem.hessian)}
    function = pymanopt.Problem(view, numpy(problem.cost), **derivatives)
    return getattr(pymanopt.optimizers, solver)(verbosity=0, **settings).run(function, initial_point=start)


@every_case
def test_it_is_a_manifold_of_pymanopt(case: Case) -> None:
    view = as_pymanopt(case.manifold, case.shape)
    assert isinstance(view, Manifold)
    assert view.dim == case.dimension
    assert view.typical_dist > 0
    x = view.random_point()
    u = view.random_tangent_vector(x)
    assert x.shape == u.shape == view.zero_vector(x).shape == case.shape
    assert x.dtype == u.dtype == np.float64
    np.testing.assert_allclose(view.norm(x, u), 1, rtol=1e-12)
    np.testing.assert_allclose(view.to_tangent_space(x, u), u, rtol=1e-9, atol=1e-12)


@every_case
def test_metric_projection_and_gradient_are_those_of_the_dense_formulas(case: Case) -> None:
    view = as_pymanopt(case.manifold, case.shape)
    x, u, v = (case.point(seed) for seed in range(3))
    a, b, c = (p.numpy() for p in (x, u, v))
    np.testing.assert_allclose(view.inner_product(a, b, c), float(case.metric(x, u, v)), rtol=1e-9)
    np.testing.assert_allclose(view.norm(a, b), float(case.metric(x, u, u)) ** 0.5, rtol=1e-9)
    np.testing.assert_allclose(view.projection(a, b), case.project(x, u).numpy(), rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(view.transport(c, a, b), case.project(x, u).numpy(), rtol=1e-8, atol=1e-8)
    egrad, ehess = fit(case).gradient(a), fit(case).hessian(a, b)
    hessian = case.manifold.at(x).hessian(torch.from_numpy(egrad), torch.from_numpy(ehess), u)
    np.testing.assert_allclose(view.euclidean_to_riemannian_hessian(a, egrad, ehess, b), hessian.numpy(), rtol=1e-12)
    # pymanopt's `Euclidean` and ours pair with a horizontal vector to the same derivative
    flat, h = Euclidean(*case.shape), view.random_tangent_vector(a)
    gradient = view.euclidean_to_riemannian_gradient(a, egrad)
    np.testing.assert_allclose(view.inner_product(a, gradient, h), flat.inner_product(a, egrad, h), rtol=1e-9)


def test_positive_is_the_inv_metric_of_each_factor() -> None:
    """A horizontal vector (b u, b v) is a vector of Positive in both factors at once, so squared lengths add up."""
    d = 4
    view, positive = as_pymanopt(DiagonalQuotient("inv"), (2, d)), Positive(2, d)
    x = positive.random_point()
    xi, eta = (view.random_tangent_vector(x) for _ in range(2))
    np.testing.assert_allclose(view.inner_product(x, xi, eta), positive.inner_product(x, xi, eta), rtol=1e-12)
    np.testing.assert_allclose(view.norm(x, xi), positive.norm(x, xi), rtol=1e-12)
    np.testing.assert_allclose(view.exp(x, xi), positive.exp(x, xi), rtol=1e-12)
    np.testing.assert_allclose(view.retraction(x, xi), positive.retraction(x, xi), rtol=1e-12)
    y = positive.exp(x, xi)
    np.testing.assert_allclose(view.log(x, y), positive.log(x, y), rtol=1e-10)
    np.testing.assert_allclose(view.dist(x, y), positive.dist(x, y), rtol=1e-10)
    np.testing.assert_allclose(view.dist(x, y), 1, rtol=1e-10)  # xi is a unit vector
    egrad = positive.random_point()
    wanted = view.projection(x, positive.euclidean_to_riemannian_gradient(x, egrad))
    np.testing.assert_allclose(view.euclidean_to_riemannian_gradient(x, egrad), wanted, rtol=1e-12)


@pytest.mark.parametrize(("solver", "metric"), SOLVERS.items())
def test_solvers_find_the_nearest_matrix_of_lower_rank(solver: str, metric: str | float) -> None:
    """Which is the truncated singular value decomposition; from badly balanced factors of another matrix."""
    n, m, h = 6, 5, 2
    target = np.random.default_rng(0).standard_normal((n, m))
    U, s, Vt = np.linalg.svd(target, full_matrices=False)
    start = np.concatenate([U[:, :h] + 0.3, 7 * Vt.T[:, :h]])
    problem = Fit(lambda x: x[:n] @ x[n:].T, torch.from_numpy(target))
    view = as_pymanopt(FixedRankQuotient(n, m, metric), (n + m, h))
    got = minimize(view, start, problem, solver, min_gradient_norm=1e-9)
    np.testing.assert_allclose(got.point[:n] @ got.point[n:].T, (U[:, :h] * s[:h]) @ Vt[:h], atol=1e-6)


def test_the_shape_of_a_vector_may_be_a_number() -> None:
    assert as_pymanopt(TranslationQuotient(), 4).random_point().shape == (4,)


def test_absence_of_pymanopt_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymanopt", None)
    with pytest.raises(ImportError, match=r'pip install "quotient-manifolds\[pymanopt\]"\.$'):
        as_pymanopt(DiagonalQuotient(), (2, 3))


@pytest.mark.parametrize("case", [case for case in small if case.name[0] in "fd"][::3], ids=str)
def test_pair_mean_is_the_middle(case: Case) -> None:
    view = as_pymanopt(case.manifold, case.shape)
    x = view.random_point()
    y = view.exp(x, 0.1 * view.random_tangent_vector(x))
    middle = view.pair_mean(x, y)
    assert view.dist(x, middle) == pytest.approx(view.dist(x, y) / 2, rel=1e-6)
    assert view.dist(middle, y) == pytest.approx(view.dist(x, y) / 2, rel=1e-6)
