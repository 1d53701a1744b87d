"""Exact geodesics of whole batches end in one of two ways, at a point with the time it was reached or in GeodesicError.

Among the entries are some that leave the manifold just before or just after t = 1, and ill-conditioned ones; none may
disturb another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quotient_manifolds.manifolds import DiagonalQuotient, FixedRankQuotient, HorizontalSpace, runge_kutta
from quotient_manifolds.manifolds.runge_kutta import FLOOR, inside, invert

METRICS = ["mix", 0.75, "inv", -0.5]
NEAR = 1e-12

every_metric = pytest.mark.parametrize("metric", METRICS, ids=str)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def to_the_end(t: float) -> float:
    """The relative velocity b of x with which x (1 + 2 t b)^(1/2t) ends at t = 1: |1 + 2 t b| = FLOOR^t."""
    return math.expm1(t * math.log(FLOOR if t > 0 else 1 / FLOOR)) / (2 * t) if t else -math.inf


class Batch(NamedTuple):
    manifold: FixedRankQuotient
    x: Tensor
    z: Tensor  # horizontal coordinates
    early: slice  # moves straight towards the end, which it meets at 1 - NEAR
    late: slice  # or at 1 + NEAR


def batch(metric: str | float, h: int, size: int, seed: int, spread: float = 1.0) -> Batch:
    """Random pairs and velocities of relative speeds 0.1 to 2; a quarter moves straight to the end of its domain."""
    random = generator(seed)
    manifold = FixedRankQuotient(4, 3, metric)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    sizes = 10 ** (6 * torch.rand(size, 1, 1, generator=random, dtype=torch.float64) - 3)
    spread = spread if manifold.t >= 0 else spread / 4  # outside of [0, 1] the equation is stiff sooner
    x = draw(size, 7, h) * torch.logspace(0, -spread, h, dtype=torch.float64) * sizes
    space = manifold.at(x)
    z = space.project(draw(size, 7, h))
    speeds = 0.1 + 1.9 * torch.rand(size, generator=random, dtype=torch.float64)
    z = z * (speeds / space.relative_speed(z))[:, None, None]
    early, late = slice(0, size // 8), slice(size // 8, size // 4)
    if manifold.t:
        straight = to_the_end(manifold.t) * space.coordinates(x)
        z[early], z[late] = straight[early] / (1 - NEAR), straight[late] / (1 + NEAR)
    return Batch(manifold, x, z, early, late)


def as_if_alone(it: Batch, y: Tensor, reached: Tensor, which: Iterable[int], rounding: float) -> None:
    for i in which:
        y_alone, reached_alone = it.manifold.at(it.x[i]).follow(it.z[i], "exact")
        assert float(reached_alone) == pytest.approx(float(reached[i]), rel=1e-8 if rounding > 1e-9 else 1e-12)
        assert (y_alone - y[i]).norm() <= rounding * max(it.x[i].norm(), y[i].norm())


def end(space: HorizontalSpace, z: Tensor) -> tuple[Tensor, Tensor]:
    """The point and the time, which are finite."""
    y, reached = space.follow(z, "exact")
    assert bool(y.isfinite().all())
    assert bool(((reached > 0) & (reached <= 1)).all())
    return y, reached


@every_metric
@settings(max_examples=5)
@given(seed=st.integers(0, 2**31))
def test_pairs_of_one_column(metric: str | float, seed: int) -> None:
    """Hundreds at once: points, times, and every entry as if it were alone."""
    it = batch(metric, 1, 400, seed)
    y, reached = end(it.manifold.at(it.x), it.z)
    if it.manifold.t:
        assert bool((reached[it.early] < 1).all())
        assert bool((reached[it.late] == 1).all())
    as_if_alone(it, y, reached, (*range(0, 400, 40), 49, 50, 99), 1e-9)


@pytest.mark.parametrize(("metric", "h"), [("mix", 3), (0.75, 2), ("inv", 3), (-0.5, 2)])
def test_pairs_of_more_columns(metric: str | float, h: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The straight ones, which end where 1 + 2 t b does, among the others."""
    monkeypatch.setattr(runge_kutta, "RESOLUTION", 1e-8)  # fewer steps up to the end
    it = batch(metric, h, 24, 3)
    y, reached = end(it.manifold.at(it.x), it.z)
    t = it.manifold.t
    if t:
        straight = slice(0, it.late.stop)
        torch.testing.assert_close(reached[straight], torch.ones_like(reached[straight]), rtol=1e-6, atol=0)
        shrunk = (y[straight] / it.x[straight]).square().amax((-2, -1))
        assert bool((shrunk < 1e-6).all() if t > 0 else (shrunk > 1e6).all())
    as_if_alone(it, y, reached, (5, 10, 23), 1e-7)


