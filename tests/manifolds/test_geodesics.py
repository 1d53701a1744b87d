"""Geodesics against an ODE solver that knows only accelerations, and against what they conserve."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import solve_ivp
from torch import Tensor

from quotient_manifolds.manifolds import FixedRankQuotient, GeodesicError, TranslationQuotient, runge_kutta
from tests.cases import EVERY_BUILT_IN, INVARIANT, VECTORS, Case

every_case = pytest.mark.parametrize("case", EVERY_BUILT_IN, ids=str)


def horizontal(case: Case, seed: int, length: float) -> tuple[Tensor, Tensor]:
    x, eta = case.point(seed), case.vector(seed + 1)
    xi = case.manifold.proju(x, eta)
    return x, length * xi / case.manifold.norm(x, xi)


def trajectory(case: Case, x: Tensor, v: Tensor, t: float) -> tuple[Tensor, Tensor]:
    """Point and velocity at time t by scipy."""

    def motion(_: float, state: np.ndarray) -> np.ndarray:
        x, v = torch.from_numpy(state).reshape(2, *case.shape)
        return np.concatenate([v.numpy().ravel(), case.acceleration(x, v).numpy().ravel()])

    start = torch.stack([x, v]).numpy().ravel()
    end = solve_ivp(motion, (0, t), start, method="DOP853", rtol=1e-9, atol=1e-10).y[:, -1]
    return tuple(torch.from_numpy(end).reshape(2, *case.shape))  # type: ignore[return-value]


@every_case
@settings(max_examples=1)
@given(seed=st.integers(0, 2**31), length=st.floats(0.01, 1.0))
def test_the_exact_geodesic_solves_the_equation(case: Case, seed: int, length: float) -> None:
    x, xi = horizontal(case, seed, length)
    try:
        y = case.manifold.expmap(x, xi)
    except GeodesicError:
        _, reached = case.manifold.at(x).follow(case.manifold.at(x).coordinates(xi), "exact")
        t = 0.9 * float(reached)
        y, xi = case.manifold.geodesic(x, xi, t, "exact"), t * xi
    expected, _ = trajectory(case, x, xi, 1.0)
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6 * float(x.abs().max()))


@every_case
def test_the_retraction_is_second_order(case: Case) -> None:
    """|retr(t xi) - exp(t xi)| falls as t^3; one order less for the straight line."""
    x, xi = horizontal(case, 11, 0.3)
    space = case.manifold.at(x)
    errors = {
        order: [
            float(space.norm(space.geodesic(xi, t, order) - space.geodesic(xi, t, "exact"))) for t in (0.1, 0.05, 0.025)
        ]
        for order in ("first", "second")
    }
    for order, power in (("first", 2), ("second", 3)):
        if errors[order][0] > 1e-12:
            assert math.log2(errors[order][1] / errors[order][2]) == pytest.approx(power, abs=0.15)
        else:  # only lines, and quadratic curves in one dimension
            curved = case.dimension > 1 or order == "first" or getattr(case.manifold, "metric", "") == "mix"
            assert not curved or isinstance(case.manifold, TranslationQuotient)


@every_case
def test_speed_and_horizontality_are_conserved(case: Case) -> None:
    """The velocity of the package's own exact curve, by finite differences of fourth order."""
    x, xi = horizontal(case, 21, 0.2)
    space, step = case.manifold.at(x), 1e-3
    for t in (0.25, 0.75):
        around = [space.geodesic(xi, t + k * step, "exact") for k in (-2, -1, 1, 2)]
        velocity = (around[0] - 8 * around[1] + 8 * around[2] - around[3]) / (12 * step)
        there = case.manifold.at(space.geodesic(xi, t, "exact"))
        assert there.norm(velocity) == pytest.approx(float(space.norm(xi)), rel=1e-7)
        if case in [*INVARIANT, *VECTORS]:  # a momentum of the group, conserved where the group acts by isometries
            assert there.norm(velocity - there.proju(velocity)) <= 1e-6 * space.norm(xi)


@pytest.mark.parametrize("case", [*INVARIANT, *VECTORS], ids=str)
@settings(max_examples=5)
@given(seed=st.integers(0, 2**31), exponent=st.floats(0, 3))
def test_exact_geodesics_are_equivariant(case: Case, seed: int, exponent: float) -> None:
    x, xi = horizontal(case, seed, 0.1)
    A = case.group(torch.Generator().manual_seed(seed), 10**exponent)
    act = case.manifold.action
    z = case.manifold.at(x).coordinates(xi)
    y, reached = case.manifold.at(x).follow(z, "exact")
    there = case.manifold.at(act(A, x))
    moved, reached_there = there.follow(there.coordinates(case.push(A, xi)), "exact")
    torch.testing.assert_close(reached, reached_there, rtol=1e-5, atol=1e-5)
    if reached == 1:
        assert case.manifold.same_orbit(moved, act(A, y), rtol=1e-7)


