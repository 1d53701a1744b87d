"""A derivative is right or refused: every method of every manifold, in both modes, twice, and mapped.

The oracle is a finite difference, which asks for values alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import geoopt
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jacfwd, jvp, vmap

from quotient_manifolds.manifolds import (
    FixedRankQuotient,
    GeodesicError,
    Recipe,
    RotaryQuotient,
    TranslationQuotient,
)
from tests.cases import EVERY, Case, fixed_rank
from tests.refusals import one_sentence

Function = Callable[..., Tensor]
NO_DERIVATIVE = "logmap must not be differentiated"

pairs = pytest.mark.parametrize("case", [fixed_rank(4, 3, 2, metric) for metric in ("inv", "mix", 0.5)], ids=str)


def inputs(case: Case, seed: int) -> tuple[Tensor, ...]:
    """A point, a representative of one near to it, two vectors, and a group element."""
    x, u, v = case.point(seed), 0.05 * case.vector(seed + 1), case.vector(seed + 2)
    A, space = case.group(torch.Generator().manual_seed(seed), 2.0), case.manifold.at(x)
    if not isinstance(case.manifold, (Recipe, TranslationQuotient)):
        u = 0.1 * u / float(space.relative_speed(space.project(space.coordinates(u))))
    return x, case.manifold.action(A, case.manifold.retr(x, u)), u, v, A


@dataclass(frozen=True)
class Method:
    """A method as a function of tensors only, of those of `inputs` that it takes."""

    call: Callable[..., Tensor]
    takes: str

    def of(self, case: Case, seed: int = 1) -> tuple[Function, tuple[Tensor, ...]]:
        given = dict(zip("xyuvA", inputs(case, seed), strict=True))
        return (lambda *tensors: self.call(case.manifold, *tensors)), tuple(given[name] for name in self.takes)


METHODS = {
    "action": Method(lambda m, A, x: m.action(A, x), "Ax"),
    "balance": Method(lambda m, x: m.balance(x), "x"),
    "projx": Method(lambda m, x: m.projx(x), "x"),
    "inner": Method(lambda m, x, u, v: m.inner(x, u, v), "xuv"),
    "norm": Method(lambda m, x, u: m.norm(x, u), "xu"),
    "component_inner": Method(lambda m, x, u, v: m.component_inner(x, u, v), "xuv"),
    "proju": Method(lambda m, x, u: m.proju(x, u), "xu"),
    "egrad2rgrad": Method(lambda m, x, v: m.egrad2rgrad(x, v), "xv"),
    "retr": Method(lambda m, x, u: m.retr(x, u), "xu"),
    "retr_transp": Method(lambda m, x, u, v: torch.stack(m.retr_transp(x, u, v)), "xuv"),
    "transp": Method(lambda m, x, y, v: m.transp(x, y, v), "xyv"),
    "expmap": Method(lambda m, x, u: m.expmap(x, u), "xu"),
    **{
        f"geodesic {order}": Method(lambda m, x, u, order=order: m.geodesic(x, u, 0.5, order), "xu")
        for order in ("first", "second")
    },
    "logmap": Method(lambda m, x, y: m.logmap(x, y), "xy"),
    "dist": Method(lambda m, x, y: m.dist(x, y), "xy"),
    "dist2": Method(lambda m, x, y: m.dist2(x, y), "xy"),
    "hessian": Method(lambda m, x, u, v: m.at(x).hessian(v, u, u), "xuv"),
    "hessian_product": Method(lambda m, x, u: m.at(x).hessian_product(lambda p: p.sin().sum(), u), "xu"),
    "relative_speed": Method(lambda m, x, u: m.at(x).relative_speed(m.at(x).coordinates(u)), "xu"),
}


def by_steps(case: Case) -> bool:
    """Whether exact geodesics are computed by a Runge-Kutta method, or logarithms by such ones: slow."""
    manifold = case.manifold
    return isinstance(manifold, Recipe) or (
        isinstance(manifold, FixedRankQuotient) and case.shape[1] > 1 and bool(manifold.t or manifold.eps)
    )


def kind(case: Case) -> tuple[object, ...]:
    """What makes the code of another case another: of one kind, one size is enough."""
    return type(case.manifold), case.manifold.t, getattr(case.manifold, "eps", 0.0), case.shape[-1] > 1


KINDS = {kind(case): case for case in reversed(EVERY)}.values()
FEW = ("fixed-rank-4-3-2-mix", "fixed-rank-3-4-2-0.5", "fixed-rank-4-3-2-inv-eps0.3", "recipe")
every_method = pytest.mark.parametrize(
    ("case", "name"),
    [
        (case, name)
        for case in KINDS
        for name in METHODS
        if case.name in FEW or not by_steps(case) or name not in ("expmap", "dist", "dist2", "logmap")
    ],
    ids=str,
)


def refusal(case: Case, name: str, twice: bool = False) -> str | None:
    """The sentence where a derivative is refused: nothing may be refused that is not named here."""
    shooting = isinstance(case.manifold, FixedRankQuotient)
    if name in ("dist", "dist2", "logmap") and isinstance(case.manifold, (RotaryQuotient, Recipe)):
        return "has no logarithm"
    if name in ("dist", "dist2", "logmap") and shooting and case.manifold.eps:
        return "eps must be 0"
    if shooting and (name == "logmap" or (twice and name in ("dist", "dist2"))):
        return NO_DERIVATIVE
    if isinstance(case.manifold, Recipe) and name == "relative_speed":
        return "compare geodesics directly"
    return None


def right_or_refused(check: Callable[[], object], refused: str | None) -> None:
    if refused is None:
        check()
        return
    with pytest.raises((NotImplementedError, ValueError), match=refused) as caught:
        check()
    assert one_sentence(str(caught.value))


def directions(tensors: tuple[Tensor, ...], seed: int) -> tuple[Tensor, ...]:
    """Changes in proportion: entries may be of any size."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(x.shape, generator=generator, dtype=x.dtype) * x.abs() for x in tensors)


