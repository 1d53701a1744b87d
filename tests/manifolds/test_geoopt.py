"""Our manifolds inside geoopt: what it expects of every manifold, equality and memory, and runs of its optimizers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import geoopt
import pytest
import torch
from geoopt.optim import RiemannianAdam, RiemannianLineSearch, RiemannianSGD
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quotient_manifolds.manifolds import (
    DiagonalQuotient,
    FixedRankQuotient,
    Recipe,
    RotaryQuotient,
    ScaleQuotient,
    TranslationQuotient,
    fixed_rank_space,
    quotient,
)
from tests.cases import EVERY, INVARIANT, VECTORS, Case, diagonal, fixed_rank

small = [*(case for case in INVARIANT if case.dimension > 1), *VECTORS]
every_case = pytest.mark.parametrize("case", EVERY, ids=str)
Make = Callable[[list[Tensor]], torch.optim.Optimizer]


SCALED = [*((case, None) for case in (*small, EVERY[-1])), *((case, 2.0) for case in small[::4])]


@pytest.mark.parametrize(("case", "factor"), SCALED, ids=str)
def test_what_geoopt_expects_of_every_manifold(case: Case, factor: float | None) -> None:
    """The properties of geoopt's own generic tests: shapes, projections, transports, broadcasting; `Scaled` too."""
    torch.manual_seed(0)
    manifold, x = case.manifold, case.point(10)
    if factor:
        manifold = geoopt.Scaled(case.manifold, factor).double()
    u, v = (0.1 * manifold.proju(x, torch.randn_like(x)) for _ in range(2))
    near = {"rtol": 1e-8, "atol": 1e-8}
    assert torch.equal(manifold.projx(x), x)
    for y, moved in (manifold.retr_transp(x, u, v), manifold.expmap_transp(x, u, v)):
        manifold.assert_check_point_on_manifold(y)
        manifold.assert_check_vector_on_tangent(y, moved)
    assert manifold.inner(x, u, v).shape == ()
    assert manifold.inner(x, u, v, keepdim=True).shape == (1,) * case.manifold.ndim
    torch.testing.assert_close(manifold.proju(torch.stack([x, x]), torch.stack([u, v])), torch.stack([u, v]), **near)
    torch.testing.assert_close(manifold.norm(x, u) ** 2, manifold.inner(x, u), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(manifold.proju(x, manifold.egrad2rgrad(x, u)), manifold.egrad2rgrad(x, u), **near)
    torch.testing.assert_close(manifold.component_inner(x, u, v).sum(), manifold.inner(x, u, v), **near)
    plain, scale = case.manifold, factor or 1.0  # Scaled keeps the metric of vectors, and what a unit vector covers
    torch.testing.assert_close(manifold.retr(x, u), plain.retr(x, u / scale), **near)
    torch.testing.assert_close(manifold.expmap(x, u), plain.expmap(x, u / scale), **near)
    torch.testing.assert_close(manifold.geodesic(x, u, 0.5), plain.geodesic(x, u / scale, 0.5), **near)
    if not case.name.startswith(("rotary", "recipe")):
        y = manifold.expmap(x, u)
        torch.testing.assert_close(manifold.dist(x, y), scale * plain.dist(x, y), **near)
        torch.testing.assert_close(manifold.logmap(x, y), u, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("case", small, ids=str)
def test_transport_is_horizontal_and_equivariant(case: Case) -> None:
    manifold, x = case.manifold, case.point(5)
    u, v = (0.1 * manifold.proju(x, case.vector(i)) for i in (6, 7))
    y, w = manifold.retr_transp(x, u, v)
    assert manifold.check_vector_on_tangent(y, w)
    torch.testing.assert_close(w, manifold.transp_follow_retr(x, u, v), rtol=1e-12, atol=1e-12)
    A = case.group(torch.Generator().manual_seed(8), 30.0)
    there = manifold.retr_transp(manifold.action(A, x), case.push(A, u), case.push(A, v))
    torch.testing.assert_close(there[0], manifold.action(A, y), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(there[1], case.push(A, w), rtol=1e-7, atol=1e-7)


SGD, Adam = partial(RiemannianSGD, lr=1e-2), partial(RiemannianAdam, lr=1e-2)
Wolfe = partial(RiemannianLineSearch, line_search_method="wolfe")
INVARIANT_RUNS: dict[str, Make] = {
    "SGD": SGD,
    "SGD(stabilize)": partial(SGD, stabilize=2),
    "Adam": Adam,
    "Adam(amsgrad, stabilize)": partial(Adam, amsgrad=True, stabilize=2),
    "LineSearch": RiemannianLineSearch,
    "LineSearch(armijo, Polak-Ribiere)": partial(RiemannianLineSearch, cg_method="pr"),
    "LineSearch(wolfe)": Wolfe,
    "LineSearch(wolfe, Fletcher-Reeves)": partial(Wolfe, cg_method="fr"),
}
"""What consults the point only through the metric."""
MOMENTUM: dict[str, Make] = {
    "SGD(momentum)": partial(SGD, momentum=0.9),
    "SGD(momentum, dampening)": partial(SGD, momentum=0.9, dampening=0.5),
    "SGD(nesterov)": partial(SGD, momentum=0.9, nesterov=True),
}
"""Its buffer starts as the Euclidean gradient, which is no tangent vector and moves as a covector."""
DECAY: dict[str, Make] = {"SGD(decay)": partial(SGD, weight_decay=0.1), "Adam(decay)": partial(Adam, weight_decay=0.1)}
"""It adds the point to the Euclidean gradient: the penalty tr G^T G + tr H^T H is not constant on the orbit."""


def run(case: Case, start: Tensor, make: Make, steps: int = 8, *, empty_buffer: bool = False) -> tuple[Tensor, Tensor]:
    """Fit the product to a fixed target from `start`: what the last point represents, and the losses.

    The target has the signs of the start: no geodesic of the diagonal quotient crosses zero.
    """
    target = 1.5 * case.product(case.point(1)) if case not in VECTORS else case.product(case.point(9))
    parameter = geoopt.ManifoldParameter(start.clone(), manifold=case.manifold)
    optimizer = make([parameter])
    if empty_buffer:
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    losses = []

    def closure() -> float:
        optimizer.zero_grad()
        loss = ((case.product(parameter) - target) ** 2).mean()
        loss.backward()
        return float(loss.detach())

    for _ in range(steps):
        losses.append(closure())
        optimizer.step(closure)
    return case.product(parameter.detach()), torch.tensor([*losses, closure()], dtype=torch.float64)


def apart(case: Case, make: Make, **options: bool) -> float:
    """How far ends of two runs from one orbit are from each other; runs that agree descend with equal losses."""
    x = case.point(1)
    A = 3 * case.group(torch.Generator().manual_seed(2), 10.0)
    (end, losses), (other, others) = (run(case, p, make, **options) for p in (x, case.manifold.action(A, x)))
    difference = float((end - other).norm() / end.norm())
    if difference < 1e-8:
        assert losses[-1] < losses[0]
        torch.testing.assert_close(others, losses, rtol=1e-6, atol=1e-10)
    return difference


FEW = [*(fixed_rank(4, 3, 2, metric) for metric in ("inv", "mix", 0.5)), *(diagonal(3, m) for m in ("inv", "mix"))]


@pytest.mark.parametrize("case", FEW, ids=str)
@pytest.mark.parametrize("name", INVARIANT_RUNS | MOMENTUM | DECAY)
def test_runs_from_one_orbit_are_one_run_if_nothing_in_them_is_euclidean(case: Case, name: str) -> None:
    make = (INVARIANT_RUNS | MOMENTUM | DECAY)[name]
    difference = apart(case, make)
    assert difference < 1e-8 if name in INVARIANT_RUNS else difference > 1e-3
    if name in MOMENTUM:  # the whole reason: a buffer that starts as a tangent vector, 0, keeps the run
        assert apart(case, make, empty_buffer=True) < 1e-8


@pytest.mark.parametrize("case", small, ids=str)
@pytest.mark.parametrize("make", [SGD, Adam], ids=["sgd", "adam"])
def test_runs_on_every_manifold(case: Case, make: Make) -> None:
    assert apart(case, make) < 1e-8


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"stabilize": 1}], ids=str)
@pytest.mark.parametrize("metric", ["inv", "mix", 0.5])
def test_steps_that_are_too_long_stay_finite_and_what_is_not_is_named(options: dict[str, float], metric: float) -> None:
    case = fixed_rank(6, 5, 2, metric)
    make = partial(RiemannianSGD, lr=10.0, **options)
    assert bool(run(case, case.point(0), make, steps=30)[0].isfinite().all())
    parameter = geoopt.ManifoldParameter(case.point(0), manifold=case.manifold)
    parameter.grad = torch.full_like(parameter, torch.nan)
    with pytest.raises(ValueError, match=r"smaller learning rate \(lr\)"):
        make([parameter]).step()


