"""Models from directories and functions: read exactly, without using up memory or the network, or refused."""

from __future__ import annotations

import contextlib
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
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from quotient_manifolds.load import (
    Checkpoint,
    LabelledText,
    example_inputs,
    find_checkpoints,
    load_checkpoint,
    load_model,
    load_symmetries,
    tokenised_batches,
)
from quotient_manifolds.load.untrusted import TooLarge, at_most, check_patterns, no_network
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


def test_example_text_has_padding_in_the_last_row_only(tmp_path: Path) -> None:
    inputs = example_inputs(load_model(hugging_face.bert_classifier(tmp_path)))
    assert torch.equal(inputs["input_ids"] == 0, inputs["attention_mask"] == 0)
    assert inputs["attention_mask"].sum(-1).tolist() == [16, 12]


def test_sharded_weights_are_read(tmp_path: Path) -> None:
    whole = load_model(hugging_face.bert_classifier(tmp_path / "whole")).state_dict()
    shards = hugging_face.bert_classifier(tmp_path / "shards", shard="10KB")
    assert len(list(shards.glob("*.safetensors"))) > 2
    assert all(torch.equal(whole[name], value) for name, value in load_model(shards).state_dict().items())


def test_no_example_inputs_without_a_configuration() -> None:
    with pytest.raises(ValueError, match="No example inputs can be made for Linear"):
        example_inputs(nn.Linear(2, 2))


def test_absent_transformers_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hugging_face.bert_classifier(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r'pip install "quotient-manifolds\[transformers\]"\.$'):
        load_model(tmp_path)


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


