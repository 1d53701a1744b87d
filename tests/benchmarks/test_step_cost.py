"""The cost of one step of the ascent over one bare forward + backward, on a pretrained BERT of 22.7 million parameters.

Batch 32 x 64 tokens; processor time, which other processes disturb less. The ascent's steps and the bare pass
alternate, so that whatever else the machine does hits both alike; a ratio compares neighbours in time. Reported in
extra_info: the median ratio, and the ratio of the fastest.
"""

from __future__ import annotations

import gc
import os
import statistics

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from quotient_manifolds.geometry import Geometry
from quotient_manifolds.sharpness import AutoPGD
from quotient_manifolds.sharpness.objective import BatchObjective
from tests.benchmarks.alternating import Alternating
from tests.benchmarks.pretrained import GEOMETRIES, Batch, Classifier, batch_of, loss, pretrained

ROUNDS = int(os.environ.get("QUOTIENT_MANIFOLDS_ROUNDS", "8"))

RADII = {"l2": 0.1, "linf": 1e-4}


@pytest.fixture(scope="module")
def model() -> Classifier:
    return pretrained()


@pytest.fixture(scope="module")
def batch() -> Batch:
    return batch_of(32)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda geometry: geometry.name)
def test_step_cost(geometry: Geometry, model: Classifier, batch: Batch, benchmark: BenchmarkFixture) -> None:
    ascent = AutoPGD(steps=ROUNDS + 3)
    parameters = tuple(model.parameters())
    space = geometry.verified(model, loss, [batch]).tangent_space(model)
    out = {name: torch.empty_like(w) for name, w in space.point.items()}
    objective = BatchObjective(model, loss, space, batch, out=out)

    def bare() -> None:
        torch.autograd.grad(loss(model, batch), parameters, allow_unused=True)

    timed = Alternating(objective, bare)
    bare()
    gc.collect()
    benchmark.pedantic(
        lambda: ascent.maximise(timed, RADII[space.norm], torch.Generator().manual_seed(0), norm=space.norm),
        rounds=1,
        iterations=1,
    )
    benchmark.extra_info |= {
        "geometry": geometry.name,
        "threads": torch.get_num_threads(),
        "parameters": sum(w.numel() for w in parameters),
        "bare_seconds": round(statistics.median(timed.bares[3:]), 4),
        "step_seconds": round(statistics.median(timed.steps[2:]), 4),
        **timed.ratios,
    }
    print(f"\n{geometry.name}: {benchmark.extra_info}")
