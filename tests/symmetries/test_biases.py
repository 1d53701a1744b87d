"""Redundant biases: false claims fail, and a measure does not see them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from quotient_manifolds.geometry import Quotient
from quotient_manifolds.sharpness import worst_case_sharpness
from quotient_manifolds.symmetries import find_symmetries, verify_symmetries
from quotient_manifolds.symmetries.canonical import canonical
from quotient_manifolds.symmetries.groups import Translation
from quotient_manifolds.symmetries.reparameterization import Reparameterization
from quotient_manifolds.symmetries.verify import verify_on_batches
from tests.nets.attention import BY_NAME, claimed, noise
from tests.symmetries.test_verify import attention, rotate

# --- false claims ----------------------------------------------------------------------------------------------------


def squared(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) ** 2).mean()


def test_a_shift_that_is_not_made_up_for_fails() -> None:
    model = BY_NAME["torch with separate weights, the whole model"]
    found, false = model.found(), list[Reparameterization]()
    for each in found.reparameterizations:
        assert isinstance(each.symmetry, Translation)
        if len(each.symmetry.parts) > 1:
            false.append(replace(each, symmetry=Translation(each.symmetry.parts[:1])))
    checks = verify_symmetries(model.build(), model.inputs(), replace(found, reparameterizations=tuple(false))).checks
    assert {check.verdict for check in checks[len(found.pairs) :]} == {"fails"}
    assert {check.verdict for check in checks[: len(found.pairs)]} == {"holds"}


@pytest.mark.filterwarnings("ignore:measures of this model are not constant")  # whose outputs a loss lets rotate
def test_a_measure_refuses_pairs_that_are_none_unless_trusted() -> None:
    model, x = attention(rotate), noise(4, 5, 12)
    found = claimed(model)  # as if it did not rotate
    with pytest.raises(ValueError, match=r"Found 0 query/key.*; pass symmetries= without it, use Adaptive\(\)"):
        worst_case_sharpness(model, squared, [x], geometry=Quotient(symmetries=found), radius=0.1, steps=2)
    trusting = Quotient(symmetries=found, verify="none")
    with pytest.raises(ValueError, match="must begin at the loss of the model"):
        worst_case_sharpness(model, squared, [x], geometry=trusting, radius=0.1, steps=2)
    assert [pair.acts for pair in find_symmetries(model, x).pairs] == ["GL(1, C)", "GL(h)"]
    left = verify_symmetries(model, x, found).holding(found)
    assert [pair.kind for pair in left.pairs] == ["value/output"]
    assert "0.q_proj.weight" in left.rest
    assert worst_case_sharpness(model, squared, [x], geometry=Quotient(symmetries=left), radius=0.1, steps=2).mean > 0


def test_verification_takes_three_evaluations_of_a_batch() -> None:
    sizes: list[tuple[int, torch.dtype]] = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        sizes.append((len(batch), batch.dtype))
        return squared(model, batch)

    case = BY_NAME["torch encoder"]
    model = case.build()
    assert verify_on_batches(model, loss, [noise(8, 5, 12)], case.found(model)).failed == {}
    assert set(sizes) == {(8, torch.float64)}
    assert len(sizes) <= 3


def test_a_loss_with_weights_and_rows_of_its_own_is_verified_in_float64() -> None:
    targets = noise(4, 5, 12)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:  # a float32 weight and a fixed batch size
        return (model(batch) * targets @ torch.ones(12, 1)).mean()

    case = BY_NAME["torch encoder"]
    model = case.build()
    verified = verify_symmetries(model, noise(4, 5, 12), case.found(model), evaluate=loss)
    assert verified.failed == {}
    assert verified.precision == torch.finfo(torch.float64).eps


# --- the measure -----------------------------------------------------------------------------------------------------


def sharpness(model: nn.Module, geometry: Quotient, x: Tensor) -> float:
    return worst_case_sharpness(model, squared, [x], geometry=geometry, radius=0.3, steps=4).mean


def test_sharpness_does_not_change_with_redundant_biases_unless_they_are_rows() -> None:
    model, x = BY_NAME["torch encoder"].build().double(), noise(2, 5, 12).double()
    other = replace(BY_NAME["torch encoder"].found(model), pairs=()).transformed(model, log_scale=20.0)
    torch.testing.assert_close(other(x), model(x), rtol=1e-12, atol=1e-12)

    def ratio(geometry: Quotient) -> float:
        return sharpness(other, geometry, x) / sharpness(model, geometry, x)

    assert ratio(Quotient()) == pytest.approx(1, abs=1e-9)
    assert abs(ratio(Quotient(symmetries="paper")) - 1) > 1e-3


def test_redundant_biases_stay_zero_and_the_query_bias_is_a_row() -> None:
    model = BY_NAME["BERT"].build()
    found = BY_NAME["BERT"].found(model)
    zeros = canonical(found.groups, {name: w.detach() for name, w in model.named_parameters()}).zeros
    assert [(pair.without(zeros).n, pair.without(zeros).m) for pair in found.pairs] == [(13, 12), (12, 12)] * 2
    space = Quotient(symmetries=found).tangent_space(model)
    moved = space.move(space.sample(torch.Generator().manual_seed(0)))
    for name, w in moved.items():
        if name.endswith(("attention.self.key.bias", "attention.self.value.bias")):
            assert not w.any()
        else:
            assert bool((w != model.get_parameter(name)).any())


def test_a_frozen_bias_is_not_touched() -> None:
    model, inputs = BY_NAME["BERT"].build(), BY_NAME["BERT"].inputs()["input_ids"]
    for name, w in model.named_parameters():
        w.requires_grad_(not name.endswith("attention.output.dense.bias"))
    point = Quotient(symmetries=BY_NAME["BERT"].found(model)).tangent_space(model).point
    assert not any(name.endswith("attention.output.dense.bias") for name in point)
    assert point["encoder.layer.0.attention.self.value.bias"].any()
    expected = model(inputs).last_hidden_state
    torch.testing.assert_close(functional_call(model, point, (inputs,)).last_hidden_state, expected)
