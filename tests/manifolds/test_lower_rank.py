"""Training from, and through, pairs whose product has a rank below h: the starts B = 0 and A = 0 of LoRA."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import geoopt
import pytest
import torch
from geoopt.optim import RiemannianAdam, RiemannianSGD
from torch import Tensor

from quotient_manifolds.manifolds import FixedRankQuotient
from tests.cases import fixed_rank

Make = Callable[[list[Tensor]], torch.optim.Optimizer]

N, M, RANK = 7, 6, 3
METRICS = ["inv", "mix", 0.5]
every_metric = pytest.mark.parametrize("metric", METRICS)
ZEROS = {"B = 0": (0, RANK), "A = 0": (RANK, 0), "rank 1 of B": (1, RANK), "rank 2 of A": (RANK, 2)}
every_zero = pytest.mark.parametrize("ranks", ZEROS.values(), ids=ZEROS)
OPTIMIZERS: dict[str, Make] = {"sgd": partial(RiemannianSGD, lr=0.3), "adam": partial(RiemannianAdam, lr=0.1)}


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def group(condition: float, seed: int = 5) -> Tensor:
    return fixed_rank(N, M, RANK, "inv").group(torch.Generator().manual_seed(seed), condition)


def start(ranks: tuple[int, int]) -> Tensor:
    """A pair whose factors are orthonormal but for the columns at the end, which are 0."""
    factors = [torch.linalg.qr(normal(seed, k, RANK)).Q for seed, k in ((1, N), (2, M))]
    return torch.cat([x * (torch.arange(RANK) < rank) for x, rank in zip(factors, ranks, strict=True)])


def slopes(manifold: FixedRankQuotient, x: Tensor) -> Tensor:
    """The Euclidean gradient of a nonlinear function of the product."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        G, H = manifold.split(leaf)
        (gradient,) = torch.autograd.grad(((G @ H.mT - normal(3, N, M).to(x)) ** 3).sum(), leaf)
    return gradient


@every_metric
@every_zero
def test_the_metric_is_that_of_mix_where_a_direction_lacks(metric: str | float, ranks: tuple[int, int]) -> None:
    """Here the other factor has orthonormal columns, so lengths are Euclidean and (G^T G)^-1 the pseudo-inverse."""
    manifold, x = FixedRankQuotient(N, M, metric), start(ranks)
    slope = slopes(manifold, x)
    (g_G, g_H), there = manifold.split(slope), torch.arange(RANK) < min(ranks)
    expected = torch.cat([g_G * (there | (ranks[0] < RANK)), g_H * (there | (ranks[1] < RANK))])
    torch.testing.assert_close(manifold.egrad2rgrad(x, slope), expected)
    assert float(expected.norm()) > 0
    torch.testing.assert_close(manifold.inner(x, expected), (expected**2).sum())
    xi = manifold.proju(x, expected)
    torch.testing.assert_close(xi, expected)
    torch.testing.assert_close(manifold.retr(x, -0.1 * xi), x - 0.1 * xi)


@every_metric
@every_zero
def test_everything_is_equivariant(metric: str | float, ranks: tuple[int, int]) -> None:
    manifold, A = FixedRankQuotient(N, M, metric), group(1e4)
    x = manifold.action(group(10.0, 6), start(ranks))
    y, eta, zeta = manifold.action(A, x), normal(7, N + M, RANK), normal(8, N + M, RANK)

    def same(there: Tensor, here: Tensor) -> None:
        torch.testing.assert_close(there, here, rtol=1e-9, atol=1e-9 * float(here.abs().max()))

    push = partial(manifold.action, A)
    xi = manifold.egrad2rgrad(x, slopes(manifold, x))
    same(manifold.egrad2rgrad(y, slopes(manifold, y)), push(xi))
    same(manifold.inner(y, push(eta), push(zeta)), manifold.inner(x, eta, zeta))
    same(manifold.proju(y, push(eta)), push(manifold.proju(x, eta)))
    same(manifold.retr(y, push(eta)), push(manifold.retr(x, eta)))
    same(manifold.transp(y, manifold.retr(y, push(xi)), push(eta)), push(manifold.transp(x, manifold.retr(x, xi), eta)))