@pytest.mark.parametrize(("metric", "h"), [(0.75, 3), ("mix", 16)])
@pytest.mark.parametrize("b", [-0.6, 0.3])
def test_sums_of_pairs_of_one_column_follow_their_closed_forms(metric: str | float, h: int, b: float) -> None:
    """One goes straight ahead, for b = -0.6 in `mix` to its end, and the others turn; in any basis of all."""
    random = generator(1)
    one, many = FixedRankQuotient(2, 2, metric), FixedRankQuotient(2 * h, 2 * h, metric)

    def joined(columns: Tensor) -> Tensor:
        return torch.cat([torch.block_diag(*part) for part in one.split(columns)])

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    x = draw(h, 4, 1)
    space = one.at(x)
    z = space.project(draw(h, 4, 1))
    z[0] = b * space.coordinates(x)[0]
    turn = torch.block_diag(*(torch.linalg.qr(draw(2 * h, 2 * h)).Q for _ in range(2)))
    A = draw(h, h)

    def elsewhere(v: Tensor) -> Tensor:
        return many.action(A, turn @ joined(v))

    there = many.at(elsewhere(x))
    y, reached = there.follow(there.coordinates(elsewhere(space.vector(z))), "exact")
    assert float(reached) == pytest.approx(float(space.follow(z, "exact")[1].min()), rel=1e-9)
    expected = joined(space.follow(float(reached) * z, "exact")[0])
    found = turn.mT @ many.action(torch.linalg.inv(A), y)
    torch.testing.assert_close(found[:, 1:], expected[:, 1:], rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(found[:, 0], expected[:, 0], rtol=0, atol=1e-6)


def test_inside_is_what_eigenvalues_say() -> None:
    """Also where norms leave it open, for what is not definite, and for what is not finite."""
    random = generator(0)
    exponents = math.log10(FLOOR) * (2.4 * torch.rand(2000, 5, generator=random, dtype=torch.float64) - 1.2)
    eigenvalues = 10**exponents
    eigenvalues[::5, 1:] = 1.0  # only one is near a bound, where the norms of wider spreads leave no doubt
    eigenvalues[::7, 0] *= -1
    Q = torch.linalg.qr(torch.randn(2000, 5, 5, generator=random, dtype=torch.float64)).Q
    sure = eigenvalues.abs().amax(-1) / eigenvalues.abs().amin(-1) < 1e7  # or the smallest are rounding's
    gram = (Q * eigenvalues[:, None, :]) @ Q.mT
    expected = ((eigenvalues > FLOOR) & (eigenvalues < 1 / FLOOR)).all(-1)
    found = inside(gram)
    assert 50 < int(expected[sure].sum()) < int(sure.sum()) - 50
    assert torch.equal(found[sure], expected[sure])
    inverse, condition, within = invert(gram)
    assert torch.equal(within, found)
    held = sure & found
    assert bool((condition[held] >= 0.999 * torch.linalg.cond(gram[held])).all())
    eye = torch.eye(5).double().expand_as(gram[held])
    torch.testing.assert_close(inverse[held] @ gram[held], eye, rtol=0, atol=1e-6)
    assert not inside(torch.stack([torch.nan * gram[0], torch.inf * gram[0]])).any()


@pytest.mark.parametrize(("metric", "h"), [*((metric, 1) for metric in METRICS), ("mix", 2)])
def test_single_precision_and_gradients(metric: str | float, h: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The points are those of double precision, and derivatives are finite, also of ended geodesics and at rest."""
    monkeypatch.setattr(runge_kutta, "RESOLUTION", 1e-5)
    monkeypatch.setattr(runge_kutta, "TOLERANCE", 1e-8)
    it = batch(metric, h, 40 if h == 1 else 8, 7)
    z = it.z.clone()
    z[-1] = 0
    z = z.requires_grad_()
    y, reached = it.manifold.at(it.x).follow(z, "exact")
    (gradient,) = torch.autograd.grad((y / it.x.norm(dim=(-2, -1), keepdim=True)).sum(), z)
    assert bool(gradient.isfinite().all())
    single, reached_single = it.manifold.at(it.x.float()).follow(it.z.float(), "exact")
    assert single.dtype == reached_single.dtype == torch.float32
    torch.testing.assert_close(reached_single.double(), reached.detach(), rtol=1e-3, atol=0)
    moderate = slice(it.late.stop, -1)
    difference = (single.double() - y.detach())[moderate].norm(dim=(-2, -1))
    size = torch.maximum(it.x[moderate].norm(dim=(-2, -1)), y.detach()[moderate].norm(dim=(-2, -1)))
    assert bool((difference <= 1e-3 * size)[reached.detach()[moderate] == 1].all())


@pytest.mark.parametrize("metric", ["mix", 0.75, -0.5])
def test_closed_forms_are_twice_differentiable_at_rest_and_straight_ahead(metric: str | float) -> None:
    manifold = FixedRankQuotient(3, 2, metric)
    x = torch.randn(3, 5, 1, generator=generator(1), dtype=torch.float64)
    space = manifold.at(x)
    aside = space.project(torch.randn(3, 5, 1, generator=generator(2), dtype=torch.float64))
    z = torch.stack([torch.zeros_like(x[0]), 0.2 * space.coordinates(x)[1], 0.3 * aside[2]]).requires_grad_()

    def point(z: Tensor) -> Tensor:
        return space.follow(space.project(z), "exact")[0]

    assert torch.autograd.gradcheck(point, z, atol=1e-6)
    assert torch.autograd.gradgradcheck(point, z, atol=1e-5)


def test_rounding_does_not_bend_a_line_into_the_apex() -> None:
    """The relative velocities of a scalar pair may differ by an epsilon of single precision: it ends all the same."""
    manifold = FixedRankQuotient(1, 1, "mix")
    space = manifold.at(torch.tensor([[3.0], [0.25]], dtype=torch.float64))
    for k in range(20):
        z = -0.7 / math.sqrt(2) * torch.tensor([[1.0], [1.0 + k * 1e-7]], dtype=torch.float64)
        y, reached = space.follow(z, "exact")
        assert float(reached) == pytest.approx(0.75 / 0.7 / math.sqrt(2), rel=1e-5)
        assert float(y.prod()) < 1e-6


@pytest.mark.parametrize("t", [1.0, 0.75, -0.5])
def test_diagonal_pairs_tell_the_first_end_of_their_coordinates(t: float) -> None:
    manifold = DiagonalQuotient(t)
    x = torch.randn(300, 2, 3, generator=generator(0), dtype=torch.float64)
    b = 2 * torch.randn(300, 1, 3, generator=generator(1), dtype=torch.float64)
    b[0] = torch.tensor([-0.5, 0.1, 0.1]) * t / (1 - NEAR)
    space = manifold.at(x)
    y, reached = space.follow(space.coordinates(b * x), "exact")
    first = torch.where(t * b < 0, -1 / (2 * t * b), torch.inf).amin((-2, -1))
    torch.testing.assert_close(reached, first.clamp_max(1.0), rtol=1e-6, atol=0)
    assert bool(y.isfinite().all())
    whole = (1 + 2 * t * b > 1e-3).expand_as(x)
    expected = ((1 + 2 * t * b).clamp_min(0.0) ** (1 / (2 * t)) * x)[whole]
    torch.testing.assert_close(y[whole], expected, rtol=1e-8, atol=1e-10)