def weights(like: Tensor, seed: int) -> Tensor:
    return directions((torch.ones_like(like),), seed)[0]


def moved(tensors: tuple[Tensor, ...], way: tuple[Tensor, ...], step: float) -> tuple[Tensor, ...]:
    return tuple(x + step * v for x, v in zip(tensors, way, strict=True))


def difference(f: Function, tensors: tuple[Tensor, ...], way: tuple[Tensor, ...], step: float = 1e-3) -> Tensor:
    """The derivative along `way` by central differences of fourth order."""
    near, far = (f(*moved(tensors, way, k * step)) - f(*moved(tensors, way, -k * step)) for k in (1, 2))
    return (8 * near - far) / (12 * step)


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6 * (1 + float(expected.detach().abs().max())))


def scalar(f: Function, weight: Tensor) -> Function:
    return lambda *tensors: (f(*tensors) * weight).sum()


def slopes(f: Function, tensors: tuple[Tensor, ...], *, graph: bool = False) -> tuple[Tensor, ...]:
    leaves = tensors if graph else tuple(x.detach().requires_grad_() for x in tensors)
    value = f(*leaves)
    if not value.requires_grad:  # constant
        return tuple(torch.zeros_like(x) for x in leaves)
    return torch.autograd.grad(value, leaves, create_graph=graph, materialize_grads=True)


def along(parts: tuple[Tensor, ...], way: tuple[Tensor, ...]) -> Tensor:
    return sum(((a * b).real.sum() for a, b in zip(parts, way, strict=True)), torch.zeros((), dtype=torch.float64))


def real(f: Function, tensors: tuple[Tensor, ...]) -> tuple[Function, tuple[Tensor, ...]]:
    """Complex group elements as pairs of real numbers."""
    kinds = [x.is_complex() for x in tensors]

    def back(*given: Tensor) -> Tensor:
        return f(*(torch.view_as_complex(x) if kind else x for x, kind in zip(given, kinds, strict=True)))

    return back, tuple(torch.view_as_real(x) if x.is_complex() else x for x in tensors)


