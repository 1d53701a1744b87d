"""A 1000 x 1000 matrix of rank 10 from 10 % of its entries, against pymanopt's own manifold of that rank.

The same conjugate gradients of pymanopt, from the same matrix, to the same relative residual over the known entries;
the cost and the sparse residual are the same code. The runs take turns.
"""

from __future__ import annotations

import os
import statistics

import numpy as np
import pytest
from pymanopt.manifolds import FixedRankEmbedded
from pytest_benchmark.fixture import BenchmarkFixture

from studies.completion import Completion, Minimum, complete, minimize, random_completion

ROUNDS = int(os.environ.get("QUOTIENT_MANIFOLDS_ROUNDS", "3"))
TOLERANCE = 2e-9


@pytest.fixture(scope="module")
def problem() -> Completion:
    return random_completion()


def embedded(problem: Completion) -> Minimum:
    """pymanopt's FixedRankEmbedded, its gradient the projection of the sparse residual."""
    n, h, x = problem.n, problem.rank, problem.start()
    manifold = FixedRankEmbedded(*problem.known.shape, h)
    s = np.linalg.norm(x[:n], axis=0) ** 2  # the start is balanced, its columns orthogonal
    order = np.argsort(-s)
    start = manifold.random_point().__class__(
        (x[:n] / np.sqrt(s))[:, order], s[order], (x[n:] / np.sqrt(s))[:, order].T
    )

    def pair(u: np.ndarray, s: np.ndarray, vt: np.ndarray) -> np.ndarray:
        return np.concatenate([u * s, vt.T])

    def gradient(u: np.ndarray, s: np.ndarray, vt: np.ndarray) -> object:
        return manifold.projection((u, s, vt), problem.sparse(problem.residual(pair(u, s, vt)) / problem.share))

    end = minimize(
        manifold,
        start,
        lambda u, s, vt: problem.cost(pair(u, s, vt)),
        gradient,
        riemannian=True,
        target=problem.target(TOLERANCE),
        min_gradient_norm=0,
        min_step_size=0,
    )
    assert problem.error(pair(*end.point)) < 1e-8
    return end


@pytest.mark.parametrize(
    ("solver", "metric"),
    [("conjugate-gradient", "mix"), ("conjugate-gradient", "inv"), ("trust-regions", "mix")],
)
def test_completion(solver: str, metric: str, problem: Completion, benchmark: BenchmarkFixture) -> None:
    ours: list[Minimum] = []
    theirs: list[Minimum] = []

    def turn() -> None:
        ours.append(complete(problem, solver=solver, metric=metric, tolerance=TOLERANCE))
        theirs.append(embedded(problem))

    benchmark.pedantic(turn, rounds=ROUNDS, iterations=1, warmup_rounds=1)
    ours, theirs = ours[1:], theirs[1:]
    assert max(problem.error(end.point) for end in ours) < 1e-8
    seconds = [[end.seconds for end in ends] for ends in (ours, theirs)]
    benchmark.extra_info |= {
        "relative_error": problem.error(ours[0].point),
        "evaluations": (ours[0].costs, ours[0].gradients, ours[0].hessians),
        "evaluations_embedded": (theirs[0].costs, theirs[0].gradients),
        "seconds": round(statistics.median(seconds[0]), 3),
        "seconds_embedded": round(statistics.median(seconds[1]), 3),
        "ratio_median": round(statistics.median(a / b for a, b in zip(*seconds, strict=True)), 3),
        "ratio_of_minima": round(min(seconds[0]) / min(seconds[1]), 3),
    }
    print(f"\n{solver}, {metric}: {benchmark.extra_info}")
