"""What the experiments would cost: passes that the library counts, times operations that torch counts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from quotient_manifolds.geometry import Euclidean
from quotient_manifolds.sharpness import Measure, cross_entropy
from studies.full_scale.experiments import FullScale

if TYPE_CHECKING:
    from quotient_manifolds.compare.measure_entries import MeasureEntry

GPU = "A100"
PEAK = 19.5e12  # operations a second in float32, without tensor cores: the maker's figure
UTILISATION = 0.4  # assumed
OVERHEAD = {"euclidean": 1.08, "adaptive": 1.08, "inv": 1.14, "mix": 1.15}
"""Of a step of the ascent over a bare pass (docs/benchmarks.md); a metric of neither name is taken for inv."""


@final
@dataclass(frozen=True)
class Passes:
    """Hold the passes of one measure on one batch."""

    forward: int
    backward: int


@final
@dataclass(frozen=True)
class Operations:
    """Hold floating point operations of a forward and of a backward pass of one batch."""

    forward: int
    backward: int


@final
@dataclass(frozen=True)
class Cost:
    """Hold GPU hours of every measure of all models, and of their scores on data and test data."""

    measures: dict[str, float]
    scores: float
    passes: int  # forward and backward, of all measures and models
    batch_size: int
    operations: Operations

    @property
    def hours(self) -> float:
        return sum(self.measures.values()) + self.scores


def cost(experiment: FullScale) -> Cost:
    """Estimate the cost: seconds = operations / (peak * utilisation) * overhead."""
    batch_size, batches, measures = _plan(experiment)
    operations = operations_of(experiment, batch_size)
    hours: dict[str, float] = {}
    total = 0
    for each in measures:
        passes = passes_of(each.measure)
        total += experiment.models * batches * (passes.forward + passes.backward)
        once = passes.forward * operations.forward + passes.backward * operations.backward
        metric = each.measure.geometry.name.split()[0]
        overhead = OVERHEAD.get(metric, OVERHEAD["inv"])
        hours[each.label] = _hours(experiment.models * batches * once) * overhead
    scored = experiment.models * operations.forward * (batches + experiment.test / batch_size)
    return Cost(hours, _hours(scored), total, batch_size, operations)


def _hours(operations: float) -> float:
    return operations / (PEAK * UTILISATION) / 3600


def operations_of(experiment: FullScale, batch_size: int) -> Operations:
    """Count operations of one batch, on the meta device: nothing is computed."""
    model, inputs = experiment.model(), experiment.inputs(batch_size)
    labels = torch.empty(batch_size, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        out = model(**inputs)
        loss = nn.functional.cross_entropy(getattr(out, "logits", out), labels)
        forward = counter.get_total_flops()
        loss.backward()
    return Operations(forward, counter.get_total_flops() - forward)


def passes_of(measure: Measure) -> Passes:
    """Return passes as the library counts them; they depend neither on geometry and radius nor on the model."""
    size: dict[str, Any] = {"radius": 0.1} if hasattr(measure, "radius") else {}
    return _counted(replace(measure, geometry=Euclidean(), **size))


@cache
def _counted(measure: Measure) -> Passes:
    """Count passes on one batch of a model so small that it takes no time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = _Tiny().eval()
        batch = (torch.randn(4, 3, 4), torch.tensor([0, 1, 0, 1]))
    found = measure.of(model, cross_entropy, [batch], None)
    return Passes(found.forward_passes, found.backward_passes)


@final
class _Tiny(nn.Module):
    """Hold an encoder with one head of two."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(4, 2, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(x).mean(1))
        return out


def _plan(experiment: FullScale) -> tuple[int, int, tuple[MeasureEntry, ...]]:
    """Return batch size, number of batches and measures, as the spec has them."""
    from quotient_manifolds.compare.measure_entries import measures_of
    from quotient_manifolds.compare.spec_file import read_yaml, validated

    with experiment.path() as path:
        top = validated(read_yaml(path))
    measures = [
        measured
        for each in top.measures
        for measured in measures_of(
            each.measure,
            each.geometry,
            each.sizes,
            warm_start=each.warm_start,
            normalise_logits=each.normalise_logits,
            options=each.options,
        )
    ]
    return top.data.batch_size, top.data.max_batches or 0, tuple(measures)