@every_method
def test_first_derivatives_in_both_modes(case: Case, name: str) -> None:
    def check() -> None:
        f, tensors = real(*METHODS[name].of(case))
        way = directions(tensors, 2)
        expected = difference(f, tensors, way)
        weight = weights(expected, 3)
        same(jvp(f, tensors, way)[1], expected)
        if not isinstance(case.manifold, Recipe):  # by torch.func.jvp, which torch refuses to nest in this
            with forward_ad.dual_level():
                image = forward_ad.unpack_dual(f(*map(forward_ad.make_dual, tensors, way)))
                same(image.primal, f(*tensors))
                same(torch.zeros_like(expected) if image.tangent is None else image.tangent, expected)
        same(along(slopes(scalar(f, weight), tensors), way), (weight * expected).sum())
        for i in range(len(tensors)):  # one alone, the others constant
            one = grad(scalar(f, weight), argnums=i)(*tensors)
            only = tuple(v if i == j else 0 * v for j, v in enumerate(way))
            same((one * way[i]).sum(), (weight * difference(f, tensors, only)).sum())

    right_or_refused(check, refusal(case, name))


@every_method
def test_second_derivatives(case: Case, name: str) -> None:
    def check() -> None:
        f, tensors = real(*METHODS[name].of(case))
        way, other = directions(tensors, 4), directions(tensors, 5)
        g = scalar(f, weights(f(*tensors), 6))
        expected = difference(lambda *p: along(slopes(g, p), other), tensors, way)
        argnums = tuple(range(len(tensors)))
        same(jvp(lambda *p: along(grad(g, argnums)(*p), other), tensors, way)[1], expected)
        same(jvp(lambda *p: jvp(g, p, other)[1], tensors, way)[1], expected)
        leaves = tuple(x.requires_grad_() for x in tensors)
        same(along(slopes(lambda *p: along(slopes(g, p, graph=True), other), leaves, graph=True), way), expected)

    right_or_refused(check, refusal(case, name, twice=True))


@every_method
def test_values_and_derivatives_of_each_of_many(case: Case, name: str) -> None:
    """vmap gives what a loop gives, with a derivative inside and outside."""

    def check(derivatives: bool) -> None:
        f, tensors = real(*METHODS[name].of(case))
        others = tuple(x * (1 + 0.01 * v) for x, v in zip(tensors, directions(tensors, 9), strict=True))
        many = tuple(torch.stack(each) for each in zip(tensors, others, strict=True))
        rows = list(zip(*many, strict=True))
        expected = torch.stack([f(*row) for row in rows])
        same(vmap(f)(*many), expected)
        last = f(rows[0][0], *rows[0][1:-1], rows[1][-1]) if len(many) > 1 else f(rows[1][0])
        fixed = [None] * (len(many) - 1) + [0]
        same(vmap(f, in_dims=tuple(fixed))(*rows[0][:-1], many[-1])[1], last)  # some of them are shared
        if not derivatives:
            return
        weight, way = weights(expected[0], 7), directions(tensors, 8)
        one, all_of_them = scalar(f, weight), scalar(vmap(f), weight)
        looped = torch.stack([grad(one)(*row) for row in rows])
        same(vmap(grad(one))(*many), looped)
        same(grad(all_of_them)(*many), looped)
        same(slopes(all_of_them, many)[0], looped)
        ways = tuple(torch.stack([v, v]) for v in way)
        tangents = torch.stack([jvp(f, row, way)[1] for row in rows])
        same(jvp(vmap(f), many, ways)[1], tangents)
        same(vmap(lambda *row: jvp(f, row, way)[1])(*many), tangents)

    of_values = refusal(case, name)
    right_or_refused(lambda: check(False), None if of_values == NO_DERIVATIVE else of_values)
    right_or_refused(lambda: check(True), of_values)


# Distances


@pairs
def test_the_gradient_of_the_distance_is_that_of_the_logarithm(case: Case) -> None:
    """d dist(x, y) = -(<log_x y, dx>_x + <log_y x, dy>_y) / dist."""
    x, y, u, v, _ = inputs(case, 1)
    manifold = case.manifold
    distance = manifold.dist(x, y)
    for f, point, other, way in ((manifold.dist, x, y, u), (lambda y, x: manifold.dist(x, y), y, x, v)):
        expected = -manifold.inner(point, manifold.logmap(point, other), way) / distance
        found = (grad(f)(point, other) * way).sum()
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


