"""What symmetries are called: by what is done to the channels on which they act, in words of the field."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quotient_manifolds.symmetries import example_inputs, find_symmetries, propose_symmetries, verify_symmetries
from quotient_manifolds.symmetries.names import meaning
from studies.common import load
from studies.invariance import Subject
from tests.nets.model_types import build
from tests.nets.net import D


def test_a_language_model_has_residual_rotations() -> None:
    found = find_symmetries(model := build("llama", model_class="LlamaForCausalLM"), example_inputs(model))
    assert [each.group for each in found.reparameterizations if each.kind == "residual rotation"] == ["SO(32)"]


def test_printed_symmetries_begin_with_a_summary() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, D)).eval()
    first, *lines = str(find_symmetries(model, torch.randn(4, 5))).splitlines()
    assert first == "symmetries of 10 dimensions: relu neuron 10"
    assert "relu neuron     GL+(1)^4  6 x 1  6 x 1  3" in lines
    assert ["2.bias", "relu", "neuron", "GL+(1)^6"] in [line.split() for line in lines]
    assert "  2 relu neuron: parameter '2.weight' is shared with 'relu neuron' (see the reparameterizations)" in lines


def test_every_family_of_the_record_has_a_meaning() -> None:
    families = {name for row in load("fibres")["rows"] for name in row["found"]}
    assert len(families) > 15
    assert [name for name in families if not meaning(name)] == []
    assert meaning("query/key norm gain") == meaning("norm gain")
    assert meaning("one of the user's own") == ""


PAIRS = ("query/key", "value/output", "lora B/A", "bottleneck in/out", "relu neuron", "gated neuron")
OTHER = {
    "convbert": "of a change of basis that 41 channels share, 3e-11 is rounding, which verification does not expect",
    "gte": "one of its planes is found as a change of basis, at the weights of the record",
}
"""Models of which other pairs are found than the record has, or one that cannot be verified, and why."""


def _case(row: dict[str, Any]) -> Any:
    marks = [pytest.mark.xfail(strict=True, reason=OTHER[row["name"]])] if row["name"] in OTHER else []
    return pytest.param(row, id=row["name"], marks=marks)


@pytest.mark.parametrize("row", [_case(row) for row in load("fibres")["rows"]])
def test_the_symmetries_of_the_record_are_found_and_verified(row: dict[str, Any]) -> None:
    """Pairs as recorded, and no more than the fibre has; translations are told apart in other ways than there."""
    subject = Subject.of(row["name"])
    frozen = {name for name, w in subject.model.named_parameters() if not w.requires_grad}
    found = propose_symmetries(subject.model, subject.batch)
    found = found.without([each.name for each in found.reparameterizations if frozen.intersection(each.names)])
    kept, recorded = found.families, row["found"]
    assert {kind: kept.get(kind) for kind in PAIRS} == {kind: recorded.get(kind) for kind in PAIRS}
    assert sum(kept.values()) <= row["dimension"]
    assert verify_symmetries(subject.model, subject.batch, found).failed == {}
