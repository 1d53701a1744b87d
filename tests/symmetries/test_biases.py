"""Redundant biases: found, verified, refused where they are none; a measure that does not see them."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from quotient_manifolds.geometry import Adaptive, Quotient
from quotient_manifolds.sharpness import worst_case_sharpness
from quotient_manifolds.symmetries import (
    Symmetries,
    balance,
    find_symmetries,
    random_representative,
    verify_symmetries,
    zeros_of,
)
from quotient_manifolds.symmetries.verify import verify_on_batches
from tests.models import BY_NAME, IDS, claimed, llama, noise
from tests.symmetries.breadth import redundant
from tests.symmetries.test_nets import found_in
from tests.symmetries.test_verify import attention, rotate

EVERYWHERE = (
    "torch",
    "torch with separate weights, the whole model",
    "torch decoder",
    "BERT",
    "GPT-2",
    "CLIP, both towers",
)


# --- what is found and verified --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERYWHERE)
def test_plain_attention_has_two_redundant_biases(name: str) -> None:
    case = BY_NAME[name]
    model = case.build()
    found = case.found(model)
    assert redundant(model, found) == Counter(
        "key bias" if pair.kind == "query/key" else "value/output bias" for pair in found.pairs
    )
    own = {view.name for pair in found.pairs for view in pair.views if view.rows == 1}
    assert {each.names[0] for each in found.reparameterizations} <= own
    heads = sum(pair.heads * pair.h for pair in found.pairs)
    assert sum(each.group_dimension for each in found.reparameterizations) == heads
    checks = verify_symmetries(model, case.inputs(), found).checks
    assert [check.name for check in checks] == [each.name for each in found.every]
    assert {check.verdict for check in checks} <= {"holds", "unused"}  # nothing reads a key bias


def test_grouped_value_heads_share_their_shift() -> None:
    """Rotary attention keeps its key bias as a row; every output head of a group answers its value head's shift."""
    model = llama(attention_bias=True)
    found = find_symmetries(model, IDS).within("pairs")
    (shift,) = found.reparameterizations
    assert (shift.kind, shift.group) == ("redundant bias", "R^12")
    assert shift.names == ("model.layers.0.self_attn.v_proj.bias", "model.layers.0.self_attn.o_proj.bias")
    assert verify_symmetries(model, IDS, found).all_hold


@pytest.mark.parametrize("options", [{"bias": False}, {"add_zero_attn": True}], ids=str)
def test_no_bias_is_redundant_where_there_is_none(options: dict[str, bool]) -> None:
    model, x = nn.MultiheadAttention(12, 3, **options).eval(), noise(5, 2, 12)
    found = find_symmetries(model, (x, x, x))
    assert len(found.pairs) == 2
    assert not redundant(model, found)


def test_a_tied_bias_makes_up_for_one() -> None:
    """The value bias of the other layer changes with it."""
    model = BY_NAME["BERT"].build()
    model.encoder.layer[1].attention.output.dense.bias = model.encoder.layer[0].attention.output.dense.bias
    assert redundant(model, BY_NAME["BERT"].found(model)) == {"key bias": 2, "value/output bias": 1}


# --- false claims ----------------------------------------------------------------------------------------------------


def squared(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) ** 2).mean()


@pytest.mark.filterwarnings("ignore:measures of this model are not constant")  # whose outputs a loss lets rotate
def test_a_key_bias_behind_a_cap_stays_a_row() -> None:
    model, x, found = found_in("capped", True)
    assert redundant(model, found) == {"value/output bias": 1}
    assert verify_symmetries(model, x, found).failed == {}
    result = worst_case_sharpness(model, squared, [x], geometry=Quotient(), radius=0.1, steps=2)
    assert result.batches[0].base_loss == pytest.approx(float(squared(model, x).detach()), rel=1e-5)


def test_a_shift_that_is_not_made_up_for_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    found = BY_NAME["torch with separate weights, the whole model"].found()
    (kind,) = {type(each) for each in found.reparameterizations}
    right = kind.tangent

    def alone(self: Any, *args: Any) -> dict[str, Tensor]:
        return {name: w if name == self.names[0] else 0 * w for name, w in right(self, *args).items()}

    def moved(self: Any, params: dict[str, Tensor], *args: Any) -> None:
        kept = {name: params[name].clone() for name in self.names[1:]}
        acts(self, params, *args)
        params.update(kept)

    acts = kind.transform
    monkeypatch.setattr(kind, "tangent", alone)
    monkeypatch.setattr(kind, "transform", moved)
    model = BY_NAME["torch with separate weights, the whole model"]
    checks = verify_symmetries(model.build(), model.inputs(), found).checks
    assert "fails" in {check.verdict for check in checks[len(found.pairs) :]}
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


