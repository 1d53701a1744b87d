"""Commands that choose a point of a model's orbit: descend and align."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import quotient_manifolds as qm
from tests.command_line import call, refused

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two Llamas: A, and B, which is A elsewhere on its orbit."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder / "A")
    found = qm.find_symmetries(model, {"input_ids": IDS})
    found.transformed(model, seed=1, log_scale=0.3).save_pretrained(folder / "B")
    (folder / "text.txt").write_text("irrelevant")
    return folder


def logits(path: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(path)(IDS).logits


@pytest.mark.parametrize("purpose", ["int4", "sparsity"])
def test_descend_writes_the_same_function_with_a_lower_objective(models: Path, tmp_path: Path, purpose: str) -> None:
    out = tmp_path / "out"
    done = call("descend", models / "A", "--for", purpose, "--steps", 30, "--out", out)
    assert done.exit_code == 0, done.output
    assert "the objective" in done.stdout
    torch.testing.assert_close(logits(out), logits(models / "A"), atol=1e-4, rtol=1e-4)
    record = json.loads((out / "orbit.json").read_text())
    assert record["objective"]["after"] < record["objective"]["before"]
    assert record["change"] < 1e-5


def test_align_finds_the_other_point_of_one_orbit(models: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = call("align", models / "A", models / "B", "--out", out)
    assert done.exit_code == 0, done.output
    record = json.loads((out / "orbit.json").read_text())
    assert record["distance"]["before"] > 0.1
    assert record["distance"]["after"] < 1e-5
    torch.testing.assert_close(logits(out), logits(models / "A"), atol=1e-4, rtol=1e-4)


def test_align_goes_on_along_the_path(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    words = "[{'input_ids': torch.arange(16).view(2, 8), 'labels': torch.arange(16).view(2, 8)}]"
    (tmp_path / "text_of_mine.py").write_text(f"import torch\n\n\ndef batches():\n    return {words}\n")
    given = ("--data", "text_of_mine:batches", "--task", "causal", "--refine", 2, "--out", "out")
    done = call("align", models / "A", models / "B", *given)
    assert done.exit_code == 0, done.output
    record = json.loads(Path("out/orbit.json").read_text())
    before, after = (max(losses) - min(losses) for losses in (record["path"]["before"], record["path"]["after"]))
    assert after < 1e-6 < before


def test_align_reads_no_more_examples_than_asked_for(bert: Path, texts: Path, tmp_path: Path) -> None:
    texts.write_text("".join(texts.read_text().splitlines(keepends=True)[:2]) + "no JSON\n")
    given = ("align", bert, bert, "--data", texts, "--out", tmp_path / "out")
    done = call(*given, "--examples", 2)
    assert done.exit_code == 0, done.output
    refused(call(*given[:-1], tmp_path / "other"), "line 3: not valid JSON")
