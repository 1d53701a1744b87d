"""The Riemannian Hessian against second derivatives along exact geodesics, and the closed form of the scalar model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quotient_manifolds.manifolds import DiagonalQuotient
from tests.cases import CASES, INVARIANT, Case

every_case = pytest.mark.parametrize("case", CASES, ids=str)


def function(case: Case, x: Tensor) -> Tensor:
    """An invariant, curved function."""
    product = case.product(x)
    return (product.sin() + product**2 / 3).sum()


def setting(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    x, u, v = (case.vector(50 + i) for i in range(3))
    space = case.manifold.at(x)
    u, v = (0.1 * w / space.norm(w) for w in (space.proju(u), space.proju(v)))
    return x, u, v


@every_case
def test_the_quadratic_form_is_the_second_derivative_along_exact_geodesics(case: Case) -> None:
    x, u, _ = setting(case)
    space = case.manifold.at(x)
    step = 0.02
    times = step * torch.arange(-3.0, 4.0, dtype=torch.float64)
    values = torch.stack([function(case, space.geodesic(u, float(t), "exact")) for t in times])
    stencil = torch.tensor([2.0, -27.0, 270.0, -490.0, 270.0, -27.0, 2.0], dtype=torch.float64) / 180  # sixth order
    second = float(stencil @ values / step**2)
    form = float(space.inner(u, space.hessian_product(lambda y: function(case, y), u)))
    assert form == pytest.approx(second, rel=1e-5, abs=1e-7)


@every_case
def test_it_is_horizontal_and_self_adjoint(case: Case) -> None:
    x, u, v = setting(case)
    space = case.manifold.at(x)
    Hu, Hv = (space.hessian_product(lambda y: function(case, y), w) for w in (u, v))
    torch.testing.assert_close(space.inner(u, Hv), space.inner(v, Hu), rtol=1e-8, atol=1e-10)
    assert space.norm(Hu - space.proju(Hu)) <= 1e-8 * space.norm(Hu)


@every_case
def test_from_euclidean_gradient_and_hessian(case: Case) -> None:
    x, u, _ = setting(case)
    egrad, ehess = torch.func.jvp(torch.func.grad(lambda y: function(case, y)), (x,), (u,))
    product = case.manifold.at(x).hessian_product(lambda y: function(case, y), u)
    converted = case.manifold.at(x).hessian(egrad, ehess, u)
    torch.testing.assert_close(converted, product, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("case", INVARIANT, ids=str)
def test_it_is_equivariant(case: Case) -> None:
    x, u, _ = setting(case)
    A = case.group(torch.Generator().manual_seed(0), 30.0)
    act = case.manifold.action
    here = case.manifold.at(x).hessian_product(lambda y: function(case, y), u)
    there = case.manifold.at(act(A, x)).hessian_product(lambda y: function(case, y), act(A, u))
    assert case.manifold.at(act(A, x)).norm(there - act(A, here)) <= 1e-8 * case.manifold.at(x).norm(here)


# The scalar toy model f = G H x with loss (f - y)^2, x = 1 [paper, App. D.1], in the metric inv: b and y0 = G H.


def scalar(y0: float, y: float, G: float = 0.7) -> tuple[float, float, float, float]:
    """Riemannian and Euclidean: squared gradient norm and Hessian trace at G H = y0."""
    point = torch.tensor([[G], [y0 / G]], dtype=torch.float64)
    loss = lambda p: (p[0, 0] * p[1, 0] - y) ** 2  # noqa: E731
    space = DiagonalQuotient("inv").at(point)
    egrad = torch.func.grad(loss)(point)
    gradient = float(space.norm(space.gradient(egrad)) ** 2)
    unit = point / space.norm(point)  # the horizontal space is a line, and the point itself lies on it
    trace = float(space.inner(unit, space.hessian_product(loss, unit)))
    hessian = torch.func.hessian(loss)(point).reshape(2, 2)
    return gradient, trace, float((egrad**2).sum()), float(hessian.trace())


@pytest.mark.parametrize("y0", [-1.5, -0.4, 0.3, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("G", [0.1, 1.0, 30.0])
def test_scalar_model_closed_forms(y0: float, G: float) -> None:
    y = 1.0
    gradient, trace, _, _ = scalar(y0, y, G)
    assert gradient == pytest.approx(8 * y0**2 * (y0 - y) ** 2, rel=1e-10, abs=1e-12)
    assert trace == pytest.approx(4 * y0 * (2 * y0 - y), rel=1e-10, abs=1e-12)


def test_scalar_model_claims_of_the_paper() -> None:
    """The claims (a) to (d) of App. D.1 about level sets, sizes, minima and maxima, each as it comes out."""
    y = 1.0
    # (a) holds: Riemannian level sets are those of the loss (both depend on G H alone); Euclidean ones are not.
    assert scalar(0.5, y, 0.1)[:2] == pytest.approx(scalar(0.5, y, 10.0)[:2])
    assert scalar(0.5, y, 0.1)[2] != pytest.approx(scalar(0.5, y, 10.0)[2], rel=0.1)
    assert scalar(0.5, y, 0.1)[3] != pytest.approx(scalar(0.5, y, 10.0)[3], rel=0.1)
    # (b) "smaller throughout" does not hold: far from the origin the Riemannian values are the larger ones.
    at = scalar(3.0, y, 3.0**0.5)
    assert at[0] > at[2]
    assert at[1] > at[3]
    near = scalar(0.2, y, 0.2**0.5)
    assert near[0] < near[2]
    assert near[1] < near[3]
    # (c) "reaches 0 at the minimum" does not hold: it is 4 y^2 there, and 0 at y0 = y / 2 and y0 = 0.
    assert scalar(y, y)[1] == pytest.approx(4 * y**2)
    assert scalar(y / 2, y)[1] == pytest.approx(0, abs=1e-12)
    # (c, second half) the Euclidean trace 2 (G^2 + H^2) is no maximum at the minimum either: it grows with |G|.
    assert scalar(y, y, 10.0)[3] > scalar(y, y, 1.0)[3]
    # (d) holds: Euclidean traces are positive everywhere; the Riemannian one is negative between its zeros.
    assert scalar(0.25, y)[1] < 0 < scalar(0.25, y)[3]
