"""What a second worker is worth: a comparison of 12 models by one worker process and by two, one thread each.

The time is that of the whole comparison, with the start of the processes, the import of their libraries and the report.
Runs of one and of two alternate; the ratio is that of neighbours in time.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from quotient_manifolds.compare import run_comparison
from tests.nets.zoos import save, vit, write_images, write_spec

ROUNDS = int(os.environ.get("QUOTIENT_MANIFOLDS_ROUNDS", "3"))
SIZES = {"hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 128, "num_attention_heads": 4}
MEASURES = (
    "measure: worst-case, geometry: [inv, adaptive], radius: [0.02, 0.05], steps: 4",
    "measure: average-case, geometry: mix, sigma: 0.05, samples: 4",
    "measure: gradient-norm, geometry: inv",
)
UNITS = 12 * 2 * (1 + 4 + 1 + 1)  # models, batches; scores and measures


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("zoo")
    for seed in range(12):
        save(vit(seed, **SIZES, image_size=32), folder / "models" / f"m_{seed}")
    write_images(folder / "train.npz", 32, seed=0, size=32)
    head = "checkpoints: {paths: models/*}\ndata: {path: train.npz, batch_size: 16}"
    return write_spec(folder, *MEASURES, head=head)


def seconds(spec: Path, workers: int) -> float:
    """Of a whole comparison by `workers` worker processes, with their start."""
    out = spec.parent / "out"
    shutil.rmtree(out, ignore_errors=True)
    start = time.perf_counter()
    found = run_comparison(spec, out, workers=workers)
    taken = time.perf_counter() - start
    assert found.measured_now == UNITS
    return taken


def test_a_second_worker(spec: Path, benchmark: BenchmarkFixture) -> None:
    times: list[tuple[float, float]] = []
    benchmark.pedantic(lambda: times.append((seconds(spec, 1), seconds(spec, 2))), rounds=ROUNDS, iterations=1)
    one, two = zip(*times, strict=True)
    benchmark.extra_info |= {
        "units": UNITS,
        "seconds_of_one": [round(each, 2) for each in one],
        "seconds_of_two": [round(each, 2) for each in two],
        "times_faster_median": round(statistics.median(a / b for a, b in zip(one, two, strict=True)), 2),
        "times_faster_of_minima": round(min(one) / min(two), 2),
    }
    print(f"\n{benchmark.extra_info}")
