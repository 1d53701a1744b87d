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
from tests.nets.attention import noise
from tests.nets.handwritten import SelfAttention
from tests.nets.model_types import build

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


def test_each_expert_has_the_symmetry_of_its_adapter() -> None:
    pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.MixtralConfig(**sizes, vocab_size=30, num_hidden_layers=1, num_local_experts=4)
    torch.manual_seed(0)
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    network = transformers.MixtralForCausalLM(config)
    model = adapted(network, target_modules=[], target_parameters=parameters, task_type="CAUSAL_LM")
    inputs = {"input_ids": torch.randint(30, (2, 9))}
    found = tuple(pair for pair in find_symmetries(model, inputs).pairs if pair.kind == ADAPTER)
    assert [str(pair.group) for pair in found] == ["GL(3)^4"] * 2
    assert verified(model, inputs, Symmetries(found))


def down(*others: str, change: Callable[[Any], object] = id, **settings: Any) -> Any:
    """A small Llama whose MLP reads its neurons with adapters, after a change."""
    model = adapted("llama", *others, target_modules=["down_proj"], **settings)
    change(model)
    return model


def silence(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.scaling["default"] = 0


def first_two(model: Any) -> None:
    model.base_model.set_adapter(["default", "second"])


DOWN, SECOND = "down_proj lora B/A of default: 32 + 24", "down_proj second lora B/A of second: 32 + 24"
ADAPTED: dict[str, tuple[Callable[[], Any], list[str]]] = {
    # a model, and of every pair its name, the adapter, and its rows
    "plain": (
        lambda: adapted("llama", target_modules=["q_proj", "down_proj"]),
        ["q_proj lora B/A of default: 32 + 32", DOWN],
    ),
    "rsLoRA": (lambda: down(use_rslora=True), [DOWN]),
    "DoRA": (lambda: down(use_dora=True), [DOWN]),
    "images": (
        lambda: adapted("vit", target_modules=["projection", "fc1"]),
        [f"projection lora B/A of default: 32 + {3 * 8 * 8}", "fc1 lora B/A of default: 24 + 32"],
    ),
    "words": (
        lambda: adapted("bert", target_modules=["word_embeddings"]),
        ["word_embeddings lora B/A of default: 32 + 60"],
    ),
    "two of three active": (lambda: down("second", "third", change=first_two), [DOWN, SECOND]),
    "two of three active, DoRA": (lambda: down("second", "third", change=first_two, use_dora=True), [DOWN, SECOND]),
    "merged": (lambda: down("second", change=lambda model: model.base_model.merge_adapter()), []),
    "another merged": (lambda: down("second", change=lambda model: model.base_model.merge_adapter(["second"])), []),
    "switched off": (lambda: down("second", change=lambda model: model.base_model.disable_adapter_layers()), []),
    "another active": (
        lambda: down("second", change=lambda model: model.set_adapter("second")),
        [DOWN.replace("default", "second")],
    ),
    "silenced": (lambda: down(change=silence), []),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", ADAPTED)
def test_adapters_that_run_carry_gl_of_their_rank(case: str) -> None:
    """Neurons behind an adapter are claimed where none runs."""
    make, expected = ADAPTED[case]
    model = make()
    inputs = example_inputs(model.base_model.model)
    found = found_of(model, inputs, ADAPTER)
    said = []
    for pair in found.pairs:
        (adapter,) = {name.removesuffix(".weight").split(".")[-1] for name in pair.names}
        said.append(f"{pair.name.split('.')[-1]} of {adapter}: {pair.n} + {pair.m}")
    assert said == expected
    assert all(pair.group == "GL(3)^1" for pair in found.pairs)
    verified(model, inputs, found)
    verified(model, inputs, found_of(model, inputs, *NEURONS))


@pytest.mark.filterwarnings("ignore")
def test_a_fresh_adapter_is_told_from_a_broken_one() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(build("llama"), peft.LoraConfig(r=3, target_modules=["down_proj"])).eval()
    inputs = example_inputs(model.base_model.model)
    found = found_of(model, inputs, ADAPTER)
    (check,) = verify_symmetries(model, inputs, found).checks
    assert (check.verdict, check.reason) == ("inconclusive", "one side is 0: moving it alone changes nothing")
    with pytest.raises(ValueError, match=r"B is 0, as peft starts it, .* measure after training has begun"):
        Quotient("inv", symmetries=found).tangent_space(model)


@pytest.mark.filterwarnings("ignore")
def test_adapters_of_torch_s_attention() -> None:
    """Its layer in peft makes new parameters whenever it is asked for them, so no copy can be run."""
    model = adapted(nn.Sequential(SelfAttention(8)), target_modules=["0.attention"])
    with pytest.raises(ValueError, match="PeftModel copies itself in a way of its own"):
        find_symmetries(model, noise(2, 5, 8))


# --- neurons ---------------------------------------------------------------------------------------------------------


def test_a_middle_that_is_wider_than_an_end_has_no_pair() -> None:
    found = find_symmetries(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 6)).eval(), noise(4, 5))
    assert found.pairs == ()
    assert ["the middle is wider than an end" in each.reason for each in found.refused] == [True]


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


# --- in a measure ----------------------------------------------------------------------------------------------------


def squared(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def test_neurons_that_are_frozen_in_part_are_left_alone() -> None:
    model = two_kinds()
    model[5].requires_grad_(False)
    space = Quotient().verified(model, squared, [noise(4, 5).double()]).tangent_space(model)
    assert {pair.kind for block in space.pairs for pair in block.pairs} == {BOTTLENECK}
