"""What the ascent and the geometry cost on an accelerator; skipped where there is none.

A random Llama of 1.1 billion parameters, 4 x 512 tokens, with QUOTIENT_MANIFOLDS_LARGE=1 also one of 6.7 billion in
bfloat16: a step of the ascent over a bare forward and backward pass, which take turns, and the peak of the device's
memory above that of bare passes, in copies of the parameters in single precision. Seconds of the wall, waiting for it.
QUOTIENT_MANIFOLDS_DEVICE=cpu runs all of it in small on the processor, without memory.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor, nn

from quotient_manifolds.geometry import Geometry, Quotient, as_geometry
from quotient_manifolds.sharpness import next_token_cross_entropy
from quotient_manifolds.sharpness.ascent import AutoPGD
from quotient_manifolds.sharpness.objective import BatchObjective
from quotient_manifolds.symmetries import Symmetries, find_symmetries
from tests.benchmarks.alternating import Alternating
from tests.benchmarks.finding import llama
from tests.devices import DEVICE, NONE

pytestmark = pytest.mark.skipif(DEVICE is None, reason=NONE)

SMALL = DEVICE is not None and DEVICE.type == "cpu"
ROUNDS = int(os.environ.get("QUOTIENT_MANIFOLDS_ROUNDS", "8"))
TOKENS = (2, 16) if SMALL else (4, 512)
COPIES = 10
"""Of the parameters, in single precision, that have to be free before a model is made."""
Batch = dict[str, Tensor]
Models = Callable[[str], tuple[nn.Module, Batch, Symmetries]]


def clock() -> float:
    """Return seconds of the wall, once the device has done all it was given."""
    torch.get_device_module(DEVICE).synchronize()
    return time.perf_counter()


def peak(work: Callable[[], object]) -> int | None:
    """Return the bytes of the device that were in use at once during some work; None of the processor."""
    if SMALL:
        work()
        return None
    device = torch.get_device_module(DEVICE)
    gc.collect()
    device.empty_cache()
    device.reset_peak_memory_stats()
    work()
    device.synchronize()
    return device.max_memory_allocated()


@pytest.fixture(scope="module")
def models() -> Models:
    """A model by name, with a batch and its symmetries; one at a time is kept on the device."""
    kept: dict[str, tuple[nn.Module, Batch, Symmetries]] = {}

    def model_of(name: str) -> tuple[nn.Module, Batch, Symmetries]:
        if name not in kept:
            kept.clear()
            gc.collect()
            require_memory(name)
            model = llama("tiny" if SMALL else name, torch.bfloat16 if name == "7b" else torch.float32, DEVICE)
            random = torch.Generator(DEVICE).manual_seed(0)
            words = torch.randint(32000, TOKENS, generator=random, device=DEVICE)
            short = {"input_ids": words[:1, :16], "labels": words[:1, :16]}
            symmetries = find_symmetries(model, short, evaluate=next_token_cross_entropy)
            kept[name] = model, {"input_ids": words, "labels": words}, symmetries
        return kept[name]

    return model_of


def require_memory(name: str) -> None:
    if name == "7b" and not os.environ.get("QUOTIENT_MANIFOLDS_LARGE"):
        pytest.skip("QUOTIENT_MANIFOLDS_LARGE=1 measures the model of 6.7 billion parameters too")
    if SMALL:
        return
    torch.get_device_module(DEVICE).empty_cache()
    free, needed = torch.get_device_module(DEVICE).mem_get_info()[0], COPIES * 4 * {"large": 1.1e9, "7b": 6.7e9}[name]
    if free < needed:
        pytest.skip(f"takes {needed / 1e9:.0f} GB of the device's memory; {free / 1e9:.0f} GB are free")


def in_autocast(model: nn.Module, batch: Batch) -> Tensor:
    with torch.autocast(DEVICE.type, torch.bfloat16):
        return next_token_cross_entropy(model, batch)


LOSSES: dict[str, Any] = {"as it is": next_token_cross_entropy, "autocast": in_autocast}


@pytest.mark.parametrize("kind", ["euclidean", "adaptive", "inv", "mix"])
@pytest.mark.parametrize(("name", "precision"), [("large", "as it is"), ("large", "autocast"), ("7b", "autocast")])
def test_step(name: str, precision: str, kind: str, models: Models, benchmark: BenchmarkFixture) -> None:
    model, batch, symmetries = models(name)
    loss, parameters = LOSSES[precision], list(model.parameters())
    geometry: Geometry = (
        Quotient(kind, symmetries=symmetries, verify="none") if kind in ("inv", "mix") else as_geometry(kind)
    )

    def bare() -> None:
        torch.autograd.grad(loss(model, batch), parameters)

    bare()
    alone = peak(bare)
    held: list[BatchObjective] = []

    def ascend(steps: int = 3, timed: bool = False) -> Any:
        if not held:
            space = geometry.tangent_space(model)
            held.append(BatchObjective(model, loss, space, batch, out=space.buffers()))
        objective = Alternating(held[0], bare, clock) if timed else held[0]
        AutoPGD(steps=steps).maximise(objective, 0.05, torch.Generator().manual_seed(0))
        return objective

    whole = peak(ascend)
    timed = benchmark.pedantic(lambda: ascend(ROUNDS + 3, timed=True), rounds=1, iterations=1)
    count = sum(w.numel() for w in parameters)
    benchmark.extra_info |= {
        "device": str(DEVICE) if SMALL else torch.get_device_module(DEVICE).get_device_name(),
        "parameters": count,
        "weights": str(parameters[0].dtype),
        "loss": precision,
        "geometry": geometry.name,
        "bare_seconds": round(statistics.median(timed.bares[3:]), 4),
        "step_seconds": round(statistics.median(timed.steps[2:]), 4),
        **timed.ratios,
        "bare_peak": alone,
        "copies_above_bare": None if whole is None or alone is None else round((whole - alone) / (4 * count), 2),
    }
    print(f"\n{benchmark.extra_info}")
