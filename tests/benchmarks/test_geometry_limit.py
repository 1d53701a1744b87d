"""How far the kernels of the geometry are from what this machine can do: counted operations and bytes over its rates.

288 pairs of two 768 x 64 factors, after the factorisation, in one call or in blocks of 8 heads, which stay in a cache.
Counted are the products with tall matrices that the mathematics needs, N = n + m rows in all, 2 N h^2 operations each:

    project   left^T z, and left times what is vertical                           2 products, 3 tall tensors
    gradient  the same after egrad is brought to coordinates                      3 products, 3 tall tensors
    geodesic  left^T z, z^T z, z times one matrix and left times another, plus x  4 products, 4 tall tensors

Tall tensors are those that have to be read or written once, even with a cache of any size. The rates are those of
products of the same tall shape in blocks of 8 heads, and of a copy of what is in no cache. The limit of a kernel is the
longer of operations / rate and bytes / rate; all take turns, and minima are compared. The rate of a product of square
matrices, which tall ones do not reach, stands beside.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

from quotient_manifolds.manifolds import FixedRankQuotient, HorizontalSpace

HEADS, ROWS, H, BLOCK = 288, 768, 64, 8
ROUNDS = int(os.environ.get("QUOTIENT_MANIFOLDS_ROUNDS", "4"))
COUNTED = {"project": (2, 3), "gradient": (3, 3), "geodesic": (4, 4)}  # products, tall tensors


def seconds(f: Callable[[], object]) -> float:
    before = time.perf_counter()
    f()
    return time.perf_counter() - before


@pytest.mark.parametrize("block", [HEADS, BLOCK], ids=["one-call", "blocks-of-8"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("metric", ["inv", "mix"])
def test_kernels_against_the_limit_of_the_machine(
    metric: str, dtype: torch.dtype, block: int, benchmark: BenchmarkFixture
) -> None:
    random = torch.Generator().manual_seed(0)
    x, eta = (torch.randn(HEADS, 2 * ROWS, H, generator=random, dtype=dtype) / 28 for _ in range(2))
    manifold = FixedRankQuotient(ROWS, ROWS, metric)
    given = list(zip([manifold.at(part, dtype=dtype) for part in x.split(block)], eta.split(block), strict=True))
    on = torch.randn(BLOCK, H, H, generator=random, dtype=dtype)
    halves = [part.split(ROWS, dim=-2) for part in eta.split(BLOCK)]
    target, square = torch.empty_like(eta), torch.randn(1024, 1024, generator=random, dtype=dtype)
    outputs = torch.empty(BLOCK, ROWS, H, dtype=dtype)
    timed: dict[str, Callable[[], object]] = {
        "product": lambda: [torch.bmm(half, on, out=outputs) for both in halves for half in both],
        "square": lambda: square @ square,
        "copy": lambda: target.copy_(eta),
        "project": lambda: each(lambda space, z: space.project(z)),
        "gradient": lambda: each(lambda space, z: space.project(space.covector(z))),
        "geodesic": lambda: each(lambda space, z: space.follow(z)),
    }

    def each(kernel: Callable[[HorizontalSpace, Tensor], object]) -> None:
        for space, z in given:
            kernel(space, z)  # what it returns is dropped before the next: memory is taken from the system once

    times: dict[str, list[float]] = {name: [] for name in timed}

    def turn() -> None:
        for name, f in timed.items():
            times[name].append(seconds(f))

    benchmark.pedantic(turn, rounds=4 * ROUNDS, iterations=1, warmup_rounds=1)
    fastest = {name: min(column) for name, column in times.items()}
    rows = {}
    for name, (products, tensors) in COUNTED.items():
        bounds = {"operations": products * fastest["product"], "bytes": tensors / 2 * fastest["copy"]}
        bound = max(bounds, key=lambda kind: bounds[kind])
        rows[name] = {
            "seconds": round(fastest[name], 4),
            "limit": round(bounds[bound], 4),
            "bound by": bound,
            "ratio": round(fastest[name] / bounds[bound], 2),
        }
    benchmark.extra_info |= {
        "metric": metric,
        "dtype": str(dtype).removeprefix("torch."),
        "block": block,
        "threads": torch.get_num_threads(),
        "operations_per_second_of_squares": round(2 * 1024**3 / fastest["square"] / 1e9, 1),
        "operations_per_second": round(2 * eta.numel() * H / fastest["product"] / 1e9, 1),
        "bytes_per_second": round(2 * eta.nbytes / fastest["copy"] / 1e9, 1),
        "kernels": rows,
    }
    print(f"\n{benchmark.extra_info}")
