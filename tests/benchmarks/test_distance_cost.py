"""The cost of distances and means of pairs of rank 16, 768 x 768.

Processor time, in milliseconds, in extra_info. Points
are ends of geodesics, `length` long in `inv`, `length` times the norm of G H^T long in `mix`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

from quotient_manifolds import linalg
from quotient_manifolds.manifolds import FixedRankQuotient
from tests.benchmarks.running import seconds

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
    times: dict[str, list[float]] = {name: [] for name in jobs}

    def round_() -> None:
        for name, job in jobs.items():
            times[name].append(seconds(job, time.process_time))

    round_()  # the first call of everything
    for series in times.values():
        series.clear()
    benchmark.pedantic(round_, rounds=ROUNDS)
    medians = {name: statistics.median(series) for name, series in times.items()}
    for name, median in medians.items():
        benchmark.extra_info[f"{name}, milliseconds"] = round(1e3 * median, 1)
    assert medians["dist"] < medians["dist of 8"]
