"""What large models cost: a sharded Llama, and one of half a billion parameters (with QUOTIENT_MANIFOLDS_LARGE=1)."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from tests.benchmarks.test_memory import PROMPT_FREE

MOST = {"cost": 1.15, "memory": 4.0}
"""Times a bare forward and backward pass of the same model; copies of a process's part above bare passes."""


def run(*command: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **PROMPT_FREE, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


@cache
def sharded(kind: str, what: str, tokens: int) -> list[dict[str, Any]]:
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    printed = run(*torchrun, "tests.benchmarks.sharded", kind, what, str(tokens))
    return [json.loads(line) for line in printed.replace("}{", "}\n{").splitlines() if line.startswith("{")]


@pytest.mark.parametrize("tokens", [64, 256])
@pytest.mark.parametrize("kind", ["euclidean", "adaptive", "inv", "mix"])
def test_sharded_step(kind: str, tokens: int, benchmark: BenchmarkFixture) -> None:
    found = benchmark.pedantic(lambda: sharded(kind, "cost", tokens), rounds=1, iterations=1)
    benchmark.extra_info |= {"geometry": kind, "tokens": 4 * tokens, "processes": found, "aimed at": MOST["cost"]}
    print(f"\n{benchmark.extra_info}")


@pytest.mark.parametrize("kind", ["euclidean", "adaptive", "inv", "mix"])
def test_sharded_memory(kind: str, benchmark: BenchmarkFixture) -> None:
    found = benchmark.pedantic(lambda: sharded(kind, "memory", 64), rounds=1, iterations=1)
    bare = max(each["above"] for each in sharded("bare", "memory", 64))
    copies = [round((each["above"] - bare) / each["part"], 2) for each in found]
    benchmark.extra_info |= {"geometry": kind, "copies_above_bare": copies, "aimed at": MOST["memory"]}
    print(f"\n{benchmark.extra_info}")


@pytest.mark.skipif(not os.environ.get("QUOTIENT_MANIFOLDS_LARGE"), reason="takes 20 GB of memory and many minutes")
@pytest.mark.parametrize("kind", ["bare", "euclidean", "mix"])
def test_half_a_billion(kind: str, benchmark: BenchmarkFixture) -> None:
    printed = benchmark.pedantic(lambda: run("tests.benchmarks.large", kind, "bfloat16", "3"), rounds=1, iterations=1)
    benchmark.extra_info |= ast.literal_eval(printed)
    print(f"\n{kind}: {benchmark.extra_info}")
