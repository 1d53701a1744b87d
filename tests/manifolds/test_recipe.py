"""What automatic differentiation makes of an action and a metric agrees with every closed form of the package."""

from __future__ import annotations

import math

import geoopt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quotient_manifolds.manifolds import (
    GeodesicError,
    QuotientManifold,
    Recipe,
    TranslationQuotient,
    runge_kutta,
)
from tests.cases import CASES, VECTORS, Case

every_case = pytest.mark.parametrize("case", CASES + VECTORS, ids=str)
exact = {"rtol": 1e-9, "atol": 1e-9}


def cook(case: Case) -> Recipe:
    """The recipe, from the case's own formula of the metric: it never sees the package's frames."""
    A, action = case.group(torch.Generator(), 1.0), case.manifold.action
    rotary = A.is_complex()
    if rotary:  # a pair of real numbers, to differentiate by
        A, action = torch.view_as_real(A), lambda a, x: case.manifold.action(torch.view_as_complex(a), x)
    identity = torch.eye(len(A), dtype=A.dtype) if A.ndim == 2 else torch.ones_like(A)
    if isinstance(case.manifold, TranslationQuotient):
        identity = torch.zeros_like(A)
    if rotary:
        identity = torch.tensor([1.0, 0.0], dtype=A.dtype)
    return Recipe(action, case.metric, shape=case.shape, identity=identity, balance=case.manifold.balance)


@every_case
@settings(max_examples=3)
@given(seed=st.integers(0, 2**31))
def test_linear_algebra_agrees(case: Case, seed: int) -> None:
    recipe, manifold = cook(case), case.manifold
    x, eta, zeta = (case.vector(seed + i, 2) for i in range(3))
    space, closed = recipe.at(x), manifold.at(x)
    torch.testing.assert_close(space.inner(eta, zeta), closed.inner(eta, zeta), rtol=1e-8, atol=1e-8)
    for ours, theirs in (
        (space.proju(eta), closed.proju(eta)),
        (space.gradient(eta), closed.gradient(eta)),
        (space.vector(space.coordinates(eta)), eta),
    ):
        assert bool((closed.norm(ours - theirs) <= 1e-8 * closed.norm(theirs)).all())
    torch.testing.assert_close(space.norm(eta), closed.norm(eta), rtol=1e-8, atol=1e-8)


@every_case
def test_dimensions_agree(case: Case) -> None:
    recipe = cook(case)
    assert recipe.dimension(case.point(0, 2, 1)).tolist() == [[case.dimension], [case.dimension]]
    vertical = recipe.vertical(case.point(0)).flatten(1)
    both = torch.cat([vertical, case.vertical(case.point(0)).flatten(1)])
    assert torch.linalg.matrix_rank(both) == torch.linalg.matrix_rank(vertical)


@every_case
@settings(max_examples=3)
@given(seed=st.integers(0, 2**31))
def test_second_order_geodesics_agree(case: Case, seed: int) -> None:
    x, eta = case.point(seed, 2), case.vector(seed + 1, 2)
    closed = case.manifold.at(x)
    xi = 0.1 * closed.proju(eta)
    end = case.manifold.geodesic(x, xi)
    assert bool((closed.norm(cook(case).geodesic(x, xi) - end) <= 1e-8 * closed.norm(end - x)).all())


@every_case
def test_exact_geodesics_agree(case: Case) -> None:
    x, eta = case.point(3), case.vector(4)
    closed = case.manifold.at(x)
    z = 0.3 * closed.coordinates(closed.proju(eta))
    _, reached = closed.follow(z, "exact")
    xi = closed.vector(z * (0.7 * reached if reached < 1 else 1.0))
    assert closed.norm(xi) > 1e-3
    assert closed.norm(cook(case).expmap(x, xi) - case.manifold.expmap(x, xi)) <= 1e-8 * closed.norm(xi)


@pytest.mark.parametrize("case", VECTORS, ids=str)
def test_orbits_agree(case: Case) -> None:
    recipe, x = cook(case), case.point(0, 3)
    y = recipe.action(case.group(torch.Generator().manual_seed(1), 3.0), x)
    assert torch.equal(y, case.manifold.action(case.group(torch.Generator().manual_seed(1), 3.0), x))
    assert recipe.same_orbit(x, y).tolist() == [True] * 3
    assert recipe.same_orbit(x, x + recipe.proju(x, case.vector(2, 3))).tolist() == [False] * 3


