"""The cost of a step of our optimizers and of geoopt's, beside AdamW's, and of SAM's beside the passes it needs.

Processor time, one thread; steps alternate, so that whatever else the machine does hits all alike. Reported in
extra_info: medians in milliseconds and median ratios within a round.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import geoopt
import pytest
import torch
from geoopt.optim import RiemannianAdam, RiemannianSGD
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor, nn

import quotient_manifolds as qm
from quotient_manifolds.manifolds import FixedRankQuotient, quotient
from tests.benchmarks.running import compared

SIZES = {
    "24 x 1024 x 1024, h = 16": ((24,), 1024, 16),
    "12 x 384 x 384, h = 32": ((12,), 384, 32),
    "768 x 768, h = 8": ((), 768, 8),
}
RIEMANNIAN: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "RiemannianSGD": RiemannianSGD,
    "RiemannianSGD(momentum)": partial(RiemannianSGD, momentum=0.9),
    "RiemannianAdam": RiemannianAdam,
}


class Adapter(nn.Module):
    def __init__(self, n: int, m: int, rank: int) -> None:
        super().__init__()
        self.B, self.A = nn.Linear(rank, n, bias=False), nn.Linear(m, rank, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.B(self.A(x))


def adapters(count: int) -> tuple[nn.Module, qm.Symmetries]:
    """So many pairs of 1024 x 1024 of rank 16, with gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Adapter(1024, 1024, 16) for _ in range(count))).eval()
    found = qm.find_symmetries(model, torch.randn(2, 1024))
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    return model, found


def riemannian(make: Callable[..., torch.optim.Optimizer], batch: tuple[int, ...], n: int, h: int) -> Callable[[], Any]:
    """A step of an optimizer on random points."""
    manifold = FixedRankQuotient(n, n)
    parameter = geoopt.ManifoldParameter(manifold.random(*batch, 2 * n, h), manifold=manifold)
    parameter.grad = torch.randn_like(parameter)
    return make([parameter], lr=1e-6).step


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", RIEMANNIAN)
def test_step_of_geoopts_optimizers(benchmark: BenchmarkFixture, name: str, size: str) -> None:
    """Using the last factorisations again, and without that."""
    torch.manual_seed(0)
    makes = (RIEMANNIAN[name], RIEMANNIAN[name], torch.optim.Adam, torch.optim.AdamW)
    again, anew, adam, adamw = (riemannian(make, *SIZES[size]) for make in makes)

    def without() -> None:
        with patch.object(quotient, "lasts", lambda x: False):
            anew()

    compared(benchmark, {name: again, "without": without, "Adam": adam, "AdamW": adamw}, name)
    assert benchmark.extra_info[f"without / {name}"] > 1


def test_step_of_24_adapters(benchmark: BenchmarkFixture) -> None:
    model, found = adapters(24)
    made = {
        "AdamW": torch.optim.AdamW(model.parameters(), lr=1e-7),
        "QuotientAdam": qm.QuotientAdam(model.named_parameters(), found, lr=1e-7),
        "QuotientSGD": qm.QuotientSGD(model.named_parameters(), found, lr=1e-7, momentum=0.9),
    }
    compared(benchmark, {name: optimizer.step for name, optimizer in made.items()}, "AdamW")


def test_one_batch_against_one_by_one(benchmark: BenchmarkFixture) -> None:
    """All pairs of a shape are one batch inside; here beside an optimizer for every pair."""
    model, found = adapters(24)
    whole = qm.QuotientAdam(model.named_parameters(), found, lr=1e-7)
    named = dict(model.named_parameters())
    single = [
        qm.QuotientAdam([(name, named[name]) for name in pair.names], qm.Symmetries((pair,)), lr=1e-7)
        for pair in found.pairs
    ]
    compared(benchmark, {"one batch": whole.step, "one by one": lambda: [each.step() for each in single]}, "one batch")


@pytest.mark.parametrize("metric", ["euclidean", "mix"])
def test_sam_beside_its_passes(benchmark: BenchmarkFixture, metric: str) -> None:
    """A step of SAM over two forward and backward passes and a step of the optimizer below: a layer of BERT's size."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(384, 12, 1536, batch_first=True, dropout=0.0).eval()
    inputs, targets = torch.randn(32, 32, 384), torch.randn(32, 32, 384)
    found = qm.find_symmetries(layer, inputs[:2])
    geometry = qm.Euclidean() if metric == "euclidean" else qm.Quotient(metric, symmetries=found)
    below = torch.optim.AdamW(layer.parameters(), lr=1e-7)
    sam = qm.SAM(below, layer, geometry=geometry, radius=0.01)

    def closure() -> Tensor:
        layer.zero_grad()
        loss = nn.functional.mse_loss(layer(inputs), targets)
        loss.backward()
        return loss.detach()

    def bare() -> None:
        closure()
        closure()
        below.step()

    compared(benchmark, {"SAM": lambda: sam.step(closure), "two passes and a step": bare}, "two passes and a step")