def translated(model: nn.Module, size: float) -> nn.Module:
    """The same function with other biases."""
    found = replace(BY_NAME["torch encoder"].found(model), pairs=())
    other = copy.deepcopy(model)
    other.load_state_dict(random_representative(model, found, log_scale=size), strict=False)
    return other


def sharpness(model: nn.Module, geometry: object, x: Tensor) -> float:
    return worst_case_sharpness(model, squared, [x], geometry=geometry, radius=0.3, steps=4).mean  # type: ignore[arg-type]


@pytest.mark.parametrize("metric", ["inv", "mix"])
def test_sharpness_does_not_change_with_redundant_biases_unless_they_are_rows(metric: str) -> None:
    model, x = BY_NAME["torch encoder"].build().double(), noise(2, 5, 12).double()
    other = translated(model, 20.0)
    torch.testing.assert_close(other(x), model(x), rtol=1e-12, atol=1e-12)

    def ratio(geometry: object) -> float:
        return sharpness(other, geometry, x) / sharpness(model, geometry, x)

    assert ratio(Quotient(metric)) == pytest.approx(1, abs=1e-9)
    assert abs(ratio(Quotient(metric, symmetries="paper")) - 1) > 1e-3
    assert abs(ratio(Adaptive()) - 1) > 1e-3


def test_sharpness_does_not_change_under_everything_at_once() -> None:
    model, x = BY_NAME["torch encoder"].build().double(), noise(2, 5, 12).double()
    other = find_symmetries(model, x).transformed(model, scale=0.1, seed=4)
    assert sharpness(other, Quotient(), x) == pytest.approx(sharpness(model, Quotient(), x), rel=1e-8)


def test_redundant_biases_stay_zero_and_the_query_bias_is_a_row() -> None:
    model = BY_NAME["BERT"].build()
    found = BY_NAME["BERT"].found(model)
    zeros = zeros_of(found.reparameterizations, balance(model, found))
    assert [(pair.without(zeros).n, pair.without(zeros).m) for pair in found.pairs] == [(13, 12), (12, 12)] * 2
    space = Quotient(symmetries=found).at(model)
    moved = space.move(space.sample(torch.Generator().manual_seed(0)))
    for name, w in moved.items():
        if name.endswith(("attention.self.key.bias", "attention.self.value.bias")):
            assert not w.any()
        else:
            assert bool((w != model.get_parameter(name)).any())


@pytest.mark.parametrize("frozen", ["output.dense.bias", "self.value.bias"])
def test_a_frozen_bias_is_not_touched(frozen: str) -> None:
    model = BY_NAME["BERT"].build()
    for name, w in model.named_parameters():
        w.requires_grad_(not name.endswith(f"attention.{frozen}"))
    geometry = Quotient(symmetries=BY_NAME["BERT"].found(model))
    if frozen == "self.value.bias":
        with pytest.raises(ValueError, match="is frozen in part"):
            geometry.at(model)
        return
    point = geometry.at(model).point
    assert not any(name.endswith(f"attention.{frozen}") for name in point)
    name = "encoder.layer.0.attention.self.value.bias"
    assert point[name].any()
    inputs = BY_NAME["BERT"].inputs()["input_ids"]
    expected = model(inputs).last_hidden_state
    torch.testing.assert_close(functional_call(model, point, (inputs,)).last_hidden_state, expected)


def test_biases_is_one_of_two() -> None:
    with pytest.raises(ValueError, match=r"symmetries must be one of all, pairs, paper, or Symmetries. Found 'none'"):
        Quotient(symmetries="none")  # type: ignore[arg-type]
    assert Quotient().name != Quotient(symmetries="paper").name


def test_redundant_biases_are_printed_and_plain_data() -> None:
    found = BY_NAME["BERT"].found()
    assert "encoder.layer.0.attention.self.value.bias redundant bias" in str(found)
    assert {"redundant bias": 12} in [each["families"] for each in found.to_dict()["reparameterizations"]]
    assert Symmetries(()).to_dict()["reparameterizations"] == []
