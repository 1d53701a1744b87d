"""Scale-invariant weights, translation-invariant biases, and rescaled neurons: what makes them quotient manifolds."""

from __future__ import annotations

import math

import geoopt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from quotient_manifolds.manifolds import FixedRankQuotient, ScaleQuotient, TranslationQuotient
from tests.cases import VECTORS, Case

every_case = pytest.mark.parametrize("case", VECTORS, ids=str)
seeds = st.integers(0, 2**31)
exact = {"rtol": 1e-9, "atol": 1e-9}


def push(case: Case, A: Tensor, eta: Tensor) -> Tensor:
    """The derivative of the (affine) action along a tangent vector."""
    return case.manifold.action(A, eta) - case.manifold.action(A, 0 * eta)


def horizontal(case: Case, seed: int, *batch: int) -> tuple[Tensor, Tensor]:
    x = case.point(seed, *batch)
    return x, case.manifold.proju(x, case.vector(seed + 1, *batch))


@every_case
@settings(max_examples=10)
@given(seed=seeds, exponent=st.floats(-6, 6))
def test_everything_is_equivariant(case: Case, seed: int, exponent: float) -> None:
    generator, manifold = torch.Generator().manual_seed(seed), case.manifold
    A = case.group(generator, 10**exponent)
    x, a, b = (case.vector(seed + i) for i in range(3))
    y = manifold.action(A, x)
    here, there = manifold.at(x), manifold.at(y)
    loss = {"rtol": 1e-9, "atol": 1e-9 * float(y.norm())}
    torch.testing.assert_close(there.inner(push(case, A, a), push(case, A, b)), here.inner(a, b), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(there.proju(push(case, A, a)), push(case, A, here.proju(a)), **loss)
    xi = here.proju(a)
    for order in ("first", "second", "exact"):
        moved = there.geodesic(push(case, A, xi), order=order)
        torch.testing.assert_close(moved, manifold.action(A, here.geodesic(xi, order=order)), **loss)
    torch.testing.assert_close(manifold.dist(y, b), manifold.dist(x, b), rtol=1e-8, atol=1e-8 * 10 ** max(0, exponent))


@every_case
@settings(max_examples=10)
@given(seed=seeds, exponent=st.floats(-4, 4))
def test_orbits_and_their_canonical_points(case: Case, seed: int, exponent: float) -> None:
    A, (x, xi) = case.group(torch.Generator().manual_seed(seed), 10**exponent), horizontal(case, seed, 3)
    manifold, y = case.manifold, case.manifold.action(A.expand(3), x)
    near = manifold.retr(x, 1e-3 * xi / manifold.norm(x, xi, keepdim=True))
    assert manifold.same_orbit(x, y).tolist() == [True] * 3
    assert not bool(manifold.same_orbit(x, near).any())
    assert bool(manifold.same_orbit(x, near, rtol=0.1 if isinstance(manifold, ScaleQuotient) else 10.0).all())
    balanced = manifold.balance(x)
    assert bool(manifold.same_orbit(x, balanced).all())
    torch.testing.assert_close(manifold.balance(y), balanced, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(manifold.balance(balanced), balanced, **exact)
    torch.testing.assert_close(balanced, case.product(x), **exact)


@every_case
@settings(max_examples=10)
@given(seed=seeds, t=st.floats(-10, 10))
def test_exact_geodesics_have_the_acceleration_and_speed_they_should(case: Case, seed: int, t: float) -> None:
    """x'' by automatic differentiation of the curve, at any time, far around the circle."""
    x, xi = horizontal(case, seed)
    time = torch.tensor(t, dtype=torch.float64)

    def velocity(t: Tensor) -> Tensor:
        return torch.func.jacfwd(lambda t: case.manifold.geodesic(x, xi, t, "exact"))(t)

    y, v, bend = case.manifold.geodesic(x, xi, t, "exact"), velocity(time), torch.func.jacfwd(velocity)(time)
    torch.testing.assert_close(bend, case.acceleration(y, v), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(case.manifold.norm(y, v), case.manifold.norm(x, xi), **exact)
    torch.testing.assert_close(case.manifold.proju(y, v), v, **exact)


@pytest.mark.parametrize("length", [1e-5, 9e-3, 1.1e-2])
def test_small_circles_are_accurate_to_rounding(length: float) -> None:
    x = torch.tensor([2.0, 0.0], dtype=torch.float64)
    y = ScaleQuotient().expmap(x, torch.tensor([0.0, 2.0 * length], dtype=torch.float64))
    expected = torch.tensor([2 * math.cos(length), 2 * math.sin(length)], dtype=torch.float64)
    torch.testing.assert_close(y, expected, rtol=2e-15, atol=0)


@every_case
@pytest.mark.parametrize("order", ["first", "second", "exact"])
def test_moves_are_differentiable_twice_at_rest_too(case: Case, order: str) -> None:
    x, xi = horizontal(case, 3)
    space = case.manifold.at(x)
    for length in (0.0, 0.005, 0.5, 5.0):
        z = (length * space.coordinates(xi) / space.norm(xi)).requires_grad_()
        torch.autograd.gradcheck(lambda z: space.follow(z, order)[0], z)
        torch.autograd.gradgradcheck(lambda z: space.follow(z, order)[0], z)


@every_case
@settings(max_examples=10)
@given(seed=seeds, length=st.floats(1e-9, 3.0))
def test_the_logarithm_inverts_the_exponential(case: Case, seed: int, length: float) -> None:
    x, xi = horizontal(case, seed, 4)
    manifold = case.manifold
    xi = length * xi / manifold.norm(x, xi, keepdim=True)
    A = case.group(torch.Generator().manual_seed(seed), 1.7).expand(4)
    y = manifold.action(A, manifold.expmap(x, xi))
    near = {"rtol": 1e-7, "atol": 1e-14 * float(x.abs().max())}
    torch.testing.assert_close(manifold.dist(x, y), torch.full((4,), length, dtype=torch.float64), **near)
    torch.testing.assert_close(manifold.dist(y, x), manifold.dist(x, y), **near)
    torch.testing.assert_close(manifold.logmap(x, y), xi, rtol=1e-6, atol=1e-14 * float(x.abs().max()))
    assert manifold.dist(x, y, keepdim=True).shape == (4, 1)
    assert bool((manifold.dist(x, manifold.action(A, x)) < 1e-12).all())


def test_the_distance_is_the_angle() -> None:
    x, y = torch.randn(2, 50, 6, dtype=torch.float64)
    torch.testing.assert_close(ScaleQuotient().dist(x, y), F.cosine_similarity(x, y, dim=-1).arccos(), **exact)


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_lengths_neither_overflow_nor_underflow(size: float) -> None:
    x, y = torch.randn(2, 3, 4, dtype=torch.float64)
    torch.testing.assert_close(ScaleQuotient().balance(size * x), ScaleQuotient().balance(x), **exact)
    torch.testing.assert_close(ScaleQuotient().dist(size * x, y), ScaleQuotient().dist(x, y), **exact)


@every_case
def test_the_mean_is_where_logarithms_add_up_to_zero(case: Case) -> None:
    x = case.point(0) + 0.3 * case.vector(1, 6)
    center = case.manifold.mean(x)
    assert float(case.manifold.norm(center, case.manifold.logmap(center.expand_as(x), x).sum(0))) < 1e-7


@every_case
@pytest.mark.parametrize("optimizer", [geoopt.optim.RiemannianSGD, geoopt.optim.RiemannianAdam], ids=["sgd", "adam"])
def test_optimizers_descend_and_do_not_see_the_representative(case: Case, optimizer: type) -> None:
    target = case.product(case.point(9))

    def descend(start: Tensor) -> tuple[list[float], Tensor]:
        parameter = geoopt.ManifoldParameter(start, manifold=case.manifold)
        stepper, losses = optimizer([parameter], lr=3e-2), []
        for _ in range(20):
            stepper.zero_grad()
            loss = ((case.product(parameter) - target) ** 2).sum()
            loss.backward()
            losses.append(float(loss.detach()))
            stepper.step()
        return losses, parameter.detach()

    losses, end = descend(case.point(1))
    moved, moved_end = descend(case.manifold.action(torch.tensor(30.0, dtype=torch.float64), case.point(1)))
    assert losses[-1] < 0.9 * losses[0]
    assert moved == pytest.approx(losses, rel=1e-6)
    assert case.manifold.same_orbit(end, moved_end, rtol=1e-8)


@every_case
@pytest.mark.parametrize("factor", [None, 2.0])
def test_what_geoopt_expects_of_every_manifold(case: Case, factor: float | None) -> None:
    manifold = case.manifold if factor is None else geoopt.Scaled(case.manifold, factor).double()
    x = manifold.random(3, *case.shape, dtype=torch.float64)
    u, v = (0.1 * manifold.proju(x, torch.randn_like(x)) for _ in range(2))
    assert torch.equal(manifold.projx(x), x)
    for y, moved in (manifold.retr_transp(x, u, v), manifold.expmap_transp(x, u, v)):
        manifold.assert_check_point_on_manifold(y)
        manifold.assert_check_vector_on_tangent(y, moved)
    assert manifold.inner(x, u, v).shape == (3,)
    assert manifold.inner(x, u, v, keepdim=True).shape == (3, 1)
    torch.testing.assert_close(manifold.component_inner(x, u, v).sum(-1), manifold.inner(x, u, v), **exact)
    torch.testing.assert_close(manifold.logmap(x, manifold.expmap(x, u)), u, **exact)
    torch.testing.assert_close(
        manifold.dist(x, manifold.expmap(x, u)), (factor or 1) * manifold.norm(x, u / (factor or 1))
    )


@every_case
def test_vectors_that_are_not_horizontal_are_named(case: Case) -> None:
    x = case.point(0)
    ok, reason = case.manifold.check_vector_on_tangent(x, case.vertical(x)[0], explain=True)
    assert not ok
    assert case.manifold.vertical_equation in reason
    assert "relative vertical part 1" in reason


BAD = [
    (lambda: ScaleQuotient().at(torch.zeros(2, 3)), "w != 0 fails: 2 vectors are 0"),
    (lambda: ScaleQuotient().at(torch.tensor([math.nan, 1.0])), "finite. Found NaN"),
    (lambda: TranslationQuotient().at(torch.tensor([math.inf, 1.0])), "finite. Found NaN or infinity"),
    (lambda: ScaleQuotient().random(3, 1), r"'x' on ScaleQuotient must have shape \(..., d\) with d >= 2. Found"),
    (lambda: TranslationQuotient().at(torch.tensor(1.0)), r"on TranslationQuotient must have .* Found \(\)"),
    (lambda: ScaleQuotient().logmap(torch.ones(3), -2 * torch.ones(3)), "must not point in opposite directions"),
    (lambda: ScaleQuotient().dist(torch.ones(3), torch.ones(2)), "must end in one shape, .*Found shape"),
    (lambda: TranslationQuotient().logmap(torch.ones(3), torch.ones(2)), "must end in one shape"),
    (lambda: ScaleQuotient().proju(torch.ones(3), torch.ones(2)), r"one shape, \(3,\). Found shape \(2,\)"),
    (lambda: TranslationQuotient().proju(torch.ones(3), torch.ones(3).double()), "one dtype and one device. Found"),
    (lambda: ScaleQuotient().geodesic(torch.ones(3), torch.ones(3), 1.0, "third"), "Found 'third'"),
]


@pytest.mark.parametrize(("call", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_input_gets_one_sentence(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


# The symmetries in networks


def test_weights_in_front_of_a_normalisation_lie_on_the_scale_quotient() -> None:
    data, target = torch.randn(20, 4, dtype=torch.float64), torch.randn(20, 3, dtype=torch.float64)

    def loss(w: Tensor) -> Tensor:  # three units, one point each
        return ((F.batch_norm(data @ w.T, None, None, training=True, eps=1e-100) - target) ** 2).mean()

    w = torch.randn(3, 4, dtype=torch.float64)
    a = torch.tensor([0.1, 2.0, 30.0], dtype=torch.float64)
    manifold = ScaleQuotient()
    torch.testing.assert_close(loss(manifold.action(a, w)), loss(w), **exact)
    assert abs(loss(-w) - loss(w)) > 1e-3
    assert manifold.check_vector_on_tangent(w, manifold.at(w).vector(manifold.at(w).covector(torch.func.grad(loss)(w))))


def test_biases_of_a_softmax_lie_on_the_translation_quotient() -> None:
    data, target = torch.randn(20, 4, dtype=torch.float64), torch.randint(0, 4, (20,))

    def loss(b: Tensor) -> Tensor:
        return F.cross_entropy(data + b, target)

    b = torch.randn(4, dtype=torch.float64)
    manifold = TranslationQuotient()
    torch.testing.assert_close(loss(manifold.action(torch.tensor(5.0, dtype=torch.float64), b)), loss(b), **exact)
    assert abs(loss(2 * b) - loss(b)) > 1e-3
    assert manifold.check_vector_on_tangent(b, torch.func.grad(loss)(b))


@pytest.mark.parametrize("metric", ["inv", "mix"])
def test_neurons_of_a_relu_network_are_pairs_under_the_positive_numbers(metric: str) -> None:
    """FixedRankQuotient with h = 1, one neuron a point: its in-row with the bias is G, its out-column is H."""
    inputs, neurons, outputs = 3, 5, 2
    data, target = torch.randn(30, inputs, dtype=torch.float64), torch.randn(30, outputs, dtype=torch.float64)
    manifold = FixedRankQuotient(inputs + 1, outputs, metric)

    def predict(x: Tensor) -> Tensor:  # x (neurons, inputs + 1 + outputs, 1)
        weight, bias, out = x[..., 0].split([inputs, 1, outputs], dim=1)
        return F.linear(F.relu(F.linear(data, weight, bias[:, 0])), out.T)

    x, eta, zeta = torch.randn(3, neurons, inputs + 1 + outputs, 1, dtype=torch.float64)
    a = torch.logspace(-2, 2, neurons, dtype=torch.float64)[:, None, None]
    y = manifold.action(a, x)
    torch.testing.assert_close(predict(y), predict(x), **exact)
    assert (predict(manifold.action(-a, x)) - predict(x)).norm() > 1e-2  # positive numbers only
    one_sided = torch.cat([x[:, : inputs + 1], y[:, inputs + 1 :]], dim=1)
    assert (predict(one_sided) - predict(x)).norm() > 1e-2

    # What GL(1) makes of the metric, of horizontal vectors and of balanced points.
    (G, H), (eta_G, eta_H), (zeta_G, zeta_H) = ([part[..., 0] for part in manifold.split(v)] for v in (x, eta, zeta))
    g, h = (G * G).sum(1), (H * H).sum(1)
    W_G, W_H = (1 / g, 1 / h) if metric == "inv" else (h, g)
    expected = W_G * (eta_G * zeta_G).sum(1) + W_H * (eta_H * zeta_H).sum(1)
    torch.testing.assert_close(manifold.inner(x, eta, zeta), expected, **exact)
    torch.testing.assert_close(manifold.inner(y, manifold.action(a, eta), manifold.action(a, zeta)), expected, **exact)
    xi = manifold.proju(x, eta)[..., 0]
    along = (G * xi[:, : inputs + 1]).sum(1) / g, (H * xi[:, inputs + 1 :]).sum(1) / h
    torch.testing.assert_close(*along, **exact)
    balanced = manifold.balance(y)[..., 0]
    torch.testing.assert_close(balanced[:, : inputs + 1].norm(dim=1), balanced[:, inputs + 1 :].norm(dim=1), **exact)

    egrad = torch.func.grad(lambda x: ((predict(x) - target) ** 2).mean())(x)
    space = manifold.at(x)
    assert manifold.check_vector_on_tangent(x, space.vector(space.covector(egrad)))
