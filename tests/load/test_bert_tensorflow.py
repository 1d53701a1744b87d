"""BERT classifiers of TensorFlow checkpoints: converted once, exactly, or refused and nothing left behind."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import einops
import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from quotient_manifolds.load import (
    Checkpoint,
    DataSource,
    find_checkpoints,
    load_checkpoint,
)
from quotient_manifolds.sharpness import cross_entropy
from quotient_manifolds.symmetries import prove_symmetries
from tests.refusals import one_sentence

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "very", "film", "a", "not"]


Variables = dict[str, NDArray[Any]]


def bert_variables(*, classes: int = 3, width: int = 128, layers: int = 2, seed: int = 0) -> Variables:
    """The variables of a TensorFlow-1 checkpoint of google-research/bert after fine-tuning: 2 layers, 2 heads of 64."""
    draw = np.random.default_rng(seed)

    def dense(path: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
        return {f"{path}/kernel": (rows, columns), f"{path}/bias": (columns,)}

    def norm(path: str) -> dict[str, tuple[int, ...]]:
        return {f"{path}/LayerNorm/gamma": (width,), f"{path}/LayerNorm/beta": (width,)}

    shapes: dict[str, tuple[int, ...]] = {
        "bert/embeddings/word_embeddings": (len(WORDS), width),
        "bert/embeddings/position_embeddings": (32, width),
        "bert/embeddings/token_type_embeddings": (2, width),
        **norm("bert/embeddings"),
        **dense("bert/pooler/dense", width, width),
        "output_weights": (classes, width),
        "output_bias": (classes,),
    }
    for i in range(layers):
        layer = f"bert/encoder/layer_{i}"
        for part in ("query", "key", "value"):
            shapes |= dense(f"{layer}/attention/self/{part}", width, width)
        shapes |= dense(f"{layer}/attention/output/dense", width, width) | norm(f"{layer}/attention/output")
        shapes |= dense(f"{layer}/intermediate/dense", width, 48)
        shapes |= dense(f"{layer}/output/dense", 48, width) | norm(f"{layer}/output")
    variables = {name: (0.2 * draw.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}
    moments = {f"{name}/{which}": np.zeros(shape, np.float32) for name, shape in shapes.items() for which in MOMENTS}
    return {**variables, **moments, "global_step": np.int64(36815)}


MOMENTS = ("adam_m", "adam_v")


def bert_logits(v: Variables, ids: NDArray[Any], types: NDArray[Any], *, heads: int = 2) -> NDArray[Any]:
    """The logits of BERT (Devlin et al., 2019) for rows without padding, in float64, straight from the variables."""

    def dense(path: str, x: NDArray[Any]) -> NDArray[Any]:
        return x @ v[f"{path}/kernel"].astype(float) + v[f"{path}/bias"]

    def norm(path: str, x: NDArray[Any]) -> NDArray[Any]:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12)
        return scaled * v[f"{path}/LayerNorm/gamma"] + v[f"{path}/LayerNorm/beta"]

    def gelu(x: NDArray[Any]) -> NDArray[Any]:
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    words, positions, kinds = (v[f"bert/embeddings/{name}_embeddings"] for name in ("word", "position", "token_type"))
    x = norm("bert/embeddings", words[ids].astype(float) + positions[: ids.shape[1]] + kinds[types])
    rows, length, width = x.shape
    for i in range(sum(name.endswith("intermediate/dense/bias") for name in v)):
        layer = f"bert/encoder/layer_{i}"
        split = (rows, length, heads, width // heads)
        q, k, value = (
            dense(f"{layer}/attention/self/{part}", x).reshape(split).transpose(0, 2, 1, 3)
            for part in ("query", "key", "value")
        )
        scores = np.exp(q @ k.transpose(0, 1, 3, 2) / np.sqrt(width // heads))
        mixed = (scores / scores.sum(-1, keepdims=True) @ value).transpose(0, 2, 1, 3).reshape(x.shape)
        x = norm(f"{layer}/attention/output", x + dense(f"{layer}/attention/output/dense", mixed))
        x = norm(f"{layer}/output", x + dense(f"{layer}/output/dense", gelu(dense(f"{layer}/intermediate/dense", x))))
    pooled = np.tanh(dense("bert/pooler/dense", x[:, 0]))
    return pooled @ v["output_weights"].T.astype(float) + v["output_bias"]


class FakeReader:
    """Answers as tensorflow's CheckpointReader does."""

    def __init__(self, variables: Variables) -> None:
        self.variables = variables

    def get_variable_to_shape_map(self) -> dict[str, list[int]]:
        return {name: list(value.shape) for name, value in self.variables.items()}

    def get_tensor(self, name: str) -> NDArray[Any]:
        return self.variables[name]


