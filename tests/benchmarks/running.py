"""Run a benchmark in a process of its own, and tell time and memory."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pytest_benchmark.fixture import BenchmarkFixture

PROMPT_FREE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}
"""Freed memory returns to the system at once, so that peaks are those of memory in use."""


def printed_by(*command: object) -> str:
    """Return what `python -m COMMAND` prints, run with one thread."""
    return subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **PROMPT_FREE, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def seconds(f: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return how long a call takes."""
    before = clock()
    f()
    return clock() - before


def in_passes(work: Callable[[], object], bare: Callable[[], object], rounds: int) -> float:
    """Return the median processor time of a call, in bare passes measured right before and right after it."""

    def one_pass() -> float:
        return statistics.median(seconds(bare, time.process_time) for _ in range(3))

    ratios = []
    for _ in range(rounds):
        before, taken = one_pass(), seconds(work, time.process_time)
        ratios.append(2 * taken / (before + one_pass()))
    return statistics.median(ratios)


def compared(benchmark: BenchmarkFixture, steps: dict[str, Callable[[], Any]], against: str, rounds: int = 20) -> None:
    """Run the steps in turn, and report medians of processor time, and medians of their ratios to one of them."""
    found: list[dict[str, float]] = []

    def turn() -> None:
        found.append({name: seconds(step, time.process_time) for name, step in steps.items()})

    benchmark.pedantic(turn, rounds=rounds, warmup_rounds=2)
    for name in steps:
        benchmark.extra_info[f"{name}, ms"] = round(1e3 * statistics.median(each[name] for each in found), 2)
        ratio = statistics.median(each[name] / each[against] for each in found)
        benchmark.extra_info[f"{name} / {against}"] = round(ratio, 2)


def peak(*, reset: bool = False) -> int:
    """Return the peak resident memory of this process, since the last reset, in bytes (Linux).

    Not by `resource`, whose peak of a new process begins at what the process that started it held.
    """
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