# Equality


one = torch.ones(())
MAKERS: list[Callable[[], quotient.QuotientManifold]] = [
    *(partial(FixedRankQuotient, *sizes) for sizes in ((4, 3), (3, 4), (4, 3, "mix"), (4, 3, 0.5), (4, 3, "inv", 0.1))),
    *(partial(RotaryQuotient, *sizes) for sizes in ((4, 3), (4, 3, "inv", 0.1))),
    *(DiagonalQuotient, partial(DiagonalQuotient, "mix"), ScaleQuotient, TranslationQuotient),
    *(partial(Recipe, max, min, identity=one, shape=(k,), balance=b) for k, b in ((2, None), (3, None), (2, min))),
]


def test_manifolds_are_equal_if_their_parameters_are() -> None:
    manifolds = [make() for make in MAKERS]
    assert len(set(manifolds)) == len(MAKERS)
    for i, a in enumerate(manifolds):
        assert [a == b for b in manifolds] == [i == j for j in range(len(MAKERS))]
        assert copy.deepcopy(a) == a == MAKERS[i]()
        assert pickle.loads(pickle.dumps(a)) == a
        assert hash(a) == hash(MAKERS[i]())
        assert repr(copy.deepcopy(a)) == repr(a)
    assert FixedRankQuotient(4, 3, "inv") == FixedRankQuotient(4, 3, 0) != "something else"
    product = geoopt.ProductManifold((FixedRankQuotient(4, 3), (7, 2)), (FixedRankQuotient(4, 3), (7, 1)))
    assert product.random(21, dtype=torch.float64).shape == (21,)


