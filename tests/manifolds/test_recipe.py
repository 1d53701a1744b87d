"""What automatic differentiation makes of an action and a metric agrees with every closed form of the package."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quotient_manifolds.manifolds import Recipe, runge_kutta
from tests.cases import CASES, VECTORS, Case, recipe

every_case = pytest.mark.parametrize("case", CASES + VECTORS, ids=str)
exact = {"rtol": 1e-9, "atol": 1e-9}


@every_case
@settings(max_examples=3)
@given(seed=st.integers(0, 2**31))
def test_linear_algebra_agrees(case: Case, seed: int) -> None:
    cooked, manifold = recipe(case), case.manifold
    x, eta, zeta = (case.vector(seed + i, 2) for i in range(3))
    space, closed = cooked.at(x), manifold.at(x)
    torch.testing.assert_close(space.inner(eta, zeta), closed.inner(eta, zeta), rtol=1e-8, atol=1e-8)
    for ours, theirs in (
        (space.proju(eta), closed.proju(eta)),
        (space.gradient(eta), closed.gradient(eta)),
        (space.vector(space.coordinates(eta)), eta),
    ):
        assert bool((closed.norm(ours - theirs) <= 1e-8 * closed.norm(theirs)).all())
    torch.testing.assert_close(space.norm(eta), closed.norm(eta), rtol=1e-8, atol=1e-8)


@every_case
def test_vertical_spaces_agree(case: Case) -> None:
    cooked = recipe(case)
    vertical = cooked.vertical(case.point(0)).flatten(1)
    both = torch.cat([vertical, case.vertical(case.point(0)).flatten(1)])
    rank = torch.linalg.matrix_rank(vertical)
    assert torch.linalg.matrix_rank(both) == rank
    assert cooked.dimension(case.point(0, 2, 1)).tolist() == [[case.dimension], [case.dimension]]


@every_case
@settings(max_examples=3)
@given(seed=st.integers(0, 2**31))
def test_second_order_geodesics_agree(case: Case, seed: int) -> None:
    x, eta = case.point(seed, 2), case.vector(seed + 1, 2)
    closed = case.manifold.at(x)
    xi = 0.1 * closed.proju(eta)
    end = case.manifold.geodesic(x, xi)
    assert bool((closed.norm(recipe(case).geodesic(x, xi) - end) <= 1e-8 * closed.norm(end - x)).all())


@pytest.mark.parametrize("case", [case for case in CASES + VECTORS if math.prod(case.shape) < 18], ids=str)
def test_exact_geodesics_agree(case: Case) -> None:
    x, eta = case.point(3), case.vector(4)
    closed = case.manifold.at(x)
    z = 0.3 * closed.coordinates(closed.proju(eta))
    _, reached = closed.follow(z, "exact")
    xi = closed.vector(z * (0.7 * reached if reached < 1 else 1.0))
    assert closed.norm(xi) > 1e-3
    assert closed.norm(recipe(case).expmap(x, xi) - case.manifold.expmap(x, xi)) <= 1e-8 * closed.norm(xi)


@pytest.mark.parametrize("case", VECTORS, ids=str)
def test_orbits_agree(case: Case) -> None:
    cooked, x = recipe(case), case.point(0, 3)
    y = cooked.action(case.group(torch.Generator().manual_seed(1), 3.0), x)
    assert torch.equal(y, case.manifold.action(case.group(torch.Generator().manual_seed(1), 3.0), x))
    assert cooked.same_orbit(x, y).tolist() == [True] * 3
    assert cooked.same_orbit(x, x + cooked.proju(x, case.vector(2, 3))).tolist() == [False] * 3


def rescale(a: Tensor, x: Tensor) -> Tensor:
    return torch.stack([x[0] / a, x[1] * a])


def toy(metric: Callable[..., Tensor] = lambda x, e, f: (e * f * x.flip(0) ** 2).sum(), **options: object) -> Recipe:
    given: dict[str, object] = {"shape": (2,), "identity": torch.ones(()), **options}
    return Recipe(rescale, metric, **given)  # type: ignore[arg-type]


def test_the_end_of_a_geodesic_is_found_and_does_not_disturb_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """(u, v) sqrt(1 + 2 b t) leaves the manifold where 1 + 2 b t = 0."""
    monkeypatch.setattr(runge_kutta, "RESOLUTION", 1e-8)  # fewer steps up to there
    x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    b = torch.tensor([[0.3], [-0.7]], dtype=torch.float64)
    space = toy().at(x)
    y, reached = space.follow(space.coordinates(b * x), "exact")
    assert float(reached[1]) == pytest.approx(1 / 1.4, rel=1e-6)
    assert float((y[1] / x).max()) < 1e-2
    assert reached[0] == 1
    torch.testing.assert_close(y[0], math.sqrt(1.6) * x, rtol=1e-8, atol=1e-8)


def test_an_action_that_leaves_directions_fixed() -> None:
    """Rotations of space: three parameters, orbits of dimension two; only the distance from the origin is left."""
    skew = torch.zeros(3, 3, 3, dtype=torch.float64)
    for k, (i, j) in enumerate([(0, 1), (0, 2), (1, 2)]):
        skew[k, i, j], skew[k, j, i] = 1.0, -1.0
    eye = torch.eye(3, dtype=torch.float64)
    rotations = Recipe(lambda A, x: A @ x, lambda x, eta, zeta: eta @ zeta, shape=(3,), identity=eye, algebra=skew)
    x, eta = torch.randn(2, 3, dtype=torch.float64)
    assert rotations.vertical(x).shape == (3, 3)
    torch.testing.assert_close(rotations.proju(x, eta), (eta @ x) / (x @ x) * x, **exact)
    torch.testing.assert_close(rotations.expmap(x, 0.5 * x), 1.5 * x, **exact)


METRICS = {
    "plain": lambda x, eta, zeta: (eta * zeta).sum(),
    "of one side": lambda x, eta, zeta: (eta * zeta / x[0] ** 2).sum(),
    "nearly": lambda x, eta, zeta: (eta * zeta * (1 / x**2 + 0.01)).sum(),
}


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_a_metric_that_the_action_changes_is_refused(metric: Any, scale: float) -> None:
    manifold = Recipe(rescale, metric, shape=(2,), identity=torch.tensor(1.0))
    x = scale * torch.tensor([1.0, 2.0], dtype=torch.float64)
    if metric is METRICS["nearly"] and scale == 1e-3:
        x *= 1e3  # where it counts
    for use in (lambda: manifold.proju(x, x), lambda: manifold.at(x), lambda: manifold.expmap(x, x)):
        with pytest.raises(
            ValueError, match=r"^the metric must be invariant, <dA eta, dA zeta>_\{A x\} = .* Found that"
        ):
            use()
    relaxed = Recipe(rescale, metric, shape=(2,), identity=torch.tensor(1.0), invariant=False)
    assert relaxed.at(x).inner(x, x) > 0


def test_a_metric_without_derivatives_is_taken_at_its_word() -> None:
    weights = torch.tensor([1.0, 2.0], dtype=torch.float64)
    manifold = Recipe(
        lambda a, x: x + a, lambda x, eta, zeta: (weights * eta * zeta).sum(), shape=(2,), identity=weights * 0
    )
    x = torch.tensor([1e6, 2.0], dtype=torch.float64)
    assert not manifold.proju(x, x).any()


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_true_metric_is_taken_at_every_point(size: float, dtype: torch.dtype) -> None:
    for seed in range(20):
        draw = torch.Generator().manual_seed(seed)
        x = (
            size
            * torch.randn(2, dtype=dtype, generator=draw)
            * 10 ** (4 * torch.rand(2, dtype=dtype, generator=draw) - 2)
        )
        toy().at(x)
        Q = torch.linalg.qr(torch.randn(3, 3, generator=draw))[0].to(dtype)  # orthogonal in single precision only
        turned = Recipe(
            lambda A, x, Q=Q: Q.to(x) @ A @ Q.to(x).mT @ x,  # type: ignore[misc]
            lambda x, eta, zeta: eta @ zeta,
            shape=(3,),
            identity=torch.eye(3),
            algebra=torch.tensor([[[0.0, 1, 0], [-1, 0, 0], [0, 0, 0]], [[0, 0, 0.3], [0, 0, 0], [-0.3, 0, 0]]]),
        )
        turned.at(size * torch.randn(3, dtype=dtype, generator=draw))
