"""Our manifolds inside geoopt: parameters, `Scaled`, optimizers, and what stays the same along an orbit."""

from __future__ import annotations

import copy

import geoopt
import pytest
import torch
from torch import Tensor

from quotient_manifolds.manifolds import DiagonalQuotient, FixedRankQuotient, GeodesicError
from tests.cases import INVARIANT, Case

small = [case for case in INVARIANT if case.dimension > 1]
every_case = pytest.mark.parametrize("case", small, ids=str)
OPTIMIZERS = {
    "sgd": lambda p: geoopt.optim.RiemannianSGD(p, lr=1e-2),
    "adam": lambda p: geoopt.optim.RiemannianAdam(p, lr=1e-2),
    "amsgrad": lambda p: geoopt.optim.RiemannianAdam(p, lr=1e-2, amsgrad=True),
}


def descend(case: Case, start: Tensor, optimizer: str, steps: int = 25) -> tuple[Tensor, list[float]]:
    """Fit the product to a fixed target from `start`; the last point and the losses.

    The target has the signs of the start: no geodesic of the diagonal quotient crosses zero.
    """
    target = 1.5 * case.product(case.point(1))
    parameter = geoopt.ManifoldParameter(start.clone(), manifold=case.manifold)
    step = OPTIMIZERS[optimizer]([parameter])
    losses = []
    for _ in range(steps):
        step.zero_grad()
        loss = ((case.product(parameter) - target) ** 2).mean()
        loss.backward()
        losses.append(float(loss.detach()))
        step.step()
    return parameter.detach(), losses


@every_case
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_descend_and_do_not_see_the_representative(case: Case, optimizer: str) -> None:
    x = case.point(1)
    A = 10 * case.group(torch.Generator().manual_seed(2), 30.0)
    end, losses = descend(case, x, optimizer)
    moved_end, moved_losses = descend(case, case.manifold.action(A, x), optimizer)
    assert losses[-1] < losses[0]
    torch.testing.assert_close(torch.tensor(moved_losses), torch.tensor(losses), rtol=1e-6, atol=1e-9)
    assert bool(case.manifold.same_orbit(end, moved_end, rtol=1e-6))


def test_euclidean_descent_does_see_the_representative() -> None:
    """The control: without the manifold the same run depends on where in the orbit it starts."""
    case = small[0]
    x = case.point(1)
    y = case.manifold.action(10 * case.group(torch.Generator().manual_seed(2), 30.0), x)
    ends = []
    for start in (x, y):
        p = start.clone().requires_grad_()
        step = torch.optim.SGD([p], lr=1e-3)
        for _ in range(25):
            step.zero_grad()
            ((case.product(p) - 1.5 * case.product(x)) ** 2).mean().backward()
            step.step()
        ends.append(case.product(p.detach()))
    assert (ends[0] - ends[1]).norm() > 1e-2 * ends[0].norm()


