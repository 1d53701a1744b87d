"""Adapters, bottlenecks and neurons: found, verified, refused with reasons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quotient_manifolds.geometry import Quotient
from quotient_manifolds.symmetries import (
    ADAPTER,
    Symmetries,
    Verification,
    example_inputs,
    find_symmetries,
    propose_symmetries,
    verify_symmetries,
)
from quotient_manifolds.symmetries.pair import BOTTLENECK, GATED, RELU
from tests.handwritten_models import SelfAttention
from tests.models import noise
from tests.symmetries.small_models import build

NEURONS = (RELU, GATED, "neurons")


def found_of(model: nn.Module, inputs: Any, *kinds: str) -> Symmetries:
    """The pairs of these kinds that a measure has, whatever adapters are idle, and what is refused of them."""
    found = propose_symmetries(model.eval(), inputs)
    return Symmetries(
        tuple(pair for pair in found.pairs if pair.kind in kinds),
        refused=tuple(each for each in found.refused if each.kind in kinds),
    )


def verified(model: nn.Module, inputs: Any, found: Symmetries) -> Verification:
    verification = verify_symmetries(model, inputs, Symmetries(found.pairs))
    assert verification.all_hold == bool(found.pairs), str(verification)
    return verification


# --- adapters --------------------------------------------------------------------------------------------------------


def adapted(model: str | nn.Module, *others: str, **settings: Any) -> Any:
    """A small model with adapters of rank 3, `others` beside the default one, none of them zero."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=3, **settings)
    model = peft.get_peft_model(build(model) if isinstance(model, str) else model, config)
    for other in others:
        model.add_adapter(other, config)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_" in name:
                value += 0.2 * torch.randn_like(value)
    return model.eval()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True},
        pytest.param(
            {"use_dora": True}, marks=pytest.mark.xfail(reason="a norm of a sum with a product is not followed")
        ),
    ],
    ids=["plain", "rsLoRA", "DoRA"],
)
def test_adapters_carry_gl_of_their_rank(settings: dict[str, bool]) -> None:
    model = adapted("llama", target_modules=["q_proj", "down_proj"], **settings)
    inputs = example_inputs(model.base_model.model)
    found = found_of(model, inputs, ADAPTER)
    assert [(pair.name.split(".")[-1], pair.group, pair.n, pair.m) for pair in found.pairs] == [
        ("q_proj lora B/A", "GL(3)^1", 32, 32),
        ("down_proj lora B/A", "GL(3)^1", 32, 24),
    ]
    verified(model, inputs, found)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "modules", "sizes"),
    [("vit", ["projection", "fc1"], [(32, 3 * 8 * 8), (24, 32)]), ("bert", ["word_embeddings"], [(32, 60)])],
)
def test_adapters_of_embeddings_and_convolutions(name: str, modules: list[str], sizes: list[tuple[int, int]]) -> None:
    model = adapted(name, target_modules=modules)
    inputs = example_inputs(model.base_model.model)
    found = found_of(model, inputs, ADAPTER)
    assert [(pair.n, pair.m, pair.h) for pair in found.pairs] == [(n, m, 3) for n, m in sizes]
    verified(model, inputs, found)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param(
            {"use_dora": True}, marks=pytest.mark.xfail(reason="a norm of a sum with a product is not followed")
        ),
    ],
    ids=["plain", "DoRA"],
)
def test_several_active_adapters_are_as_many_pairs(settings: dict[str, bool]) -> None:
    model = adapted("llama", "second", "third", target_modules=["down_proj"], **settings)
    model.base_model.set_adapter(["default", "second"])
    inputs = example_inputs(model.base_model.model)
    found = found_of(model, inputs, ADAPTER)
    assert [{name.split(".")[-2] for name in pair.names} for pair in found.pairs] == [{"default"}, {"second"}]
    assert len({pair.name for pair in found.pairs}) == 2
    verified(model, inputs, found)