@pytest.fixture
def tensorflow(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A tensorflow whose checkpoints hold `variables`; `opened` counts how often one was."""
    state = SimpleNamespace(variables=bert_variables(), opened=0, reader=FakeReader)

    def load_checkpoint(prefix: str) -> Any:
        state.opened += 1
        return state.reader(state.variables)

    einops.rearrange(torch.zeros(1), "a -> a")  # which asks every library that is imported, once, for its tensors
    module = ModuleType("tensorflow")
    module.__spec__ = ModuleSpec("tensorflow", None)  # libraries that are imported now ask whether it is there
    module.train = SimpleNamespace(load_checkpoint=load_checkpoint)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorflow", module)
    return state


def bundle(folder: Path, name: str = "bert_00", *, vocabulary: bool = True) -> Checkpoint:
    """The files of a TensorFlow checkpoint: the fake reads none of them, their content is their identity."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / name / "model.ckpt-36815.index").write_bytes(b"checksums of " + name.encode())
    (folder / name / "model.ckpt-36815.data-00000-of-00001").write_bytes(b"data")
    if vocabulary:
        (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    (found,) = find_checkpoints([name], "bert-tensorflow", folder)
    return found


def test_bert_computes_what_its_variables_say(tensorflow: SimpleNamespace, tmp_path: Path) -> None:
    model = load_checkpoint(bundle(tmp_path))
    assert isinstance(model, transformers.BertForSequenceClassification)
    ids, types = np.array([[2, 5, 8, 3, 6, 3], [2, 9, 7, 6, 3, 10]]), np.array([[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 1]])
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(ids), token_type_ids=torch.tensor(types)).logits.numpy()
    expected = bert_logits(tensorflow.variables, ids, types)
    assert np.abs(logits - expected).max() < 1e-5 * np.abs(expected).max()
    assert not model.training
    assert model.config.id2label == {0: "contradiction", 1: "entailment", 2: "neutral"}


def test_conversion_is_made_once_and_says_what_it_left_out(tensorflow: SimpleNamespace, tmp_path: Path) -> None:
    checkpoint = bundle(tmp_path)
    first = load_checkpoint(checkpoint)
    again = load_checkpoint(checkpoint)
    assert tensorflow.opened == 1
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in first.state_dict().items())
    (directory,) = (path for path in (tmp_path / "bert_00").iterdir() if path.is_dir())
    record = json.loads((directory / "conversion.json").read_text())
    assert record["skipped"] == sorted(name for name in tensorflow.variables if "adam" in name or name == "global_step")
    assert find_checkpoints(["bert*"], "bert-tensorflow", tmp_path) == (checkpoint,)  # a conversion is none
    (same,) = find_checkpoints(["bert*/*"], "bert-tensorflow", tmp_path)
    assert same.name == "model.ckpt-36815"
    (tmp_path / "bert_00" / "model.ckpt-36815.index").write_bytes(b"checksums of other weights")
    tensorflow.variables = bert_variables(seed=1)
    changed = load_checkpoint(checkpoint)
    assert tensorflow.opened == 2
    assert not torch.equal(changed.state_dict()["classifier.weight"], first.state_dict()["classifier.weight"])


def test_conversions_in_a_cache(tensorflow: SimpleNamespace, tmp_path: Path) -> None:
    cache = tmp_path / "kept" / "here"
    for seed, name in enumerate(("bert_00", "bert_01")):
        tensorflow.variables = bert_variables(seed=seed)
        checkpoint = bundle(tmp_path, name)
        for _ in range(2):
            model = load_checkpoint(checkpoint, cache=cache)
            found = model.get_parameter("classifier.weight").detach().numpy()
            assert np.array_equal(found, tensorflow.variables["output_weights"])
        assert not [path for path in (tmp_path / name).iterdir() if path.is_dir()]
    assert tensorflow.opened == 2
    assert len(list(cache.iterdir())) == 2