@every_case
def test_one_velocity_many_times(case: Case) -> None:
    x, xi = horizontal(case, 31, 0.02)
    times = torch.linspace(-1, 1, 5, dtype=torch.float64)
    batch = case.manifold.geodesic(x, xi, times, "exact")
    assert batch.shape == (5, *case.shape)
    torch.testing.assert_close(batch[2], x, rtol=1e-9, atol=1e-9)
    for t, y in zip(times, batch, strict=True):
        torch.testing.assert_close(y, case.manifold.geodesic(x, xi, float(t), "exact"), rtol=1e-7, atol=1e-7)


@every_case
@pytest.mark.parametrize("order", ["first", "second", "exact"])
def test_moves_are_differentiable(case: Case, order: str) -> None:
    x, xi = horizontal(case, 41, 0.2)
    space = case.manifold.at(x)
    z = space.coordinates(xi).requires_grad_()
    torch.autograd.gradcheck(lambda z: space.follow(z, order)[0], z, atol=1e-5, rtol=1e-3, fast_mode=True)
    zero = torch.zeros_like(z).requires_grad_()
    (grad,) = torch.autograd.grad(space.follow(zero, order)[0].sum(), zero)
    torch.testing.assert_close(grad, space.covector(torch.ones_like(x)), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("case", [case for case in EVERY_BUILT_IN if len(case.shape) == 2], ids=str)
@pytest.mark.parametrize(("order", "length"), [("second", 0.0), ("second", 0.1), ("exact", 0.1)])
def test_linearised_moves_are_moves_with_the_gradient_of_autograd(case: Case, order: str, length: float) -> None:
    x, xi = horizontal(case, 71, length)
    space, c = case.manifold.at(x), case.vector(73)
    z = space.coordinates(xi)
    leaf = z.clone().requires_grad_()
    expected = space.follow(leaf, order)[0]
    (slope,) = torch.autograd.grad((c * expected).sum(), leaf)
    linearise = space.linearised(order)
    n = getattr(case.manifold, "n", 1)
    for sizes in ([1, len(x) - 1], [n, len(x) - n]):  # many from one point, whose rows lie in any tensors
        y, gradient = torch.empty_like(x), torch.empty_like(z)
        linearise(z, y.split(sizes))(c.clone().split(sizes), gradient)
        torch.testing.assert_close(y, expected.detach(), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(gradient, space.project(slope), rtol=1e-7, atol=1e-7)


@every_case
@pytest.mark.parametrize("method", ["inner", "proju", "egrad2rgrad", "retr", "expmap"])
def test_methods_are_differentiable_in_point_and_vector(case: Case, method: str) -> None:
    x, xi = horizontal(case, 51, 0.05)
    apply = getattr(case.manifold, method)
    inputs = x.requires_grad_(), xi.requires_grad_()
    torch.autograd.gradcheck(apply, inputs, atol=1e-5, rtol=1e-3, fast_mode=True)


def test_rank_one_mix_follows_the_closed_form_and_says_where_it_ends() -> None:
    """(u, v) sqrt(1 + 2 b t), which leaves the manifold where 1 + 2 b t = 0."""
    manifold, x = FixedRankQuotient(2, 3, "mix"), torch.randn(5, 1, dtype=torch.float64)
    for b in (-0.4, 0.7, 3.0):
        torch.testing.assert_close(manifold.expmap(x, b * x), math.sqrt(1 + 2 * b) * x, rtol=1e-8, atol=1e-8)
    with pytest.raises(GeodesicError, match=r"Found that it leaves the manifold at t = 0\.25"):
        manifold.expmap(x, -2.0 * x)


def test_square_mix_pairs_are_never_off_the_line_unnoticed() -> None:
    """Fast ones too, which pass near lower rank, where the velocity stays in the span of the point but for rounding."""
    manifold = FixedRankQuotient(3, 3, "mix")
    random, whole = torch.Generator().manual_seed(0), 0
    for _ in range(12):
        x, eta = (torch.randn(6, 3, generator=random, dtype=torch.float64) for _ in range(2))
        space = manifold.at(x)
        z = space.project(eta) / space.project(eta).norm()
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(runge_kutta, "MAX_STEPS", 100)
                y, reached = space.follow(z, "exact")
        except GeodesicError:
            continue
        (G, H), (a, b), (P, Q) = (manifold.split(v) for v in (x, space.vector(z), y))
        whole += bool(reached == 1)
        torch.testing.assert_close(P @ Q.T, G @ H.T + reached * (a @ H.T + G @ b.T), rtol=1e-7, atol=1e-7)
    assert whole > 3
