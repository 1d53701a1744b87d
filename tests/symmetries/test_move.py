"""Moving on purpose: every group, and the canonical representative."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from quotient_manifolds.symmetries import (
    Factor,
    ParameterView,
    SymmetricPair,
    Symmetries,
    balance,
    find_symmetries,
    output_change,
    random_move,
)
from tests.models import BY_NAME, IDS, ModelCase, llama, noise

NAMES = ("torch", "torch without bias", "torch with appended tokens", "BERT", "GPT-2", "CLIP, both towers")


@pytest.mark.parametrize("name", NAMES)
def test_balancing_keeps_the_function_and_forgets_the_representative(name: str) -> None:
    case: ModelCase = BY_NAME[name]
    model = case.build().double()
    canonical = balance(model)
    assert output_change(model, case.inputs(), {}, canonical) < 1e-12
    elsewhere = copy.deepcopy(model)
    elsewhere.load_state_dict(random_move(model, scale=2.0, seed=3), strict=False)
    again = balance(elsewhere)
    for key, w in canonical.items():
        torch.testing.assert_close(again[key], w, rtol=1e-7, atol=1e-8)
    found = find_symmetries(model)
    for pair in found.pairs:
        G, H = pair.G.read(canonical), pair.H.read(canonical)
        torch.testing.assert_close(G.mT @ G, H.mT @ H, rtol=1e-9, atol=1e-9)
    for shift in found.translations:
        assert not shift.bias.read(canonical).any()


def test_rotary_models_move_and_balance_too() -> None:
    model = llama(num_hidden_layers=2, attention_bias=True).double()
    found = find_symmetries(model)
    assert {pair.acts for pair in found.pairs} == {"GL(1, C)", "GL(h)"}
    moved = random_move(model, scale=3.0, seed=1)
    assert output_change(model, IDS, {}, moved) < 1e-11
    assert all(not torch.equal(moved[name], w) for name, w in model.named_parameters() if name in found.moved)
    other = copy.deepcopy(model)
    other.load_state_dict(moved, strict=False)
    for key, w in balance(model).items():
        torch.testing.assert_close(balance(other)[key], w, rtol=1e-8, atol=1e-9)


class Neurons(nn.Module):
    """Linear -> ReLU -> Linear: each neuron can be scaled by a positive number."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def neurons(model: Neurons) -> Symmetries:
    params = dict(model.named_parameters())

    def part(name: str, pattern: str) -> ParameterView:
        return ParameterView.of(name, params[name], pattern, {})

    G = Factor((part("up.weight", "heads rows -> heads rows 1"), part("up.bias", "heads -> heads 1 1")))
    H = Factor((part("down.weight", "rows heads -> heads rows 1"),))
    return Symmetries((SymmetricPair("neurons", "MLP", G, H, "GL+(1)"),))


def test_only_positive_numbers_act_on_neurons() -> None:
    model = Neurons().double()
    found, x = neurons(model), noise(9, 5).double()
    for seed in range(3):
        moved = random_move(model, found, seed=seed)
        torch.testing.assert_close(functional_call(model, moved, (x,)), model(x), rtol=1e-12, atol=1e-12)
    canonical = balance(model, found)
    torch.testing.assert_close(functional_call(model, canonical, (x,)), model(x), rtol=1e-12, atol=1e-12)
    pair = found.pairs[0]
    torch.testing.assert_close(pair.G.read(canonical).norm(dim=1), pair.H.read(canonical).norm(dim=1))


def test_translations_can_be_left_out_and_parameters_need_symmetries() -> None:
    model = BY_NAME["BERT"].build()
    name = "encoder.layer.0.attention.output.dense.bias"
    own = model.get_parameter(name)
    assert torch.equal(random_move(model, translations=False)[name], own)
    assert not torch.equal(random_move(model)[name], own)
    with pytest.raises(ValueError, match="give the model, or its symmetries"):
        balance(dict(model.named_parameters()))


@pytest.mark.parametrize("broken", ["meta", "int8", "nan"])
def test_broken_weights_are_named(broken: str) -> None:
    model = BY_NAME["torch"].build()
    found = find_symmetries(model)
    params = {name: w.detach().clone() for name, w in model.named_parameters()}
    bad = {"meta": lambda w: w.to("meta"), "int8": lambda w: w.to(torch.int8), "nan": lambda w: w * torch.nan}
    params["attention.in_proj_weight"] = bad[broken](params["attention.in_proj_weight"])
    for call in (random_move, balance):
        with pytest.raises(ValueError, match=r"parameter 'attention.in_proj_weight'"):
            call(params, found)