def test_heads_of_another_width_come_from_the_configuration_beside(tensorflow: SimpleNamespace, tmp_path: Path) -> None:
    tensorflow.variables = bert_variables(width=32, classes=2)
    checkpoint = bundle(tmp_path)
    with pytest.raises(ValueError, match=r"32 wide, which does not make 0 heads; put its bert_config\.json beside it"):
        load_checkpoint(checkpoint)
    (tmp_path / "bert_00" / "bert_config.json").write_text('{"num_attention_heads": 4, "hidden_act": "gelu"}')
    model = load_checkpoint(checkpoint)
    ids = np.array([[2, 5, 8, 3]])
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(ids)).logits.numpy()
    expected = bert_logits(tensorflow.variables, ids, np.zeros_like(ids), heads=4)
    assert np.abs(logits - expected).max() < 1e-5 * np.abs(expected).max()
    assert prove_symmetries(model, {"input_ids": torch.tensor(ids)}).all_proved


def edited(**changes: NDArray[Any] | None) -> Callable[[Variables], Variables]:
    def edit(variables: Variables) -> Variables:
        merged: dict[str, Any] = {**variables, **{name.replace("__", "/"): value for name, value in changes.items()}}
        return {name: value for name, value in merged.items() if value is not None}

    return edit


BROKEN_BERTS = {
    "a variable missing": (edited(bert__encoder__layer_1__output__dense__bias=None), r"lacks parameter .*1\.output"),
    "no head": (edited(output_weights=None), "no matrix classifier.weight"),
    "an unknown variable": (edited(bert__more=np.zeros(3, np.float32)), r"unexpected parameter bert\.more"),
    "a pretraining head": (edited(cls__predictions__output_bias=np.zeros(3, np.float32)), "unexpected parameter cls"),
    "another shape": (
        edited(bert__pooler__dense__bias=np.zeros(3, np.float32)),
        r"pooler\.dense\.bias of shape \(3,\)",
    ),
    "not transposed": (
        lambda v: {n: a.T if n.endswith("intermediate/dense/kernel") else a for n, a in v.items()},
        "intermediate.dense.weight of shape",
    ),
    "integers": (edited(output_bias=np.zeros(3, np.int64)), "output_bias of dtype int64"),
}


@pytest.mark.parametrize(("edit", "match"), BROKEN_BERTS.values(), ids=list(BROKEN_BERTS))
def test_broken_bert_is_refused_and_leaves_nothing(
    edit: Callable[[Variables], Variables], match: str, tensorflow: SimpleNamespace, tmp_path: Path
) -> None:
    tensorflow.variables = edit(tensorflow.variables)
    checkpoint = bundle(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=match) as caught:
        load_checkpoint(checkpoint)
    assert one_sentence(str(caught.value))
    assert str(checkpoint.path) in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


class FailingReader(FakeReader):
    """Tells the shapes and fails at the values, as tensorflow does for files that were cut."""

    def get_tensor(self, name: str) -> NDArray[Any]:
        raise IndexError("Read less bytes than requested\nsecond line")


class ForgetfulReader(FakeReader):
    """Answers differently when asked again."""

    def __init__(self, variables: Variables) -> None:
        super().__init__(variables)
        self.asked: set[str] = set()

    def get_tensor(self, name: str) -> NDArray[Any]:
        value = self.variables[name]
        again = name in self.asked and name == "bert/pooler/dense/kernel"
        self.asked.add(name)
        return value + 1 if again else value


@pytest.mark.parametrize(
    ("reader", "match"),
    [
        (FailingReader, "is damaged: .* cannot be read: Read less bytes than requested$"),
        (ForgetfulReader, "pooler/dense"),
    ],
)
def test_what_is_read_is_checked(
    reader: type[FakeReader], match: str, tensorflow: SimpleNamespace, tmp_path: Path
) -> None:
    tensorflow.reader = reader
    with pytest.raises(ValueError, match=match):
        load_checkpoint(bundle(tmp_path))
    assert not [path for path in (tmp_path / "bert_00").iterdir() if path.is_dir()]


