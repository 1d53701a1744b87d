"""The command that moves a model along its orbit: quotient measures stay, the adaptive one goes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

from quotient_manifolds import SharpnessRecord
from quotient_manifolds.cli.app import cli
from quotient_manifolds.cli.batches import distance, distance_batch, first_output
from tests import hugging_face


def call(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def test_rows_for_every_precision_measure_and_scale(tmp_path: Path) -> None:
    model = hugging_face.bert_classifier(tmp_path / "bert")
    before = {file.name: file.read_bytes() for file in model.iterdir()}
    out = tmp_path / "orbit.json"
    result = call("orbit", model, "--steps", 2, "--scale", 0.1, "--scale", 10, "--out", out)
    assert result.exit_code == 0, result.output
    assert "a = 0.1" in result.output
    found = SharpnessRecord.load(out)
    assert len(found) == 2 * 3 * 3
    frame = found.frame()
    assert frame["scale"].isna().sum() == 2 * 3
    before_move = {(row.dtype, row.geometry): row.mean for row in frame[frame["scale"].isna()].itertuples()}
    for row in frame.itertuples():
        assert row.ratio == row.mean / before_move[row.dtype, row.geometry]
    ratios = {(row.dtype, row.geometry, row.scale): row.ratio for row in frame[frame["scale"].notna()].itertuples()}
    for (dtype, geometry, _), value in ratios.items():
        if geometry != "adaptive":
            assert value == pytest.approx(1, abs=1e-6 if dtype == "float64" else 2e-2)
    assert all(abs(value - 1) > 1e-3 for (_, geometry, _), value in ratios.items() if geometry == "adaptive")
    assert {file.name: file.read_bytes() for file in model.iterdir()} == before


def test_what_cannot_be_moved(tmp_path: Path) -> None:
    result = call("orbit", "torch.nn:ReLU")
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    result = call("orbit", hugging_face.bert_classifier(tmp_path / "bert"), "--radius", -1)
    assert result.exit_code == 2
    assert "radius" in result.output.lower()


def test_the_distance_loss_is_that_of_the_first_output() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"ids": torch.zeros(2, dtype=torch.long), "out": 2 * x}

    inputs, targets = distance_batch(Two(), {"x": torch.ones(3)}, seed=0)
    assert targets.shape == (3,)
    assert float(distance(Two(), (inputs, targets))) == pytest.approx(float(((2 - targets) ** 2).mean()))
    with pytest.raises(TypeError, match="should return a floating-point tensor"):
        first_output((torch.zeros(2, dtype=torch.long),))
