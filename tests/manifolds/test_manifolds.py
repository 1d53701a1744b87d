"""What makes a quotient manifold one: metric, horizontal space, gradient, group; on every case of the table."""

from __future__ import annotations

import copy
import math
import pickle

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quotient_manifolds.manifolds import DiagonalQuotient, FixedRankQuotient
from tests.cases import CASES, EVERY_BUILT_IN, INVARIANT, RELAXED, Case

every_case = pytest.mark.parametrize("case", EVERY_BUILT_IN, ids=str)
every_invariant_case = pytest.mark.parametrize("case", INVARIANT, ids=str)
seeds = st.integers(0, 2**31)
exact = {"rtol": 1e-9, "atol": 1e-9}


@every_case
@settings(max_examples=10)
@given(seed=seeds)
def test_metric_is_the_formula(case: Case, seed: int) -> None:
    x, eta, zeta = (case.vector(seed + i) for i in range(3))
    torch.testing.assert_close(case.manifold.inner(x, eta, zeta), case.metric(x, eta, zeta), rtol=1e-7, atol=1e-7)


@every_case
def test_metric_is_symmetric_bilinear_positive(case: Case) -> None:
    x, a, b, c = (case.vector(i) for i in range(4))
    inner = case.manifold.at(x).inner
    torch.testing.assert_close(inner(a, b), inner(b, a), **exact)
    torch.testing.assert_close(inner(a, 2 * b - 3 * c), 2 * inner(a, b) - 3 * inner(a, c), **exact)
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
@settings(max_examples=10)
@given(seed=seeds)
def test_projection_is_the_dense_one(case: Case, seed: int) -> None:
    x, eta = case.point(seed), case.vector(seed + 1)
    torch.testing.assert_close(case.manifold.proju(x, eta), case.project(x, eta), rtol=1e-5, atol=1e-5)


@every_case
@settings(max_examples=10)
@given(seed=seeds)
def test_projection_is_orthogonal_idempotent_self_adjoint(case: Case, seed: int) -> None:
    x, a, b = (case.vector(seed + i) for i in range(3))
    space = case.manifold.at(x)
    p, q = space.proju(a), space.proju(b)
    size = space.norm(a) * space.norm(b)
    for v in case.vertical(x):
        assert abs(space.inner(p, v)) <= 1e-9 * space.norm(a) * space.norm(v)
    assert space.norm(space.proju(p) - p) <= 1e-9 * space.norm(a)
    assert abs(space.inner(p, b) - space.inner(a, q)) <= 1e-9 * size


@every_case
def test_projection_takes_away_vertical_vectors_only(case: Case) -> None:
    x, eta = case.point(3), case.vector(4)
    removed = (eta - case.manifold.proju(x, eta)).flatten()
    basis = case.vertical(x).flatten(1)
    fit = basis.T @ torch.linalg.lstsq(basis.T, removed[:, None]).solution[:, 0]
    torch.testing.assert_close(fit, removed, **exact)


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
def test_dimension_is_the_rank_of_a_gram_matrix(case: Case) -> None:
    x = case.point(6)
    space = case.manifold.at(x)
    z = space.coordinates(space.proju(case.vector(7, 2 * x.numel()))).flatten(1)
    assert int(torch.linalg.matrix_rank(z @ z.T, rtol=1e-10)) == case.dimension


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
    generator = torch.Generator().manual_seed(seed)
    A = case.group(generator, 10**exponent)
    act = case.manifold.action
    x, a, b = (case.vector(seed + i) for i in range(3))
    here, there = case.manifold.at(x), case.manifold.at(act(A, x))
    loss = 1e-13 * 10**exponent * float(torch.linalg.cond(case.product(x))) if case.product(x).ndim == 2 else 1e-12
    near = {"rtol": 1e3 * loss, "atol": 0}
    torch.testing.assert_close(there.inner(act(A, a), act(A, a)), here.inner(a, a), **near)
    xi = 0.3 * here.proju(a) / here.norm(a)
    for left, right in (
        (there.proju(act(A, b)), act(A, here.proju(b))),
        (there.gradient(cotangent(case, A, b)), act(A, here.gradient(b))),
    ):
        assert there.norm(left - right) <= 1e3 * loss * there.norm(right)
    for order in ("first", "second"):
        moved, image = there.geodesic(act(A, xi), order=order), act(A, here.geodesic(xi, order=order))
        assert case.manifold.same_orbit(moved, image, rtol=1e3 * loss)
        assert there.norm(moved - image) <= 1e4 * loss * here.norm(x)


