"""Distance and mean of aligned points: a curve's length bounds the distance, and nothing sees the representative."""

from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quotient_manifolds.manifolds import FixedRankQuotient

SHAPES = [(6, 5, 2), (3, 3, 3), (3, 4, 3), (4, 3, 3), (3, 2, 1), (1, 2, 1), (9, 8, 4)]
seeds = st.integers(0, 2**31)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
every_metric = pytest.mark.parametrize("metric", ["inv", "mix"])


def gaussian(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def along_a_geodesic(manifold: FixedRankQuotient, h: int, seed: int, length: float) -> tuple[Tensor, Tensor, float]:
    """x, a representative of Exp_x(xi) and |xi|, the distance if it is small."""
    x = gaussian(manifold.n + manifold.m, h, seed=seed)
    space = manifold.at(x)
    xi = space.sample(torch.Generator().manual_seed(seed + 1))
    length *= float(space.singular_values[-1] ** manifold.t)
    y = manifold.expmap(x, length * xi / space.norm(xi))
    return x, manifold.action(gaussian(h, h, seed=seed + 2), y), length


def connected(manifold: FixedRankQuotient, x: Tensor, y: Tensor) -> Tensor:
    products = [G @ H.mT for G, H in (manifold.split(x), manifold.split(y))]
    if not manifold.n == manifold.m == x.shape[-1]:
        return torch.ones(x.shape[:-2], dtype=torch.bool)
    return torch.linalg.det(products[0]) * torch.linalg.det(products[1]) > 0


@every_metric
@every_shape
@settings(max_examples=5)
@given(seed=seeds)
def test_near_points_are_bounded_tightly(metric: str, shape: tuple[int, int, int], seed: int) -> None:
    n, m, h = shape
    manifold = FixedRankQuotient(n, m, metric)
    excess = []
    for length in (0.3, 0.01):
        x, y, distance = along_a_geodesic(manifold, h, seed, length)
        excess.append(float(manifold.alignment_dist(x, y)) / distance - 1)
    assert min(excess) > -1e-8
    assert excess[0] < 0.3
    assert excess[1] < 0.01


def path_length(manifold: FixedRankQuotient, x: Tensor, y: Tensor, segments: int = 24) -> float:
    """Minimises the energy of a discretised path in the total space, the end free on its orbit; the length of it."""
    n, h, inv = manifold.n, x.shape[-1], manifold.t == 0
    times = torch.linspace(0, 1, segments + 1, dtype=x.dtype)[1:-1, None, None]
    target = manifold.align(x, y)
    inner = (x + times * (target - x)).requires_grad_()
    log_A = torch.zeros(h, h, dtype=x.dtype, requires_grad=True)

    def squares() -> Tensor:
        E = torch.linalg.matrix_exp(log_A)
        end = torch.cat([torch.linalg.solve(E, target[:n], left=False), target[n:] @ E.T])
        path = torch.cat([x[None], inner, end[None]])
        step, middle = path.diff(dim=0), (path[1:] + path[:-1]) / 2
        (G, H), (D, E) = (p.split([n, p.shape[-2] - n], dim=-2) for p in (middle, step))
        weights = [torch.linalg.inv(p.mT @ p) for p in (G, H)] if inv else [H.mT @ H, G.mT @ G]
        return sum(((v @ W) * v).sum((-2, -1)) for v, W in zip((D, E), weights, strict=True))

    optimizer = torch.optim.LBFGS([inner, log_A], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        energy = segments * squares().sum()
        energy.backward()
        return energy

    optimizer.step(closure)
    return float(squares().detach().sqrt().sum())


@every_metric
@pytest.mark.parametrize("shape", [(3, 2, 2), (3, 3, 1), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_no_path_that_was_found_is_longer(metric: str, shape: tuple[int, int, int], seed: int) -> None:
    """The oracle: paths as polygons, far from their start, where the bound is no more than a few percent too large."""
    n, m, h = shape
    manifold = FixedRankQuotient(n, m, metric)
    x, xi = gaussian(n + m, h, seed=seed), gaussian(n + m, h, seed=seed + 50)
    size = 0.5 if metric == "inv" else 0.15
    y = manifold.action(gaussian(h, h, seed=seed + 9), manifold.retr(x, size * manifold.proju(x, xi)))
    bound = float(manifold.alignment_dist(x, y))
    if not bool(connected(manifold, x, y)):
        assert bound == math.inf
        return
    found = path_length(manifold, x, y)
    assert found <= bound * (1 + 5e-3)  # polygons of 24 segments
    assert bound <= 1.3 * found


@every_metric
@every_shape
@settings(max_examples=5)
@given(seed=seeds, exponent=st.floats(0, 4))
def test_far_points(metric: str, shape: tuple[int, int, int], seed: int, exponent: float) -> None:
    """Symmetric, constant along both orbits, 0 on the orbit, between what is known of mix; batches broadcast."""
    n, m, h = shape
    manifold = FixedRankQuotient(n, m, metric)
    x, y = gaussian(5, n + m, h, seed=seed), gaussian(n + m, h, seed=seed + 1)
    turns = torch.linalg.qr(gaussian(2, h, h, seed=seed + 2)).Q
    A, B = turns * torch.logspace(0, -exponent, h, dtype=x.dtype)
    bound = manifold.alignment_dist(x, y)
    assert bound.shape == (5,)
    assert manifold.alignment_dist(x, y, keepdim=True).shape == (5, 1, 1)
    near = {"rtol": 1e-6, "atol": 1e-9}
    torch.testing.assert_close(manifold.alignment_dist(y, x), bound, **near)
    moved = manifold.alignment_dist(manifold.action(A, x), manifold.action(B, y))
    torch.testing.assert_close(moved, bound, **near)
    size = (x.square().sum((-2, -1)) if metric == "mix" else torch.ones(())).max()
    assert bool((manifold.alignment_dist(x, manifold.action(A, x)) < 1e-9 * size).all())
    assert torch.equal(bound.isfinite(), connected(manifold, x, y))
    if metric == "mix":
        X, Y = (G @ H.mT for G, H in (manifold.split(x), manifold.split(y)))
        norm = torch.linalg.matrix_norm
        assert bool((bound >= norm(X - Y) / math.sqrt(2) * (1 - 1e-9)).all())
        assert bool(
            (bound[bound.isfinite()] <= ((norm(X) + norm(Y)) / math.sqrt(2) * (1 + 1e-9))[bound.isfinite()]).all()
        )


def test_rank_one_inv_is_exact() -> None:
    """log length and two angles; of the angles, the first or the second may be taken from the other side."""
    for seed in range(20):
        manifold = FixedRankQuotient(3, 4)
        x, y = gaussian(2, 7, 1, seed=seed)
        (g, h), (p, q) = manifold.split(x), manifold.split(y)
        angles = [math.acos(float((a * b).sum() / a.norm() / b.norm())) for a, b in ((g, p), (h, q))]
        turns = [math.hypot(*angles), math.hypot(math.pi - angles[0], math.pi - angles[1])]
        growth = math.log(float(p.norm() * q.norm() / g.norm() / h.norm()))
        expected = math.hypot(growth / math.sqrt(2), min(turns))
        assert float(manifold.alignment_dist(x, y)) == pytest.approx(expected, rel=1e-10)


def test_products_that_are_numbers() -> None:
    x, y = torch.tensor([[2.0], [0.5]]), torch.tensor([[1.0], [3.0]])
    assert float(FixedRankQuotient(1, 1).alignment_dist(x, y)) == pytest.approx(math.log(3) / math.sqrt(2))
    found = float(FixedRankQuotient(1, 1, "mix").alignment_dist(x, y))
    assert math.sqrt(2) <= found * (1 + 1e-6) <= math.sqrt(2) * (1 + 1e-3)
    assert float(FixedRankQuotient(1, 1).alignment_dist(x, y * torch.tensor([[1.0], [-1.0]]))) == math.inf


@every_metric
def test_single_precision_and_a_spread_spectrum(metric: str) -> None:
    manifold = FixedRankQuotient(7, 6, metric)
    x, y = gaussian(2, 13, 4, seed=0) * torch.logspace(0, -3, 4, dtype=torch.float64)
    wide = manifold.alignment_dist(x, y)
    narrow = manifold.alignment_dist(x.float(), y.float())
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(narrow.double(), wide, rtol=1e-3, atol=0)


@every_metric
def test_gradients_and_vmap(metric: str) -> None:
    manifold = FixedRankQuotient(5, 4, metric)
    x, y = gaussian(3, 9, 2, seed=0), gaussian(3, 9, 2, seed=1)
    torch.autograd.gradcheck(manifold.alignment_dist, (x.requires_grad_(), y.requires_grad_()))
    mapped = torch.func.vmap(manifold.alignment_dist)(x.detach(), y.detach())
    torch.testing.assert_close(mapped, manifold.alignment_dist(x, y).detach(), rtol=1e-9, atol=1e-9)


@every_shape
@settings(max_examples=5)
@given(seed=seeds, spread=st.sampled_from([0.01, 0.3, 10.0]))
def test_the_mean_sees_orbits_only(shape: tuple[int, int, int], seed: int, spread: float) -> None:
    n, m, h = shape
    manifold = FixedRankQuotient(n, m)
    x = gaussian(n + m, h, seed=seed) + spread * gaussian(4, n + m, h, seed=seed + 1)
    w = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    A, order = gaussian(4, h, h, seed=seed + 2), [2, 0, 3, 1]
    mean = manifold.alignment_mean(x, w)
    torch.testing.assert_close(manifold.balance(mean), mean, rtol=1e-6, atol=1e-8)
    there = manifold.alignment_mean(manifold.action(A, x)[order], 7 * w[order])
    assert bool(manifold.same_orbit(there, mean, rtol=1e-6))
    doubled = manifold.alignment_mean(torch.cat([x, x[3:]]), [0.1, 0.2, 0.3, 0.2, 0.2])
    assert bool(manifold.same_orbit(doubled, mean, rtol=1e-6))


@every_shape
def test_the_mean_of_one_orbit_is_the_orbit(shape: tuple[int, int, int]) -> None:
    n, m, h = shape
    manifold = FixedRankQuotient(n, m)
    x = gaussian(2, n + m, h, seed=3)
    A = gaussian(5, 2, h, h, seed=4)
    assert manifold.same_orbit(manifold.alignment_mean(x[None]), x, rtol=1e-9).tolist() == [True, True]
    assert manifold.same_orbit(manifold.alignment_mean(manifold.action(A, x)), x, rtol=1e-9).tolist() == [True, True]
    each = torch.stack([manifold.alignment_mean(manifold.action(A, x)[:, i]) for i in range(2)])
    assert bool(manifold.same_orbit(each, x, rtol=1e-9).all())
    assert manifold.alignment_mean(x.float()).dtype == torch.float32


def best_turns(z: Tensor) -> tuple[float, Tensor]:
    """Minimises the sum of squared distances of points (k, rows, 2) to their mean over a turn of each; the mean."""
    angles = torch.zeros(len(z), dtype=z.dtype, requires_grad=True)
    optimizer = torch.optim.LBFGS([angles], max_iter=100, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def turned() -> Tensor:
        rows = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], dim=-1)
        return z @ rows.reshape(-1, 2, 2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        total = (turned() - turned().mean(0)).square().sum()
        total.backward()
        return total

    optimizer.step(closure)
    points = turned().detach()
    return float((points - points.mean(0)).square().sum()), points.mean(0)


def test_the_mean_is_the_middle_of_the_best_turns() -> None:
    manifold = FixedRankQuotient(6, 5)
    x = gaussian(11, 2, seed=0) + 0.2 * gaussian(4, 11, 2, seed=1)
    z, found = manifold.balance(x), []
    for signs in range(8):  # each point but the first may be reflected, too
        flip = torch.tensor([[1.0, 1 - 2 * (signs * 2 >> i & 1)] for i in range(4)], dtype=z.dtype)
        found.append(best_turns(z * flip[:, None, :]))
    best = min(found, key=lambda pair: pair[0])
    assert bool(manifold.same_orbit(best[1], manifold.alignment_mean(x), rtol=1e-6))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda x: FixedRankQuotient(2, 1, 0.3).alignment_dist(x[0], x[0]), "needs the metric 'inv' or 'mix'"),
        (lambda x: FixedRankQuotient(2, 1, eps=0.1).alignment_dist(x[0], x[0]), "with eps = 0; found"),
        (lambda x: FixedRankQuotient(2, 1).alignment_mean(x[0]), "at least one point along a first dimension"),
        (lambda x: FixedRankQuotient(2, 1).alignment_mean(x, [1.0]), r"shape \(2,\), one for each point; found"),
        (lambda x: FixedRankQuotient(2, 1).alignment_mean(x, [1.0, -1.0]), "finite, at least 0, and not all 0"),
        (lambda x: FixedRankQuotient(2, 1).alignment_mean(x, "a"), "should be numbers, one for each point"),
    ],
)
def test_bad_input(call: object, sentence: str) -> None:
    with pytest.raises((ValueError, TypeError), match=sentence) as error:
        call(torch.ones(2, 3, 1))
    assert not re.search("\n", str(error.value))