@pairs
def test_autocast_does_not_change_the_gradient_of_the_distance(case: Case) -> None:
    x, y = (p.float() for p in inputs(case, 1)[:2])
    (expected,) = slopes(lambda p: case.manifold.dist(p, y), (x,))
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        case.manifold.dist(leaf, y).backward()
    assert torch.equal(leaf.grad, expected)


@pytest.mark.parametrize("case", [case for case in EVERY if refusal(case, "dist", twice=True) is None], ids=str)
def test_the_hessian_of_the_squared_distance_at_0_is_twice_the_metric(case: Case) -> None:
    x, way, other = case.point(1), case.vector(2), case.vector(3)
    found = jvp(lambda p: (grad(case.manifold.dist2)(p, x) * other).sum(), (x,), (way,))[1]
    torch.testing.assert_close(found, 2 * case.manifold.inner(x, case.manifold.proju(x, way), other))


def test_a_mapped_geodesic_that_ends_early_is_refused() -> None:
    manifold, x = FixedRankQuotient(4, 3, "mix"), fixed_rank(4, 3, 2, "mix").point(1)
    with pytest.raises(GeodesicError, match=r"leaves the manifold at t = 0\.166667"):
        vmap(lambda u: manifold.expmap(x, u))(torch.stack([0.1 * x, -3 * x]))


@pairs
def test_descent_on_the_squared_distance_reaches_the_point(case: Case) -> None:
    x, y, *_ = inputs(case, 1)
    parameter = geoopt.ManifoldParameter(x.clone(), manifold=case.manifold)
    optimizer = geoopt.optim.RiemannianSGD([parameter], lr=0.1)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = case.manifold.dist(parameter, y) ** 2
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    # a step of lr 0.1 goes a fifth of the way: what is left is 0.8^2 of the square
    torch.testing.assert_close(
        torch.tensor(losses[1:]) / torch.tensor(losses[:-1]), torch.full((9,), 0.64), rtol=0.02, atol=0
    )


@pytest.mark.parametrize("case", [case for case in EVERY if refusal(case, "dist") is None], ids=str)
def test_distances_of_equal_points_have_gradient_0(case: Case) -> None:
    x = case.point(1)
    for f in (case.manifold.dist, case.manifold.dist2):
        for slope in slopes(f, (x, x.clone())):
            torch.testing.assert_close(slope, torch.zeros_like(x), rtol=0, atol=1e-6)
        tangent = jvp(f, (x, x.clone()), directions((x, x), 1))[1]
        assert float(tangent.abs()) <= 1e-6


@pairs
def test_a_logarithm_by_shooting_has_a_value_and_no_derivative(case: Case) -> None:
    x, y, u, _, _ = inputs(case, 1)
    leaf, f = x.clone().requires_grad_(), case.manifold.logmap
    found = f(leaf, y)
    assert torch.equal(found.detach(), f(x, y))
    calls = [
        lambda: found.sum().backward(),
        lambda: grad(lambda p: f(p, y).sum())(x),
        lambda: jvp(lambda p: f(p, y), (x,), (u,)),
        lambda: jvp(lambda p: f(x, p), (y,), (u,)),
    ]
    for call in calls:
        with pytest.raises(NotImplementedError, match=NO_DERIVATIVE) as caught:
            call()
        assert one_sentence(str(caught.value))


# Geodesics in forward mode


@pytest.mark.parametrize("case", [fixed_rank(4, 3, 2, metric) for metric in ("inv", "mix", 0.5)], ids=str)
def test_forward_mode_through_exact_geodesics(case: Case) -> None:
    x, _, u, v, _ = inputs(case, 1)

    def loss(u: Tensor) -> Tensor:
        return case.manifold.expmap(x, u).sin().sum()

    (slope,) = slopes(loss, (u,))
    torch.testing.assert_close(jacfwd(loss)(u), slope, rtol=1e-7, atol=1e-9)
    hessian = torch.func.hessian(loss)(u)
    expected = difference(lambda p: slopes(loss, (p,))[0], (u,), (v,))
    torch.testing.assert_close(torch.einsum("ijkl,kl->ij", hessian, v), expected, rtol=1e-5, atol=1e-7)
