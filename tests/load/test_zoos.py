"""Models of a zoo, found in order and named, and what functions of the user's return."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from quotient_manifolds.load import Checkpoint, find_checkpoints, load_checkpoint, load_model, load_symmetries
from tests.nets import hugging_face
from tests.nets.hugging_face import edit_config, rewrite_weights


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
        (f"{module}:decoder", "Found no function 'decoder'"),
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
        ("absent", "Found no function 'absent'"),
    ],
)
def test_what_does_not_fit_is_one_sentence(module: str, function: str, match: str) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        load_symmetries(f"{module}:{function}", model())
    assert "\n" not in str(caught.value)
