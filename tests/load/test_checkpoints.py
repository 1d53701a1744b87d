"""The models of a zoo: found in order, named, and each read by its loader."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from torch import nn

from quotient_manifolds.files import siblings
from quotient_manifolds.load import (
    Checkpoint,
    DataSource,
    find_checkpoints,
    load_checkpoint,
    load_model,
)
from tests import hugging_face
from tests.image_files import PLAIN
from tests.refusals import one_sentence


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def names(checkpoints: tuple[Checkpoint, ...]) -> list[str]:
    return [checkpoint.name for checkpoint in checkpoints]


def test_numbers_sort_as_numbers(tmp_path: Path) -> None:
    touch(tmp_path, *(f"model_{i}.pt" for i in (10, 2, 0, 71)), "README.md", "model_2.json")
    found = find_checkpoints(["model_*"], "clip-soup", tmp_path)
    assert names(found) == ["model_0", "model_2", "model_10", "model_71"]
    assert [checkpoint.path for checkpoint in found] == [tmp_path / f"model_{i}.pt" for i in (0, 2, 10, 71)]
    assert {checkpoint.loader for checkpoint in found} == {"clip-soup"}


def test_names_are_unique(tmp_path: Path) -> None:
    touch(tmp_path, "a/best.pt", "b/best.pt", "b/last.pt", "b/best.safetensors", "best.pth")
    found = find_checkpoints(["**/*.*"], "clip-soup", tmp_path)
    assert names(found) == ["a/best", "b/best.pt", "b/best.safetensors", "last", "best"]


def test_a_checkpoint_that_two_patterns_match_counts_once(tmp_path: Path) -> None:
    touch(tmp_path, "a.pt", "b.pt")
    found = find_checkpoints(["*.pt", str(tmp_path / "a.pt"), "./b.pt"], "clip-soup", tmp_path)
    assert names(found) == ["a", "b"]


def test_a_name_with_brackets_is_found_literally(tmp_path: Path) -> None:
    touch(tmp_path, "run [1].pt")
    assert names(find_checkpoints(["run [1].pt"], "clip-soup", tmp_path)) == ["run [1]"]


def test_directories_and_bundles(tmp_path: Path) -> None:
    touch(tmp_path, "x/1/model.v2/config.json", "x/2/README", "README")
    assert names(find_checkpoints(["x/*/*", "x/*"], "huggingface", tmp_path)) == ["1", "model.v2", "2"]
    parts = ("index", "meta", "data-00000-of-00001")
    touch(tmp_path, *(f"bert_{i:02}/model.ckpt-36815.{part}" for i in range(3) for part in parts), "bert_00/checkpoint")
    touch(tmp_path, *(f"flat/bert_1.ckpt.{part}" for part in parts))
    whole = find_checkpoints(["bert_*"], "bert-tensorflow", tmp_path)
    assert names(whole) == [f"bert_0{i}" for i in range(3)]
    files = find_checkpoints(["bert_*/*"], "bert-tensorflow", tmp_path)
    assert names(files) == [f"bert_0{i}/model.ckpt-36815" for i in range(3)]
    (flat,) = find_checkpoints(["flat/*"], "bert-tensorflow", tmp_path)
    assert flat == Checkpoint("bert_1.ckpt", tmp_path / "flat/bert_1.ckpt", "bert-tensorflow")
    assert find_checkpoints(["flat/bert_1.ckpt.index"], "bert-tensorflow", tmp_path) == (flat,)


NOT_FOUND = {
    "no match": (["nothing_*.pt"], "clip-soup", "'nothing_\\*.pt' matches nothing in"),
    "other files only": (["*.md"], "clip-soup", r"reads a .pt, .pth, .safetensors file, and this matches README.md"),
    "a file is no directory": (["a.pt"], "huggingface", "reads a directory, and this matches a.pt"),
    "one of two": (["a.pt", "c.pt"], "clip-soup", "'c.pt' matches nothing"),
    "loader": (["a.pt"], "clip_soup", "one of huggingface, clip-soup, bert-tensorflow, or package.module:function"),
    "no patterns": ([], "huggingface", "needs patterns"),
}


@pytest.mark.parametrize(("patterns", "loader", "match"), NOT_FOUND.values(), ids=list(NOT_FOUND))
def test_what_is_not_found_is_said(patterns: list[str], loader: str, match: str, tmp_path: Path) -> None:
    touch(tmp_path, "a.pt", "README.md")
    with pytest.raises(ValueError, match=match) as caught:
        find_checkpoints(patterns, loader, tmp_path)
    assert one_sentence(str(caught.value))


@pytest.fixture
def zoo_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "zoo_of_functions.py").write_text(
        "import torch\n"
        "def one():\n    return torch.nn.Linear(2, 3, dtype=torch.float64)\n"
        "def sized(path):\n    return torch.nn.Linear(int(path.read_text()), 1)\n"
        "def bad(path):\n    raise RuntimeError('first\\nsecond')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delitem(sys.modules, "zoo_of_functions", raising=False)
    return "zoo_of_functions"


def test_functions_with_and_without_a_path(zoo_module: str, tmp_path: Path) -> None:
    (tmp_path / "4.txt").write_text("4")
    (tmp_path / "12.txt").write_text("12")
    small, large = find_checkpoints(["*.txt"], f"{zoo_module}:sized", tmp_path)
    assert [small.name, large.name] == ["4", "12"]
    model = load_checkpoint(large)
    assert isinstance(model, nn.Linear)
    assert model.in_features == 12
    (alone,) = find_checkpoints([], f"{zoo_module}:one", tmp_path)
    assert alone == Checkpoint(f"{zoo_module}:one", None, f"{zoo_module}:one")
    model = load_checkpoint(alone)
    assert not model.training
    assert {value.dtype for value in model.parameters()} == {torch.float64}  # as it is
    with pytest.raises(ValueError, match=r"bad was called with .*4\.txt and raised RuntimeError: first$"):
        load_checkpoint(Checkpoint("4", tmp_path / "4.txt", f"{zoo_module}:bad"))
    with pytest.raises(ValueError, match="has no path"):
        load_checkpoint(Checkpoint("4", None, "huggingface"))


def test_a_directory_in_half_precision_is_measured_in_single(tmp_path: Path) -> None:
    hugging_face.bert_classifier(tmp_path / "a")
    half = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "a", dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "b")
    (checkpoint,) = find_checkpoints(["b"], "huggingface", tmp_path)
    model = load_checkpoint(checkpoint)
    assert {value.dtype for value in model.parameters()} == {torch.float32}
    stored = safetensors.torch.load_file(tmp_path / "b" / "model.safetensors")["classifier.weight"]
    assert stored.dtype == torch.bfloat16
    assert torch.equal(model.get_parameter("classifier.weight"), stored.float())
    (tmp_path / "b" / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="does not load"):
        load_checkpoint(checkpoint)
    (tmp_path / "b" / "model.safetensors").unlink()
    (tmp_path / "b" / "model.safetensors.index.json").write_text('{"weight_map": [1]}')
    with pytest.raises(ValueError, match="has no weight_map"):
        load_checkpoint(checkpoint)


def test_folders_of_thousands_are_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / f"m{i}.safetensors" for i in range(50)]
    for file in files:
        file.touch()
    (tmp_path / "m7.json").touch()
    os.utime(tmp_path, (1e9, 1e9))
    listed = []
    names = os.listdir
    monkeypatch.setattr(os, "listdir", lambda folder: listed.append(folder) or names(folder))
    found = [siblings(file, file.stem) for file in files]
    assert len(listed) == 1
    assert [path.name for path in found[7]] == ["m7.json", "m7.safetensors"]
    assert len(found[4]) == 11  # m4 and m40 to m49
    (tmp_path / "m4.json").touch()
    assert len(siblings(files[4], "m4")) == 12


def test_the_home_of_nobody(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No model at ~nosuchuser"):
        load_model("~nosuchuser/model")
    for name in ("a.jsonl", "a.npz", "a"):
        with pytest.raises(ValueError, match=r"There is no .*~nosuchuser"):
            DataSource(f"~nosuchuser/{name}", mean=None if name == "a.jsonl" else "none").batches(PLAIN)
    with pytest.raises(ValueError, match="matches nothing"):
        find_checkpoints(["~nosuchuser/*"], "huggingface", tmp_path)
