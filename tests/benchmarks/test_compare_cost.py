"""What a second process is worth: a comparison of 12 models by one process and by two, one thread each.

The time is that of measuring (loading every model, proving symmetries, all units, each written to disk), without the
start of the processes and the import of their libraries. Runs of one and of two alternate; the ratio is that of
neighbours in time. Where others use the machine, two processes get more of it than one: then the ratio of the
processor's time, of one to the busier of two, says what two would be worth on cores of their own.
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from tests.zoos import save, vit, write_images, write_spec

ROUNDS = int(os.environ.get("QUOTIENT_MANIFOLDS_ROUNDS", "3"))
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "image_size": 32,
}
MEASURES = (
    "measure: worst-case, geometry: [inv, adaptive], radius: [0.02, 0.05], steps: 4",
    "measure: average-case, geometry: mix, radius: 0.05, samples: 4",
    "measure: gradient-norm, geometry: inv",
)
UNITS = 12 * 2 * (1 + 4 + 1 + 1)  # models, batches; scores and measures


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("zoo")
    for seed in range(12):
        save(vit(seed, **SIZES), folder / "models" / f"m_{seed}")
    write_images(folder / "train.npz", 32, seed=0, size=32)
    head = "checkpoints: {paths: models/*}\ndata: {path: train.npz, batch_size: 16}"
    return write_spec(folder, *MEASURES, head=head)


def seconds(spec: Path, processes: int) -> tuple[float, list[float]]:
    """From the start of the first to the end of the last, and the processor's time of each."""
    out = spec.parent / "out"
    shutil.rmtree(out, ignore_errors=True)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [*start, "-m", "tests.benchmarks.timed_compare", str(spec), str(out)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    said = r"(\d+) of (\d+) units, ([\d.]+) seconds of processor, ([\d.]+) seconds in all"
    found = re.findall(said, done.stdout)
    assert len(found) == processes
    assert sum(int(own) for own, *_ in found) == UNITS
    return max(float(whole) for *_, whole in found), [float(busy) for *_, busy, _ in found]


def test_a_second_process(spec: Path, benchmark: BenchmarkFixture) -> None:
    alone: list[tuple[float, list[float]]] = []
    both: list[tuple[float, list[float]]] = []

    def alternate() -> None:
        alone.append(seconds(spec, 1))
        both.append(seconds(spec, 2))

    benchmark.pedantic(alternate, rounds=ROUNDS, iterations=1)
    ratios = [one / two for (one, _), (two, _) in zip(alone, both, strict=True)]
    benchmark.extra_info |= {
        "models": 12,
        "units": UNITS,
        "seconds_of_one": [round(each, 2) for each, _ in alone],
        "seconds_of_two": [round(each, 2) for each, _ in both],
        "times_faster_median": round(statistics.median(ratios), 2),
        "times_faster_of_minima": round(min(alone)[0] / min(both)[0], 2),
        "times_faster_by_processor": round(
            statistics.median(one / max(two) for (_, (one,)), (_, two) in zip(alone, both, strict=True)), 2
        ),
        "processor_of_one": [round(busy, 2) for _, each in alone for busy in each],
        "processor_of_two": [[round(busy, 2) for busy in each] for _, each in both],
        "load_of_the_machine": [round(each, 1) for each in os.getloadavg()],
    }
    print(f"\n{benchmark.extra_info}")