def rescale(a: Tensor, x: Tensor) -> Tensor:
    return torch.stack([x[0] / a, x[1] * a])


def mixed(x: Tensor, eta: Tensor, zeta: Tensor) -> Tensor:
    return (eta * zeta * x.flip(0) ** 2).sum()


def toy(dtype: torch.dtype = torch.float64) -> Recipe:
    return Recipe(rescale, mixed, shape=(2,), identity=torch.tensor(1.0, dtype=dtype))


def test_the_end_of_a_geodesic_is_found_and_does_not_disturb_the_others() -> None:
    """(u, v) sqrt(1 + 2 b t) leaves the manifold where 1 + 2 b t = 0."""
    x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    b = torch.tensor([[0.3], [-0.7]], dtype=torch.float64)
    space = toy().at(x)
    y, reached = space.follow(space.coordinates(b * x), "exact")
    assert float(reached[1]) == pytest.approx(1 / 1.4, rel=1e-6)
    assert float((y[1] / x).max()) < 1e-2
    assert reached[0] == 1
    torch.testing.assert_close(y[0], math.sqrt(1.6) * x, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("order", ["first", "second", "exact"])
def test_moves_are_differentiable(order: str) -> None:
    space = toy().at(torch.tensor([1.0, 2.0], dtype=torch.float64))
    z = torch.tensor([0.3, -0.2], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: space.follow(space.project(z), order)[0], z, atol=1e-6)


def test_single_precision_agrees() -> None:
    x, u = torch.tensor([1.0, 2.0]), torch.tensor([0.3, 0.1])
    for method in ("proju", "egrad2rgrad", "retr", "expmap"):
        result = getattr(toy(torch.float32), method)(x, u)
        assert result.dtype == torch.float32
        torch.testing.assert_close(result.double(), getattr(toy(), method)(x.double(), u.double()), rtol=1e-5, atol=0)


def test_many_times_and_leading_dimensions_broadcast() -> None:
    x = torch.rand(3, 1, 2, dtype=torch.float64) + 1
    xi = 0.1 * toy().proju(x, torch.randn(3, 1, 2, dtype=torch.float64))
    times = torch.linspace(-1, 1, 4, dtype=torch.float64).reshape(4, 1, 1)
    for order in ("second", "exact"):
        batch = toy().geodesic(x, xi, times, order)
        assert batch.shape == (4, 3, 1, 2)
        torch.testing.assert_close(batch[2, 1], toy().geodesic(x[1], xi[1], times[2, 0], order), **exact)
    assert toy().inner(x, xi, keepdim=True).shape == (3, 1, 1)


@pytest.mark.parametrize("optimizer", [geoopt.optim.RiemannianSGD, geoopt.optim.RiemannianAdam], ids=["sgd", "adam"])
def test_optimizers_run_as_on_the_closed_form(optimizer: type) -> None:
    case = next(case for case in CASES if case.name == "fixed-rank-4-3-2-mix")
    target = torch.ones(4, 3, dtype=torch.float64)

    def descend(manifold: QuotientManifold) -> Tensor:
        parameter = geoopt.ManifoldParameter(case.point(0), manifold=manifold)
        stepper = optimizer([parameter], lr=1e-2)
        for _ in range(5):
            stepper.zero_grad()
            ((case.product(parameter) - target) ** 2).sum().backward()
            stepper.step()
        return parameter.detach()

    end = descend(cook(case))
    torch.testing.assert_close(end, descend(case.manifold), rtol=1e-8, atol=1e-8)
    assert not torch.equal(end, case.point(0))


def test_the_hessian_is_that_of_the_closed_form() -> None:
    case = next(case for case in CASES if case.name == "fixed-rank-4-3-2-inv")
    x, xi = case.point(0), case.manifold.proju(case.point(0), case.vector(1))
    products = [m.at(x).hessian_product(lambda y: case.product(y).sin().sum(), xi) for m in (cook(case), case.manifold)]
    torch.testing.assert_close(*products, rtol=1e-8, atol=1e-8)


def rotations(metric=lambda x, eta, zeta: eta @ zeta) -> Recipe:  # type: ignore[no-untyped-def]
    skew = torch.zeros(3, 3, 3, dtype=torch.float64)
    for k, (i, j) in enumerate([(0, 1), (0, 2), (1, 2)]):
        skew[k, i, j], skew[k, j, i] = 1.0, -1.0
    return Recipe(lambda A, x: A @ x, metric, shape=(3,), identity=torch.eye(3, dtype=torch.float64), algebra=skew)


def test_an_action_that_leaves_directions_fixed() -> None:
    """Rotations of space: three parameters, orbits of dimension two; only the distance from the origin is left."""
    recipe, (x, eta) = rotations(), torch.randn(2, 3, dtype=torch.float64)
    assert recipe.vertical(x).shape == (3, 3)
    assert recipe.dimension(x) == 1
    torch.testing.assert_close(recipe.proju(x, eta), (eta @ x) / (x @ x) * x, **exact)
    torch.testing.assert_close(recipe.expmap(x, 0.5 * x), 1.5 * x, **exact)


def test_geoopt_accepts_its_points_and_vectors() -> None:
    manifold = cook(next(case for case in CASES if case.name == "diagonal-4-inv"))
    x = manifold.random(5, 2, 4, dtype=torch.float64)
    manifold.assert_check_point_on_manifold(x)
    assert torch.equal(manifold.projx(x), x)
    u, v = (0.1 * manifold.proju(x, torch.randn(5, 2, 4, dtype=torch.float64)) for _ in range(2))
    y, moved = manifold.retr_transp(x, u, v)
    manifold.assert_check_point_on_manifold(y)
    manifold.assert_check_vector_on_tangent(y, moved)
    ok, reason = manifold.check_vector_on_tangent(x, x * torch.tensor([[1.0], [-1.0]]), explain=True)
    assert not ok
    assert "horizontal space" in reason
    assert "shape=(2, 4)" in repr(manifold)


BAD = [
    (lambda: toy().at(torch.ones(3)), r"must have shape \(..., 2\). Found \(3,\)"),
    (lambda: toy().at(torch.tensor([0.0, 1.0])), r"<eta, eta> > 0 fails: the matrix of the metric has the eigenvalue"),
    (lambda: toy().at(torch.tensor([math.nan, 1.0])), "must be finite. Found NaN"),
    (lambda: rotations(lambda x, eta, zeta: eta[0] * zeta[1]).at(torch.ones(3)), "<eta, zeta> = <zeta, eta> fails"),
    (lambda: toy().proju(torch.ones(2), torch.ones(3)), r"must end in one shape, \(2,\). Found shape \(3,\)"),
    (lambda: toy().proju(torch.ones(2), torch.ones(2).double()), "one dtype and one device. Found"),
    (lambda: toy().geodesic(torch.ones(2), torch.ones(2), 1.0, "third"), "Found 'third'"),
    (
        lambda: Recipe(rescale, mixed, shape=(2,), identity=torch.ones(3), algebra=torch.ones(4, 2)),
        r"must have shape \(k, \*identity.shape\) = \(k, 3\). Found \(4, 2\)",
    ),
]


@pytest.mark.parametrize(("call", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_input_gets_one_sentence(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_canonical_points_need_a_function() -> None:
    with pytest.raises(NotImplementedError, match="balance must be given"):
        toy().balance(torch.ones(2))


def test_a_metric_that_breaks_off_is_noticed() -> None:
    """A metric without the smoothness a geodesic needs: its energy jumps, and that is said."""
    jump = Recipe(rescale, lambda x, e, f: (e * f).sum() * (1 + (x[0] > 1.05)), shape=(2,), identity=torch.ones(()))
    x = torch.ones(2, dtype=torch.float64)
    with pytest.raises(GeodesicError, match="energy of a geodesic must be constant"):
        jump.expmap(x, 0.3 * x)


def test_a_solver_that_gives_up_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runge_kutta, "MAX_STEPS", 1)
    x = torch.ones(2, dtype=torch.float64)
    with pytest.raises(GeodesicError, match=r"must end within .* steps. Found one that came no further than t = 0"):
        toy().expmap(x, -0.4 * x)