def _silence(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.scaling["default"] = 0


UNREAD: dict[str, tuple[Callable[[Any], object], set[str]]] = {
    "merged": (lambda model: model.base_model.merge_adapter(), set()),
    "another merged": (lambda model: model.base_model.merge_adapter(["second"]), set()),
    "switched off": (lambda model: model.base_model.disable_adapter_layers(), set()),
    "another active": (lambda model: model.set_adapter("second"), {"second"}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", UNREAD)
def test_adapters_nobody_reads_are_no_pairs(case: str) -> None:
    change, left = UNREAD[case]
    model = adapted("llama", "second", target_modules=["down_proj"])
    change(model)
    found = found_of(model, example_inputs(model.base_model.model), ADAPTER)
    assert {name.split(".")[-2] for pair in found.pairs for name in pair.names} == left


@pytest.mark.filterwarnings("ignore")
def test_a_silenced_adapter_has_no_pair() -> None:
    model = adapted("llama", target_modules=["down_proj"])
    _silence(model)
    assert found_of(model, example_inputs(model.base_model.model), ADAPTER).pairs == ()


@pytest.mark.filterwarnings("ignore")
def test_a_fresh_adapter_is_told_from_a_broken_one() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(build("llama"), peft.LoraConfig(r=3, target_modules=["down_proj"])).eval()
    inputs = example_inputs(model.base_model.model)
    found = found_of(model, inputs, ADAPTER)
    (check,) = verify_symmetries(model, inputs, found).checks
    assert (check.verdict, check.reason) == ("inconclusive", "one side is 0: moving it alone changes nothing")
    with pytest.raises(ValueError, match=r"B is 0, as peft starts it, .* measure after training has begun"):
        Quotient("inv", symmetries=found).at(model)


@pytest.mark.filterwarnings("ignore")
def test_adapters_of_torch_s_attention() -> None:
    """Its layer in peft makes new parameters whenever it is asked for them, so no copy can be run."""
    model = adapted(nn.Sequential(SelfAttention(8)), target_modules=["0.inner"])
    with pytest.raises(ValueError, match="PeftModel copies itself in a way of its own"):
        find_symmetries(model, noise(2, 5, 8))


@pytest.mark.filterwarnings("ignore")
def test_neurons_behind_an_adapter_are_not_claimed() -> None:
    model = adapted("llama", target_modules=["down_proj"])
    inputs = example_inputs(model.base_model.model)
    found = found_of(model, inputs, *NEURONS)
    verified(model, inputs, found)


# --- neurons ---------------------------------------------------------------------------------------------------------

MLPS: dict[str, tuple[Callable[[], nn.Module], list[str], list[str]]] = {
    "ReLU": (lambda: nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 2)), ["GL+(1)^7"], []),
    "leaky, dropout": (
        lambda: nn.Sequential(nn.Linear(5, 7, bias=False), nn.LeakyReLU(), nn.Dropout(), nn.Linear(7, 2)),
        ["GL+(1)^7"],
        [],
    ),
    "GELU": (lambda: nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 2)), [], []),
    "three layers, each in one pair": (
        lambda: nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 2)),
        ["GL+(1)^7"],
        ["parameter '2.weight' is shared with 'relu neuron' (see the reparameterizations)"],
    ),
    "normalised": (lambda: nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 2)), [], []),
}


@pytest.mark.parametrize("mlp", MLPS)
def test_neurons_of_a_sequence(mlp: str) -> None:
    make, groups, reasons = MLPS[mlp]
    model = make().eval()
    found = found_of(model, noise(4, 5), *NEURONS)
    assert [pair.group for pair in found.pairs] == groups
    assert [refusal.reason for refusal in found.refused] == reasons
    verified(model, noise(4, 5), found)


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("llama", ["GL(1)^24"]),
        ("phi3", ["GL(1)^24"]),
        ("modernbert", ["GL(1)^24"]),
        ("mt5", ["GL(1)^24"] * 2),
        ("t5", ["GL+(1)^24"] * 2),
        ("opt", ["GL+(1)^32"]),
        ("bert", []),
        ("gpt2", []),
    ],
)
def test_neurons_of_transformers(name: str, groups: list[str]) -> None:
    pytest.importorskip("transformers")
    model = build(name)
    inputs = example_inputs(model)
    found = found_of(model, inputs, *NEURONS)
    assert [pair.group for pair in found.pairs] == groups
    assert found.refused == ()
    verified(model, inputs, found)


