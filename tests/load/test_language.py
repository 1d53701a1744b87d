"""Text for language models: what they see and what they have to tell, and the loss that Hugging Face has for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quotient_manifolds.load import DataSource, load_model
from quotient_manifolds.load.huggingface import load_tokenizer
from quotient_manifolds.sharpness import next_token_cross_entropy
from tests.nets import hugging_face
from tests.nets.hugging_face import causal_model

WORDS = hugging_face.VOCABULARY[5:]
LINES = [" ".join(WORDS[(row + place) % 6] for place in range(1 + row % 7)) for row in range(11)]


@pytest.fixture
def causal(tmp_path: Path) -> Path:
    return causal_model(tmp_path)


def plain(folder: Path) -> Path:
    (folder / "text.txt").write_text("\n".join(LINES) + "\n")
    return folder / "text.txt"


def rows(folder: Path, texts: list[str] = LINES) -> Path:
    lines = [json.dumps({"text": text}) for text in texts]
    (folder / "text.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder / "text.jsonl"


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss that Hugging Face computes from labels."""
    with torch.no_grad():
        return torch.as_tensor(model(**batch).loss)


def unpadded(batches: Any) -> list[list[int]]:
    pairs = ((row, mask) for batch in batches for row, mask in zip(*map(batch.get, KEYS), strict=True))
    return [row[mask.bool()].tolist() for row, mask in pairs]


KEYS = ("input_ids", "attention_mask")


def test_a_causal_model_reads_blocks_one_behind_the_other(causal: Path, tmp_path: Path) -> None:
    model, file = load_model(causal), plain(tmp_path)
    settings: Any = {"task": "causal", "max_length": 8, "batch_size": 2}
    found = DataSource(file, **settings).batches(model)
    tokens = load_tokenizer(causal)(file.read_text())["input_ids"]
    blocks = [tokens[start : start + 8] for start in range(0, len(tokens), 8)]
    assert unpadded(found) == blocks
    for batch in found:
        assert torch.equal(batch["labels"] == -100, batch["attention_mask"] == 0)
        assert torch.allclose(next_token_cross_entropy(model, batch), own_loss(model, batch))
    few = DataSource(file, **settings, max_batches=1).batches(model)
    assert unpadded(few) == blocks[:2]
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())  # which some editors put before UTF-8
    assert unpadded(DataSource(file, **settings).batches(model)) == blocks
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"text\.txt"):
        DataSource(file, **settings).batches(model)
    file = plain(tmp_path)
    drawn = unpadded(DataSource(file, **settings, max_examples=3, seed=1).batches(model))
    assert len(drawn) == 3
    assert drawn != blocks[:3]
    assert all(block in blocks for block in drawn)


def test_a_long_text_is_read_as_far_as_it_is_wanted(causal: Path, tmp_path: Path) -> None:
    model, file = load_model(causal), tmp_path / "long.txt"
    file.write_text("a very good film not bad\n" * 400)
    settings: Any = {"task": "causal", "max_length": 8, "batch_size": 2}
    whole = DataSource(file, **settings).batches(model)
    assert unpadded(DataSource(file, **settings, max_batches=3).batches(model)) == unpadded(whole)[:6]


def test_a_model_of_ones_own_gets_tokens_and_labels(causal: Path, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 11)).eval()
    source = DataSource(plain(tmp_path), task="causal", max_length=8, batch_size=2, tokenizer=causal)
    for inputs, labels in source.batches(model):
        assert inputs.shape == labels.shape
        assert float(next_token_cross_entropy(model, (inputs, labels)).detach()) > 0


def test_a_causal_model_reads_rows_cut_and_filled_up(causal: Path, tmp_path: Path) -> None:
    model = load_model(causal)
    found = DataSource(rows(tmp_path), task="causal", max_length=5, batch_size=4).batches(model)
    assert max(batch["input_ids"].shape[1] for batch in found) == 5
    long = sum(len(line.split()) + 2 > 5 for line in LINES)
    assert found.notes == [f"{long} of 11 texts were cut at 5 tokens (max_length)."]
    for batch in found:
        assert torch.allclose(next_token_cross_entropy(model, batch), own_loss(model, batch))


def test_the_model_must_be_a_causal_one(causal: Path, tmp_path: Path) -> None:
    source = DataSource(plain(tmp_path), task="causal", tokenizer=causal)
    with pytest.raises(ValueError, match=r"ends in ForCausalLM\. Found BertForSequenceClassification"):
        source.batches(load_model(hugging_face.bert_classifier(tmp_path / "bert")))
