"""Moving on purpose: every group, and the canonical representative."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from quotient_manifolds.symmetries import (
    Symmetries,
    balance,
    declare_pair,
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
    found = case.found(model, "all")
    canonical = balance(model, found)
    assert output_change(model, case.inputs(), {}, canonical) < 1e-12
    elsewhere = copy.deepcopy(model)
    elsewhere.load_state_dict(random_move(model, found, scale=2.0, seed=3), strict=False)
    again = balance(elsewhere, found)
    for key, w in canonical.items():
        torch.testing.assert_close(again[key], w, rtol=1e-7, atol=1e-8)
    for pair in found.pairs:
        G, H = pair.G.read(canonical), pair.H.read(canonical)
        torch.testing.assert_close(G.mT @ G, H.mT @ H, rtol=1e-9, atol=1e-9)
    for shift in found.translations:
        assert not shift.bias.read(canonical).any()


def test_rotary_models_move_and_balance_too() -> None:
    model = llama(num_hidden_layers=2, attention_bias=True).double()
    found = find_symmetries(model, IDS).within("pairs")  # its norms cast to float32
    assert {pair.acts for pair in found.pairs} == {"GL(1, C)", "GL(h)"}
    moved = random_move(model, found, scale=3.0, seed=1)
    assert output_change(model, IDS, {}, moved) < 1e-11
    assert all(not torch.equal(moved[name], w) for name, w in model.named_parameters() if name in found.moved)
    other = copy.deepcopy(model)
    other.load_state_dict(moved, strict=False)
    for key, w in balance(model, found).items():
        torch.testing.assert_close(balance(other, found)[key], w, rtol=1e-8, atol=1e-9)


class Neurons(nn.Module):
    """Linear -> ReLU -> Linear: each neuron can be scaled by a positive number."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def neurons(model: Neurons) -> Symmetries:
    return Symmetries(
        (
            declare_pair(
                model,
                "neurons",
                "MLP",
                G=lambda w: torch.cat([w["up.weight"], w["up.bias"][:, None]], dim=1)[:, :, None],
                H=lambda w: w["down.weight"].T[:, :, None],
                acts="GL+(1)",
            ),
        )
    )


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


def test_translations_can_be_left_out() -> None:
    model = BY_NAME["BERT"].build()
    found = BY_NAME["BERT"].found(model)
    name = "encoder.layer.0.attention.output.dense.bias"
    own = model.get_parameter(name)
    assert torch.equal(random_move(model, found, translations=False)[name], own)
    assert not torch.equal(random_move(model, found)[name], own)


@pytest.mark.parametrize("broken", ["meta", "int8", "nan"])
def test_broken_weights_are_named(broken: str) -> None:
    model = BY_NAME["torch"].build()
    found = BY_NAME["torch"].found(model)
    params = {name: w.detach().clone() for name, w in model.named_parameters()}
    bad = {"meta": lambda w: w.to("meta"), "int8": lambda w: w.to(torch.int8), "nan": lambda w: w * torch.nan}
    params["attention.in_proj_weight"] = bad[broken](params["attention.in_proj_weight"])
    for call in (random_move, balance):
        with pytest.raises(ValueError, match=r"parameter 'attention.in_proj_weight'"):
            call(params, found)
