"""Models from directories and functions: read exactly, without using up memory or the network, or refused."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quotient_manifolds.load import DataSource, load_model
from quotient_manifolds.symmetries import example_inputs
from tests import hugging_face
from tests.hugging_face import edit_config, rewrite_weights
from tests.refusals import one_sentence

MAKERS = [hugging_face.bert_classifier, hugging_face.vit_classifier, hugging_face.clip, hugging_face.gpt2]


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


def test_sharded_weights_are_read(tmp_path: Path) -> None:
    whole = load_model(hugging_face.bert_classifier(tmp_path / "whole")).state_dict()
    shards = hugging_face.bert_classifier(tmp_path / "shards", shard="10KB")
    assert len(list(shards.glob("*.safetensors"))) > 2
    assert all(torch.equal(whole[name], value) for name, value in load_model(shards).state_dict().items())


def test_absent_transformers_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hugging_face.bert_classifier(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r'pip install "quotient-manifolds\[transformers\]"\.$'):
        load_model(tmp_path)
    with pytest.raises(ValueError, match="No model at"):
        load_model(tmp_path / "nowhere")


# ---- directories that are broken, or made to harm


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
    "a pickled shard": (shard("model-1.bin"), "must name files of safetensors beside it"),
    "a shard elsewhere": (shard("../model-1.safetensors"), "must name files of safetensors beside it"),
    "a shard missing": (
        lambda path: shard("model-1.safetensors")(path) or (path / "model-1.safetensors").unlink(),
        "model-1",
    ),
    "a long header": (header(2**40, b"{}"), "does not load"),
    "a header that lies": (header(len(LIES), LIES), "does not load"),
}


@pytest.mark.parametrize(("spoil", "match"), DIRECTORIES.values(), ids=list(DIRECTORIES))
def test_a_broken_directory_is_refused(spoil: Callable[[Path], Any], match: str, tmp_path: Path) -> None:
    model = hugging_face.bert_classifier(tmp_path / "model")
    spoil(model)
    started = time.process_time()
    with pytest.raises(ValueError, match=match) as caught:
        load_model(model)
    assert one_sentence(str(caught.value)), str(caught.value)
    assert time.process_time() - started < 10


# ---- the network


@pytest.fixture
def without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever opens a connection fails, and nobody was told to stay offline."""
    from huggingface_hub import constants

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


BACKBONE = {"backbone": "microsoft/resnet-50", "use_pretrained_backbone": True, "use_timm_backbone": False}


@pytest.mark.usefixtures("without_network")
def test_a_backbone_is_not_fetched(tmp_path: Path) -> None:
    from huggingface_hub import constants

    hugging_face.bert_classifier(tmp_path)
    kind = {"model_type": "upernet", "architectures": ["UperNetForSemanticSegmentation"]}
    (tmp_path / "config.json").write_text(json.dumps({**kind, **BACKBONE}))
    with pytest.raises(ValueError, match=r"nothing is ever fetched from a network") as caught:
        load_model(tmp_path)
    assert one_sentence(str(caught.value)), str(caught.value)
    assert constants.HF_HUB_OFFLINE is False


@pytest.mark.usefixtures("without_network")
def test_models_and_tokenizers_load_without_a_connection(tmp_path: Path) -> None:
    model = load_model(hugging_face.bert_classifier(tmp_path))
    (tmp_path / "a.jsonl").write_text('{"text": "good", "label": 0}')
    assert DataSource(tmp_path / "a.jsonl").batches(model)
