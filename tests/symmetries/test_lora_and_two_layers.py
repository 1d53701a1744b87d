"""Adapters, bottlenecks, neurons, and what looks like attention: found when asked for, proved, refused with reasons."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from quotient_manifolds.geometry import Quotient
from quotient_manifolds.load import example_inputs
from quotient_manifolds.symmetries import (
    Match,
    Matcher,
    Proof,
    Symmetries,
    bottleneck,
    find_symmetries,
    lora,
    neurons,
    prove_symmetries,
)
from tests.models import noise
from tests.small_models import build


def found_by(matcher: Matcher, model: nn.Module) -> Symmetries:
    return find_symmetries(model.eval(), layouts=(), matchers=(matcher,))


def proof_of(model: nn.Module, inputs: Any, found: Symmetries) -> Proof:
    proof = prove_symmetries(model, inputs, Symmetries(found.pairs))
    assert proof.all_proved == bool(found.pairs), str(proof)
    return proof


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
@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}, {"use_dora": True}], ids=["plain", "rsLoRA", "DoRA"])
def test_adapters_carry_gl_of_their_rank(settings: dict[str, bool]) -> None:
    model = adapted("llama", target_modules=["q_proj", "down_proj"], **settings)
    found = find_symmetries(model)
    assert [(pair.name.split(".")[-1], pair.group, pair.n, pair.m) for pair in found.pairs] == [
        ("q_proj lora B/A", "GL(3)^1", 32, 32),
        ("down_proj lora B/A", "GL(3)^1", 32, 24),
    ]
    assert re.search(r"self_attn \(LlamaAttention\): its projections carry adapters: merge them", found.unrecognised[0])
    proof_of(model, example_inputs(model.base_model.model), found)


@pytest.mark.filterwarnings("ignore")
def test_adapters_of_embeddings_and_convolutions() -> None:
    model = adapted("vit", target_modules=["projection", "fc1"])
    found = found_by(lora, model)
    assert [(pair.n, pair.m, pair.h) for pair in found.pairs] == [(32, 3 * 8 * 8, 3), (24, 32, 3)]
    proof_of(model, example_inputs(model.base_model.model), found)
    model = adapted("bert", target_modules=["word_embeddings"])
    found = found_by(lora, model)
    assert [(pair.n, pair.m, pair.h) for pair in found.pairs] == [(32, 60, 3)]
    proof_of(model, example_inputs(model.base_model.model), found)


@pytest.mark.filterwarnings("ignore")
def test_adapters_of_experts_have_a_group_each() -> None:
    model = adapted("mixtral", target_modules=[], target_parameters=["mlp.experts.down_proj"])
    found = found_by(lora, model)
    assert [pair.group for pair in found.pairs] == ["GL(3)^2"]
    proof_of(model, example_inputs(model.base_model.model), found)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("settings", [{}, {"use_dora": True}], ids=["plain", "DoRA"])
def test_several_active_adapters_are_as_many_pairs(settings: dict[str, bool]) -> None:
    model = adapted("llama", "second", "third", target_modules=["down_proj"], **settings)
    model.base_model.set_adapter(["default", "second"])
    found = found_by(lora, model)
    assert [pair.name.partition("down_proj ")[2] for pair in found.pairs] == ["lora B/A", "second lora B/A"]
    assert [refusal.name.partition("down_proj ")[2] for refusal in found.refused] == ["third lora B/A"]
    assert "not active" in found.refused[0].reason
    proof_of(model, example_inputs(model.base_model.model), found)


def _silence(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.scaling["default"] = 0


UNREAD: dict[str, tuple[Callable[[Any], object], tuple[str, ...]]] = {
    "merged": (lambda model: model.base_model.merge_adapter(), ("merged into the weight", "'default' is merged")),
    "another merged": (
        lambda model: model.base_model.merge_adapter(["second"]),
        ("'second' is merged into the weight", "merged into the weight"),
    ),
    "switched off": (lambda model: model.base_model.disable_adapter_layers(), ("switched off",) * 2),
    "another active": (lambda model: model.set_adapter("second"), ("not active",)),
    "scale": (_silence, ("scale is 0", "not active")),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", UNREAD)
def test_adapters_nobody_reads_are_refused(case: str) -> None:
    """Refused are exactly those that may be anything without the output changing."""
    change, reasons = UNREAD[case]
    model = adapted("llama", "second", target_modules=["down_proj"])
    change(model)
    found = found_by(lora, model)
    assert all(reason in refusal.reason for reason, refusal in zip(reasons, found.refused, strict=True))
    inputs = example_inputs(model.base_model.model)
    before = model(**inputs)[0]
    read = {name for pair in found.pairs for name in pair.names}
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_" in name and name not in read:
                value += 1
    assert torch.equal(model(**inputs)[0], before)


@pytest.mark.filterwarnings("ignore")
def test_a_fresh_adapter_is_told_from_a_broken_one() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(build("llama"), peft.LoraConfig(r=3, target_modules=["down_proj"])).eval()
    found = found_by(lora, model)
    (proof,) = prove_symmetries(model, example_inputs(model.base_model.model), found).pairs
    assert proof.verdict == "inconclusive"
    assert "changes nothing (is the other side 0?)" in proof.reason
    with pytest.raises(ValueError, match=r"B is 0, as peft starts it, .* measure after training has begun"):
        Quotient("inv", symmetries=found).at(model)


@pytest.mark.filterwarnings("ignore")
def test_adapters_of_other_kinds_are_named() -> None:
    peft = pytest.importorskip("peft")
    for config in (
        peft.AdaLoraConfig(target_modules=["down_proj"], total_step=10, init_r=3),
        peft.IA3Config(target_modules=["down_proj"], feedforward_modules=["down_proj"]),
    ):
        found = found_by(lora, peft.get_peft_model(build("llama"), config))
        assert found.pairs == ()
        assert ["not known" in refusal.reason for refusal in found.refused] == [True]


@pytest.mark.filterwarnings("ignore")
def test_adapters_of_torch_s_attention() -> None:
    """Its layer in peft makes new parameters whenever it is asked for them."""
    model = adapted(nn.Sequential(nn.MultiheadAttention(8, 2, batch_first=True)), target_modules=["0"])
    assert [pair.group for pair in find_symmetries(model).pairs] == ["GL(3)^1"] * 2


@pytest.mark.filterwarnings("ignore")
def test_neurons_behind_an_adapter_are_not_claimed() -> None:
    found = found_by(neurons, adapted("llama", target_modules=["down_proj"]))
    assert (found.pairs, found.refused) == ((), ())


# --- neurons ---------------------------------------------------------------------------------------------------------

MLPS: dict[str, tuple[Callable[[], nn.Module], list[str], list[str]]] = {
    "ReLU": (lambda: nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 2)), ["GL+(1)^7"], []),
    "leaky, dropout": (
        lambda: nn.Sequential(nn.Linear(5, 7, bias=False), nn.LeakyReLU(), nn.Dropout(), nn.Linear(7, 2)),
        ["GL+(1)^7"],
        [],
    ),
    "GELU": (lambda: nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 2)), [], ["GELU lets no factor pass"]),
    "three layers, each in one pair": (
        lambda: nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 2)),
        ["GL+(1)^7"],
        [],
    ),
    "normalised": (lambda: nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 2)), [], []),
}


@pytest.mark.parametrize("mlp", MLPS)
def test_neurons_of_a_sequence(mlp: str) -> None:
    make, groups, reasons = MLPS[mlp]
    model = make().eval()
    found = found_by(neurons, model)
    assert [pair.group for pair in found.pairs] == groups
    assert len(found.refused) == len(reasons)
    assert all(reason in refusal.reason for reason, refusal in zip(reasons, found.refused, strict=True))
    proof_of(model, noise(4, 5), found)


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
    found = found_by(neurons, model)
    assert [pair.group for pair in found.pairs] == groups
    assert bool(found.refused) == (not groups)
    assert all("only a ReLU is positively homogeneous" in refusal.reason for refusal in found.refused)
    proof_of(model, example_inputs(model), found)


def test_a_sign_is_no_symmetry_of_a_relu() -> None:
    """GL(1) with its negative numbers is refuted where GL+(1) is proved."""
    model = MLPS["ReLU"][0]().eval()
    pair = found_by(neurons, model).pairs[0]
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


def test_neurons_and_bottlenecks_are_left_alone_unless_asked_for() -> None:
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    assert find_symmetries(model) == Symmetries((), tuple(name for name, _ in model.named_parameters()))


# --- bottlenecks -----------------------------------------------------------------------------------------------------


def test_a_bottleneck_carries_gl_of_its_width() -> None:
    model = nn.Sequential(nn.Linear(5, 3), nn.Dropout(), nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).eval()
    found = found_by(bottleneck, model)
    assert [(pair.name, pair.group, pair.n, pair.m) for pair in found.pairs] == [
        ("2 bottleneck in/out", "GL(3)^1", 6, 6)
    ]
    proof_of(model, noise(4, 5), found)


def test_a_bulge_is_no_bottleneck() -> None:
    found = found_by(bottleneck, nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 6)))
    assert found.pairs == ()
    assert "the middle is wider than an end" in found.refused[0].reason


def test_a_matcher_is_asked_about_every_module() -> None:
    asked: list[str] = []

    def curious(module: nn.Module, name: str, names: Any) -> Match | None:
        asked.append(name)
        return None

    find_symmetries(nn.Sequential(nn.Sequential(nn.Linear(2, 2))), matchers=(curious,))
    assert asked[:3] == ["", "0", "0.0"]
