"""Appendix G: relative flatness against its definition, and the command on a small zoo. The norm: tests/geometry."""

from __future__ import annotations

import copy
from pathlib import Path

import pandas as pd
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from studies.__main__ import study
from studies.appendix_g import relative_flatness
from tests.nets.classifiers import Batch, Classifier, moved
from tests.nets.net import shaken
from tests.nets.zoos import write_spec, write_zoo


@pytest.fixture
def model() -> Classifier:
    torch.manual_seed(0)
    return shaken(Classifier().double(), 0.5)


@pytest.fixture
def batch() -> Batch:
    return torch.randn(4, 3, 4, dtype=torch.float64), torch.tensor([0, 2, 1, 2])


@pytest.mark.parametrize("second", [2, -100], ids=["labelled", "ignored"])
def test_relative_flatness_is_its_definition(model: Classifier, batch: Batch, second: int) -> None:
    x, labels = batch[0], torch.tensor([0, second, 1, 2])
    phi = model.attention(x, x, x)[0].mean(1).detach()
    w, b = model.head.weight.detach(), model.head.bias.detach()
    hessian = torch.func.hessian(lambda w: nn.functional.cross_entropy(phi @ w.mT + b, labels))(w)
    definition = torch.einsum("sk, tk, sjtj ->", w, w, hessian)
    assert relative_flatness(model, (x, labels), "head") == pytest.approx(float(definition), rel=1e-10)


def test_relative_flatness_of_a_head_is_invariant_under_attention_and_under_its_own_scaling(
    model: Classifier, batch: Batch
) -> None:
    here = relative_flatness(model, batch, "head")
    assert here > 0.01
    assert relative_flatness(moved(model, batch[0], 1.0, seed=5), batch, "head") == pytest.approx(here, rel=1e-10)
    scaled = copy.deepcopy(model)
    with torch.no_grad():
        scaled.head.weight.mul_(4)
        for w in scaled.attention.out_proj.parameters():
            w.div_(4)
    assert relative_flatness(scaled, batch, "head") == pytest.approx(here)


@pytest.mark.parametrize(
    ("layer", "word"),
    [
        ("attention", "must name an nn.Linear"),
        ("unused", "Found 0 calls"),
        ("early", "mean cross-entropy of the output"),
    ],
)
def test_other_layers_are_refused(model: Classifier, batch: Batch, layer: str, word: str) -> None:
    model.unused, model.early = nn.Linear(4, 3).double(), nn.Linear(4, 4).double()
    model.attention.register_forward_pre_hook(lambda module, inputs: (model.early(inputs[0]), *inputs[1:]))
    with pytest.raises(ValueError, match=word):
        relative_flatness(model, batch, layer)
    assert not model.head._forward_hooks


def test_the_command_measures_a_zoo_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    zoo, out = write_zoo(tmp_path, models=2), tmp_path / "out"
    write_spec(zoo, "measure: gradient-norm, geometry: inv")
    arguments = ["appendix-g", "--zoo", str(zoo), "--out", str(out), "--radius", "0.1", "--steps", "2", "--quiet"]
    CliRunner().invoke(study, arguments, catch_exceptions=False)
    text = (out / "appendix_g.csv").read_text()
    rows = pd.read_csv(out / "appendix_g.csv", dtype={"checkpoint": str})
    assert list(rows["checkpoint"]) == ["m_0", "m_1"]
    assert (rows[["inv, adaptive norm", "mix, adaptive norm", "relative flatness"]] > 0).all(axis=None)
    (out / "appendix_g.csv").write_text("".join(text.splitlines(keepends=True)[:2]))  # as after the first model
    done = CliRunner().invoke(study, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert (out / "appendix_g.csv").read_text() == text