def pickled_shard(path: Path) -> None:
    """An index that names a file which torch.load would read."""
    tensors = load_file(path / "model.safetensors")
    torch.save(tensors, path / "model-1.bin")
    (path / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model-1.bin")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def pipe(name: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        os.mkfifo(path / name)

    return make


def shard_elsewhere(path: Path) -> None:
    (path / "model.safetensors").rename(path.parent / "model.safetensors")
    index = {"weight_map": {"classifier.bias": "../model.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


DIRECTORIES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (drop("config.json"), "no config.json"),
    "config is no JSON": (text("{"), "not valid JSON"),
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
    "classes": (config(num_labels=10**9), "asks for num_labels = 1000000000"),
    "classes, nested": (config(text_config={"num_labels": 1e9}), "asks for num_labels"),
    "layers": (config(num_hidden_layers=10**7), "asks for num_hidden_layers"),
    "some more layers": (config(num_hidden_layers=900), "many times larger than its weights"),
    "width": (config(hidden_size=10**6), "many times larger than its weights"),
    "words": (config(vocab_size=10**12), "many times larger than its weights"),
    "lists": (text('{"model_type": "bert", "a": ' + "[" * 5000 + "]" * 5000 + "}"), "not valid JSON"),
    "a list": (text("[]"), "one JSON object"),
    "digits": (text('{"model_type": "bert", "hidden_size": ' + "9" * 5000 + "}"), "not valid JSON"),
    "architectures is a word": (config(architectures="Bert"), "does not know"),
    "architectures is a number": (config(architectures=[3]), "does not know"),
    "a tokenizer": (config(architectures=["BertTokenizer"]), "does not know"),
    "a kind of number": (config(num_hidden_layers="many"), "num_hidden_layers"),
    "pickled shard": (pickled_shard, "as a shard: expected files of safetensors"),
    "shard elsewhere": (shard_elsewhere, "as a shard: expected files of safetensors"),
    "weights of its own": (config(transformers_weights="x.safetensors.index.json"), "names weights of its own"),
    "a pipe for the weights": (pipe("model.safetensors"), "no regular file"),
    "a pipe beside them": (pipe("generation_config.json"), "no regular file"),
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


def test_missing_shard_is_named(tmp_path: Path) -> None:
    hugging_face.bert_classifier(tmp_path, shard="10KB")
    shard = min(tmp_path.glob("model-*.safetensors"))
    shard.unlink()
    with pytest.raises(ValueError, match=shard.name):
        load_model(tmp_path)


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No model at"):
        load_model(tmp_path / "nowhere")


@settings(max_examples=30)
@given(
    entries=st.dictionaries(
        st.sampled_from(["hidden_size", "num_hidden_layers", "vocab_size", "architectures", "id2label", "dtype", "x"]),
        st.recursive(
            st.none() | st.booleans() | st.integers(-(10**9), 10**13) | st.floats() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
            max_leaves=5,
        ),
        min_size=1,
        max_size=3,
    )
)
def test_any_configuration_loads_or_is_refused(
    entries: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = hugging_face.bert_classifier(tmp_path_factory.mktemp("model"))
    edit_config(model, **entries)
    with contextlib.suppress(ValueError):
        load_model(model)


def test_a_model_may_be_a_few_times_larger_than_its_file() -> None:
    """Tied weights stand in a file once; parameters that are put in others' place count once."""
    shapes = {"weight": (1000, 4000)}
    with at_most(shapes, "here"):
        layer = nn.Linear(4000, 2000, device="meta")
        for _ in range(50):
            layer.weight = nn.Parameter(torch.empty(2000, 4000, device="meta"))
    with pytest.raises(TooLarge, match="many times larger"), at_most(shapes, "here"):
        nn.Linear(10**5, 10**5, device="meta")
    nn.Linear(10**5, 10**5, device="meta")  # outside, anything goes


@pytest.mark.parametrize("name", ["target_modules", "layers_pattern", "rank_pattern", "alpha_pattern"])
def test_expressions_that_may_take_for_ever_are_refused(name: str) -> None:
    for slow in ("(a+)+b", "(a|aa)+b", "(a*)*b", "a*a*a*a*a*b", "(a?){50}", "a?a?a?a?a?a?"):
        for given_as in (slow, [slow], {slow: 1}):
            with pytest.raises(ValueError, match="may take for ever"):
                check_patterns({name: given_as}, "here")
    for quick in (
        r".*\.(q|v)_proj$",
        r"(?!.*vision).*\.layers\.\d+\.mlp",
        "query",
        r"^(?:model\.)?layers\.(\d+)\.\w+$",
    ):
        check_patterns({name: quick}, "here")


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


@pytest.mark.parametrize(
    ("kind", "model_type"),
    [
        ("DetrForObjectDetection", "detr"),
        ("DPTForDepthEstimation", "dpt"),
        ("UperNetForSemanticSegmentation", "upernet"),
        ("MaskFormerForInstanceSegmentation", "maskformer"),
    ],
)
@pytest.mark.usefixtures("without_network")
def test_a_backbone_is_not_fetched(kind: str, model_type: str, tmp_path: Path) -> None:
    from huggingface_hub import constants

    hugging_face.bert_classifier(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "architectures": [kind], **BACKBONE}))
    with pytest.raises(ValueError, match=r"nothing is ever fetched from a network") as caught:
        load_model(tmp_path)
    assert one_sentence(str(caught.value)), str(caught.value)
    assert constants.HF_HUB_OFFLINE is False


@pytest.mark.usefixtures("without_network")
def test_the_switch_stays_down_until_the_last_has_left() -> None:
    from huggingface_hub import constants

    with no_network():
        with no_network():
            assert constants.HF_HUB_OFFLINE is True
        assert constants.HF_HUB_OFFLINE is True
    assert constants.HF_HUB_OFFLINE is False


@pytest.mark.usefixtures("without_network")
def test_models_and_tokenizers_load_without_a_connection(tmp_path: Path) -> None:
    load_model(hugging_face.bert_classifier(tmp_path))
    assert tokenised_batches(tmp_path, [LabelledText("good", None, 0)])


# ---- zoos


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


FOUND: dict[str, tuple[list[str], list[str]]] = {
    "numbers sort as numbers": (["model_*"], ["model_0", "model_2", "model_10", "model_71"]),
    "names are unique": (["a/*", "b/*"], ["a/best.pt", "b/best.pt", "last"]),
    "each once": (["model_2.pt", "./model_2.pt", "model_[02].pt"], ["model_0", "model_2"]),
    "brackets as they are": (["run [1].pt"], ["run [1]"]),
}


@pytest.mark.parametrize(("patterns", "names"), FOUND.values(), ids=list(FOUND))
def test_checkpoints_are_found_in_order_by_names_of_their_own(
    patterns: list[str], names: list[str], tmp_path: Path
) -> None:
    touch(tmp_path, *(f"model_{i}.pt" for i in (10, 2, 0, 71)), "a/best.pt", "b/best.pt", "b/last.pt", "run [1].pt")
    found = find_checkpoints(patterns, "zoo:model", tmp_path)
    assert [each.name for each in found] == names
    assert all(each.path is not None and each.path.is_file() for each in found)


def test_directories_are_checkpoints_and_files_beside_them_are_none(tmp_path: Path) -> None:
    touch(tmp_path, "x/1/model.v2/config.json", "x/2/README", "x/README")
    found = find_checkpoints(["x/*/*", "x/*"], "huggingface", tmp_path)
    assert [each.name for each in found] == ["1", "model.v2", "2"]


NOT_FOUND = {
    "no match": (["nothing_*"], "huggingface", r"'nothing_\*' matches nothing in"),
    "files alone": (["*.md"], "huggingface", r"matches no directory: it matches files, such as README\.md"),
    "loader": (["*"], "clip-soup", r"huggingface or package\.module:function. Found 'clip-soup'"),
    "no patterns": ([], "huggingface", "needs patterns"),
    "nobody's home": (["~nosuchuser/*"], "huggingface", "matches nothing"),
}


@pytest.mark.parametrize(("patterns", "loader", "match"), NOT_FOUND.values(), ids=list(NOT_FOUND))
def test_what_is_not_found_is_said(patterns: list[str], loader: str, match: str, tmp_path: Path) -> None:
    touch(tmp_path, "README.md")
    with pytest.raises(ValueError, match=match) as caught:
        find_checkpoints(patterns, loader, tmp_path)
    assert one_sentence(str(caught.value))


def test_a_directory_in_half_precision_is_measured_in_single(tmp_path: Path) -> None:
    hugging_face.bert_classifier(tmp_path)
    rewrite_weights(tmp_path, lambda t: t.update({name: value.half() for name, value in t.items()}))
    edit_config(tmp_path, dtype="float16")
    assert next(load_model(tmp_path).parameters()).dtype == torch.float16
    (checkpoint,) = find_checkpoints([str(tmp_path)], "huggingface")
    assert next(load_checkpoint(checkpoint).parameters()).dtype == torch.float32
    with pytest.raises(ValueError, match="has no path"):
        load_checkpoint(Checkpoint("4", None, "huggingface"))


# ---- functions of the user's


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_functions.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delitem(sys.modules, "my_functions", raising=False)
    return "my_functions"


def test_functions_of_a_module_in_the_current_directory(module: str, tmp_path: Path) -> None:
    model = load_model(f"{module}:encoder")
    assert isinstance(model, nn.TransformerEncoderLayer)
    assert not model.training
    (tmp_path / "12.txt").write_text("12")
    (found,) = find_checkpoints(["*.txt"], f"{module}:sized", tmp_path)
    assert load_checkpoint(found).in_features == 12
    (alone,) = find_checkpoints([], f"{module}:double", tmp_path)
    assert alone == Checkpoint(f"{module}:double", None, f"{module}:double")
    model = load_checkpoint(alone)
    assert (model.training, next(model.parameters()).dtype) == (False, torch.float64)  # as it is
    with pytest.raises(ValueError, match=r"raising was called with .*12\.txt and raised RuntimeError: no such layer$"):
        load_checkpoint(Checkpoint("12", tmp_path / "12.txt", f"{module}:raising"))
    for name, match in (
        (f"{module}:number", "Found an object of type int"),
        (f"{module}:decoder", "no function 'decoder'"),
        ("zoo_of_nobody:encoder", "Cannot import 'zoo_of_nobody'"),
    ):
        with pytest.raises(ValueError, match=match):
            load_model(name)


FUNCTIONS = """
import torch
from torch import nn
from quotient_manifolds.symmetries import Symmetries, declare_pair

def declared(model, prefix=""):
    pair = declare_pair(
        model, "1", "bottleneck in/out",
        G=lambda w: w[prefix + "0.weight"].mT[None], H=lambda w: w[prefix + "1.weight"][None],
    )
    return Symmetries((pair,))

def of_another_model(model):
    return declared(nn.ModuleDict({"other": model}), "other.")

def of_another_shape(model):
    return declared(nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 5)))

def pairs_alone(model):
    return declared(model).pairs

def encoder():
    return nn.TransformerEncoderLayer(8, 2)

def double():
    return nn.Linear(2, 3, dtype=torch.float64)

def sized(path):
    return nn.Linear(int(path.read_text()), 1)

def number():
    return 3

def raising(model):
    raise RuntimeError("no such layer")

def without_arguments():
    return Symmetries(())
"""


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 5))


def test_what_a_function_declares_is_returned(module: str) -> None:
    found = load_symmetries(f"{module}:declared", model())
    assert [(pair.name, pair.group) for pair in found.pairs] == [("1 bottleneck in/out", "GL(3)^1")]


@pytest.mark.parametrize(
    ("function", "match"),
    [
        ("of_another_model", "parameter 'other.0.weight', which Sequential does not have"),
        ("of_another_shape", "does not fit Sequential: "),
        ("pairs_alone", "must return quotient_manifolds.Symmetries.* of type tuple"),
        ("raising", "called with Sequential and raised RuntimeError: no such layer"),
        ("without_arguments", "called with Sequential and raised TypeError"),
        ("absent", "has no function 'absent'"),
    ],
)
def test_what_does_not_fit_is_one_sentence(module: str, function: str, match: str) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        load_symmetries(f"{module}:{function}", model())
    assert "\n" not in str(caught.value)