def test_a_batch_may_hold_points_of_all_ranks() -> None:
    manifold = FixedRankQuotient(N, M, "mix")
    x = torch.stack([start((RANK, RANK)), *map(start, ZEROS.values()), start((0, 0))])[:, None].expand(-1, 2, -1, -1)
    slope = torch.stack([slopes(manifold, one) for one in x[:, 0]])[:, None].expand_as(x)
    together = manifold.egrad2rgrad(x, slope)
    for k, one in enumerate(x[:, 0]):
        alone = manifold.egrad2rgrad(one, slope[k, 0])
        torch.testing.assert_close(together[k], alone.expand(2, -1, -1))
        torch.testing.assert_close(manifold.retr(x, -together)[k, 1], manifold.retr(one, -alone))
    assert not bool(together[-1].any())  # nothing moves where both are 0: all gradients vanish there


def products(
    make: Make, metric: str | float, x: Tensor, steps: int = 25, noisy: bool = False
) -> tuple[Tensor, list[float]]:
    """A regression through the pair: the product after every step, and the losses."""
    manifold = FixedRankQuotient(N, M, metric)
    p = geoopt.ManifoldParameter(x.clone(), manifold=manifold)
    optimizer, generator = make([p]), torch.Generator().manual_seed(4)
    inputs, W = normal(10, 64, M).to(x), (normal(11, N, RANK) @ normal(12, RANK, M) / 4).to(x)
    seen, losses = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        batch = inputs[torch.randint(64, (2,), generator=generator)] if noisy else inputs
        G, H = manifold.split(p)
        loss = (batch @ H @ G.mT - batch @ W.mT).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        with torch.no_grad():
            seen.append((G @ H.mT).clone())
    return torch.stack(seen), losses


@every_metric
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("ranks", [(0, RANK), (RANK, 0)], ids=["B = 0", "A = 0"])
def test_runs_from_one_orbit_are_one_run(name: str, metric: str | float, ranks: tuple[int, int]) -> None:
    x, A = start(ranks), group(1e4)
    y = FixedRankQuotient(N, M).action(A, x)
    for noisy in (False, True):
        (here, losses), (there, _) = (products(OPTIMIZERS[name], metric, point, noisy=noisy) for point in (x, y))
        assert float((here - there).norm() / here.norm()) < 1e-8
        assert noisy or losses[-1] < 0.8 * losses[0]
    mild = FixedRankQuotient(N, M).action(group(10.0), x).float()
    single = products(OPTIMIZERS[name], metric, mild)[0]
    assert float((products(OPTIMIZERS[name], metric, x)[0] - single).norm() / single.norm()) < 1e-4


@pytest.mark.parametrize("seed", range(2))
def test_steps_that_are_too_fast_stay_bounded(seed: int) -> None:
    manifold = FixedRankQuotient(N, M, "mix")
    tiny = torch.tensor([1.0, 1e-2, 1e-5], dtype=torch.float64)
    x = torch.cat([normal(seed, N, RANK) * tiny, normal(seed + 50, M, RANK)])
    space = manifold.at(x)
    for size in (1e-7, 1e-2, 1.0, 1e3):
        z = space.project(normal(seed + 100, N + M, RANK))
        xi = space.vector(size * z / z.norm())
        fast = float(space.relative_speed(space.coordinates(xi))) > 1
        before, after = (G @ H.mT for G, H in map(manifold.split, (x, manifold.retr(x, xi))))
        both = [float(torch.linalg.matrix_norm(X, 2)) for X in (before, after)]
        assert both[1] <= 7 * both[0] + size
        assert fast == (size > 1e-4)
        A = group(100.0, seed)
        moved = manifold.retr(manifold.action(A, x), manifold.action(A, xi))
        G, H = manifold.split(moved)
        torch.testing.assert_close(G @ H.mT, after, rtol=0, atol=1e-6 * both[1])
