"""The geometry of all heads of a 12-layer, 12-head model in batched calls, against a loop over the heads.

288 pairs of two 768 x 64 factors in float64: horizontal projection, Riemannian gradient and second-order geodesic. The
batch factors once and then works in orthonormal coordinates, as an ascent does; 1/20 of the factorisation counts for
each step. The loop is NumPy and `scipy.linalg.solve_sylvester` with Gram matrices, head by head; it runs over some of
the heads and is scaled up. Both take turns, so that whatever else the machine does hits both alike.
"""

from __future__ import annotations

import os
import statistics

import numpy as np
import pytest
import scipy.linalg
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

from quotient_manifolds.manifolds import FixedRankQuotient
from tests.benchmarks.running import seconds

HEADS, ROWS, H = 288, 768, 64
LOOPED = 24  # heads in the loop
ROUNDS = int(os.environ.get("QUOTIENT_MANIFOLDS_ROUNDS", "4"))
STEPS_PER_POINT = 20
Array = np.ndarray


def loop(x: Array, eta: Array) -> tuple[Array, Array, Array]:
    """Projection, gradient and geodesic (along the projection) for `inv`, one head."""
    (G, H), (a, b) = np.split(x, 2), np.split(eta, 2)
    GG, HH = G.T @ G, H.T @ H
    A = GG @ HH
    L = scipy.linalg.solve_sylvester(A, A, GG @ (H.T @ b) - (a.T @ G) @ HH).T  # A L^T + L^T A = B
    a, b = a + G @ L, b - H @ L.T
    gradient = np.concatenate([eta[:ROWS] @ GG, eta[ROWS:] @ HH])
    moved = np.concatenate([bend(G, a, GG), bend(H, b, HH)])
    return np.concatenate([a, b]), gradient, moved


def bend(G: Array, a: Array, gram: Array) -> Array:
    W, cross = np.linalg.inv(gram), a.T @ G
    return G + a + (a @ (W @ (cross + cross.T)) - G @ (W @ (a.T @ a))) / 2


@pytest.fixture(scope="module")
def data() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    return tuple(torch.randn(HEADS, 2 * ROWS, H, generator=random, dtype=torch.float64) / 28 for _ in range(2))


def test_they_compute_the_same(data: tuple[Tensor, Tensor], benchmark: BenchmarkFixture) -> None:
    x, eta = (t[0] for t in data)
    space = FixedRankQuotient(ROWS, ROWS, "inv").at(x)
    xi, gradient, y = (torch.from_numpy(part) for part in benchmark.pedantic(loop, (x.numpy(), eta.numpy())))
    torch.testing.assert_close(space.proju(eta), xi, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(space.vector(space.covector(eta)), gradient, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(space.geodesic(xi), y, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("block", [HEADS, 8], ids=["one-call", "blocks-of-8"])
@pytest.mark.parametrize("metric", ["inv", "mix"])
def test_all_heads_against_a_loop(
    metric: str, block: int, data: tuple[Tensor, Tensor], benchmark: BenchmarkFixture
) -> None:
    """In one batched call, whose tensors of 226 MB leave every cache, and in blocks of heads that stay in one."""
    x, eta = data
    manifold = FixedRankQuotient(ROWS, ROWS, metric)
    blocks = x.split(block)
    given = list(zip([manifold.at(part) for part in blocks], eta.split(block), strict=True))
    loops, factors, parts = [], [], []

    def step() -> tuple[float, ...]:
        return (
            seconds(lambda: [space.project(e) for space, e in given]),
            seconds(lambda: [space.project(space.covector(e)) for space, e in given]),
            seconds(lambda: [space.follow(e)[0] for space, e in given]),
        )

    def turn() -> None:
        heads = x[:LOOPED].numpy(), eta[:LOOPED].numpy()
        loops.append(seconds(lambda: [loop(*head) for head in zip(*heads, strict=True)]) * HEADS / LOOPED)
        factors.append(seconds(lambda: [manifold.at(part) for part in blocks]))
        parts.append(step())

    turn()
    loops, factors, parts = [], [], []
    benchmark.pedantic(turn, rounds=ROUNDS, iterations=1)
    steps = [sum(part) + factor / STEPS_PER_POINT for part, factor in zip(parts, factors, strict=True)]
    project, gradient, geodesic = (round(min(column), 3) for column in zip(*parts, strict=True))
    benchmark.extra_info |= {
        "metric": metric,
        "block": block,
        "threads": torch.get_num_threads(),
        "loop_seconds": round(statistics.median(loops), 3),
        "step_seconds": round(statistics.median(steps), 3),
        "fastest": {"at": round(min(factors), 3), "project": project, "gradient": gradient, "geodesic": geodesic},
        "ratio_median": round(statistics.median(a / b for a, b in zip(loops, steps, strict=True)), 2),
        "ratio_of_minima": round(min(loops) / min(steps), 2),
    }
    print(f"\n{benchmark.extra_info}")


def test_inv_against_mix(data: tuple[Tensor, Tensor], benchmark: BenchmarkFixture) -> None:
    """After the factorisation; the two metrics take turns."""
    x, eta = (t[:32] for t in data)
    spaces = {metric: FixedRankQuotient(ROWS, ROWS, metric).at(x) for metric in ("inv", "mix")}
    times: dict[str, list[float]] = {metric: [] for metric in spaces}

    def turn() -> None:
        for metric, space in spaces.items():
            z = space.project(eta)
            times[metric].append(seconds(lambda s=space, z=z: (s.project(s.covector(eta)), s.follow(z)[0])))

    benchmark.pedantic(turn, rounds=8 * ROUNDS, iterations=1, warmup_rounds=2)
    benchmark.extra_info |= {
        "ratio_median": round(statistics.median(a / b for a, b in zip(times["inv"], times["mix"], strict=True)), 3),
        "ratio_of_minima": round(min(times["inv"]) / min(times["mix"]), 3),
    }
    print(f"\n{benchmark.extra_info}")