# What a manifold remembers: never anything stale, nothing that shares memory


def in_place(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.mul_(1.1)


def by_data(x: Tensor) -> Tensor:
    x.data[..., 0] *= 1.1
    return x


def by_numpy(x: Tensor) -> Tensor:
    x.detach().numpy()[...] *= 1.1
    return x


CHANGES: list[Callable[[Tensor], Tensor]] = [
    *(in_place, by_data, by_numpy),
    *(lambda x: 1.1 * x.detach(), lambda x: x.detach().clone(), lambda x: x.detach().float()),
    *(lambda x: x.detach().double(), lambda x: torch.nn.Parameter(x.detach().clone()), lambda x: x),
]


@every_case
@settings(max_examples=5)
@given(data=st.data())
def test_nothing_stale_is_used(case: Case, data: st.DataObject) -> None:
    """One manifold through all changes of a point, against a new copy for every call."""
    manifold = copy.deepcopy(case.manifold)
    x, u = case.point(1), 0.01 * case.vector(2)
    for _ in range(6):
        x = data.draw(st.sampled_from(CHANGES))(x)
        name = data.draw(st.sampled_from(("proju", "egrad2rgrad", "retr", "norm")))
        with torch.set_grad_enabled(data.draw(st.booleans())):
            found = getattr(manifold, name)(x, u.to(x.dtype))
            expected = getattr(copy.deepcopy(case.manifold), name)(x, u.to(x.dtype))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert found.requires_grad == expected.requires_grad
        found.detach().mul_(torch.nan)  # what was returned is the caller's


@every_case
def test_results_with_a_memory_are_differentiable_as_without(case: Case) -> None:
    manifold, x, u = case.manifold, case.point(1).requires_grad_(), 0.01 * case.vector(2)
    with torch.no_grad():
        manifold.retr(x, u)
    gradients = [torch.autograd.grad(manifold.inner(x, u).sum() + 0 * x.sum(), x)[0] for _ in range(2)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)
    v = u.clone().requires_grad_()
    with torch.inference_mode():
        manifold.retr(x.detach().clone(), u)
    torch.autograd.grad(manifold.retr(x.detach(), v).sum(), v)
    torch.func.grad(lambda p: manifold.inner(p, u))(x.detach())
    torch.func.jvp(lambda p: manifold.inner(p, u), (x.detach(),), (u,))


@pytest.mark.parametrize("make", [SGD, partial(SGD, momentum=0.9), Adam], ids=["sgd", "momentum", "adam"])
def test_a_step_factors_one_new_point(make: Make) -> None:
    case = fixed_rank(5, 4, 2, "inv")
    with patch.object(fixed_rank_space, "pair_frame", wraps=fixed_rank_space.pair_frame) as factored:
        end, _ = run(case, case.point(1), make, steps=5)
        assert factored.call_count <= 6
        with patch.object(quotient, "lasts", lambda x: False):
            plain, _ = run(case, case.point(1), make, steps=5)
    assert factored.call_count >= 6 + 2 * 5 - 1
    assert torch.equal(end, plain)
