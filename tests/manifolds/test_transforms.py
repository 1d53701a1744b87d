"""Under `torch.func.vmap` methods give what a loop gives; inside autocast, to the last digit what they give outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quotient_manifolds import linalg
from quotient_manifolds.manifolds import GEODESICS, HorizontalSpace, QuotientManifold
from tests.cases import EVERY, Case
from tests.manifolds.test_scales import AT_POINTS

every_case = pytest.mark.parametrize("case", EVERY, ids=str)

METHODS: dict[str, Callable[[QuotientManifold, Tensor, Tensor], Tensor]] = {
    "inner": lambda m, x, u: m.inner(x, u),
    "norm": lambda m, x, u: m.norm(x, u, keepdim=True),
    "proju": lambda m, x, u: m.proju(x, u),
    "egrad2rgrad": lambda m, x, u: m.egrad2rgrad(x, u),
    "retr": lambda m, x, u: m.retr(x, u),
    "retr_transp": lambda m, x, u: m.retr_transp(x, u, u)[1],
    "geodesic": lambda m, x, u: m.geodesic(x, u, 0.5, "first"),
    "projx": lambda m, x, u: m.projx(x),
}


def batch(case: Case) -> tuple[Tensor, Tensor]:
    return case.point(1, 3), 0.01 * case.vector(2, 3)


@every_case
@pytest.mark.parametrize("name", METHODS)
def test_vmap_gives_what_a_loop_gives(case: Case, name: str) -> None:
    (x, u), method = batch(case), METHODS[name]
    near = {"rtol": 1e-8, "atol": 1e-10}
    expected = torch.stack([method(case.manifold, *pair) for pair in zip(x, u, strict=True)])
    mapped = torch.func.vmap(lambda x, u: method(case.manifold, x, u))(x, u)
    torch.testing.assert_close(mapped, expected, **near)
    with torch.no_grad():
        mapped = torch.func.vmap(lambda u: method(case.manifold, x[0], u))(u)
    torch.testing.assert_close(mapped, torch.stack([method(case.manifold, x[0], v) for v in u]), **near)


@every_case
def test_gradients_of_each_of_many(case: Case) -> None:
    """vmap over grad, the usual reason to call it."""

    def f(x: Tensor, u: Tensor) -> Tensor:
        return case.manifold.inner(x, u) + case.manifold.retr(x, u).square().sum()

    x, u = batch(case)
    mapped = torch.func.vmap(torch.func.grad(f, argnums=(0, 1)))(x, u)
    looped = zip(*(torch.func.grad(f, argnums=(0, 1))(*pair) for pair in zip(x, u, strict=True)), strict=True)
    for a, b in zip(mapped, looped, strict=True):
        torch.testing.assert_close(a, torch.stack(b), rtol=1e-6, atol=1e-8)


def same_inside_autocast(compute: Callable[[], Any]) -> None:
    """Compare what a call gives outside and inside, or its error: drawn from the same seeds."""

    def leaves() -> list[Any]:
        torch.manual_seed(0)
        try:
            found = compute()
        except (ValueError, NotImplementedError) as error:
            return [type(error), str(error)]
        return list(found) if isinstance(found, tuple) else [found]

    outside = leaves()
    with torch.autocast("cpu", torch.bfloat16):
        inside = leaves()
    for here, there in zip(outside, inside, strict=True):
        if isinstance(here, Tensor):
            torch.testing.assert_close(there, here, rtol=0, atol=0)
        else:
            assert there == here


@every_case
def test_autocast_is_off_in_every_method_of_a_manifold(case: Case) -> None:
    x, u = (each.float() for each in batch(case))
    y = case.manifold.retr(x, u)
    for method, _ in AT_POINTS.values():
        same_inside_autocast(lambda method=method: method(case.manifold, x, y, u, u))
    same_inside_autocast(lambda: case.manifold.egrad2rgrad(x, u))
    same_inside_autocast(lambda: case.manifold.random(*x.shape))


def linearised(space: HorizontalSpace, z: Tensor, order: str) -> tuple[Tensor, Tensor]:
    """The point that z moves to, and the gradient pulled back from there; rows are for points that have some."""
    y, gradient = torch.empty_like(z), torch.empty_like(z)
    if z.ndim > 1:
        space.linearised(order)(z, (y,))((torch.ones_like(y),), gradient)
    return (y, gradient) if z.ndim > 1 else (z, z)


ON_SPACES: dict[str, Callable[[HorizontalSpace, Tensor, Tensor], Any]] = {
    "coordinates": lambda space, u, z: space.coordinates(u),
    "vector": lambda space, u, z: space.vector(z),
    "covector": lambda space, u, z: space.covector(u),
    "project": lambda space, u, z: space.project(z),
    "from_balanced": lambda space, u, z: space.from_balanced(z),
    "relative_speed": lambda space, u, z: space.relative_speed(z),
    **{f"follow {order}": lambda space, u, z, order=order: space.follow(z, order) for order in GEODESICS},
    **{f"geodesic {order}": lambda space, u, z, order=order: space.geodesic(u, 0.5, order) for order in GEODESICS},
    **{f"linearised {order}": lambda space, u, z, order=order: linearised(space, z, order) for order in GEODESICS},
    "inner": lambda space, u, z: space.inner(u, z),
    "norm": lambda space, u, z: space.norm(u),
    "proju": lambda space, u, z: space.proju(u),
    "gradient": lambda space, u, z: space.gradient(u),
    "hessian": lambda space, u, z: space.hessian(u, z, u),
    "hessian_product": lambda space, u, z: space.hessian_product(lambda x: x.sin().sum(), u),
    "sample": lambda space, u, z: space.sample(),
}
"""What to do with a space, a vector u and coordinates z."""


@every_case
def test_autocast_is_off_in_every_method_of_a_space(case: Case) -> None:
    assert {name.split()[0] for name in ON_SPACES} == {name for name in vars(HorizontalSpace) if name[0] != "_"}
    u, z = ((0.1 * case.vector(seed)).float() for seed in (2, 3))
    space = case.manifold.at(case.point(1).float())
    for compute in ON_SPACES.values():
        same_inside_autocast(lambda compute=compute: compute(space, u, z))


@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu", "hpu", "privateuseone"])
def test_autocast_of_every_device_is_off_inside_and_on_again_after_an_error(device: str) -> None:
    @linalg.full_precision
    def enabled(fails: bool) -> bool:
        if fails:
            raise ValueError("fails")
        return torch.is_autocast_enabled(device)

    before = torch.is_autocast_enabled(device)
    torch.set_autocast_enabled(device, True)
    try:
        assert not enabled(False)
        with pytest.raises(ValueError, match="fails"):
            enabled(True)
        assert torch.is_autocast_enabled(device)
    finally:
        torch.set_autocast_enabled(device, before)