def test_a_sign_is_no_symmetry_of_a_relu() -> None:
    """GL(1) with its negative numbers fails where GL+(1) holds."""
    model = MLPS["ReLU"][0]().eval()
    pair = found_of(model, noise(4, 5), *NEURONS).pairs[0]
    params = {name: value.detach().double() for name, value in model.named_parameters()}
    x = pair.read(params)
    outputs = []
    for factor in (3.0, -3.0):
        moved = {name: value.clone() for name, value in params.items()}
        pair.write(moved, torch.cat([x[:, : pair.n] / factor, x[:, pair.n :] * factor], dim=1))
        outputs.append(torch.func.functional_call(model.double(), moved, (noise(4, 5).double(),)))
    reference = model.double()(noise(4, 5).double())
    assert torch.allclose(outputs[0], reference)
    assert not torch.allclose(outputs[1], reference, atol=1e-2)


def two_kinds() -> nn.Sequential:
    """A bottleneck, and neurons behind it."""
    layers = (nn.Linear(5, 3), nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))
    return nn.Sequential(*layers).double().eval()


def test_pairs_of_attention_leave_neurons_and_bottlenecks_alone() -> None:
    model = two_kinds().float()
    found = find_symmetries(model, noise(4, 5))
    assert {pair.kind for pair in found.pairs} == {BOTTLENECK, RELU}
    assert found.within("pairs").pairs == found.within("paper").pairs == ()
    assert sorted(found.within("pairs").rest) == sorted(name for name, _ in model.named_parameters())


# --- bottlenecks -----------------------------------------------------------------------------------------------------


def test_a_bottleneck_carries_gl_of_its_width() -> None:
    model = nn.Sequential(nn.Linear(5, 3), nn.Dropout(), nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).eval()
    found = found_of(model, noise(4, 5), BOTTLENECK)
    assert [(pair.name, pair.group, pair.n, pair.m) for pair in found.pairs] == [("bottleneck in/out", "GL(3)^1", 6, 6)]
    verified(model, noise(4, 5), found)


def test_a_bulge_is_no_bottleneck() -> None:
    found = found_of(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 6)), noise(4, 5), BOTTLENECK)
    assert found.pairs == ()
    assert "the middle is wider than an end" in found.refused[0].reason


# --- in a measure ----------------------------------------------------------------------------------------------------


def squared(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@pytest.mark.filterwarnings("ignore:measures of this model are not constant")  # whose outputs a loss lets rotate
def test_a_neuron_without_rank_is_measured_elementwise_with_those_beside_it() -> None:
    torch.manual_seed(0)
    model = two_kinds()
    x = noise(4, 5).double()
    whole = Quotient().verified(model, squared, [x]).at(model)
    with torch.no_grad():
        model[3].weight[0] = 0
        model[3].bias[0] = 0
    with pytest.warns(UserWarning, match="Pair relu neuron is measured elementwise: rank"):
        left = Quotient().verified(model, squared, [x]).at(model)
    assert {pair.kind for block in whole.pairs for pair in block.pairs} >= {RELU}
    assert {pair.kind for block in left.pairs for pair in block.pairs} == {BOTTLENECK}


def test_neurons_that_are_frozen_in_part_are_left_alone() -> None:
    model = two_kinds()
    model[5].requires_grad_(False)
    space = Quotient().verified(model, squared, [noise(4, 5).double()]).at(model)
    assert {pair.kind for block in space.pairs for pair in block.pairs} == {BOTTLENECK}
