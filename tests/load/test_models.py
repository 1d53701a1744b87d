"""Models from directories and functions: read exactly, without using up memory or the network, or refused."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quotient_manifolds.load import DataSource, load_model
from quotient_manifolds.symmetries import example_inputs
from tests.nets import hugging_face
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
    with pytest.raises(ValueError, match=r"nothing is ever downloaded") as caught:
        load_model(tmp_path)
    assert one_sentence(str(caught.value)), str(caught.value)
    assert constants.HF_HUB_OFFLINE is False


@pytest.mark.usefixtures("without_network")
def test_models_and_tokenizers_load_without_a_connection(tmp_path: Path) -> None:
    model = load_model(hugging_face.bert_classifier(tmp_path))
    (tmp_path / "a.jsonl").write_text('{"text": "good", "label": 0}')
    assert DataSource(tmp_path / "a.jsonl").batches(model)
