"""Models and data from disk: what is there is read exactly, and what is wrong is said in one sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import PreTrainedTokenizerFast

from quotient_manifolds.load import LabelledText, example_inputs, load_model, read_text_labels, tokenised_batches
from quotient_manifolds.load.tokens import OFFSET_POSITIONS
from tests import hugging_face

MAKERS = [hugging_face.bert_classifier, hugging_face.vit_classifier, hugging_face.clip, hugging_face.gpt2]


def one_sentence(message: str) -> bool:
    return "\n" not in message.strip() and "Traceback" not in message and len(message) > 20


@pytest.mark.parametrize("make", MAKERS)
def test_model_is_read_exactly_and_takes_its_example_inputs(make: Callable[[Path], Path], tmp_path: Path) -> None:
    model = load_model(make(tmp_path))
    loaded = list(model.state_dict().values())  # by value: some names change between the file and the module
    for name, stored in load_file(tmp_path / "model.safetensors").items():
        assert any(torch.equal(stored, value) for value in loaded), name
    assert type(model).__name__ == json.loads((tmp_path / "config.json").read_text())["architectures"][0]
    assert not model.training
    inputs = example_inputs(model, seed=3)
    with torch.no_grad():
        output = model(**inputs)
    logits = output["logits_per_image"] if "logits_per_image" in output else output["logits"]
    assert torch.isfinite(logits).all()
    again, other = example_inputs(model, seed=3), example_inputs(model, seed=4)
    assert all(torch.equal(inputs[name], again[name]) for name in inputs)
    assert any(not torch.equal(inputs[name], other[name]) for name in inputs)


def test_clip_gets_text_and_pictures(tmp_path: Path) -> None:
    assert set(example_inputs(load_model(hugging_face.clip(tmp_path)))) == {
        "input_ids",
        "attention_mask",
        "pixel_values",
    }


def test_example_text_has_padding_in_the_last_row_only(tmp_path: Path) -> None:
    inputs = example_inputs(load_model(hugging_face.bert_classifier(tmp_path)))
    assert torch.equal(inputs["input_ids"] == 0, inputs["attention_mask"] == 0)
    assert inputs["attention_mask"].sum(-1).tolist() == [16, 12]


def test_sharded_weights_are_read(tmp_path: Path) -> None:
    whole = load_model(hugging_face.bert_classifier(tmp_path / "whole")).state_dict()
    shards = hugging_face.bert_classifier(tmp_path / "shards", shard="10KB")
    assert len(list(shards.glob("*.safetensors"))) > 2
    assert all(torch.equal(whole[name], value) for name, value in load_model(shards).state_dict().items())


def test_function_of_a_module_in_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "zoo_of_mine.py").write_text(
        "import torch\ndef encoder():\n    return torch.nn.TransformerEncoderLayer(8, 2)\ndef number():\n    return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    model = load_model("zoo_of_mine:encoder")
    assert isinstance(model, nn.TransformerEncoderLayer)
    assert not model.training
    with pytest.raises(ValueError, match="returned an int"):
        load_model("zoo_of_mine:number")
    with pytest.raises(ValueError, match="no function 'decoder'"):
        load_model("zoo_of_mine:decoder")
    with pytest.raises(ValueError, match="Cannot import 'zoo_of_nobody'"):
        load_model("zoo_of_nobody:encoder")


def drop(directory: Path, name: str) -> None:
    (directory / name).unlink()


def rewrite_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def pickle_weights(directory: Path) -> None:
    torch.save(load_file(directory / "model.safetensors"), directory / "pytorch_model.bin")
    drop(directory, "model.safetensors")


def edit_config(directory: Path, **entries: object) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **entries}))


BROKEN = {
    "no config": (lambda d: drop(d, "config.json"), "no config.json"),
    "config is no JSON": (lambda d: (d / "config.json").write_text("{"), "not valid JSON"),
    "config is no object": (lambda d: (d / "config.json").write_text("[]"), "one JSON object"),
    "config names no model": (lambda d: (d / "config.json").write_text("{}"), "model_type"),
    "no weights": (lambda d: drop(d, "model.safetensors"), "no weights"),
    "pickle only": (pickle_weights, "safe_serialization=True"),
    "truncated weights": (lambda d: os.truncate(d / "model.safetensors", 100), "does not load"),
    "a parameter missing": (lambda d: rewrite_weights(d, lambda t: t.pop("classifier.bias")), "classifier.bias"),
    "a parameter of another shape": (
        lambda d: rewrite_weights(d, lambda t: t.update({"classifier.bias": torch.zeros(5)})),
        r"classifier.bias of shape \(5,\), but config.json describes one of \(2,\)",
    ),
    "unknown architecture": (lambda d: edit_config(d, architectures=["MyBert"]), "MyBert"),
}


@pytest.mark.parametrize(("spoil", "match"), BROKEN.values(), ids=list(BROKEN))
def test_broken_directory_is_refused_in_one_sentence(
    spoil: Callable[[Path], object], match: str, tmp_path: Path
) -> None:
    hugging_face.bert_classifier(tmp_path)
    spoil(tmp_path)
    with pytest.raises(ValueError, match=match) as caught:
        load_model(tmp_path)
    assert one_sentence(str(caught.value)), str(caught.value)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    hugging_face.bert_classifier(tmp_path, shard="10KB")
    shard = min(tmp_path.glob("model-*.safetensors"))
    shard.unlink()
    with pytest.raises(ValueError, match=shard.name):
        load_model(tmp_path)


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No model at"):
        load_model(tmp_path / "nowhere")


def test_no_example_inputs_without_a_configuration() -> None:
    with pytest.raises(ValueError, match="No example inputs can be made for Linear"):
        example_inputs(nn.Linear(2, 2))


def test_absent_transformers_names_the_extra(tmp_path: Path) -> None:
    hugging_face.bert_classifier(tmp_path)
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        f"from quotient_manifolds.load import load_model; load_model({str(tmp_path)!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip().splitlines()[-1].endswith('pip install "quotient-manifolds[transformers]".')


# ---- labelled text


def test_jsonl_and_csv_agree(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a good film", "label": 1}\n\n{"text": "bad, bad", "label": 0}\n')
    (tmp_path / "a.csv").write_text('\ufefflabel,text,id\n1,a good film,7\n0,"bad, bad",8\n', encoding="utf-8")
    expected = [LabelledText("a good film", None, 1), LabelledText("bad, bad", None, 0)]
    assert read_text_labels(tmp_path / "a.jsonl") == expected
    assert read_text_labels(tmp_path / "a.csv", num_labels=2) == expected


def test_pairs(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "good", "text_pair": "bad", "label": 0}\n')
    assert read_text_labels(tmp_path / "a.jsonl") == [LabelledText("good", "bad", 0)]


GOOD = '{"text": "good", "label": 1}\n'
BAD_DATA = {
    "empty": ("a.jsonl", "", "is empty"),
    "blank": ("a.jsonl", "\n \n", "is empty"),
    "header only": ("a.csv", "text,label\n", "is empty"),
    "no JSON": ("a.jsonl", GOOD + "good\n", "line 2: not valid JSON"),
    "no object": ("a.jsonl", GOOD + "[1]\n", "line 2: expected an object"),
    "no label": ("a.jsonl", GOOD + '\n{"text": "good"}\n', "line 3: no 'label'"),
    "no text": ("a.csv", "words,label\ngood,1\n", "line 2: no 'text'"),
    "short row": ("a.csv", "text,label\ngood,1\nbad\n", "line 3: no 'label'"),
    "long row": ("a.csv", "text,label\ngood,1\nbad, bad,0\n", "line 3: more fields than columns"),
    "text is a number": ("a.jsonl", '{"text": 3, "label": 1}\n', "line 1: text and text_pair must be strings"),
    "label is a word": ("a.csv", "text,label\ngood,1\nbad,no\n", "line 3: the label must be an integer, found 'no'"),
    "label is a string": ("a.jsonl", '{"text": "good", "label": "1"}\n', "line 1: the label must be an integer"),
    "label is a truth value": ("a.jsonl", '{"text": "good", "label": true}\n', "line 1: the label must be an integer"),
    "label too large": ("a.jsonl", GOOD + '{"text": "bad", "label": 2}\n', r"line 2: .* 0 \.\.\. 1, .* found 2"),
    "label negative": ("a.csv", "text,label\ngood,-1\n", "line 2: .* found -1"),
    "another kind of file": ("a.parquet", "", ".jsonl, .csv or .tsv"),
}


@pytest.mark.parametrize(("name", "content", "match"), BAD_DATA.values(), ids=list(BAD_DATA))
def test_bad_data_is_refused_in_one_sentence(name: str, content: str, match: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=match) as caught:
        read_text_labels(tmp_path / name, num_labels=2)
    assert one_sentence(str(caught.value)), str(caught.value)


def test_absent_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no data file"):
        read_text_labels(tmp_path / "a.csv")
    (tmp_path / "a.csv").write_bytes(b"text,label\n\xff\xfe,1\n")
    with pytest.raises(ValueError, match="UTF-8"):
        read_text_labels(tmp_path / "a.csv")


def test_batches_hold_every_example_once_in_order(tmp_path: Path) -> None:
    hugging_face.bert_classifier(tmp_path)
    texts = ["good", "very bad film", "a film", "not very good", "bad"]
    examples = [LabelledText(text, None, i % 2) for i, text in enumerate(texts)]
    batches = tokenised_batches(tmp_path, examples, batch_size=2)
    assert [len(batch["labels"]) for batch in batches] == [2, 2, 1]
    assert torch.cat([batch["labels"] for batch in batches]).tolist() == [0, 1, 0, 1, 0]
    vocabulary = hugging_face.VOCABULARY
    rows = [row[row != 0].tolist() for batch in batches for row in batch["input_ids"]]
    assert [" ".join(vocabulary[i] for i in row[1:-1]) for row in rows] == texts
    with torch.no_grad():
        assert load_model(tmp_path)(**batches[0]).loss.isfinite()


def test_batches_cut_long_texts_and_mark_pairs(tmp_path: Path) -> None:
    hugging_face.bert_classifier(tmp_path)
    (batch,) = tokenised_batches(tmp_path, [LabelledText("good " * 50, None, 0)], max_length=8)
    assert batch["input_ids"].shape == (1, 8)
    (batch,) = tokenised_batches(tmp_path, [LabelledText("good", "bad", 0)])
    assert batch["token_type_ids"].tolist() == [[0, 0, 0, 1, 1]]


def save_tokenizer(directory: Path, tokens: list[str]) -> None:
    model = WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0])
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), unk_token=tokens[0]).save_pretrained(directory)


def test_batches_refuse_what_they_cannot_do(tmp_path: Path) -> None:
    good, pair = LabelledText("good", None, 0), LabelledText("good", "bad", 0)
    hugging_face.gpt2(tmp_path)
    with pytest.raises(ValueError, match="no tokenizer"):
        tokenised_batches(tmp_path, [good])
    save_tokenizer(tmp_path, ["?", "good"])
    with pytest.raises(ValueError, match="no padding token; use batches of size 1"):
        tokenised_batches(tmp_path, [good])
    (batch,) = tokenised_batches(tmp_path, [good], batch_size=1)
    assert batch["input_ids"].tolist() == [[1]]
    save_tokenizer(tmp_path, [str(i) for i in range(50)] + ["good"])
    with pytest.raises(ValueError, match="gives token 50, but the model knows 40"):
        tokenised_batches(tmp_path, [good], batch_size=1)
    hugging_face.bert_classifier(tmp_path)
    with pytest.raises(ValueError, match="all of them one, or none"):
        tokenised_batches(tmp_path, [good, pair])
    with pytest.raises(ValueError, match="at least 1"):
        tokenised_batches(tmp_path, [good], batch_size=0)
    with pytest.raises(ValueError, match=r"max_length must lie in 3 \.\.\. 64, .* found 65"):
        tokenised_batches(tmp_path, [good], max_length=65)


# ---- what a tokenizer knows, and where the table of positions ends


def write_vocabulary(directory: Path, words: list[str]) -> None:
    (directory / "tokenizer.json").unlink(missing_ok=True)
    (directory / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]) + "\n")


def test_a_vocabulary_of_another_model_is_refused(tmp_path: Path) -> None:
    hugging_face.bert_classifier(tmp_path)
    texts = ["good film", "very bad", "a film"]
    examples = [LabelledText(text, None, 0) for text in texts]
    assert tokenised_batches(tmp_path, examples).notes == []
    for words in ([], ["xx", "yy"], ["".join(reversed(word)) + "x" for word in hugging_face.VOCABULARY[5:]]):
        write_vocabulary(tmp_path, words)
        with pytest.raises(ValueError, match=r"100% of the tokens are unknown to the tokenizer") as caught:
            tokenised_batches(tmp_path, examples)
        assert one_sentence(str(caught.value))
    (tmp_path / "vocab.txt").write_text("")
    with pytest.raises(ValueError, match="The tokenizer in"):
        tokenised_batches(tmp_path, examples)
    write_vocabulary(tmp_path, hugging_face.VOCABULARY[5:])
    honest = [LabelledText("a good film", None, 0), LabelledText("a good qwerty", None, 0)]
    assert tokenised_batches(tmp_path, honest).notes == ["17% of the tokens are unknown to the tokenizer."]


def test_texts_that_are_cut_are_counted(tmp_path: Path) -> None:
    hugging_face.bert_classifier(tmp_path)
    examples = [LabelledText("good " * count, None, 0) for count in (5, 6, 7, 8, 9, 200)]
    for batch_size in (1, 4, 32):
        batches = tokenised_batches(tmp_path, examples, batch_size=batch_size, max_length=9)
        assert (batches.truncated, batches.examples, batches.max_length) == (3, 6, 9)
        assert batches.notes == ["3 of 6 texts were cut at 9 tokens (max_length)."]
    assert tokenised_batches(tmp_path, examples).max_length == 64  # the model's positions
    assert tokenised_batches(tmp_path, examples[:3]).truncated == 0


def test_empty_texts(tmp_path: Path) -> None:
    hugging_face.bert_classifier(tmp_path)
    (batch,) = tokenised_batches(tmp_path, [LabelledText("", None, 0), LabelledText("good", None, 1)])
    assert batch["attention_mask"].sum(1).tolist() == [2, 3]
    save_tokenizer(tmp_path, ["?", "good"])  # adds no tokens of its own
    with pytest.raises(ValueError, match=r"example 1: the text '' has no tokens"):
        tokenised_batches(tmp_path, [LabelledText("good", None, 0), LabelledText("", None, 0)], batch_size=1)


def test_pairs_for_a_model_with_one_type_of_tokens(tmp_path: Path) -> None:
    hugging_face.bert_classifier(tmp_path)
    edit_config(tmp_path, type_vocab_size=1)
    rewrite_weights(
        tmp_path,
        lambda t: t.update({name: t[name][:1].clone() for name in t if "token_type_embeddings" in name}),
    )
    (batch,) = tokenised_batches(tmp_path, [LabelledText("good", "bad", 0)])
    with torch.no_grad():
        assert load_model(tmp_path)(**batch).loss.isfinite()


def test_the_end_of_the_table_of_positions(tmp_path: Path) -> None:
    """RoBERTa's begins after the padding token: of 12 places with padding token 1, 10 are used."""
    torch.manual_seed(0)
    config = transformers.RobertaConfig(
        vocab_size=len(hugging_face.VOCABULARY),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=12,
        pad_token_id=1,
        num_labels=2,
    )
    transformers.RobertaForSequenceClassification(config).save_pretrained(tmp_path)
    vocabulary = {token: i for i, token in enumerate(hugging_face.VOCABULARY)}
    transformers.BertTokenizerFast(vocab=vocabulary).save_pretrained(tmp_path)
    model, long = load_model(tmp_path), [LabelledText("good " * 50, None, 0)]
    (batch,) = tokenised_batches(tmp_path, long)
    assert batch["input_ids"].shape == (1, 10)
    del batch["token_type_ids"]
    with torch.no_grad():
        assert model(**batch).loss.isfinite()
    with pytest.raises(ValueError, match=r"max_length must lie in 3 \.\.\. 10, .* found 11"):
        tokenised_batches(tmp_path, long, max_length=11)


@pytest.mark.parametrize("model_type", sorted(OFFSET_POSITIONS))
def test_types_whose_table_of_positions_begins_after_the_padding_token(model_type: str) -> None:
    config = transformers.AutoConfig.for_model(model_type)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    tables = [
        module
        for module in model.modules()
        if hasattr(module, "padding_idx") and len(getattr(module, "weight", ())) == config.max_position_embeddings
    ]
    assert any(table.padding_idx == config.pad_token_id for table in tables)
