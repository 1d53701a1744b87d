"""The cost of distances of pairs of rank 16, 768 x 768, in milliseconds of processor time, in extra_info.

Points are ends of geodesics, `length` long in `inv`, `length` times the norm of G H^T long in `mix`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

from quotient_manifolds import linalg
from quotient_manifolds.manifolds import FixedRankQuotient
from tests.benchmarks.running import compared

SIZE, RANK, POINTS, ROUNDS = 768, 16, 8, 3


def spread(manifold: FixedRankQuotient, length: float) -> tuple[Tensor, Tensor]:
    """A point, and points at a distance from it, each at a representative of its own."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2 * SIZE, RANK, generator=generator, dtype=torch.float64)
    space = manifold.at(x)
    size = length * (linalg.singular_frame(*manifold.split(x)).s.norm() if manifold.metric == "mix" else 1.0)
    ends = []
    for _ in range(POINTS):
        xi = space.sample(generator)
        A = torch.randn(RANK, RANK, generator=generator, dtype=torch.float64)
        ends.append(manifold.action(A, manifold.expmap(x, size * xi / space.norm(xi))))
    return x, torch.stack(ends)


@pytest.mark.parametrize("length", [0.1, 0.3])
@pytest.mark.parametrize("metric", ["inv", "mix"])
def test_distances(benchmark: BenchmarkFixture, metric: str, length: float) -> None:
    manifold = FixedRankQuotient(SIZE, SIZE, metric)
    x, points = spread(manifold, length)
    jobs: dict[str, Callable[[], object]] = {
        "dist": lambda: manifold.dist(x, points[0]),
        "dist of 8": lambda: manifold.dist(x.expand_as(points), points),
    }
    compared(benchmark, jobs, "dist", ROUNDS)
    assert benchmark.extra_info["dist of 8 / dist"] > 1
