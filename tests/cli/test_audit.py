"""The command `audit`: optimizers by name or by function, their drift in a table and in a file."""

from __future__ import annotations

import json
from pathlib import Path

from tests import hugging_face
from tests.command_line import call, refused


def test_drifts_are_shown_and_written(tmp_path: Path) -> None:
    bert, out = hugging_face.bert_classifier(tmp_path / "bert"), tmp_path / "audit.json"
    result = call("audit", bert, "--steps", 4, "--moves", 1, "--out", out)
    assert result.exit_code == 0, result.output
    assert "QuotientAdam" in result.output
    audits = json.loads(out.read_text())["audits"]
    assert audits["QuotientAdam"]["drifts"][0] < 1e-6 < 1e-3 < audits["AdamW"]["drifts"][0]


def test_an_optimizer_that_is_none_is_refused(tmp_path: Path) -> None:
    bert = hugging_face.bert_classifier(tmp_path / "bert")
    refused(call("audit", bert, "--optimizer", "Adamant"), "'Adamant'")
    refused(call("audit", bert, "--optimizer", "torch.nn:Nothing"), "no function 'Nothing'")
    refused(call("audit", "torch.nn:ReLU"), "has no parameters")
