"""What symmetries are called: by what is done to the channels on which they act, in words of the field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quotient_manifolds.symmetries import example_inputs, find_symmetries, propose_symmetries, verify_symmetries
from quotient_manifolds.symmetries.wires.labels import meaning
from studies.common import load
from studies.invariance import Subject
from tests.symmetries.nets import GIVEN, TOKENS, Change, D, Net
from tests.symmetries.small_models import build

UNREAD, CONSTANT, REDUNDANT = "unread output direction", "constant input direction", "redundant bias"
PAIRS = {"query/key", "value/output"}


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("gpt2", PAIRS | {"norm gain", UNREAD, CONSTANT, REDUNDANT}),
        ("gemma3_text", {"value/output", "gated neuron", "norm gain", "query/key norm gain"}),
        ("bitnet", {"query/key", "norm gain", "relu neuron", "value/output rotation"}),
        ("deepseek_v3", PAIRS | {"gated neuron", "norm gain", "hidden rotation"}),
        ("t5", PAIRS | {"relu neuron", "norm gain", REDUNDANT}),
        ("beit", PAIRS | {"norm gain", "channel gain", UNREAD, CONSTANT, REDUNDANT}),
        ("mpt", PAIRS | {"norm gain", UNREAD, "unreached input direction"}),
    ],
)
def test_kinds_of_a_model(name: str, kinds: set[str]) -> None:
    model = build(name)
    assert set(find_symmetries(model, example_inputs(model)).families) == kinds


def _attends(s: Net, x: Tensor, norm: Change = lambda y: y, values: Change = lambda y: y) -> Tensor:
    q, k = norm(s.a_8_6(x)), norm(s.b_8_6(x))
    return x + s.o_4_8((q @ k.mT / 3).softmax(-1) @ values(s.v_8_4(x)))


def _unit(y: Tensor) -> Tensor:
    return F.normalize(y, dim=-1)


def _normed(y: Tensor) -> Tensor:
    return y / (y.square().mean(-1, keepdim=True) + 1).sqrt()


@pytest.mark.parametrize(
    ("body", "some"),
    [
        (lambda s, x: _attends(s, x, norm=_unit), {"query/key rotation", "query/key scale"}),
        (lambda s, x: _attends(s, x, values=_normed), {"query/key", "value/output rotation"}),
        (lambda s, x: s.c_7_8(s.b_6_7(s.a_8_6(x).relu()).relu()), {"relu neuron"}),
        (lambda s, x: s.b_6_8(_normed(s.a_8_6(x))), {"hidden rotation"}),
    ],
)
def test_kinds_follow_what_is_done_to_channels(body: Callable[[Net, Tensor], Tensor], some: set[str]) -> None:
    torch.manual_seed(0)
    net, x = Net(body, bias=False, pooled=True, words=False), torch.randn(4, TOKENS, GIVEN)
    net(x)
    kinds = set(find_symmetries(net.eval().double(), x.double()).families)
    assert some <= kinds
    assert not {f"{where} rotation" for where in ("residual", "hidden", "query/key", "value/output")} & kinds - some


def test_a_language_model_has_residual_rotations() -> None:
    found = find_symmetries(model := build("llama", model_class="LlamaForCausalLM"), example_inputs(model))
    assert found.families["residual rotation"] == 32 * 31 // 2
    assert [each.group for each in found.reparameterizations if each.kind == "residual rotation"] == ["SO(32)"]


def test_printed_symmetries_begin_with_a_summary() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, D)).eval()
    first, *lines = str(find_symmetries(model, torch.randn(4, 5))).splitlines()
    assert first == "symmetries of 10 dimensions: relu neuron 10"
    assert "relu neuron     GL+(1)^4  6 x 1  6 x 1  3" in lines
    assert "2.bias relu neuron  GL+(1)^6" in lines
    assert "  2 relu neuron: parameter '2.weight' is shared with 'relu neuron' (see the reparameterizations)" in lines


def test_every_family_of_the_record_has_a_meaning() -> None:
    families = {name for row in load("fibres")["rows"] for name in row["found"]}
    assert len(families) > 15
    assert [name for name in families if not meaning(name)] == []
    assert meaning("query/key norm gain") == meaning("norm gain")
    assert meaning("one of the user's own") == ""


@pytest.mark.parametrize("row", load("fibres")["rows"], ids=lambda row: row["name"])
def test_the_symmetries_of_the_record_are_found_and_verified(row: dict[str, Any]) -> None:
    subject = Subject.of(row["name"])
    frozen = {name for name, w in subject.model.named_parameters() if not w.requires_grad}
    found = propose_symmetries(subject.model, subject.batch)
    found = found.without([each.name for each in found.reparameterizations if frozen.intersection(each.names)])
    assert sum(found.families.values()) == sum(row["found"].values())
    assert verify_symmetries(subject.model, subject.batch, found).failed == {}