def cotangent(case: Case, A: Tensor, egrad: Tensor) -> Tensor:
    """The Euclidean gradient at the moved point: the adjoint of the inverse action."""
    basis = torch.eye(egrad.numel(), dtype=egrad.dtype).reshape(-1, *egrad.shape)
    matrix = case.manifold.action(A, basis).flatten(1)  # rows: images of basis vectors
    return torch.linalg.solve(matrix, egrad.flatten()).reshape(egrad.shape)


@every_invariant_case
@settings(max_examples=15)
@given(seed=seeds, exponent=st.floats(0, 4))
def test_orbits_and_their_canonical_points(case: Case, seed: int, exponent: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    A, x = case.group(generator, 10**exponent), case.point(seed, 3)
    y = case.manifold.action(A, x)
    assert bool(case.manifold.same_orbit(x, y).all())
    assert not bool(case.manifold.same_orbit(x, 1.01 * x).any())
    assert case.manifold.same_orbit(x, 1.01 * x, rtol=0.1).shape == (3,)
    balanced = case.manifold.balance(x)
    assert bool(case.manifold.same_orbit(x, balanced).all())
    torch.testing.assert_close(case.manifold.balance(balanced), balanced, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("n", "m", "h"), [(4, 3, 2), (3, 3, 3), (5, 2, 1)])
def test_balanced_points_have_equal_grams_and_do_not_depend_on_the_representative(n: int, m: int, h: int) -> None:
    manifold = FixedRankQuotient(n, m)
    x = torch.randn(n + m, h, dtype=torch.float64)
    A = torch.randn(h, h, dtype=torch.float64)
    G, H = manifold.split(manifold.balance(x))
    torch.testing.assert_close(G.T @ G, H.T @ H, **exact)
    torch.testing.assert_close(G.T @ G, torch.diag(torch.diagonal(G.T @ G)), **exact)
    torch.testing.assert_close(manifold.balance(manifold.action(A, x)), manifold.balance(x), rtol=1e-7, atol=1e-7)


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
def test_batches_hold_different_points(case: Case) -> None:
    x, eta = case.point(0, 2, 3), case.vector(1, 2, 3)
    manifold = case.manifold
    for batched, single in (
        (manifold.proju(x, eta), lambda i, j: manifold.proju(x[i, j], eta[i, j])),
        (manifold.inner(x, eta), lambda i, j: manifold.inner(x[i, j], eta[i, j])),
        (manifold.retr(x, 0.1 * eta), lambda i, j: manifold.retr(x[i, j], 0.1 * eta[i, j])),
    ):
        expected = torch.stack([torch.stack([single(i, j) for j in range(3)]) for i in range(2)])
        torch.testing.assert_close(batched, expected, **exact)
    assert manifold.inner(x, eta, keepdim=True).shape == (2, 3, *[1] * manifold.ndim)
    assert manifold.norm(x, eta, keepdim=True).shape == (2, 3, *[1] * manifold.ndim)


@every_case
def test_single_precision_agrees(case: Case) -> None:
    x, eta = case.point(0, 3), case.vector(1, 3)
    for name in ("proju", "egrad2rgrad", "inner"):
        method = getattr(case.manifold, name)
        result = method(x.float(), eta.float())
        assert result.dtype == torch.float32
        torch.testing.assert_close(result.double(), method(x, eta), rtol=2e-3, atol=2e-3)


@every_case
def test_norm_has_gradient_zero_at_zero(case: Case) -> None:
    u = torch.zeros(case.shape, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(case.manifold.norm(case.point(0), u), u)
    assert torch.equal(grad, torch.zeros_like(grad))


@every_case
def test_random_points_pass_the_check_and_projx_leaves_them_alone(case: Case) -> None:
    x = case.manifold.random(7, *case.shape, dtype=torch.float64)
    ok, reason = case.manifold.check_point_on_manifold(x, explain=True)
    assert ok, reason
    assert torch.equal(case.manifold.projx(x), x)


@every_invariant_case
def test_the_check_holds_all_along_an_orbit(case: Case) -> None:
    x, eta = case.point(0), case.vector(1)
    A = 1e3 * case.group(torch.Generator().manual_seed(0), 10.0)
    y = case.manifold.action(A, x)
    assert case.manifold.check_point_on_manifold(y)
    assert case.manifold.check_vector_on_tangent(y, case.manifold.action(A, case.manifold.proju(x, eta)))
    ok, reason = case.manifold.check_vector_on_tangent(y, case.manifold.action(A, eta), explain=True)
    assert not ok
    assert "horizontal space" in reason
    assert "relative vertical part" in reason


@every_case
def test_manifolds_can_be_copied_and_pickled(case: Case) -> None:
    x, eta = case.point(0), case.vector(1)
    expected = case.manifold.proju(x, eta)
    for twin in (copy.deepcopy(case.manifold), pickle.loads(pickle.dumps(case.manifold)), case.manifold.to("cpu")):
        assert torch.equal(twin.proju(x, eta), expected)
        assert repr(twin) == repr(case.manifold)


def test_projx_leaves_pairs_of_lower_rank_and_lifts_zeros_of_diagonal_ones() -> None:
    manifold = FixedRankQuotient(4, 3)
    x = torch.randn(2, 7, 2, dtype=torch.float64)
    x[0, :4, 1] = 2 * x[0, :4, 0]
    assert not manifold.check_point_on_manifold(x)
    assert torch.equal(manifold.projx(x), x)
    zero = torch.tensor([[0.0, 2.0], [3.0, 4.0]])
    assert DiagonalQuotient().check_point_on_manifold(DiagonalQuotient().projx(zero))


BAD = [
    (lambda: FixedRankQuotient(3, 2, "riemann"), "metric must be 'inv' or 'mix' or a finite number. Found 'riemann'"),
    (lambda: DiagonalQuotient(metric=math.inf), "or a finite number. Found inf"),
    (lambda: FixedRankQuotient(0, 2), "at least 1. Found n = 0"),
    (lambda: FixedRankQuotient(3, 2, eps=-1.0), "eps must be a finite number >= 0. Found -1.0"),
    (lambda: FixedRankQuotient(3, 2).at(torch.ones(4, 1)), r"must have shape \(..., 5, h\).*Found \(4, 1\)"),
    (lambda: FixedRankQuotient(3, 2).at(torch.ones(5, 3)), "with 1 <= h <= 2"),
    (lambda: FixedRankQuotient(3, 2).at(torch.full((5, 1), math.nan)), "finite. Found NaN"),
    (lambda: FixedRankQuotient(3, 2).expmap(torch.zeros(5, 1), torch.zeros(5, 1)), "rank"),
    (
        lambda: FixedRankQuotient(3, 2).retr(torch.ones(5, 1), torch.ones(4, 1)),
        r"must end in one shape, \(5, 1\). Found shape",
    ),
    (
        lambda: FixedRankQuotient(3, 2).proju(torch.ones(5, 1), torch.ones(5, 1).double()),
        "one dtype and one device",
    ),
    (lambda: FixedRankQuotient(3, 2).geodesic(torch.ones(5, 1), torch.ones(5, 1), 1.0, "third"), "Found 'third'"),
    (lambda: FixedRankQuotient(3, 2).dist(torch.ones(5, 2), torch.ones(5, 2)), r"rank\(G H\^T\) = h = 2 fails"),
    (
        lambda: FixedRankQuotient(3, 2).logmap(torch.ones(5, 1), torch.ones(5, 1).double()),
        "one dtype and one device",
    ),
    (lambda: FixedRankQuotient(3, 2).mean(torch.ones(0, 5, 1)), r"at least one point.* Found shape \(0,"),
    (lambda: DiagonalQuotient().logmap(torch.tensor([[0.0], [1.0]]), torch.ones(2, 1)), "entries are 0"),
    (lambda: DiagonalQuotient().dist(torch.ones(2, 2), torch.ones(2, 1)), "must end in one shape"),
    (lambda: DiagonalQuotient().at(torch.ones(3, 2)), r"shape \(..., 2, d\). Found \(3, 2\)"),
    (lambda: DiagonalQuotient().at(torch.tensor([[0.0], [1.0]])), "u_i != 0 and v_i != 0 fails: 1 entries are 0"),
    (lambda: DiagonalQuotient().dist(torch.ones(2, 1), torch.tensor([[1.0], [-1.0]])), "same signs"),
]


@pytest.mark.parametrize(("call", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_input_gets_one_sentence(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "t"), [("inv", 0.0), ("mix", 1.0)])
def test_the_named_metrics_are_members_of_the_family(name: str, t: float) -> None:
    for named, numbered in (
        (FixedRankQuotient(4, 3, name), FixedRankQuotient(4, 3, t)),
        (DiagonalQuotient(name), DiagonalQuotient(t)),
    ):
        x, u = torch.randn(2, *((7, 2) if isinstance(named, FixedRankQuotient) else (2, 3)), dtype=torch.float64)
        for method in ("inner", "proju", "egrad2rgrad", "retr"):
            assert torch.equal(getattr(named, method)(x, 0.1 * u), getattr(numbered, method)(x, 0.1 * u))


def test_the_half_metric_is_euclidean_at_balanced_points() -> None:
    manifold = FixedRankQuotient(4, 3, metric=0.5)
    x = manifold.balance(torch.randn(7, 2, dtype=torch.float64))
    u = torch.randn(7, 2, dtype=torch.float64)
    torch.testing.assert_close(manifold.inner(x, u), (u * u).sum(), **exact)


@pytest.mark.parametrize("metric", ["inv", "mix"])
def test_single_precision_keeps_small_singular_values_of_large_products(metric: str) -> None:
    """cond(G) = cond(H) = 1e3 in float32: the product's singular values spread over 1e6, and all of them count."""
    n = m = 128
    h = 16
    generator = torch.Generator().manual_seed(0)
    spread = torch.logspace(1.5, -1.5, h, dtype=torch.float64)

    def factor(rows: int) -> Tensor:
        Q = torch.linalg.qr(torch.randn(rows, h, generator=generator, dtype=torch.float64)).Q
        return Q * spread @ torch.linalg.qr(torch.randn(h, h, generator=generator, dtype=torch.float64)).Q

    manifold = FixedRankQuotient(n, m, metric)
    x = torch.cat([factor(n), factor(m)]).float()
    eta = torch.randn(n + m, h, generator=generator)
    assert manifold.check_point_on_manifold(x)
    true = manifold.at(x.double())
    found = manifold.proju(x, eta).double()
    z = true.coordinates(found)
    assert (z - true.project(z)).norm() < 1e-4 * z.norm()
    torch.testing.assert_close(manifold.norm(x, eta).double(), true.norm(eta.double()), rtol=1e-4, atol=0)


@pytest.mark.parametrize("metric", ["inv", "mix", 0.5])
@pytest.mark.parametrize("method", ["inner", "norm", "proju", "egrad2rgrad", "retr"])
def test_gradients_in_the_point_where_singular_values_agree(metric: str | float, method: str) -> None:
    """At G = H = I, as every orthogonal initialisation has it, against central differences."""
    manifold = FixedRankQuotient(3, 3, metric)
    x = torch.cat([torch.eye(3, dtype=torch.float64)] * 2)
    u, w = torch.randn(2, 6, 3, dtype=torch.float64)
    direction = torch.randn(6, 3, dtype=torch.float64)

    def scalar(x: Tensor) -> Tensor:
        result = getattr(manifold, method)(x, 0.3 * u)
        return (result * w).sum() if result.ndim else result

    (grad,) = torch.autograd.grad(scalar(leaf := x.clone().requires_grad_()), leaf)
    step = 1e-5
    expected = (scalar(x + step * direction) - scalar(x - step * direction)) / (2 * step)
    assert float((grad * direction).sum()) == pytest.approx(float(expected), rel=1e-5, abs=1e-6)


def test_empty_batches() -> None:
    for manifold, x in ((FixedRankQuotient(4, 3), torch.ones(0, 7, 2)), (DiagonalQuotient(), torch.ones(0, 2, 3))):
        assert manifold.check_point_on_manifold(x)
        assert manifold.check_vector_on_tangent(x, x)
        for result in (manifold.proju(x, x), manifold.retr(x, x), manifold.balance(x), manifold.logmap(x, x)):
            assert result.shape == x.shape


@pytest.mark.parametrize("t", [1e-10, 1e-14])
def test_diagonal_metrics_near_inv_are_near_inv(t: float) -> None:
    x, y = 1 + torch.rand(2, 2, 3, dtype=torch.float64)
    inv, near = DiagonalQuotient("inv"), DiagonalQuotient(t)
    torch.testing.assert_close(near.logmap(x, y), inv.logmap(x, y), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(near.expmap(x, 0.1 * x), inv.expmap(x, 0.1 * x), rtol=1e-8, atol=1e-8)


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
