"""Data sources: every row once, in order, as the model wants it, with the labels of its head."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

from quotient_manifolds.load import (
    Checkpoint,
    DataSource,
    load_model,
)
from quotient_manifolds.load.labelled_examples import Head
from quotient_manifolds.sharpness import cross_entropy
from tests import hugging_face
from tests.image_files import PLAIN, paint, pictures, write_npz
from tests.refusals import one_sentence


def write_examples(folder: Path, count: int) -> Path:
    words = hugging_face.VOCABULARY[5:]
    lines = [{"text": " ".join(words[: 1 + i % 6]), "label": i % 2} for i in range(count)]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "data.jsonl"


def test_first_rows_in_order_as_keywords_of_the_model(tmp_path: Path) -> None:
    model = load_model(hugging_face.bert_classifier(tmp_path / "model"))
    path = write_examples(tmp_path, 11)
    batches = DataSource(path, batch_size=4, max_batches=2).batches(model)
    assert [batch["labels"].tolist() for batch in batches] == [[0, 1, 0, 1], [0, 1, 0, 1]]
    lengths = torch.cat([batch["attention_mask"].sum(1) for batch in batches]) - 2
    assert lengths.tolist() == [1, 2, 3, 4, 5, 6, 1, 2]
    assert [len(batch["labels"]) for batch in DataSource(path, batch_size=4).batches(model)] == [4, 4, 3]
    assert [len(batch["labels"]) for batch in DataSource(path, batch_size=4, max_batches=9).batches(model)] == [4, 4, 3]
    with torch.no_grad():
        assert torch.equal(cross_entropy(model, batches[0]), model(**batches[0]).loss)
    (short,) = DataSource(path, max_length=4, batch_size=11).batches(model)
    assert short["input_ids"].shape == (11, 4)
    for most, sizes in ((1, [1]), (4, [4]), (6, [4, 2]), (99, [4, 4, 3])):
        found = DataSource(path, batch_size=4, max_examples=most).batches(model)
        assert [len(batch["labels"]) for batch in found] == sizes
    assert len(DataSource(path, batch_size=2, max_batches=2, max_examples=9, seed=1).batches(model)) == 2
    (path).write_text(path.read_text() + "no JSON\n")
    assert len(DataSource(path, batch_size=11, max_examples=11).batches(model)) == 1
    assert len(DataSource(path, batch_size=11, max_batches=1).batches(model)) == 1  # what is not wanted is not read
    with pytest.raises(ValueError, match="line 12: not valid JSON"):
        DataSource(path).batches(model)


def test_a_seed_draws_rows_without_putting_back(tmp_path: Path) -> None:
    model = load_model(hugging_face.bert_classifier(tmp_path / "model"))
    path = write_examples(tmp_path, 11)

    def ids(seed: int | None, batches: int | None = None) -> list[tuple[int, ...]]:
        source = DataSource(path, batch_size=3, max_batches=batches, seed=seed)
        return [
            (*row[mask.bool()].tolist(), label)
            for batch in source.batches(model)
            for row, mask, label in zip(
                batch["input_ids"], batch["attention_mask"], batch["labels"].tolist(), strict=True
            )
        ]

    assert sorted(ids(0)) == sorted(ids(None))
    assert ids(0) == ids(0)
    assert ids(0, 2) == ids(0)[:6]
    assert len({tuple(ids(seed)) for seed in (None, 0, 1)}) == 3


def test_tokenizer_of_the_model_of_the_checkpoint_or_another(tmp_path: Path) -> None:
    home = hugging_face.bert_classifier(tmp_path / "model")
    path = write_examples(tmp_path, 2)
    model = load_model(home)
    expected = DataSource(path).batches(model)[0]["input_ids"]
    bare = transformers.BertForSequenceClassification(model.config)
    bare.config.name_or_path = bare.name_or_path = ""
    with pytest.raises(ValueError, match="was not loaded from a directory, so there is no tokenizer"):
        DataSource(path).batches(bare)
    for batches in (
        DataSource(path).batches(bare, Checkpoint("model", home, "huggingface")),
        DataSource(path, tokenizer=home).batches(bare),
    ):
        assert torch.equal(batches[0]["input_ids"], expected)
    other = tmp_path / "other"
    (other).mkdir()
    (other / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh", "good"]))
    (other / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "model_max_length": 16}')
    with pytest.raises(ValueError, match="gives token 13, but the model knows 11 tokens only"):
        DataSource(path, tokenizer=other).batches(model)
    with pytest.raises(ValueError, match=r"max_length must lie in 3 \.\.\. 16, .* found 17"):
        DataSource(path, tokenizer=other, max_length=17).batches(model)
    with pytest.raises(ValueError, match="has no tokenizer"):
        DataSource(path, tokenizer=tmp_path).batches(model)


class Ids(nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        return tokens.float()


class Configured(Ids):
    """With a configuration, and yet a model of one tensor."""

    config = "small"


class Keywords(nn.Module):
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return (input_ids * attention_mask).float()


class PassesOn(nn.Module):
    """As wrappers of Hugging Face models do."""

    def __init__(self, config: object) -> None:
        super().__init__()
        self.config = config

    def forward(self, **inputs: Tensor) -> Tensor:
        return inputs["input_ids"].float()


def test_the_signature_of_the_model_decides(tmp_path: Path) -> None:
    home = hugging_face.bert_classifier(tmp_path / "model")
    source = DataSource(write_examples(tmp_path, 2), tokenizer=home)
    ((ids, labels),) = source.batches(Ids())
    assert labels.tolist() == [0, 1]
    ((again, _),) = source.batches(Configured())
    assert torch.equal(again, ids)
    (named,) = source.batches(Keywords())
    assert set(named) == {"input_ids", "attention_mask", "labels"}
    assert torch.equal(named["input_ids"], ids)
    (all_of_them,) = source.batches(PassesOn(load_model(home).config))
    assert set(all_of_them) == {"input_ids", "attention_mask", "token_type_ids", "labels"}


def test_labels_outside_the_head_are_named(folders: Path, tmp_path: Path) -> None:
    text, npz = write_examples(tmp_path, 3), write_npz(tmp_path, images=pictures(), labels=np.array([0, 1, 2, 5, -1]))
    for source, classes in (
        (DataSource(text), 2),
        (DataSource(folders), 3),
        (DataSource(npz, max_batches=1, batch_size=3), 3),
    ):
        source.check(classes)
    with pytest.raises(ValueError, match=r"data\.jsonl, line 2: the label must be in 0 \.\.\. 0, .* found 1"):
        DataSource(text).check(1)
    with pytest.raises(ValueError, match=r"data\.npz, row 3: the label must be in 0 \.\.\. 4, .* found 5"):
        DataSource(npz).check(5)
    with pytest.raises(ValueError, match=r"data\.npz, row 4: the label must be in 0 \.\.\. 5, .* found -1"):
        DataSource(npz).check(6)
    with pytest.raises(ValueError, match=r"wolf/10\.png: the label must be in 0 \.\.\. 1, .* found 2"):
        DataSource(folders).check(2)


def changed(path: Path) -> None:
    """Another time of change, a second later."""
    before = path.stat()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))


def test_fingerprint_tells_settings_and_files_apart(folders: Path, tmp_path: Path) -> None:
    home = hugging_face.bert_classifier(tmp_path / "model")
    text, npz = write_examples(tmp_path, 3), write_npz(tmp_path, images=pictures(), labels=np.arange(5))
    sources = [
        DataSource(text),
        DataSource(text, batch_size=2),
        DataSource(text, max_batches=1),
        DataSource(text, seed=0),
        DataSource(text, labels=[1, 0]),
        DataSource(text, labels={"0": 1, "1": 0}),
        DataSource(text, columns={"text": "text"}),
        DataSource(text, max_length=8),
        DataSource(text, tokenizer=home),
        DataSource(npz),
        DataSource(npz, mean="clip"),
        DataSource(folders),
        DataSource(folders, size=8),
        DataSource(folders, channels=1),
        DataSource(folders, labels=[0, 2, 1]),
    ]
    before = [source.fingerprint() for source in sources]
    assert len(set(before)) == len(sources)
    assert [source.fingerprint() for source in sources] == before
    assert DataSource(str(text), format="text").fingerprint() == before[0]
    for touched, kinds in ((text, {"text"}), (npz, {"npz"}), (folders / "ox" / "deep" / "1.ppm", {"images"})):
        changed(touched)
        after = [source.fingerprint() for source in sources]
        assert {source.kind for source, old, new in zip(sources, before, after, strict=True) if old != new} == kinds
        assert all(old != new for source, old, new in zip(sources, before, after, strict=True) if source.kind in kinds)
        before = after
    changed(home / "tokenizer.json")
    assert [source.fingerprint() != old for source, old in zip(sources, before, strict=True)].index(True) == 8
    paint(folders / "ape" / "1.png")  # a class before the others: every label changes
    assert sources[11].fingerprint() != before[11]
    text.unlink()
    with pytest.raises(ValueError, match=r"no file .*data\.jsonl"):
        sources[0].fingerprint()


def test_fingerprint_reads_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("no JSON")
    assert len(DataSource(tmp_path / "a.jsonl").fingerprint()) == 64


BAD_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "format": ({"path": "a.csv", "format": "parquet"}, "one of text, npz, images, found 'parquet'"),
    "batch size": ({"path": "a.csv", "batch_size": 0}, "batch_size must be an integer of at least 1, found 0"),
    "batches": ({"path": "a.csv", "max_batches": 0}, "max_batches must be"),
    "length": ({"path": "a.csv", "max_length": -1}, "max_length must be"),
    "size of text": ({"path": "a.csv", "size": 8}, "size means nothing for data of the format text"),
    "length of arrays": ({"path": "a.npz", "max_length": 8}, "max_length means nothing for data of the format npz"),
    "size of arrays": ({"path": "a.npz", "size": 8}, "size means nothing for data of the format npz"),
    "columns of images": ({"path": "a", "columns": {}}, "columns means nothing for data of the format images"),
    "a column": ({"path": "a.csv", "columns": {"lable": "x"}}, "some of text, text_pair, label, found 'lable'"),
    "channels": ({"path": "a", "channels": 2}, r"channels must be 1 \(grey\) or 3"),
    "mean alone": ({"path": "a", "mean": [0.5]}, "must have a figure for each channel"),
    "std alone": ({"path": "a", "std": [0.5]}, "must have a figure for each channel"),
    "std zero": ({"path": "a", "mean": [0.5], "std": [0.0]}, "std above 0"),
    "preset": ({"path": "a", "mean": "clap"}, "one of clip, imagenet, none alone; found 'clap'"),
    "preset and std": ({"path": "a", "mean": "clip", "std": [1.0]}, "alone; found 'clip'"),
    "negative class": ({"path": "a.csv", "labels": {"a": -1}}, "must give the new class, 0 or more"),
    "no class": ({"path": "a.csv", "labels": []}, "must give the new class, 0 or more"),
    "a word": ({"path": "a.csv", "labels": "ab"}, "must give the new class, 0 or more"),
    "a truth": ({"path": "a.csv", "labels": [True]}, "must give the new class, 0 or more"),
}


@pytest.mark.parametrize(("settings", "match"), BAD_SETTINGS.values(), ids=list(BAD_SETTINGS))
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        DataSource(**settings)
    assert one_sentence(str(caught.value))


def test_words_are_the_models_classes(tmp_path: Path) -> None:
    home = hugging_face.bert_classifier(tmp_path / "model", num_labels=3)
    content = json.loads((home / "config.json").read_text())
    names = ["contradiction", "Entailment", "neutral"]
    by_name = {name: number for number, name in enumerate(names)}
    path = tmp_path / "data.csv"
    path.write_text("text,label\ngood,entailment\nbad,NEUTRAL\nnot,contradiction\nfilm,1\n")
    source = DataSource(path)
    with pytest.raises(ValueError, match=r"line 2: the label must be an integer, found 'entailment', .* no names"):
        source.batches(load_model(home))
    named = {"id2label": dict(enumerate(names)), "label2id": by_name}
    (home / "config.json").write_text(json.dumps({**content, **named}))
    model = load_model(home)
    assert source.batches(model)[0]["labels"].tolist() == [1, 2, 0, 1]
    source.check()
    again = DataSource(path, labels={"entailment": 0, "NEUTRAL": 0, "contradiction": 2, "1": 1})
    assert again.batches(model)[0]["labels"].tolist() == [0, 0, 2, 1]
    path.write_text("text,label\ngood,entailed\n")
    with pytest.raises(
        ValueError,
        match=r"line 2: the label 'entailed' is not one of the model's \('contradiction', 'Entailment'",
    ):
        source.batches(model)
    path.write_text("text,label\ngood,3\n")
    with pytest.raises(ValueError, match=r"line 2: the label must be in 0 \.\.\. 2, the classes of the model, found 3"):
        source.batches(model)


def test_names_that_differ_in_capitals_alone_are_told_apart() -> None:
    head = Head(3, {"US": 0, "us": 1, "Them": 2})
    assert [head.find(word) for word in ("US", "us", "Us", "them", " THEM ", "we")] == [0, 1, None, 2, 2, None]


def test_texts_that_are_cut_are_counted_in_a_source(tmp_path: Path) -> None:
    model = load_model(hugging_face.bert_classifier(tmp_path / "model"))
    batches = DataSource(write_examples(tmp_path, 12), batch_size=5, max_length=5).batches(model)
    assert (batches.truncated, batches.examples) == (6, 12)  # of 1 to 6 words, those of 4, 5 and 6
    assert batches.notes == ["6 of 12 texts were cut at 5 tokens (max_length)."]
    arrays = DataSource(write_npz(tmp_path, images=pictures(), labels=np.arange(5)), mean="none")
    assert arrays.batches(PLAIN).notes == []
