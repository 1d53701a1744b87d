"""Cost of finding symmetries: time over that of a forward pass, and memory above the model over that of its weights.

A random Llama of 153 million parameters, and of 1.1 billion where QUOTIENT_MANIFOLDS_LARGE is set, which takes 6 GB of
memory in float32; two sequences of 16 tokens, one thread, whose time is counted. Freed memory returns to the system at
once.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from tests.benchmarks.test_memory import PROMPT_FREE

NAMES = ["small", *(["large"] if os.environ.get("QUOTIENT_MANIFOLDS_LARGE") else [])]


def measured(name: str, kind: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.finding", name, kind, "16"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **PROMPT_FREE, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = ast.literal_eval(done.stdout)
    return found


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_finding(name: str, kind: str, benchmark: BenchmarkFixture) -> None:
    pytest.importorskip("transformers")
    found = benchmark.pedantic(lambda: measured(name, kind), rounds=1, iterations=1)
    benchmark.extra_info |= {
        "parameters": found["parameters"],
        "type": kind,
        "seconds": round(found["find"], 1),
        "forward_passes": round(found["find"] / found["forward"], 1),
        "extra_over_weights": round(found["extra"] / found["weights"], 2),
        "extra_bytes_per_parameter": round(found["extra"] / found["parameters"], 2),
    }
    print(f"\n{benchmark.extra_info}")
    assert min(found["pairs"], found["freedoms"]) > 0
