"""Autocast is for networks: inside it, manifolds and the optimizers compute to the last digit what they do outside."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import geoopt
import pytest
import torch
from torch import Tensor

import quotient_manifolds as qm
from quotient_manifolds import linalg
from quotient_manifolds.manifolds import GEODESICS, FixedRankQuotient, HorizontalSpace
from tests.cases import Case
from tests.manifolds.test_arguments import EVERY, call, good, methods
from tests.optim.cases import made

every_case = pytest.mark.parametrize("case", EVERY, ids=str)


def both(compute: Callable[[], Any]) -> tuple[list[Any], list[Any]]:
    """What a call gives outside autocast and inside, or the first words of its error: drawn from the same seeds."""

    def leaves() -> list[Any]:
        torch.manual_seed(0)
        try:
            found = compute()
        except (ValueError, NotImplementedError) as error:
            return [type(error), str(error)]
        return list(found) if isinstance(found, tuple) else [found]

    outside = leaves()
    with torch.autocast("cpu", torch.bfloat16):
        return outside, leaves()


def assert_same(outside: list[Any], inside: list[Any]) -> None:
    for here, there in zip(outside, inside, strict=True):
        assert type(here) is type(there), (here, there)
        if isinstance(here, Tensor):
            torch.testing.assert_close(there, here, rtol=0, atol=0)
        elif not isinstance(here, HorizontalSpace):
            assert there == here


def single(x: Tensor) -> Tensor:
    """Autocast leaves double precision alone."""
    return x.to(torch.complex64 if x.is_complex() else torch.float32)


@every_case
def test_every_method_of_a_manifold(case: Case) -> None:
    manifold, shape = case.manifold, (3, *case.shape)
    for name in methods(manifold):
        arguments = {key: single(value) for key, value in good(case, name).items()}
        assert_same(*both(lambda name=name, arguments=arguments: call(case, name, arguments)))
    for drawn in (lambda: manifold.random(*shape), lambda: manifold.origin(*shape)):
        assert_same(*both(drawn))


def loss(x: Tensor) -> Tensor:
    return x.sin().sum()


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
    "retract": lambda space, u, z: space.retract(u),
    "inner": lambda space, u, z: space.inner(u, z),
    "norm": lambda space, u, z: space.norm(u),
    "proju": lambda space, u, z: space.proju(u),
    "gradient": lambda space, u, z: space.gradient(u),
    "hessian": lambda space, u, z: space.hessian(u, z, u),
    "hessian_product": lambda space, u, z: space.hessian_product(loss, u),
    "hessian_trace": lambda space, u, z: space.hessian_trace(loss, samples=2),
    "sample": lambda space, u, z: space.sample(),
}
"""What to do with a space, a vector u and coordinates z; a test below tells what is missing."""


def linearised(space: HorizontalSpace, z: Tensor, order: str) -> tuple[Tensor, Tensor]:
    """The point that z moves to, and the gradient pulled back from there."""
    y, gradient = torch.empty_like(z), torch.empty_like(z)
    rows = (y,) if y.ndim > 1 else (y[None],)
    space.linearised(order)(z, rows)((torch.ones_like(y),), gradient)
    return y, gradient


def test_every_method_of_a_space_is_looked_at() -> None:
    public = {name for name in vars(HorizontalSpace) if not name.startswith("_")} - {"full_rank"}
    assert {name.split()[0] for name in ON_SPACES} == public


@every_case
def test_every_method_of_a_space(case: Case) -> None:
    u, z = (single(0.1 * case.vector(seed)) for seed in (2, 3))
    space = case.manifold.at(single(case.point(1)))
    for name, compute in ON_SPACES.items():
        if name.startswith("linearised") and z.ndim == 1:
            continue  # rows are for points that have some
        assert_same(*both(lambda compute=compute: compute(space, u, z)))


@pytest.mark.parametrize("optimizer", [geoopt.optim.RiemannianSGD, geoopt.optim.RiemannianAdam])
def test_steps_of_geoopt(optimizer: type) -> None:
    def stepped() -> Tensor:
        manifold = FixedRankQuotient(5, 4, "mix")
        parameter = geoopt.ManifoldParameter(manifold.random(3, 9, 2), manifold=manifold)
        steps = optimizer([parameter], lr=0.1)
        for _ in range(2):
            parameter.grad = torch.randn_like(parameter)
            steps.step()
        return parameter.detach()

    assert_same(*both(stepped))


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda model, found: qm.QuotientSGD(model.named_parameters(), found, lr=0.1, momentum=0.9, max_norm=0.1),
    "Adam": lambda model, found: qm.QuotientAdam(model.named_parameters(), found, lr=0.1, max_norm=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("case", ["low rank", "encoder", "Llama"])
def test_steps_of_optimizers(name: str, case: str) -> None:
    start, _, _, found = made(case, torch.float32)

    def stepped() -> tuple[Tensor, ...]:
        model = copy.deepcopy(start)
        optimizer = OPTIMIZERS[name](model, found)
        for _ in range(2):
            for p in model.parameters():
                p.grad = torch.randn_like(p) if p.requires_grad else None
            optimizer.step()
        return tuple(p.detach() for p in model.parameters())

    assert_same(*both(stepped))


@pytest.mark.parametrize("geometry", ["inv", "mix"])
def test_the_ascent_of_sam(geometry: str) -> None:
    start, _, _, found = made("encoder", torch.float32)

    def perturbed() -> tuple[Tensor, ...]:
        model = copy.deepcopy(start)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        with qm.SAM(plain, model, geometry=qm.Quotient(geometry, symmetries=found), radius=0.1).perturbed():
            return tuple(p.detach().clone() for p in model.parameters())

    assert_same(*both(perturbed))


def test_a_closure_stays_in_the_autocast_of_its_caller() -> None:
    model, inputs, targets, found = made("low rank", torch.float32)
    seen = []

    def closure() -> Tensor:
        seen.append(model(inputs).dtype)
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        return loss

    with torch.autocast("cpu", torch.bfloat16):
        OPTIMIZERS["Adam"](model, found).step(closure)
    assert seen == [torch.bfloat16]


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