def test_a_full_disk_leaves_nothing(
    tensorflow: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", full)
    with pytest.raises(ValueError, match=r"cannot be written to .*No space left on device; give a directory"):
        load_checkpoint(bundle(tmp_path))
    assert not [path for path in (tmp_path / "bert_00").iterdir() if path.is_dir()]
    monkeypatch.undo()


def test_two_processes_converting_at_once(
    tensorflow: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process finishes while this one is about to: the rename fails, and what is there is read."""
    checkpoint, rename = bundle(tmp_path), os.replace

    def overtaken(source: Path, target: Path) -> None:
        monkeypatch.setattr("os.replace", rename)
        load_checkpoint(checkpoint)
        rename(source, target)  # a directory that is not empty stands there now

    monkeypatch.setattr("os.replace", overtaken)
    load_checkpoint(checkpoint)
    assert tensorflow.opened == 2
    assert len([path for path in (tmp_path / "bert_00").iterdir() if path.is_dir()]) == 1


def test_killed_in_the_middle_of_a_conversion(
    tensorflow: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a killed process leaves behind is never taken for a conversion."""
    checkpoint = bundle(tmp_path)
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)  # a killed process does not clean up

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", killed)
        with pytest.raises(KeyboardInterrupt):
            load_checkpoint(checkpoint)
    assert len([path for path in (tmp_path / "bert_00").iterdir() if path.is_dir()]) == 1
    assert load_checkpoint(checkpoint).config.num_labels == 3
    assert tensorflow.opened == 2


def test_absent_and_unreadable_tensorflow_checkpoints(
    tensorflow: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = bundle(tmp_path)

    def not_one(_: str) -> object:
        raise OSError("not an sstable (bad magic number)")

    monkeypatch.setattr(sys.modules["tensorflow"].train, "load_checkpoint", not_one)
    with pytest.raises(ValueError, match="no readable TensorFlow checkpoint: not an sstable"):
        load_checkpoint(checkpoint)
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(ImportError, match=r'pip install "quotient-manifolds\[tensorflow\]"'):
        load_checkpoint(checkpoint)
    with pytest.raises(ValueError, match=r"There is no TensorFlow checkpoint .*nowhere/model\.ckpt"):
        load_checkpoint(Checkpoint("a", tmp_path / "nowhere" / "model.ckpt", "bert-tensorflow"))


def test_mnli_pairs_reach_the_classes_in_the_order_of_the_checkpoint(
    tensorflow: SimpleNamespace, tmp_path: Path
) -> None:
    """contradiction 0, entailment 1, neutral 2, whatever the copy of MNLI calls them; pairs, uncased, at most 128."""
    model = load_checkpoint(checkpoint := bundle(tmp_path))
    rows = [("Good film", "a BAD film", "contradiction"), ("a film", "film", "entailment"), ("good", "very", "neutral")]
    words = tmp_path / "mnli.jsonl"
    lines = [{"sentence1": a, "sentence2": b, "gold_label": label} for a, b, label in rows]
    words.write_text("".join(json.dumps(line) + "\n" for line in lines))
    by_name = DataSource(
        words,
        columns={"text": "sentence1", "text_pair": "sentence2", "label": "gold_label"},
        labels={"entailment": 1, "contradiction": 0, "neutral": 2},
    )
    glue = {"entailment": 0, "neutral": 1, "contradiction": 2}
    numbers = tmp_path / "glue.csv"
    numbers.write_text("label,text,text_pair\n" + "".join(f"{glue[label]},{a},{b}\n" for a, b, label in rows))
    (batch,) = by_name.batches(model, checkpoint)
    (other,) = DataSource(numbers, labels=[1, 2, 0]).batches(model, checkpoint)
    assert batch["labels"].tolist() == [0, 1, 2]
    assert batch["input_ids"][0].tolist() == [2, 5, 8, 3, 9, 6, 8, 3]  # [CLS] good film [SEP] a bad film [SEP]
    assert batch["token_type_ids"][0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert all(torch.equal(batch[name], other[name]) for name in batch)
    logits = [
        bert_logits(tensorflow.variables, ids[mask].numpy()[None], types[mask].numpy()[None])[0]
        for ids, types, mask in zip(
            batch["input_ids"], batch["token_type_ids"], batch["attention_mask"].bool(), strict=True
        )
    ]
    losses = [np.log(np.exp(row).sum()) - row[label] for row, label in zip(logits, [0, 1, 2], strict=True)]
    with torch.no_grad():
        assert float(cross_entropy(model, batch)) == pytest.approx(np.mean(losses), rel=1e-5)
