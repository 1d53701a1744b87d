"""Bad input of every kind is refused in one sentence, without running code, filling the memory or hanging."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from quotient_manifolds.load import DataSource, find_checkpoints, load_model
from quotient_manifolds.load.text import class_of, read_examples
from tests.load.sources import PLAIN, pictures
from tests.nets import hugging_face
from tests.nets.hugging_face import edit_config, rewrite_weights
from tests.nets.lora_files import edit, replace_tensors
from tests.refusals import one_sentence

# ---- directories of models


def broken_model(spoil: Callable[[Path], Any], folder: Path) -> None:
    model = hugging_face.bert_classifier(folder / "model")
    spoil(model)
    load_model(model)


def drop(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def pickle_weights(directory: Path) -> None:
    torch.save(load_file(directory / "model.safetensors"), directory / "pytorch_model.bin")
    drop("model.safetensors")(directory)


def config(**entries: Any) -> Callable[[Path], None]:
    return lambda path: edit_config(path, **entries)


def text(content: str, name: str = "config.json") -> Callable[[Path], Any]:
    return lambda path: (path / name).write_text(content)


def shard(name: str) -> Callable[[Path], None]:
    """An index that names a file, which is there."""

    def make(path: Path) -> None:
        (path / "model.safetensors").rename(path / name)
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"classifier.bias": name}}))

    return make


def header(length: int, content: bytes) -> Callable[[Path], Any]:
    return lambda path: (path / "model.safetensors").write_bytes(length.to_bytes(8, "little") + content)


LIES = b'{"a":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4398046511104]}}'
DIRECTORIES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (drop("config.json"), "no config.json"),
    "config is no JSON": (text("{"), "not valid JSON"),
    "a number that is none": (config(hidden_dropout_prob=float("nan")), r"config\.json .* Found NaN"),
    "a byte order mark": (text("\ufeff{}"), r"config\.json must be UTF-8 without a byte order mark"),
    "config names no model": (text("{}"), "model_type"),
    "no weights": (drop("model.safetensors"), "no weights"),
    "pickle only": (pickle_weights, "safe_serialization=True"),
    "truncated weights": (lambda path: os.truncate(path / "model.safetensors", 100), "does not load"),
    "a parameter missing": (lambda path: rewrite_weights(path, lambda t: t.pop("classifier.bias")), "classifier.bias"),
    "a parameter of another shape": (
        lambda path: rewrite_weights(path, lambda t: t.update({"classifier.bias": torch.zeros(5)})),
        r"classifier.bias of shape \(5,\), but config.json describes one of \(2,\)",
    ),
    "unknown architecture": (config(architectures=["MyBert"]), "MyBert"),
    "classes": (config(num_labels=10**9), "num_labels in .* must be at most 10000"),
    "layers": (config(num_hidden_layers=10**7), "num_hidden_layers in .* must be"),
    "width": (config(hidden_size=64), "of shape .* but config.json describes one of"),
    "lists": (text('{"model_type": "bert", "a": ' + "[" * 5000 + "]" * 5000 + "}"), "not valid JSON"),
    "architectures is a word": (config(architectures="Bert"), "does not know"),
    "a tokenizer": (config(architectures=["BertTokenizer"]), "does not know"),
    "a kind of number": (config(num_hidden_layers="many"), "num_hidden_layers"),
    "weights of its own": (config(transformers_weights="x.safetensors.index.json"), "must leave its weights in"),
    "a pickled shard": (shard("model-1.bin"), "must name safetensors files beside it"),
    "a shard elsewhere": (shard("../model-1.safetensors"), "must name safetensors files beside it"),
    "a shard missing": (
        lambda path: shard("model-1.safetensors")(path) or (path / "model-1.safetensors").unlink(),
        "model-1",
    ),
    "a long header": (header(2**40, b"{}"), "does not load"),
    "a header that lies": (header(len(LIES), LIES), "does not load"),
}


# ---- directories of adapters


def broken_adapter(spoil: Callable[[Path], Any], folder: Path) -> None:
    peft_files = pytest.importorskip("tests.nets.peft_files")
    _, directory = peft_files.classifier(folder)
    spoil(directory)
    load_model(directory)


def rename(old: str, new: str) -> Callable[[Path], None]:
    return lambda path: pytest.importorskip("tests.nets.peft_files").rename(path, lambda name: name.replace(old, new))


def pickle_adapter(path: Path) -> None:
    torch.save(load_file(path / "adapter_model.safetensors"), path / "adapter_model.bin")
    (path / "adapter_model.safetensors").unlink()


ADAPTERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a name on a hub": (
        lambda path: edit(path, base_model_name_or_path="google/bert-tiny"),
        r"is an adapter of peft \(LORA\) of 'google/bert-tiny', .* nothing is ever downloaded; put the base model",
    ),
    "no name": (lambda path: edit(path, base_model_name_or_path=None), "put the base model"),
    "of an adapter": (lambda path: edit(path, base_model_name_or_path="../adapter"), "is an adapter itself"),
    "another kind": (lambda path: edit(path, peft_type="PROMPT_TUNING"), "only ADALORA, IA3, LOHA, LOKR, LORA"),
    "a module to import": (lambda path: edit(path, megatron_config={"a": 1}, megatron_core="os"), "only ADALORA"),
    "settings are no JSON": (lambda path: (path / "adapter_config.json").write_text("{"), "not valid JSON"),
    "no weights": (lambda path: (path / "adapter_model.safetensors").unlink(), "has no weights"),
    "pickled": (pickle_adapter, "unpickling can run any code"),
    "a matrix missing": (
        lambda path: replace_tensors(path, "1.attention.self.query.lora_A"),
        "lacks parameter .*lora_A",
    ),
    "the head missing": (lambda path: replace_tensors(path, "classifier"), "lacks parameter .*classifier"),
    "one too many": (lambda path: replace_tensors(path, odd=torch.zeros(1)), "has the unexpected parameter .*odd"),
    "a great rank": (lambda path: edit(path, r=10**9), "r in .* must be at most"),
    "another rank": (lambda path: edit(path, r=3), "does not load"),
    "no such module": (rename("query", "queries"), "has the unexpected"),
    "expressions for alpha": (
        lambda path: edit(path, alpha_pattern={"(a+)+b": 3}),
        r"alpha_pattern in .* must have names of modules as keys. Found '\(a\+\)\+b'",
    ),
    "layers repeated": (lambda path: edit(path, layer_replication=[[0, 2]] * 10**5), "on unchanged layers"),
}


# ---- options of data, arrays, text, and checkpoints


def bad_options(settings: dict[str, Any], folder: Path) -> None:
    DataSource(**settings)


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "format": ({"path": "a.parquet"}, r"in a \.jsonl, .* or \.npz file. Found a\.parquet"),
    "batch size": ({"path": "a.csv", "batch_size": 0}, "batch_size must be an integer of at least 1. Found 0"),
    "mean of text": ({"path": "a.csv", "mean": "clip"}, "mean must be left out for text data. Found 'clip'"),
    "length of arrays": ({"path": "a.npz", "max_length": 8}, "max_length must be left out for npz data. Found 8"),
    "a column": ({"path": "a.csv", "columns": {"lable": "x"}}, "some of text, text_pair, label. Found 'lable'"),
    "mean alone": ({"path": "a.npz", "mean": [0.5]}, "must have a number for each channel"),
    "std zero": ({"path": "a.npz", "mean": [0.5], "std": [0.0]}, "std above 0"),
    "std of text": ({"path": "a.npz", "mean": ["a"], "std": ["b"]}, "must have a number for each channel"),
    "no text": ({"path": 5}, "A path must be text. Found 5"),
    "preset": ({"path": "a.npz", "mean": "clap"}, "one of clip, imagenet, none alone. Found 'clap'"),
}


def broken_arrays(spoil: Callable[[Path], Any], folder: Path) -> None:
    path = folder / "data.npz"
    spoil(path)
    DataSource(path, mean="clip").batches(PLAIN)


def pickled(path: Path) -> None:
    """Labels that are pickled objects; loading them would make a directory."""

    class Code:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(path.with_name("ran")),)

    np.savez(path, images=pictures(), labels=np.array([Code()] * 5, dtype=object))


def arrays(**changes: Any) -> Callable[[Path], None]:
    return lambda path: np.savez(path, **{"images": pictures(), "labels": np.arange(5), **changes})


def flipped(path: Path) -> None:
    arrays()(path)
    content = bytearray(path.read_bytes())
    content[content.find(pictures().tobytes()) + 7] ^= 1
    path.write_bytes(content)


ARRAYS: dict[str, tuple[Callable[[Path], object], str]] = {
    "absent": (lambda path: None, "no data file"),
    "pickled": (pickled, "no readable .npz file of plain arrays"),
    "no labels": (lambda path: np.savez(path, images=pictures()), "no array 'labels'"),
    "no images": (lambda path: np.savez(path, labels=np.arange(5)), "no array 'images'"),
    "a changed bit": (flipped, "no readable .npz"),
    "labels are real": (arrays(labels=np.arange(5.0)), r"integers \(N,\). Found float64"),
    "fewer labels": (arrays(labels=np.arange(4)), "as many images as labels. Found 5 and 4"),
    "images are integers": (arrays(images=pictures("int64")), "uint8 or floating point, .* Found int64"),
    "seven channels": (arrays(images=np.zeros((5, 7, 8, 9), np.uint8)), r"Found uint8 \(5, 7, 8, 9\)"),
    "grey for three": (arrays(images=pictures(channels=1)), "1 channels. Found mean and std for 3"),
}


def bad_text(name: str, content: str, folder: Path) -> None:
    (folder / name).write_bytes(content.encode(errors="surrogateescape"))
    for example in read_examples(folder / name):
        class_of(example.label, f"{folder / name}, line {example.line}", count=2)


GOOD = '{"text": "good", "label": 1}\n'
TEXTS = {
    "empty": ("a.jsonl", "", "it is empty"),
    "no JSON": ("a.jsonl", GOOD + "good\n", "line 2: not valid JSON"),
    "no object": ("a.jsonl", GOOD + "[1]\n", "line 2 must be an object"),
    "no label": ("a.jsonl", GOOD + '\n{"text": "good"}\n', "line 3 must have the columns .* Found no 'label'"),
    "short row": ("a.csv", "text,label\ngood,1\nbad\n", "line 3 must have the columns .* Found no 'label'"),
    "long row": ("a.csv", "text,label\ngood,1\nbad, bad,0\n", "line 3 has more fields than columns"),
    "text is a number": ("a.jsonl", '{"text": 3, "label": 1}\n', "line 1: text and text_pair must be strings"),
    "label is a word": ("a.csv", "text,label\ngood,1\nbad,no\n", "line 3: the label must be an integer. Found 'no'"),
    "label is a truth value": ("a.jsonl", '{"text": "good", "label": true}\n', "line 1: the label must be an integer"),
    "label too large": ("a.jsonl", GOOD + '{"text": "bad", "label": 2}\n', r"line 2: .* 0 \.\.\. 1, .* Found 2"),
    "label negative": ("a.csv", "text,label\ngood,-1\n", "line 2: .* Found '-1'"),
    "an empty cell": ("a.csv", "text,label\ngood,1\n,0\n", "a.csv, line 3: the text must not be empty"),
    "an empty string": ("a.jsonl", GOOD + '{"text": " ", "label": 1}\n', "a.jsonl, line 2: the text must not be empty"),
    "a column twice": (
        "a.csv",
        "text,label,text\ngood,1,bad\n",
        "a.csv must have each column once. Found 'text' twice",
    ),
    "another kind of file": ("a.parquet", "", r"\.jsonl, \.csv, \.tsv"),
    "no UTF-8": ("a.csv", "text,label\n\udcff,1\n", "UTF-8"),
}


def bad_causal_data(name: str, settings: dict[str, Any], folder: Path) -> None:
    (folder / "text.txt").write_text("a very good film\n")
    (folder / "text.jsonl").write_text('{"text": "good", "label": 0}\n')
    (folder / "empty.txt").write_text("\n")
    source = DataSource(folder / name, **settings)
    source.check()
    source.batches(load_model(hugging_face.causal_model(folder)))


CAUSAL: dict[str, tuple[str, dict[str, Any], str]] = {
    "no task": ("text.txt", {}, "must have the task causal .* Found task None"),
    "labels": ("text.jsonl", {"task": "causal", "labels": {"a": 0}}, "labels must be left out for the task causal"),
    "another task": ("text.txt", {"task": "speech"}, "task must be one of classification, causal"),
    "arrays": ("data.npz", {"task": "causal"}, "task must be left out for npz data"),
    "columns": ("text.txt", {"task": "causal", "columns": {"text": "body"}}, "no columns"),
    "one token": ("text.txt", {"task": "causal", "max_length": 1}, "max_length must lie in"),
    "no text": ("empty.txt", {"task": "causal"}, "it is empty"),
    "a classifier's task": ("text.jsonl", {}, "task must be causal for a GPT2LMHeadModel"),
}


def no_checkpoints(patterns: list[str], loader: str, folder: Path) -> None:
    (folder / "README.md").touch()
    find_checkpoints(patterns, loader, folder)


CHECKPOINTS = {
    "no match": (["nothing_*"], "huggingface", r"'nothing_\*' matches nothing in"),
    "files alone": (["*.md"], "huggingface", r"matches no directory: it matches files, such as README\.md"),
    "loader": (["*"], "clip-soup", r"huggingface or package\.module:function. Found 'clip-soup'"),
    "no patterns": ([], "huggingface", "needs patterns"),
    "nobody's home": (["~nosuchuser/*"], "huggingface", "matches nothing"),
}


# ---- all of them

TABLES: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
    "model": (broken_model, DIRECTORIES),
    "adapter": (broken_adapter, ADAPTERS),
    "options": (bad_options, OPTIONS),
    "arrays": (broken_arrays, ARRAYS),
    "text": (bad_text, TEXTS),
    "causal": (bad_causal_data, CAUSAL),
    "checkpoints": (no_checkpoints, CHECKPOINTS),
}
CASES = {
    f"{kind}: {name}": (partial(call, *case), word, kind in ("model", "adapter", "arrays", "text"))
    for kind, (call, table) in TABLES.items()
    for name, (*case, word) in table.items()
}


@pytest.mark.parametrize(("call", "word", "reads_files"), CASES.values(), ids=list(CASES))
def test_bad_input_is_refused_in_one_sentence(
    call: Callable[[Path], None], word: str, reads_files: bool, tmp_path: Path
) -> None:
    started = time.process_time()
    with pytest.raises((ValueError, TypeError), match=word) as caught:
        call(tmp_path)
    message = str(caught.value)
    assert one_sentence(message), message
    assert not message.removesuffix("...").endswith("."), message
    assert str(tmp_path) in message or not reads_files
    assert not (tmp_path / "ran").exists()
    assert time.process_time() - started < 10
