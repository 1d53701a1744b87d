"""Text for language models: what they see and what they have to tell, and the loss that Hugging Face has for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from torch import nn

from quotient_manifolds.cli.record import SharpnessRecord
from quotient_manifolds.compare import Comparison
from quotient_manifolds.load import DataSource, load_model
from quotient_manifolds.load.huggingface import load_tokenizer
from quotient_manifolds.sharpness import cross_entropy, next_token_cross_entropy, worst_case_sharpness
from tests import hugging_face
from tests.command_line import call as invoke
from tests.refusals import one_sentence

WORDS = hugging_face.VOCABULARY[5:]
LINES = [" ".join(WORDS[(row + place) % 6] for place in range(1 + row % 7)) for row in range(11)]


def with_tokenizer(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    vocabulary = {token: i for i, token in enumerate(hugging_face.VOCABULARY)}
    transformers.BertTokenizerFast(vocab=vocabulary).save_pretrained(folder)
    return folder


@pytest.fixture
def causal(tmp_path: Path) -> Path:
    return with_tokenizer(load_model(hugging_face.gpt2(tmp_path / "made")), tmp_path / "causal")


@pytest.fixture
def masked(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.BertConfig(vocab_size=11, max_position_embeddings=64, **sizes)
    return with_tokenizer(transformers.BertForMaskedLM(config), tmp_path / "masked")


@pytest.fixture
def seq2seq(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=11, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0, pad_token_id=0
    )
    return with_tokenizer(transformers.T5ForConditionalGeneration(config), tmp_path / "seq2seq")


def plain(folder: Path) -> Path:
    (folder / "text.txt").write_text("\n".join(LINES) + "\n")
    return folder / "text.txt"


def rows(folder: Path, **more: str) -> Path:
    lines = [json.dumps({"text": text, **dict.fromkeys(more, LINES[row - 1])}) for row, text in enumerate(LINES)]
    (folder / "text.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder / "text.jsonl"


def own_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss that Hugging Face computes from labels."""
    given = {name: value for name, value in batch.items() if name != "decoder_input_ids"}
    with torch.no_grad():
        return torch.as_tensor(model(**given).loss)


def test_a_causal_model_reads_blocks_one_behind_the_other(causal: Path, tmp_path: Path) -> None:
    model, file = load_model(causal), plain(tmp_path)
    found = DataSource(file, task="causal", max_length=8, batch_size=2).batches(model)
    tokens = load_tokenizer(causal)(file.read_text())["input_ids"]
    blocks = [tokens[start : start + 8] for start in range(0, len(tokens), 8)]
    seen = [
        row[mask.bool()].tolist()
        for batch in found
        for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    assert seen == blocks
    assert found.examples == len(blocks)
    for batch in found:
        assert torch.equal(batch["labels"] == -100, batch["attention_mask"] == 0)
        assert torch.allclose(next_token_cross_entropy(model, batch), own_loss(model, batch))
    few = DataSource(file, task="causal", max_length=8, batch_size=2, max_batches=1).batches(model)
    assert [len(batch["labels"]) for batch in few] == [2]
    drawn = DataSource(file, task="causal", max_length=8, batch_size=2, max_examples=3, seed=1).batches(model)
    assert [row.tolist() for batch in drawn for row in batch["input_ids"]] != seen[:3]


def test_a_long_text_is_read_as_far_as_it_is_wanted(causal: Path, tmp_path: Path) -> None:
    model, file = load_model(causal), tmp_path / "long.txt"
    file.write_text("a very good film not bad\n" * 400)
    settings: Any = {"task": "causal", "max_length": 8, "batch_size": 2}
    whole = DataSource(file, **settings).batches(model)
    few = DataSource(file, **settings, max_batches=3).batches(model)
    assert len(few) == 3
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(few, whole, strict=False))


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
    assert found.notes == [f"{found.truncated} of 11 texts were cut at 5 tokens (max_length)."]
    for batch in found:
        assert torch.allclose(next_token_cross_entropy(model, batch), own_loss(model, batch))


