"""Logarithm and distance: they undo what the exponential does, and are the shortest paths."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation
from torch import Tensor

from quotient_manifolds.linalg import singular_frame
from quotient_manifolds.manifolds import DiagonalQuotient, FixedRankQuotient, GeodesicError, ScaleQuotient
from quotient_manifolds.manifolds.fixed_rank import nearest
from tests.cases import INVARIANT, VECTORS, Case, fixed_rank

every_case = pytest.mark.parametrize(
    "case", [case for case in [*INVARIANT, *VECTORS] if not case.name.startswith("rotary")], ids=str
)


def near(case: Case, seed: int, length: float = 0.3) -> tuple[Tensor, Tensor, Tensor]:
    """x, a horizontal xi and a random representative of Exp_x(xi)."""
    x, space, manifold = case.point(seed), case.manifold.at(case.point(seed)), case.manifold
    xi = space.proju(case.vector(seed + 1))
    smallest = singular_frame(*manifold.split(x)).s[-1] if isinstance(manifold, FixedRankQuotient) else None
    reach = x.prod(0).abs().min() if isinstance(manifold, DiagonalQuotient) else smallest
    xi = length * xi / space.norm(xi) * (1.0 if reach is None else reach**manifold.t)
    A = case.group(torch.Generator().manual_seed(seed), 30.0)
    return x, xi, manifold.action(A, manifold.expmap(x, xi))


@every_case
@settings(max_examples=2)
@given(seed=st.integers(0, 2**31), exponent=st.floats(-5, -0.5))
def test_the_logarithm_undoes_the_exponential(case: Case, seed: int, exponent: float) -> None:
    manifold, (x, xi, y) = case.manifold, near(case, seed, 10**exponent)
    length = float(manifold.norm(x, xi))
    rounding = 1e-6 * length + 1e-12 * float(manifold.norm(x, x))
    assert manifold.norm(x, manifold.logmap(x, y) - xi) <= rounding
    assert manifold.dist(x, y) == pytest.approx(length, abs=rounding)
    assert manifold.dist(y, x) == pytest.approx(length, abs=rounding)


@every_case
def test_batches_dtypes_and_the_point_itself(case: Case) -> None:
    """Pairs end their searches at different times, and do not depend on the others in the batch."""
    manifold = case.manifold
    rows = [near(case, seed, length) for seed, length in ((0, 0.2), (1, 1e-3))]
    x, xi, y = (torch.stack(column) for column in zip(*rows, strict=True))
    found = manifold.logmap(x, y)
    for i in range(2):
        rounding = 1e-6 * manifold.norm(x[i], xi[i]) + 1e-12 * manifold.norm(x[i], x[i])
        assert manifold.norm(x[i], found[i] - xi[i]) <= rounding
        torch.testing.assert_close(manifold.logmap(x[i], y[i]), found[i], rtol=1e-6, atol=1e-12)
    assert manifold.dist(x, y, keepdim=True).shape == (2, *[1] * manifold.ndim)
    assert manifold.logmap(x.float(), y.float()).dtype == torch.float32
    torch.testing.assert_close(manifold.dist2(x, y), manifold.dist(x, y) ** 2, rtol=1e-12, atol=1e-12)
    A = case.group(torch.Generator().manual_seed(1), 3.0)
    same = manifold.dist(x[0], manifold.action(A, x[0]))
    assert float(same) <= 1e-9 * max(float(manifold.norm(x[0], x[0])), 1.0)
    assert manifold.logmap(x[:0], y[:0]).shape == x[:0].shape


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


@pytest.mark.parametrize("metric", ["inv", "mix"])
def test_the_diagonal_distance_is_the_closed_form(metric: str) -> None:
    manifold = DiagonalQuotient(metric)
    x = torch.randn(7, 2, 3, dtype=torch.float64)
    y = manifold.action(torch.randn(7, 3, dtype=torch.float64), x * (1 + torch.rand(7, 1, 3, dtype=torch.float64)))
    beta, other = x.prod(-2), y.prod(-2)
    expected = (other / beta).log() if metric == "inv" else other - beta
    torch.testing.assert_close(manifold.dist(x, y), expected.norm(dim=-1) / math.sqrt(2), rtol=1e-10, atol=1e-10)


def test_the_distance_of_directions_is_the_angle() -> None:
    x, y = torch.randn(2, 50, 6, dtype=torch.float64)
    angle = torch.nn.functional.cosine_similarity(x, y, dim=-1).arccos()
    torch.testing.assert_close(ScaleQuotient().dist(x, y), angle, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("metric", ["inv", "mix"])
def test_rank_16(metric: str) -> None:
    """The sizes of adapters: points as far apart as a third of themselves, of which one is the end of the other."""
    case = fixed_rank(96, 80, 16, metric)
    manifold, (x, xi, _) = case.manifold, near(case, 5)
    space = manifold.at(x)
    product = float(singular_frame(*manifold.split(x)).s.norm())
    size = 0.3 * (product if metric == "mix" else 1) / space.norm(xi)
    y = torch.stack([manifold.expmap(x, size * xi), x])
    found = manifold.logmap(x, manifold.action(torch.randn(16, 16, dtype=torch.float64), y))
    torch.testing.assert_close(found[0], size * xi, rtol=1e-6, atol=1e-6 * float(size * xi.abs().max()))
    assert float(space.norm(found[1])) < 1e-9 * product


def aligned(manifold: FixedRankQuotient, x: Tensor, y: Tensor) -> Tensor:
    """The representative of y nearest to x at the balanced points, in the frame of x."""
    here, there = (singular_frame(*manifold.split(point)) for point in (x, y))
    G, H = manifold.split(nearest(here, there) / here.s.sqrt())
    return torch.cat([G @ here.from_left, H @ here.from_right])


def path_length(manifold: FixedRankQuotient, x: Tensor, y: Tensor, segments: int = 24) -> float:
    """Minimises the energy of a discretised path in the total space, the end free on its orbit; the length of it."""
    n, h, inv = manifold.n, x.shape[-1], manifold.t == 0
    times = torch.linspace(0, 1, segments + 1, dtype=x.dtype)[1:-1, None, None]
    target = aligned(manifold, x, y)
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
    case = fixed_rank(*shape, metric)
    x, _, y = near(case, 1, length=0.5)
    assert float(case.manifold.dist(x, y)) == pytest.approx(path_length(case.manifold, x, y), rel=5e-3)


closed_form = [
    case for case in INVARIANT if case.name.startswith("fixed") and 0 in (case.manifold.t, case.shape[1] - 1)
]


@pytest.mark.parametrize("case", closed_form, ids=str)
def test_another_vector_is_a_shorter_geodesic(case: Case) -> None:
    """Of a unit Gaussian at a point: the logarithm is the velocity, or it is shorter and leads to the same orbit."""
    manifold, x = case.manifold, case.point(10)
    xi = manifold.proju(x, case.vector(0))
    try:
        y = manifold.expmap(x, xi)
        found = manifold.logmap(x, y)
    except GeodesicError:  # it is too far
        return
    if not torch.allclose(found, xi, rtol=1e-5, atol=1e-7):
        assert manifold.norm(x, found) < manifold.norm(x, xi)
        assert manifold.same_orbit(manifold.expmap(x, found), y, rtol=1e-5)


@pytest.mark.parametrize("case", [case for case in INVARIANT if case.name.startswith("diag")], ids=str)
@given(seed=st.integers(0, 2**31))
@example(seed=105)  # ratios of the entries of both points whose product leaves the range of float64
def test_on_diagonal_pairs_every_geodesic_is_the_shortest(case: Case, seed: int) -> None:
    """The product moves on a line, or its logarithm does, and never back: no other vector leads there."""
    manifold, x = case.manifold, case.point(seed)
    xi = manifold.proju(x, case.vector(seed + 1000))
    try:
        y = manifold.expmap(x, xi)
    except GeodesicError:  # it ends before
        return
    torch.testing.assert_close(manifold.logmap(x, y), xi, rtol=1e-7, atol=1e-9)
