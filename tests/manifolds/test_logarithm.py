"""Logarithm, distance, alignment and mean of the fixed-rank quotient: they undo what the exponential does."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation
from torch import Tensor

from quotient_manifolds.manifolds import FixedRankQuotient, GeodesicError

SHAPES = [(6, 5, 2), (3, 3, 3), (3, 2, 1), (2, 4, 2)]


def near(manifold: FixedRankQuotient, h: int, seed: int, length: float = 0.3) -> tuple[Tensor, Tensor, Tensor]:
    """x, a horizontal xi and a random representative of Exp_x(xi)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(manifold.n + manifold.m, h, generator=generator, dtype=torch.float64)
    space = manifold.at(x)
    xi = space.sample(generator)
    xi = length * xi / space.norm(xi) * space.singular_values[-1] ** manifold.t
    A = torch.randn(h, h, generator=generator, dtype=torch.float64)
    return x, xi, manifold.action(A, manifold.expmap(x, xi))


@pytest.mark.parametrize("metric", ["inv", "mix"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(max_examples=2)
@given(seed=st.integers(0, 2**31))
def test_the_logarithm_undoes_the_exponential(metric: str, shape: tuple[int, int, int], seed: int) -> None:
    n, m, h = shape
    manifold = FixedRankQuotient(n, m, metric)
    x, xi, y = near(manifold, h, seed)
    space = manifold.at(x)
    found = manifold.logmap(x, y)
    assert space.norm(found - xi) <= 1e-6 * space.norm(xi)
    assert manifold.dist(x, y) == pytest.approx(float(space.norm(xi)), rel=1e-6)
    assert manifold.dist(y, x) == pytest.approx(float(space.norm(xi)), rel=1e-6)


def test_a_metric_between() -> None:
    manifold = FixedRankQuotient(3, 2, 0.5)
    x, xi, y = near(manifold, 1, 0)
    torch.testing.assert_close(manifold.logmap(x, y), xi, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("metric", ["inv", "mix"])
def test_batches_dtypes_and_the_point_itself(metric: str) -> None:
    manifold = FixedRankQuotient(4, 3, metric)
    rows = [near(manifold, 2, seed) for seed in range(3)]
    x, xi, y = (torch.stack(column) for column in zip(*rows, strict=True))
    torch.testing.assert_close(manifold.logmap(x, y), xi, rtol=1e-6, atol=1e-6)
    assert manifold.dist(x, y, keepdim=True).shape == (3, 1, 1)
    assert manifold.logmap(x.float(), y.float()).dtype == torch.float32
    A = torch.randn(2, 2, dtype=torch.float64)
    assert float(manifold.dist(x[0], manifold.action(A, x[0]))) <= 1e-9 * float(manifold.at(x[0]).singular_values[0])


def test_rank_one_inv_distance_has_a_closed_form() -> None:
    """inv at h = 1 is, for each factor, log length and angle on the sphere; horizontally both lengths share log s."""
    manifold = FixedRankQuotient(3, 3, "inv")
    u, v = torch.randn(2, 3, dtype=torch.float64)
    rotate = torch.from_numpy(Rotation.from_rotvec([0.3, -0.2, 0.1]).as_matrix())
    x, y = torch.cat([u, v])[:, None], torch.cat([2.0 * rotate @ u, 1.5 * v])[:, None]
    angle = math.acos(float(u @ rotate @ u / (u @ u)))
    expected = math.sqrt(math.log(3.0) ** 2 / 2 + angle**2)
    assert float(manifold.dist(x, y)) == pytest.approx(expected, rel=1e-8)


def test_rank_one_mix_distance_is_that_of_a_cone() -> None:
    """mix at h = 1: dr^2 / 2 + r^2 (dth_u^2 + dth_v^2), r = |u| |v|: a flat cone after stretching angles by sqrt 2."""
    manifold = FixedRankQuotient(2, 2, "mix")

    def point(r: float, alpha: float, beta: float) -> Tensor:
        u, v = (torch.tensor([math.cos(a), math.sin(a)], dtype=torch.float64) for a in (alpha, beta))
        return torch.cat([math.sqrt(r) * u, math.sqrt(r) * v])[:, None]

    stretched = math.sqrt(2) * math.hypot(0.4, 0.7)
    R, Q = 1.3 / math.sqrt(2), 2.1 / math.sqrt(2)
    expected = math.sqrt(R**2 + Q**2 - 2 * R * Q * math.cos(stretched))
    assert float(manifold.dist(point(1.3, 0.2, 0.1), point(2.1, 0.6, 0.8))) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_alignment(shape: tuple[int, int, int]) -> None:
    n, m, h = shape
    manifold = FixedRankQuotient(n, m)
    x, _, y = near(manifold, h, 3, length=0.1)
    A, B = torch.randn(2, h, h, dtype=torch.float64)
    aligned = manifold.align(x, y)
    assert bool(manifold.same_orbit(aligned, y))
    assert manifold.at(x).norm(aligned - x) < 0.2  # y itself is a random representative, far away
    torch.testing.assert_close(manifold.align(x, manifold.action(B, y)), aligned, rtol=1e-6, atol=1e-6)
    moved = manifold.align(manifold.action(A, x), y)
    torch.testing.assert_close(moved, manifold.action(A, aligned), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("metric", ["inv", "mix"])
def test_the_mean_is_where_logarithms_add_up_to_zero(metric: str) -> None:
    manifold = FixedRankQuotient(3, 3, metric)
    x = torch.randn(6, 2, dtype=torch.float64)
    space = manifold.at(x)
    step = space.sample() * 0.05 * space.singular_values[-1] ** manifold.t
    points = torch.stack([manifold.expmap(x, k * step) for k in (-1.0, 0.25, 0.75)])
    assert bool(manifold.same_orbit(manifold.mean(points), x, rtol=1e-6))


def test_the_mean_of_one_point_and_in_single_precision() -> None:
    manifold = FixedRankQuotient(3, 3)
    x = torch.randn(1, 6, 2)
    assert bool(manifold.same_orbit(manifold.mean(x), x[0], rtol=1e-5))
    near = x[0] * (1 + 0.01 * torch.randn(4, 6, 2))
    assert manifold.mean(near).dtype == torch.float32


@pytest.mark.parametrize("metric", ["inv", "mix"])
def test_rank_16(metric: str) -> None:
    """The sizes of adapters: points as far apart as a third of themselves, of which one is the end of the other."""
    manifold = FixedRankQuotient(96, 80, metric)
    x, xi, _ = near(manifold, 16, 5)
    space = manifold.at(x)
    size = 0.3 * (space.singular_values.norm() if metric == "mix" else 1) / space.norm(xi)
    y = torch.stack([manifold.expmap(x, size * xi), x])
    found = manifold.logmap(x, manifold.action(torch.randn(16, 16, dtype=torch.float64), y))
    torch.testing.assert_close(found[0], size * xi, rtol=1e-6, atol=1e-6 * float(size * xi.abs().max()))
    assert float(space.norm(found[1])) < 1e-9 * float(space.singular_values[0])


@pytest.mark.parametrize("metric", ["inv", "mix"])
def test_a_pair_does_not_depend_on_the_others_in_the_batch(metric: str) -> None:
    """Pairs end their searches at different times."""
    manifold = FixedRankQuotient(5, 4, metric)
    pairs = [near(manifold, 2, seed, length) for seed, length in ((0, 0.5), (1, 1e-3), (2, 0.2), (3, 1e-7))]
    x, xi, y = (torch.stack(column) for column in zip(*pairs, strict=True))
    found = manifold.logmap(x, y)
    for i in range(4):
        assert manifold.norm(x[i], found[i] - xi[i]) <= 1e-6 * manifold.norm(x[i], xi[i])
        torch.testing.assert_close(manifold.logmap(x[i], y[i]), found[i], rtol=1e-7, atol=1e-13)


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


@pytest.mark.parametrize("metric", ["inv", "mix"])
@pytest.mark.parametrize("shape", [(3, 2, 2), (3, 3, 1), (2, 2, 2)], ids=str)
def test_distances_are_those_of_shortest_paths(metric: str, shape: tuple[int, int, int]) -> None:
    """The oracle: polygons whose energy is minimised, up to the error of 24 segments."""
    n, m, h = shape
    manifold = FixedRankQuotient(n, m, metric)
    x, _, y = near(manifold, h, 1, length=0.5)
    assert float(manifold.dist(x, y)) == pytest.approx(path_length(manifold, x, y), rel=5e-3)


def test_far_points_and_relaxed_metrics_are_refused() -> None:
    manifold = FixedRankQuotient(1, 1, "inv")
    x = torch.tensor([[1.0], [1.0]], dtype=torch.float64)
    y = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    with pytest.raises(GeodesicError, match="must be near enough to find a geodesic"):
        manifold.logmap(x, y)
    with pytest.raises(ValueError, match=r"eps must be 0 for logmap and dist, an invariant metric. Found eps = 0.1"):
        FixedRankQuotient(1, 1, eps=0.1).dist(x, x)
    with pytest.raises(GeodesicError, match="Found no fixed point within 1 steps"):
        manifold.mean(torch.stack([x, 1.1 * x, 1.3 * x]), steps=1)