def test_a_masked_model_tells_what_it_does_not_see(masked: Path, tmp_path: Path) -> None:
    model, tokenizer = load_model(masked), load_tokenizer(masked)
    for file in (plain(tmp_path), rows(tmp_path)):
        source = DataSource(file, task="masked", batch_size=4)
        found, again = source.batches(model), source.batches(model)
        texts = [tokenizer(text)["input_ids"] for text in LINES]
        place = 0
        for batch, same in zip(found, again, strict=True):
            assert torch.equal(batch["labels"], same["labels"])
            told = batch["labels"] != -100
            assert torch.equal(told, batch["input_ids"] == tokenizer.mask_token_id)
            assert bool(told.any(1).all())
            whole = torch.where(told, batch["labels"], batch["input_ids"])
            for row, mask in zip(whole, batch["attention_mask"], strict=True):
                assert row[mask.bool()].tolist() == texts[place]
                place += 1
            assert not bool(torch.isin(batch["labels"], torch.tensor(tokenizer.all_special_ids)).any())
            assert torch.allclose(cross_entropy(model, batch), own_loss(model, batch))
        assert place == 11


def test_texts_are_cut_as_the_tokenizer_cuts_them(masked: Path, tmp_path: Path) -> None:
    """With the special token at the end, which the model expects there."""
    model, tokenizer = load_model(masked), load_tokenizer(masked)
    source = DataSource(rows(tmp_path), task="masked", max_length=4, batch_size=3, seed=1, max_examples=6)
    found = source.batches(model)
    last = [row[mask.bool()][-1] for b in found for row, mask in zip(b["input_ids"], b["attention_mask"], strict=True)]
    assert set(map(int, last)) == {tokenizer.sep_token_id}
    assert found.truncated <= found.examples == 6


def test_what_has_nothing_to_tell_is_refused(masked: Path, seq2seq: Path, tmp_path: Path) -> None:
    file = tmp_path / "odd.jsonl"
    file.write_text('{"text": "zzz", "text_pair": "good"}\n')
    with pytest.raises(ValueError, match="needs a word that its tokenizer knows"):
        DataSource(file, task="masked").batches(load_model(masked))
    config = transformers.RobertaConfig(vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    sees_ahead = transformers.RobertaForCausalLM(config).eval()
    with pytest.raises(ValueError, match="sees the tokens it has to tell"):
        DataSource(plain(tmp_path), task="causal", tokenizer=masked).batches(sees_ahead)


def test_examples_are_counted_that_have_something_to_tell(causal: Path, tmp_path: Path) -> None:
    """A text of one token gives a causal model nothing to tell; as many of the others are read as are wanted."""
    file, model = tmp_path / "short.jsonl", load_model(causal)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, "good"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "words")
    lines = ["", *["good"] * 9, "good bad", "good", "very good film", "a film", "good", "not good"]
    file.write_text("".join(f"{json.dumps({'text': line})}\n" for line in lines))
    told = [[WORDS.index(word) for word in line.split()] for line in lines if " " in line]
    for wanted in range(1, len(told) + 3):
        found = DataSource(file, task="causal", max_examples=wanted, tokenizer=tmp_path / "words").batches(model)
        assert found.examples == min(wanted, len(told))
        seen = [
            row[mask.bool()].tolist()
            for batch in found
            for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        ]
        assert seen == told[:wanted]
    file.write_text("".join(f"{json.dumps({'text': line})}\n" for line in lines) + "no json\n")
    source = {"task": "causal", "tokenizer": tmp_path / "words"}
    for wanted in range(1, len(told) + 1):  # and nothing behind them
        assert DataSource(file, max_examples=wanted, **source).batches(model).examples == wanted
    for wanted in (len(told) + 1, None):
        with pytest.raises(ValueError, match=f"line {len(lines) + 1}: not valid JSON"):
            DataSource(file, max_examples=wanted, **source).batches(model)


def test_a_sequence_model_tells_the_second_text(seq2seq: Path, tmp_path: Path) -> None:
    model = load_model(seq2seq)
    for batch in DataSource(rows(tmp_path, text_pair=""), task="seq2seq", batch_size=4).batches(model):
        assert torch.allclose(cross_entropy(model, batch), own_loss(model, batch))
        assert torch.equal(batch["decoder_input_ids"][:, 1:], batch["labels"][:, :-1].clamp_min(0))


