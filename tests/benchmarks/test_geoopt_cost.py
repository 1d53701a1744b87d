"""The cost of one step of geoopt's optimizers on a pair, with and without using the last factorisations again.

Processor time; steps with and without alternate, so that whatever else the machine does hits both alike. Reported in
extra_info: the median ratio without / with, and the milliseconds of a step, beside those of torch's Adam and AdamW.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from unittest.mock import patch

import geoopt
import pytest
import torch
from geoopt.optim import RiemannianAdam, RiemannianSGD
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

from quotient_manifolds.manifolds import FixedRankQuotient, quotient

Make = Callable[[list[Tensor]], torch.optim.Optimizer]

SIZES = {
    "24 x 1024 x 1024, h = 16": ((24,), 1024, 16),
    "12 x 384 x 384, h = 32": ((12,), 384, 32),
    "768 x 768, h = 8": ((), 768, 8),
}
OPTIMIZERS: dict[str, Make] = {
    "RiemannianSGD": lambda p: RiemannianSGD(p, lr=1e-6),
    "RiemannianSGD(momentum)": lambda p: RiemannianSGD(p, lr=1e-6, momentum=0.9),
    "RiemannianAdam": lambda p: RiemannianAdam(p, lr=1e-6),
}
PLAIN: tuple[Make, Make] = (lambda p: torch.optim.Adam(p, lr=1e-6), lambda p: torch.optim.AdamW(p, lr=1e-6))
ROUNDS = 20


def stepper(make: Make, batch: tuple[int, ...], n: int, h: int) -> Callable[[], float]:
    """Takes one step and returns its seconds of processor time."""
    torch.manual_seed(0)
    manifold = FixedRankQuotient(n, n)
    parameter = geoopt.ManifoldParameter(manifold.random(*batch, 2 * n, h), manifold=manifold)
    gradient, optimizer = torch.randn_like(parameter), make([parameter])

    def step() -> float:
        parameter.grad = gradient.clone()
        before = time.process_time()
        optimizer.step()
        return time.process_time() - before

    return step


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_step(benchmark: BenchmarkFixture, name: str, size: str) -> None:
    make, (batch, n, h) = OPTIMIZERS[name], SIZES[size]
    again, anew, plain, decayed = (stepper(m, batch, n, h) for m in (make, make, *PLAIN))
    ratios, steps, adams, adamws = [], [], [], []

    def round_() -> None:
        with patch.object(quotient, "lasts", lambda x: False):
            without = anew()
        steps.append(again())
        adams.append(plain())
        adamws.append(decayed())
        ratios.append(without / steps[-1])

    round_()  # states of the optimizers, and the first factorisation
    for series in (ratios, steps, adams, adamws):
        series.clear()
    benchmark.pedantic(round_, rounds=ROUNDS)
    benchmark.extra_info["without / with"] = round(statistics.median(ratios), 2)
    benchmark.extra_info["milliseconds"] = round(1e3 * statistics.median(steps), 2)
    for other, series in (("Adam", adams), ("AdamW", adamws)):
        benchmark.extra_info[f"milliseconds of torch.optim.{other}"] = round(1e3 * statistics.median(series), 2)
    benchmark.extra_info["times torch.optim.AdamW"] = round(statistics.median(steps) / statistics.median(adamws), 1)
    assert statistics.median(ratios) > 1
