"""Directories of peft: the base that they name with the adapter on it, head included, or what to do about it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from quotient_manifolds.compare.worker import files_fingerprint, model_hash
from quotient_manifolds.load import DataSource, find_checkpoints, load_checkpoint, load_model
from quotient_manifolds.load.text import known_classes
from quotient_manifolds.symmetries import example_inputs
from tests import hugging_face
from tests.lora_files import edit, replace_tensors
from tests.refusals import one_sentence

peft = pytest.importorskip("peft")


def adapter(folder: Path, *, classes: int = 3, head: str = "classifier", **options: Any) -> tuple[nn.Module, Path]:
    """A BERT with an adapter and a head of its own, every number random; and the directory it is saved in."""
    base = hugging_face.bert_classifier(folder / "base", num_labels=classes)
    network = transformers.BertForSequenceClassification.from_pretrained(base)
    settings = {"r": 2, "target_modules": ["query", "value"], "task_type": "SEQ_CLS", **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft calls what transformers has renamed
        model = peft.get_peft_model(network, peft.LoraConfig(**settings))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                value.normal_()
    model.save_pretrained(folder / "adapter")
    return model.eval(), folder / "adapter"


def same(model: nn.Module, other: nn.Module) -> bool:
    inputs = example_inputs(other)
    with torch.no_grad():
        return torch.equal(model(**inputs).logits, other(**inputs).logits)


@pytest.mark.parametrize("task", ["SEQ_CLS", None])
def test_adapter_and_head_are_read_exactly(task: str | None, tmp_path: Path) -> None:
    saved = {} if task else {"modules_to_save": ["classifier"]}
    model, directory = adapter(tmp_path, task_type=task, **saved)
    loaded = load_model(directory)
    assert same(model, loaded)
    assert not loaded.training
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    assert {name for name, value in loaded.named_parameters() if value.requires_grad} == trained
    assert known_classes(loaded)[0] == 3
    assert model_hash(loaded) == model_hash(load_model(directory))  # nothing in it is random


def test_the_base_may_have_no_head_or_one_of_other_classes(tmp_path: Path) -> None:
    model, directory = adapter(tmp_path)
    file = tmp_path / "base" / "model.safetensors"
    body = {name: value for name, value in load_file(file).items() if not name.startswith("classifier")}
    for head in ({}, {"classifier.weight": torch.zeros(5, 32), "classifier.bias": torch.zeros(5)}):
        save_file({**body, **head}, file, metadata={"format": "pt"})
        assert same(model, load_model(directory))


def test_where_the_base_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, directory = adapter(tmp_path)
    for named in ("base", "../base", str(tmp_path / "base")):
        edit(directory, base_model_name_or_path=named)
        assert same(model, load_model(directory))
    edit(directory, base_model_name_or_path="here")
    (tmp_path / "base").rename(tmp_path / "here")
    monkeypatch.chdir(tmp_path)
    assert same(model, load_model("adapter"))


def test_tokenizer_of_the_adapter_or_of_the_base(tmp_path: Path) -> None:
    _, directory = adapter(tmp_path)
    (tmp_path / "data.jsonl").write_text('{"text": "good film", "label": 1}\n{"text": "bad", "label": 2}\n')
    source = DataSource(tmp_path / "data.jsonl")
    (batch,) = source.batches(load_model(directory))
    assert batch["input_ids"].tolist() == [[2, 5, 8, 3], [2, 6, 3, 0]]
    tokens = hugging_face.VOCABULARY[:5] + hugging_face.VOCABULARY[:4:-1]
    transformers.BertTokenizerFast(vocab={token: i for i, token in enumerate(tokens)}).save_pretrained(directory)
    (batch,) = source.batches(load_model(directory))
    assert batch["input_ids"][0].tolist() == [2, 10, 7, 3]


def test_a_zoo_of_adapters(tmp_path: Path) -> None:
    model, directory = adapter(tmp_path)
    (checkpoint,) = find_checkpoints(["adapter"], "huggingface", tmp_path)
    assert same(model, load_checkpoint(checkpoint))
    before = files_fingerprint(directory)
    (tmp_path / "base" / "model.safetensors").touch()
    assert files_fingerprint(directory) != before


def pickled(path: Path) -> None:
    torch.save(load_file(path / "adapter_model.safetensors"), path / "adapter_model.bin")
    (path / "adapter_model.safetensors").unlink()


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "a name on a hub": (
        lambda path: edit(path, base_model_name_or_path="google/bert-tiny"),
        r"is an adapter of peft \(LORA\) of 'google/bert-tiny', .* nothing is ever downloaded: put the base model",
    ),
    "no name": (lambda path: edit(path, base_model_name_or_path=None), "put the base model"),
    "of an adapter": (lambda path: edit(path, base_model_name_or_path="../adapter"), "is an adapter itself"),
    "another kind": (lambda path: edit(path, peft_type="PROMPT_TUNING"), "only ADALORA, IA3, LOHA, LOKR, LORA"),
    "a module to import": (lambda path: edit(path, megatron_config={"a": 1}, megatron_core="os"), "only ADALORA"),
    "settings are no JSON": (lambda path: (path / "adapter_config.json").write_text("{"), "not valid JSON"),
    "no weights": (lambda path: (path / "adapter_model.safetensors").unlink(), "has no weights"),
    "pickled": (pickled, "unpickling can run any code"),
    "a matrix missing": (
        lambda path: replace_tensors(path, "1.attention.self.query.lora_A"),
        "lacks parameter .*lora_A",
    ),
    "the head missing": (lambda path: replace_tensors(path, "classifier"), "lacks parameter .*classifier"),
    "one too many": (lambda path: replace_tensors(path, odd=torch.zeros(1)), "has the unexpected parameter .*odd"),
    "a great rank": (lambda path: edit(path, r=10**9), "r in .* must be at most"),
    "another rank": (lambda path: edit(path, r=3), "does not load"),
    "no such module": (lambda path: edit(path, target_modules=["nothing"]), "does not load"),
    "layers repeated": (lambda path: edit(path, layer_replication=[[0, 2]] * 10**5), "on layers as they are"),
}


@pytest.mark.parametrize(("spoil", "match"), BROKEN.values(), ids=list(BROKEN))
def test_broken_adapters_are_refused_in_one_sentence(spoil: Callable[[Path], None], match: str, tmp_path: Path) -> None:
    _, directory = adapter(tmp_path)
    spoil(directory)
    with pytest.raises(ValueError, match=match) as caught:
        load_model(directory)
    assert one_sentence(str(caught.value)), str(caught.value)


def test_absent_peft_names_the_base_and_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, directory = adapter(tmp_path)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r'adapter is an adapter of .*base, .* "quotient-manifolds\[peft\]"\.'):
        load_model(directory)
