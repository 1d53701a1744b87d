"""What makes a quotient manifold one: metric, horizontal space, gradient, group; on every case of the table."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quotient_manifolds.manifolds import FixedRankQuotient
from tests.cases import CASES, EVERY_BUILT_IN, INVARIANT, RELAXED, VECTORS, Case

every_case = pytest.mark.parametrize("case", EVERY_BUILT_IN, ids=str)
every_invariant_case = pytest.mark.parametrize("case", [*INVARIANT, *VECTORS], ids=str)
seeds = st.integers(0, 2**31)
exact = {"rtol": 1e-9, "atol": 1e-9}


@every_case
@settings(max_examples=10)
@given(seed=seeds)
def test_metric_is_the_formula_symmetric_bilinear_positive(case: Case, seed: int) -> None:
    x, a, b, c = (case.vector(seed + i) for i in range(4))
    inner = case.manifold.at(x).inner
    torch.testing.assert_close(inner(a, b), case.metric(x, a, b), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(inner(a, b), inner(b, a), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(inner(a, 2 * b - 3 * c), 2 * inner(a, b) - 3 * inner(a, c), rtol=1e-7, atol=1e-7)
    assert inner(a, a) > 0
    assert inner(0 * a, 0 * a) == 0


@every_case
def test_coordinates_are_an_isometry(case: Case) -> None:
    x, eta = case.point(0, 5), case.vector(1, 5)
    space = case.manifold.at(x)
    z = space.coordinates(eta)
    torch.testing.assert_close(torch.linalg.vector_norm(z, dim=space.dims), case.manifold.norm(x, eta), **exact)
    torch.testing.assert_close(space.vector(z), eta, rtol=1e-8, atol=1e-8)


@every_case
def test_a_space_stays_that_of_its_point(case: Case) -> None:
    """Whoever writes to the tensor it was made of, in whatever way."""
    x, eta = case.point(0), case.vector(1)
    space = case.manifold.at(x)
    before = space.proju(eta), space.geodesic(0.1 * space.proju(eta)), space.point.clone()
    x.mul_(3.0)
    x.data.add_(1.0)
    after = space.proju(eta), space.geodesic(0.1 * space.proju(eta)), space.point
    assert all(torch.equal(here, there) for here, there in zip(before, after, strict=True))


@every_case
@settings(max_examples=5)
@given(seed=seeds)
def test_projection_is_the_dense_one_orthogonal_idempotent_self_adjoint(case: Case, seed: int) -> None:
    x, a, b = (case.vector(seed + i) for i in range(3))
    space = case.manifold.at(x)
    p, q = space.proju(a), space.proju(b)
    torch.testing.assert_close(p, case.project(x, a), rtol=1e-5, atol=1e-5)
    size = space.norm(a) * space.norm(b)
    for v in case.vertical(x):
        assert abs(space.inner(p, v)) <= 1e-9 * space.norm(a) * space.norm(v)
    assert space.norm(space.proju(p) - p) <= 1e-9 * space.norm(a)
    assert abs(space.inner(p, b) - space.inner(a, q)) <= 1e-9 * size


@every_case
@settings(max_examples=10)
@given(seed=seeds)
def test_gradient_represents_the_differential(case: Case, seed: int) -> None:
    x, egrad, eta = (case.vector(seed + i) for i in range(3))
    xi = case.manifold.proju(x, eta)
    grad = case.manifold.egrad2rgrad(x, egrad)
    scale = case.manifold.norm(x, grad) * case.manifold.norm(x, xi)
    assert abs(case.metric(x, grad, xi) - (egrad * xi).sum()) <= 1e-8 * scale
    ok, reason = case.manifold.check_vector_on_tangent(x, grad, explain=True)
    assert ok, reason


@every_case
def test_gradient_of_an_invariant_function_is_the_raised_index(case: Case) -> None:
    x = case.point(5).requires_grad_()
    (egrad,) = torch.autograd.grad(case.product(x).sin().sum(), x)
    raised = torch.linalg.solve(case.gram(x.detach()), egrad.flatten()).reshape(x.shape)
    torch.testing.assert_close(case.manifold.egrad2rgrad(x.detach(), egrad), case.project(x.detach(), raised), **exact)
    if case not in RELAXED:  # already horizontal, as for every function on the quotient
        torch.testing.assert_close(case.project(x.detach(), raised), raised, **exact)


@every_case
def test_samples_are_standard_gaussians_of_the_horizontal_space(case: Case) -> None:
    x = case.point(8).expand(4000, *case.shape)
    space = case.manifold.at(x)
    xi = space.sample(torch.Generator().manual_seed(0))
    torch.testing.assert_close(xi, space.proju(xi), rtol=1e-7, atol=1e-7)
    mean = float(space.inner(xi, xi).mean())
    assert mean == pytest.approx(case.dimension, abs=5 * math.sqrt(2 * case.dimension / 4000))


@every_invariant_case
@settings(max_examples=15)
@given(seed=seeds, exponent=st.floats(0, 6))
def test_everything_is_equivariant(case: Case, seed: int, exponent: float) -> None:
    A = case.group(torch.Generator().manual_seed(seed), 10**exponent)
    x, a, b = (case.vector(seed + i) for i in range(3))
    here, there = case.manifold.at(x), case.manifold.at(case.manifold.action(A, x))
    pair = case.product(x).ndim == 2
    loss = 1e-10 * 10**exponent * (float(torch.linalg.cond(case.product(x))) if pair else 10)
    torch.testing.assert_close(there.inner(case.push(A, a), case.push(A, a)), here.inner(a, a), rtol=loss, atol=0)
    xi = 0.3 * here.proju(a) / here.norm(a)
    for left, right in (
        (there.proju(case.push(A, b)), case.push(A, here.proju(b))),
        (there.gradient(cotangent(case, A, b)), case.push(A, here.gradient(b))),
    ):
        assert there.norm(left - right) <= loss * (there.norm(right) + there.norm(case.push(A, b)))
    for order in ("first", "second"):
        moved = there.geodesic(case.push(A, xi), order=order)
        image = case.manifold.action(A, here.geodesic(xi, order=order))
        assert case.manifold.same_orbit(moved, image, rtol=loss)
        assert there.norm(moved - image) <= 10 * loss * here.norm(x)


def cotangent(case: Case, A: Tensor, egrad: Tensor) -> Tensor:
    """The Euclidean gradient at the moved point: the adjoint of the inverse action."""
    basis = torch.eye(egrad.numel(), dtype=egrad.dtype).reshape(-1, *egrad.shape)
    matrix = case.push(A, basis).flatten(1)  # rows: images of basis vectors
    return torch.linalg.solve(matrix, egrad.flatten()).reshape(egrad.shape)


@every_invariant_case
@settings(max_examples=15)
@given(seed=seeds, exponent=st.floats(0, 4))
def test_orbits_and_their_canonical_points(case: Case, seed: int, exponent: float) -> None:
    manifold, A, x = case.manifold, case.group(torch.Generator().manual_seed(seed), 10**exponent), case.point(seed, 3)
    y, xi = manifold.action(A, x), manifold.proju(x, case.vector(seed + 1, 3))
    near = manifold.retr(x, 1e-2 * xi / manifold.norm(x, xi, keepdim=True) * manifold.norm(x, x, keepdim=True))
    assert bool(manifold.same_orbit(x, y).all())
    assert not bool(manifold.same_orbit(x, near).any())
    assert manifold.same_orbit(x, near, rtol=10.0).tolist() == [True] * 3
    balanced = manifold.balance(x)
    assert bool(manifold.same_orbit(x, balanced).all())
    rounding = {"rtol": 1e-6, "atol": 1e-6 * float(balanced.abs().max())}
    torch.testing.assert_close(manifold.balance(y), balanced, **rounding)
    torch.testing.assert_close(manifold.balance(balanced), balanced, **rounding)


@pytest.mark.parametrize(("n", "m", "h"), [(4, 3, 2), (3, 3, 3), (5, 2, 1)])
def test_balanced_pairs_have_equal_diagonal_grams(n: int, m: int, h: int) -> None:
    manifold = FixedRankQuotient(n, m)
    G, H = manifold.split(manifold.balance(torch.randn(n + m, h, dtype=torch.float64)))
    torch.testing.assert_close(G.T @ G, H.T @ H, **exact)
    torch.testing.assert_close(G.T @ G, torch.diag(torch.diagonal(G.T @ G)), **exact)


@pytest.mark.parametrize("metric", ["inv", "mix"])
@pytest.mark.parametrize(
    ("dtype", "condition", "bound"), [(torch.float64, 1e6, 1e-10), (torch.float32, 1e3, 1e-4)], ids=["f64", "f32"]
)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("far", [False, True], ids=["independent", "far-on-orbit"])
def test_projection_of_ill_conditioned_pairs(
    metric: str, dtype: torch.dtype, condition: float, bound: float, seed: int, far: bool
) -> None:
    """Relative vertical part of the projection, computed in 60 digits, with cond(G) = cond(H) = `condition`."""
    n, m, h = 6, 5, 3
    generator = torch.Generator().manual_seed(seed)

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def spread(rows: int) -> Tensor:
        Q, P = torch.linalg.qr(gaussian(rows, h)).Q, torch.linalg.qr(gaussian(h, h)).Q
        return Q * torch.logspace(0, -1, h, base=condition, dtype=torch.float64) @ P

    manifold = FixedRankQuotient(n, m, metric)
    x, eta = torch.cat([spread(n), spread(m)]), gaussian(n + m, h)
    if far:
        A = spread(h)
        x, eta = manifold.action(A, gaussian(n + m, h)), manifold.action(A, eta)
    x, eta = x.to(dtype), eta.to(dtype)
    assert vertical_part(x, manifold.proju(x, eta), n, metric) < bound


def vertical_part(x: Tensor, eta: Tensor, n: int, metric: str) -> float:
    """sup over vertical v of <eta, v> / |eta| |v|, in high precision."""
    with mpmath.workdps(60):
        G, H, a, b = (mpmath.matrix(part.double().tolist()) for part in (x[:n], x[n:], eta[:n], eta[n:]))
        h, grams = G.cols, (G.T * G, H.T * H)
        W_G, W_H = (grams[0] ** -1, grams[1] ** -1) if metric == "inv" else (grams[1], grams[0])
        C = G.T * a * W_G - (H.T * b * W_H).T
        system = mpmath.matrix(h * h)
        for i, j, k, l in ((i, j, k, l) for i in range(h) for j in range(h) for k in range(h) for l in range(h)):
            system[i * h + j, k * h + l] = grams[0][i, k] * W_G[j, l] + W_H[i, k] * grams[1][j, l]
        c = mpmath.matrix([C[i, j] for i in range(h) for j in range(h)])
        squared = (c.T * mpmath.lu_solve(system, c))[0]
        size = sum((W_G * a.T * a)[i, i] + (W_H * b.T * b)[i, i] for i in range(h))
        return float(mpmath.sqrt(squared / size))


@every_case
def test_batches_hold_different_points_and_single_precision_agrees(case: Case) -> None:
    x, eta = case.point(0, 2, 3), case.vector(1, 2, 3)
    for name in ("proju", "inner", "egrad2rgrad", "retr"):
        method = getattr(case.manifold, name)
        u = 0.1 * eta if name == "retr" else eta
        expected = torch.stack([torch.stack([method(x[i, j], u[i, j]) for j in range(3)]) for i in range(2)])
        torch.testing.assert_close(method(x, u), expected, **exact)
        single = method(x.float(), u.float())
        assert single.dtype == torch.float32
        torch.testing.assert_close(single.double(), expected, rtol=2e-3, atol=2e-3)
    for name in ("inner", "norm"):
        assert getattr(case.manifold, name)(x, eta, keepdim=True).shape == (2, 3, *[1] * case.manifold.ndim)
    empty = x[:0]
    assert case.manifold.check_point_on_manifold(empty)
    assert case.manifold.check_vector_on_tangent(empty, empty)
    assert case.manifold.proju(empty, empty).shape == case.manifold.retr(empty, empty).shape == empty.shape


@every_case
def test_norm_has_gradient_zero_at_zero(case: Case) -> None:
    u = torch.zeros(case.shape, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(case.manifold.norm(case.point(0), u), u)
    assert torch.equal(grad, torch.zeros_like(grad))


@every_invariant_case
def test_the_check_holds_all_along_an_orbit(case: Case) -> None:
    x, eta = case.point(0), case.vector(1)
    A = 1e3 * case.group(torch.Generator().manual_seed(0), 10.0)
    y = case.manifold.action(A, x)
    assert case.manifold.check_point_on_manifold(y)
    assert case.manifold.check_vector_on_tangent(y, case.push(A, case.manifold.proju(x, eta)))
    ok, reason = case.manifold.check_vector_on_tangent(y, case.vertical(y)[0], explain=True)
    assert not ok
    assert reason == f"{case.manifold.vertical_equation} fails: relative vertical part 1"


@pytest.mark.parametrize("metric", ["inv", "mix", 0.5])
@pytest.mark.parametrize("method", ["inner", "norm", "proju", "egrad2rgrad", "retr"])
def test_gradients_in_the_point_where_singular_values_agree(metric: str | float, method: str) -> None:
    """At G = H = I, as every orthogonal initialisation has it, against central differences."""
    apply = getattr(FixedRankQuotient(3, 3, metric), method)
    u, direction = 0.3 * torch.randn(2, 6, 3, dtype=torch.float64)
    x = torch.cat([torch.eye(3, dtype=torch.float64)] * 2).requires_grad_()
    (grad,) = torch.autograd.grad(apply(x, u).sin().sum(), x)
    above, below = (apply(x.detach() + step * direction, u).sin().sum() for step in (1e-5, -1e-5))
    assert float((grad * direction).sum()) == pytest.approx(float(above - below) / 2e-5, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("case", [case for case in CASES if isinstance(case.manifold, FixedRankQuotient)], ids=str)
def test_a_space_in_single_precision_is_factored_in_double(case: Case) -> None:
    """A badly balanced point, far along its orbit, loses nothing but the last rounding."""
    A = case.group(torch.Generator().manual_seed(0), 1e4 if case not in RELAXED else 1.0)
    x, egrad = case.manifold.action(A, case.point(0)), case.vector(1)
    double, single = case.manifold.at(x), case.manifold.at(x, dtype=torch.float32)
    z = double.project(case.vector(2))
    assert single.point.dtype == single.vector(z.float()).dtype == torch.float32
    for there, here in (
        (single.vector(z.float()), double.vector(z)),
        (single.covector(egrad.float()), double.covector(egrad)),
        (single.project(egrad.float()), double.project(egrad)),
    ):
        assert (there.double() - here).norm() <= 1e-5 * here.norm()
