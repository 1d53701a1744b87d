"""Symmetries that a user's function declares: read by name, checked against the model, refused in one sentence."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from quotient_manifolds.load import load_symmetries
from quotient_manifolds.symmetries import find_symmetries

FUNCTIONS = """
from dataclasses import replace
from torch import nn
from quotient_manifolds.symmetries import Symmetries, bottleneck, find_symmetries

def declared(model):
    return find_symmetries(model, layouts=(), matchers=(bottleneck,))

def of_another_model(model):
    return declared(nn.ModuleDict({"other": model}))

def of_another_shape(model):
    return declared(nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 5)))

def pairs_alone(model):
    return declared(model).pairs

def raising(model):
    raise RuntimeError("no such layer")

def without_arguments():
    return Symmetries(())
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_symmetries.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delitem(sys.modules, "my_symmetries", raising=False)
    return "my_symmetries"


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 5))


def test_what_a_function_declares_is_returned(module: str) -> None:
    found = load_symmetries(f"{module}:declared", model())
    assert [(pair.name, pair.group) for pair in found.pairs] == [("1 bottleneck in/out", "GL(3)^1")]
    assert find_symmetries(model()).pairs == ()


@pytest.mark.parametrize(
    ("function", "match"),
    [
        ("of_another_model", "parameter 'other.0.weight', which Sequential does not have"),
        ("of_another_shape", "does not fit Sequential: "),
        ("pairs_alone", "must return quotient_manifolds.Symmetries.* of type tuple"),
        ("raising", "called with a Sequential and raised RuntimeError: no such layer"),
        ("without_arguments", "called with a Sequential and raised TypeError"),
        ("absent", "has no function 'absent'"),
    ],
)
def test_what_does_not_fit_is_one_sentence(module: str, function: str, match: str) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        load_symmetries(f"{module}:{function}", model())
    assert "\n" not in str(caught.value)