@every_case
def test_scaled_manifolds(case: Case) -> None:
    """Scaled(M, c) keeps the metric of vectors and scales what a unit vector covers."""
    scaled = geoopt.Scaled(case.manifold, 2.0).double()
    x, u = case.point(3), case.manifold.proju(case.point(3), 0.1 * case.vector(4))
    torch.testing.assert_close(scaled.retr(x, u), case.manifold.retr(x, u / 2), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(scaled.expmap(x, u), case.manifold.expmap(x, u / 2), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(scaled.geodesic(x, u, 0.5), case.manifold.geodesic(x, u, 0.25), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(scaled.proju(x, u), case.manifold.proju(x, u), rtol=1e-12, atol=1e-12)
    if isinstance(case.manifold, DiagonalQuotient):
        y = case.manifold.retr(x, u)
        torch.testing.assert_close(scaled.dist(x, y), 2 * case.manifold.dist(x, y), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(scaled.logmap(x, scaled.expmap(x, u)), u, rtol=1e-8, atol=1e-8)


@every_case
def test_transport_is_horizontal_and_equivariant(case: Case) -> None:
    manifold, x = case.manifold, case.point(5)
    u, v = (0.1 * manifold.proju(x, case.vector(i)) for i in (6, 7))
    y, w = manifold.retr_transp(x, u, v)
    torch.testing.assert_close(y, manifold.retr(x, u), rtol=1e-12, atol=1e-12)
    assert manifold.check_vector_on_tangent(y, w)
    torch.testing.assert_close(w, manifold.transp_follow_retr(x, u, v), rtol=1e-12, atol=1e-12)
    A = case.group(torch.Generator().manual_seed(8), 30.0)
    act = manifold.action
    y_there, w_there = manifold.retr_transp(act(A, x), act(A, u), act(A, v))
    torch.testing.assert_close(y_there, act(A, y), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(w_there, act(A, w), rtol=1e-7, atol=1e-7)


@every_case
def test_component_inner_adds_up(case: Case) -> None:
    x, u, v = (case.vector(i, 2) for i in range(3))
    parts = case.manifold.component_inner(x, u, v)
    assert torch.broadcast_shapes(parts.shape, x.shape) == x.shape
    torch.testing.assert_close(parts.sum((-2, -1)), case.manifold.inner(x, u, v), rtol=1e-10, atol=1e-10)


def test_parameters_in_a_module_move_and_copy() -> None:
    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            manifold = FixedRankQuotient(4, 3, "mix")
            self.pair = geoopt.ManifoldParameter(manifold.random(2, 7, 2, dtype=torch.float32), manifold=manifold)

    head = Head()
    twin = copy.deepcopy(head).double()
    assert twin.pair.dtype == torch.float64
    assert twin.pair.manifold.metric == "mix"
    head.load_state_dict(twin.state_dict())
    torch.testing.assert_close(head.pair.detach().double(), twin.pair.detach())


def battery() -> list[tuple[str, Tensor, geoopt.Manifold]]:
    rows = [(case.name, case.point(10), case.manifold) for case in small]
    return rows + [(f"scaled-{name}", x, geoopt.Scaled(manifold, 2.0).double()) for name, x, manifold in rows]


@pytest.mark.parametrize(("x", "manifold"), [row[1:] for row in battery()], ids=[row[0] for row in battery()])
@pytest.mark.parametrize("seed", range(3))
def test_what_geoopt_expects_of_every_manifold(x: Tensor, manifold: geoopt.Manifold, seed: int) -> None:
    """The properties of geoopt's own generic tests: shapes, projections, transports, broadcasting."""
    torch.manual_seed(seed)
    u, v = (0.1 * manifold.proju(x, torch.randn_like(x)) for _ in range(2))
    manifold.assert_check_point_on_manifold(manifold.projx(x))
    manifold.assert_check_vector_on_tangent(x, u)
    y, moved = manifold.retr_transp(x, u, v)
    manifold.assert_check_point_on_manifold(y)
    manifold.assert_check_vector_on_tangent(y, moved)
    y, moved = manifold.expmap_transp(x, u, v)
    manifold.assert_check_point_on_manifold(y)
    manifold.assert_check_vector_on_tangent(y, moved)
    assert manifold.inner(x, u, v).shape == ()
    assert manifold.inner(x, u, v, keepdim=True).shape == (1, 1)
    stacked = manifold.proju(torch.stack([x, x]), torch.stack([u, v]))
    torch.testing.assert_close(stacked, torch.stack([u, v]), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(manifold.norm(x, u) ** 2, manifold.inner(x, u), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(manifold.proju(x, manifold.egrad2rgrad(x, u)), manifold.egrad2rgrad(x, u))


with_logarithm = [row for row in battery() if "rotary" not in row[0]]


@pytest.mark.parametrize(("x", "manifold"), [row[1:] for row in with_logarithm], ids=[row[0] for row in with_logarithm])
def test_a_logarithm_is_the_velocity_or_a_shorter_one(x: Tensor, manifold: geoopt.Manifold) -> None:
    """Of short velocities it is the same. A long geodesic may end, or not be the shortest one to where it leads."""
    near = {"rtol": 1e-5, "atol": 1e-7}
    direction = manifold.proju(x, torch.randn_like(x))
    short = 0.1 * direction
    torch.testing.assert_close(manifold.logmap(x, manifold.expmap(x, short)), short, **near)
    try:
        y = manifold.expmap(x, direction)
        found = manifold.logmap(x, y)
    except GeodesicError:
        return
    if not torch.allclose(found, direction, **near):
        assert manifold.norm(x, found) < manifold.norm(x, direction)
        plain = manifold.base if isinstance(manifold, geoopt.Scaled) else manifold
        assert plain.same_orbit(manifold.expmap(x, found), y, rtol=near["rtol"])
