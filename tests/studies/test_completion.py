"""Low-rank matrix completion: derivatives, exactness, and every solver to the same matrix."""

from __future__ import annotations

import numpy as np
import pytest

from quotient_manifolds.manifolds import Metric
from studies.completion import GEOOPT, SOLVERS, Completion, complete, random_completion


@pytest.fixture(scope="module")
def problem() -> Completion:
    return random_completion(100, 80, 3, oversampling=5, seed=1)


def dense(problem: Completion, x: np.ndarray) -> np.ndarray:
    return x[: problem.n] @ x[problem.n :].T


@pytest.mark.parametrize("metric", ["inv", "mix", 0.5])
@pytest.mark.parametrize("solver", [*SOLVERS, GEOOPT])
def test_every_solver_completes_the_matrix(problem: Completion, solver: str, metric: Metric) -> None:
    done = complete(problem, solver=solver, metric=metric)
    truth = dense(problem, problem.truth)
    assert done.residual <= 2e-9
    assert done.error < 1e-8
    assert np.linalg.norm(dense(problem, done.point) - truth) < 1e-8 * np.linalg.norm(truth)


def test_the_control_stops_short_where_too_little_is_known() -> None:
    """With about as many entries as unknowns there are other matrices of this rank: nothing recovers the right one."""
    problem = random_completion(100, 80, 3, oversampling=1, seed=1)
    assert complete(problem, solver="conjugate-gradient", max_steps=100).error > 1e-2


def test_entries_are_those_of_the_product(problem: Completion) -> None:
    x = np.random.default_rng(0).standard_normal(problem.truth.shape)
    known = problem.known.toarray() != 0
    np.testing.assert_allclose(problem.entries(x[: problem.n], x[problem.n :]), dense(problem, x)[known], rtol=1e-12)
    np.testing.assert_allclose(problem.known.data, dense(problem, problem.truth)[known], rtol=1e-12)
    assert problem.known.nnz == 5 * (100 + 80 - 3) * 3


def test_error_is_the_dense_one(problem: Completion) -> None:
    x = problem.start()
    truth = dense(problem, problem.truth)
    wanted = np.linalg.norm(dense(problem, x) - truth) / np.linalg.norm(truth)
    np.testing.assert_allclose(problem.error(x), wanted, rtol=1e-12)


def test_derivatives_by_central_differences(problem: Completion) -> None:
    """The cost is a quartic and the gradient a cubic along a line: central differences at two steps cancel the rest."""
    rng = np.random.default_rng(0)
    x, u = (rng.standard_normal(problem.truth.shape) for _ in range(2))

    def slope(f, e: float):
        return (f(x + e * u) - f(x - e * u)) / (2 * e)

    def exact(f):
        return (4 * slope(f, 0.5) - slope(f, 1.0)) / 3

    np.testing.assert_allclose(np.vdot(problem.gradient(x), u), exact(problem.cost), rtol=1e-10)
    np.testing.assert_allclose(problem.hessian(x, u), exact(problem.gradient), rtol=1e-9, atol=1e-9)


def test_impossible_oversampling() -> None:
    with pytest.raises(ValueError, match="oversampling should leave between 1 and n m = 80 entries known"):
        random_completion(10, 8, 2, oversampling=5)
