"""The Riemannian Hessian against second derivatives along exact geodesics, and the closed form of the scalar model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quotient_manifolds.manifolds import DiagonalQuotient
from tests.cases import CASES, Case

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


@pytest.mark.parametrize("y0", [-1.5, -0.4, 0.3, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("G", [0.1, 1.0, 30.0])
def test_the_scalar_model_has_its_closed_forms(y0: float, G: float) -> None:
    """f = G H x with loss (f - y)^2, x = y = 1, in inv [paper, App. D.1]: squared gradient norm and Hessian trace."""
    point = torch.tensor([[G], [y0 / G]], dtype=torch.float64)
    loss = lambda p: (p[0, 0] * p[1, 0] - 1.0) ** 2  # noqa: E731
    space = DiagonalQuotient("inv").at(point)
    gradient = float(space.norm(space.gradient(torch.func.grad(loss)(point))) ** 2)
    unit = point / space.norm(point)  # the horizontal space is a line, and the point itself lies on it
    trace = float(space.inner(unit, space.hessian_product(loss, unit)))
    assert gradient == pytest.approx(8 * y0**2 * (y0 - 1) ** 2, rel=1e-10, abs=1e-12)
    assert trace == pytest.approx(4 * y0 * (2 * y0 - 1), rel=1e-10, abs=1e-12)
