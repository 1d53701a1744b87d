"""The group, parametrized: every element leaves the function alone, is well conditioned, and is differentiable."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quotient_manifolds.orbit import Group
from quotient_manifolds.orbit.group import names_of
from quotient_manifolds.symmetries import Params
from tests.nets.net import difference
from tests.nets.small import NETS, found_in
from tests.symmetries.test_nets import CHANGE

BOUND = 50.0


def drawn(group: Group, size: float = 1.0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [size * torch.randn_like(each) for each in group.zeros(dtype)]


def along(moved: Params) -> Tensor:
    """A smooth number of all parameters."""
    generator = torch.Generator().manual_seed(1)
    rows = (torch.randn(w.shape, generator=generator, dtype=torch.float64) for w in moved.values())
    return torch.stack([(w * (row + w)).sum() for row, w in zip(rows, moved.values(), strict=True)]).sum()


@pytest.mark.parametrize(
    ("name", "fold"), [*((name, True) for name in NETS), *((name, False) for name in [*NETS][::3])]
)
def test_an_element_keeps_the_function_and_its_bound_and_is_differentiable(name: str, fold: bool) -> None:
    model, x, symmetries = found_in(name, True)
    own = {key: w.detach() for key, w in model.named_parameters()}
    group = Group(symmetries, own, condition=BOUND, fold=fold)
    if not fold:
        for key, w in group.element(group.zeros()).apply(own).items():
            torch.testing.assert_close(w, own[key], rtol=1e-12, atol=1e-12, msg=key)
    numbers, other = drawn(group), drawn(group)
    element = group.element(numbers)
    assert difference(model, x, element.apply(own)) < CHANGE
    started = [symmetry for symmetry, _ in group.start.steps]
    rest = (step for step in element.steps if step[0] not in started)
    assert all(symmetry.condition(value.detach()) < BOUND * (1 + 1e-9) for symmetry, value in rest)

    def value(t: Tensor) -> Tensor:
        moved = group.element([s + t * d for s, d in zip(numbers, other, strict=True)]).apply(own, torch.float64)
        return along(moved)

    if group.symmetries:
        t = torch.zeros((), dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(value(t), t)
        ahead, back = value(torch.tensor(1e-5).double()), value(torch.tensor(-1e-5).double())
        torch.testing.assert_close(slope, (ahead - back) / 2e-5, rtol=1e-6, atol=1e-6 * float(ahead.abs()))


@pytest.mark.parametrize("name", ["encoder", "lora", "bilinear", "ln res", "gain lin", "squared relu"])
def test_at_the_identity_numbers_move_along_every_generator(name: str) -> None:
    """As many directions as each symmetry has dimensions: no chart is singular at 0."""
    model, _, symmetries = found_in(name, True)
    own = {key: w.detach() for key, w in model.named_parameters()}
    group = Group(symmetries, own)
    zeros = group.zeros()
    for index, symmetry in enumerate(group.symmetries):

        def moved(s: Tensor, at: int = index) -> Tensor:
            found = group.element([s if k == at else zero for k, zero in enumerate(zeros)]).apply(own, torch.float64)
            return torch.cat([found[key].flatten() for key in names_of([group.symmetries[at]])])

        jacobian = torch.autograd.functional.jacobian(moved, zeros[index].detach()).flatten(1)
        jacobian = jacobian.reshape(len(jacobian), -1)
        assert torch.linalg.matrix_rank(jacobian, rtol=1e-9) >= symmetry.dimension(own), symmetry.names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_in_low_precision_are_rounded_once(dtype: torch.dtype) -> None:
    model, _, symmetries = found_in("encoder", True)
    own = {key: w.detach().to(dtype) for key, w in model.named_parameters()}
    group = Group(symmetries, own)
    element = group.element(drawn(group, dtype=torch.float32))
    moved, wide = element.apply(own), element.apply(own, torch.float64)
    assert all(w.dtype == dtype for w in moved.values())
    for key in element.names:
        torch.testing.assert_close(moved[key].double(), wide[key], rtol=float(torch.finfo(dtype).eps), atol=1e-30)


@pytest.mark.parametrize("condition", [1.0, float("inf"), "1e3"])
def test_a_bound_that_bounds_nothing_is_refused(condition: float) -> None:
    _, _, symmetries = found_in("encoder", True)
    with pytest.raises(ValueError, match="bound on the condition number must be a number above 1"):
        Group(symmetries, {}, condition=condition)
