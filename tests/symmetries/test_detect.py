"""No attention is passed over in silence: its class, its children or its parameters are named so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quotient_manifolds.symmetries.detect import looks_like_attention


@pytest.mark.parametrize(
    "names",
    ["wq wk wv", "W_Q W_K W_V W_O", "q_proj_weight k_proj_weight v_proj_weight", "qkv", "Wqkv", "in_proj_weight"],
)
@pytest.mark.parametrize("container", [nn.Module, nn.ParameterDict])
def test_parameters_named_as_projections_are_attention(names: str, container: type[nn.Module]) -> None:
    module = type("Mystery", (container,), {})()
    for name in names.split():
        module.register_parameter(name, nn.Parameter(torch.zeros(4, 4)))
    assert looks_like_attention(module)


@pytest.mark.filterwarnings("ignore")
def test_scripted_attention_is_named() -> None:
    assert looks_like_attention(torch.jit.script(nn.MultiheadAttention(8, 2)))


@pytest.mark.parametrize("name", ["SelfAttention", "CrossAttn", "MyMHA", "BlockMHSA"])
def test_a_class_named_so_is_attention_if_it_has_parameters(name: str) -> None:
    for parent, found in ((nn.Linear, True), (nn.Identity, False)):
        assert looks_like_attention(type(name, (parent,), {})(4, 4)) == found
        assert looks_like_attention(type("Other", (type(name, (parent,), {}),), {})(4, 4)) == found


@pytest.mark.parametrize(
    "names",
    [("query", "key", "value"), ("q_proj", "k_proj", "v_proj"), ("to_q", "to_k", "to_v"), ("Wq", "Wk", "Wv"), ("qkv",)],
)
def test_projections_tell_attention_of_any_name(names: tuple[str, ...]) -> None:
    mixer = type("Mixer", (nn.Module,), {})()
    for name in names:
        mixer.add_module(name, nn.Linear(4, 4))
    assert looks_like_attention(mixer)


def test_what_has_no_projections_is_no_attention() -> None:
    mixer = type("Mixer", (nn.Module,), {})()
    for name in ("key", "value", "norm"):
        mixer.add_module(name, nn.Linear(4, 4))
    assert not looks_like_attention(mixer)