def test_bad_input_is_one_sentence(causal: Path, masked: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no labels: give a task") as found:
        DataSource(plain(tmp_path))
    one_sentence(str(found.value))
    with pytest.raises(ValueError, match="labels mean nothing for the task causal"):
        DataSource(plain(tmp_path), task="causal", labels=[1, 0])
    with pytest.raises(ValueError, match="task must be one of"):
        DataSource(plain(tmp_path), task="speech")
    with pytest.raises(ValueError, match="task means nothing for data of the format npz"):
        DataSource("data.npz", task="causal")
    with pytest.raises(ValueError, match="needs a model whose class ends in ForCausalLM, found BertForMaskedLM"):
        DataSource(plain(tmp_path), task="causal").batches(load_model(masked))
    with pytest.raises(ValueError, match="line 1: 'text_pair' must be a text"):
        DataSource(rows(tmp_path), task="seq2seq").check()
    for task in ("causal", "masked"):
        with pytest.raises(ValueError, match=r"columns mean nothing for a \.txt file") as found:
            DataSource(plain(tmp_path), task=task, columns={"text": "body"})
        one_sentence(str(found.value))
    with pytest.raises(ValueError, match=r"text_pair from text: expected a \.jsonl, \.csv or \.tsv file") as found:
        DataSource(plain(tmp_path), task="seq2seq")
    one_sentence(str(found.value))
    with pytest.raises(ValueError, match="max_length must be at least 2 for the task causal"):
        DataSource(plain(tmp_path), task="causal", max_length=1)
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(ValueError, match="is empty: expected text"):
        DataSource(tmp_path / "empty.txt", task="causal").check()
    with pytest.raises(ValueError, match="is empty: expected lines with a text"):
        DataSource(tmp_path / "empty.txt", task="masked").check()


def test_a_zoo_of_causal_models_is_compared(causal: Path, tmp_path: Path) -> None:
    file, test = plain(tmp_path), rows(tmp_path)
    other = load_model(causal)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    other = with_tokenizer(other, tmp_path / "other")
    (tmp_path / "spec.yaml").write_text(
        "checkpoints: {paths: [causal, other]}\n"
        f"data: {{path: {file.name}, task: causal, max_length: 8, batch_size: 5}}\n"
        f"test: {{path: {test.name}, task: causal, max_length: 8, batch_size: 5}}\n"
        "measures: [{measure: worst-case, geometry: mix, radius: 0.05, steps: 2}]\n"
    )
    done = invoke("compare", tmp_path / "spec.yaml", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    found = Comparison.load(tmp_path / "out")
    for (_, row), folder in zip(found.frame().iterrows(), (causal, other), strict=True):
        model = load_model(folder)
        batches = list(DataSource(file, task="causal", max_length=8, batch_size=5).batches(model))
        own = worst_case_sharpness(model, next_token_cross_entropy, batches, geometry="mix", radius=0.05, steps=2)
        assert row[found.labels[0]] == pytest.approx(own.mean, rel=1e-4)
        counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
        losses = [float(own_loss(model, batch)) for batch in batches]
        loss = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
        assert row["loss"] == pytest.approx(loss, rel=1e-5)
        assert 0 < row["test_error"] <= 1


def test_the_command_line_measures_a_causal_model(causal: Path, tmp_path: Path) -> None:
    file, out = plain(tmp_path), tmp_path / "out.json"
    arguments = ["--task", "causal", "--max-length", 8, "--geometry", "mix:0.05", "--steps", 3, "--batch-size", 3]
    done = invoke("measure", causal, "--data", file, *arguments, "--out", out)
    assert done.exit_code == 0, done.output
    (measured,) = SharpnessRecord.load(out).results
    model = load_model(causal)
    batches = DataSource(file, task="causal", max_length=8, batch_size=3).batches(model)
    own = worst_case_sharpness(model, next_token_cross_entropy, list(batches), geometry="mix", radius=0.05, steps=3)
    assert measured.mean == pytest.approx(own.mean, rel=1e-4)
    refused = invoke("measure", causal, "--data", rows(tmp_path), "--geometry", "mix:0.05")
    assert refused.exit_code == 2
    assert "give --task causal" in refused.output
