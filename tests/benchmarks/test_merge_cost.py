"""Cost and error of merging 8 adapters of rank 16 in 12 layers of 768 x 768, beside peft's `add_weighted_adapter`.

Each in a process of its own, one thread, whose time is counted; freed memory returns to the system at once.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from tests.benchmarks.test_memory import PROMPT_FREE

METHODS = ("ours", "svd", "linear", "ties")


@cache
def merged(kind: str, method: str, width: int = 768, layers: int = 12) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.merging", kind, method, str(width), str(layers)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **PROMPT_FREE, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = ast.literal_eval(done.stdout)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="the peak memory of a part of a process is told by Linux alone")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["related", "rotated", "independent", "rslora"])
def test_merging(kind: str, method: str, benchmark: BenchmarkFixture) -> None:
    pytest.importorskip("peft")
    found = benchmark.pedantic(lambda: merged(kind, method), rounds=1, iterations=1)
    own = merged(kind, "ours")
    benchmark.extra_info |= {
        "seconds": round(found["seconds"], 3),
        "times_ours": round(found["seconds"] / own["seconds"], 1),
        "extra_megabytes": round(found["extra"] / 1e6),
        "error_of_update": round(found["update"], 4),
        "error_of_function": round(found["function"], 4),
    }
    print(f"\n{kind} {method}: {benchmark.extra_info}")
