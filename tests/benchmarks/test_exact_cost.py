"""What exact geodesics of `mix`, which have no closed form, cost on a pretrained BERT, beside their limit of a second.

144 pairs of (384 | 385 + 384) x 32, moved up the gradient of a loss by |z| = 0.1 and 0.4: a move, a move with the
pull-back of a gradient, and the same of second order; in seconds, and over a counted limit. Counted are, N = n + m:

    13 velocities of both factors, each four products of (2h x h) and a Cholesky inverse (h^3)     34 h^3 each
    left^T z, the rest, its products, and the two products that lead to the end                    10 N h^2

at the rate of batched products of (64 x 32) by (32 x 32). What takes more than one step takes more.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from quotient_manifolds.geometry import Quotient
from quotient_manifolds.sharpness.vector import norm
from tests.benchmarks.pretrained import batch_of, loss, pretrained
from tests.benchmarks.running import seconds
from tests.geometry.cases import pull_back

LIMIT = 1.0
"""Seconds that a move may take, with one thread."""


@pytest.mark.parametrize("length", [0.1, 0.4])
def test_exact_moves_of_mix(length: float, benchmark: BenchmarkFixture) -> None:
    model, batch = pretrained(), batch_of(4, 32)
    spaces = {
        geodesic: Quotient("mix", geodesic=geodesic).verified(model, loss, [batch]).tangent_space(model)
        for geodesic in ("second", "exact")
    }
    slopes = torch.autograd.grad(loss(model, batch), list(model.parameters()), allow_unused=True)
    gradients = dict(zip(dict(model.named_parameters()), slopes, strict=True))
    z = {}
    for name, space in spaces.items():
        up = space.gradient(gradients)
        z[name] = {key: part * (length / norm(up)) for key, part in up.items()}
    c, on = torch.randn(32, 64, 32, dtype=torch.float64), torch.randn(32, 32, 32, dtype=torch.float64)
    timed: dict[str, Callable[[], object]] = {
        "products": lambda: [torch.bmm(c, on) for _ in range(100)],
        **{f"{name} move": lambda s=space, z=z[name]: s.move(z) for name, space in spaces.items()},
        **{f"{name} pull": lambda s=space, z=z[name]: pull_back(s, z, gradients) for name, space in spaces.items()},
    }
    times: dict[str, list[float]] = {name: [] for name in timed}

    def turn() -> None:
        for name, f in timed.items():
            times[name].append(seconds(f))

    benchmark.pedantic(turn, rounds=5, iterations=1, warmup_rounds=1)
    fastest = {name: min(column) for name, column in times.items()}
    blocks = [block.space.point for block in spaces["exact"].pairs]
    h = blocks[0].shape[-1]
    operations = sum(len(x) * (2 * 13 * 17 * h**3 + 10 * x.shape[-2] * h**2) for x in blocks)
    rate = 100 * 2 * c.numel() * h / fastest.pop("products")
    benchmark.extra_info |= {
        "length": length,
        "pairs": sum(map(len, blocks)),
        "threads": torch.get_num_threads(),
        **{name: round(value, 3) for name, value in fastest.items()},
        "limit of an exact move": LIMIT,
        "counted": round(operations / rate, 3),
        "over counted": round(fastest["exact move"] * rate / operations, 2),
    }
    print(f"\n{benchmark.extra_info}")
