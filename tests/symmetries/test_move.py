"""Moving on purpose: every group, the canonical representative, and models on disk."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from quotient_manifolds.symmetries import (
    Factor,
    ParameterView,
    SymmetricPair,
    Symmetries,
    balance,
    find_symmetries,
    output_change,
    random_move,
)
from tests.models import BY_NAME, IDS, ModelCase, llama, noise

NAMES = ("torch", "torch without bias", "torch with appended tokens", "BERT", "GPT-2", "CLIP, both towers")


@pytest.mark.parametrize("name", NAMES)
def test_balancing_keeps_the_function_and_forgets_the_representative(name: str) -> None:
    case: ModelCase = BY_NAME[name]
    model = case.build().double()
    canonical = balance(model)
    assert output_change(model, case.inputs(), {}, canonical) < 1e-12
    elsewhere = copy.deepcopy(model)
    elsewhere.load_state_dict(random_move(model, scale=2.0, seed=3), strict=False)
    again = balance(elsewhere)
    for key, w in canonical.items():
        torch.testing.assert_close(again[key], w, rtol=1e-7, atol=1e-8)
    found = find_symmetries(model)
    for pair in found.pairs:
        G, H = pair.G.read(canonical), pair.H.read(canonical)
        torch.testing.assert_close(G.mT @ G, H.mT @ H, rtol=1e-9, atol=1e-9)
    for shift in found.translations:
        assert not shift.bias.read(canonical).any()


def test_rotary_models_move_and_balance_too() -> None:
    model = llama(num_hidden_layers=2, attention_bias=True).double()
    found = find_symmetries(model)
    assert {pair.acts for pair in found.pairs} == {"GL(1, C)", "GL(h)"}
    moved = random_move(model, scale=3.0, seed=1)
    assert output_change(model, IDS, {}, moved) < 1e-11
    assert all(not torch.equal(moved[name], w) for name, w in model.named_parameters() if name in found.moved)
    other = copy.deepcopy(model)
    other.load_state_dict(moved, strict=False)
    for key, w in balance(model).items():
        torch.testing.assert_close(balance(other)[key], w, rtol=1e-8, atol=1e-9)


class Neurons(nn.Module):
    """Linear -> ReLU -> Linear: each neuron can be scaled by a positive number."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def neurons(model: Neurons) -> Symmetries:
    params = dict(model.named_parameters())

    def part(name: str, pattern: str) -> ParameterView:
        return ParameterView.of(name, params[name], pattern, {})

    G = Factor((part("up.weight", "heads rows -> heads rows 1"), part("up.bias", "heads -> heads 1 1")))
    H = Factor((part("down.weight", "rows heads -> heads rows 1"),))
    return Symmetries((SymmetricPair("neurons", "MLP", G, H, "GL+(1)"),))


def test_only_positive_numbers_act_on_neurons() -> None:
    model = Neurons().double()
    found, x = neurons(model), noise(9, 5).double()
    for seed in range(3):
        moved = random_move(model, found, seed=seed)
        torch.testing.assert_close(functional_call(model, moved, (x,)), model(x), rtol=1e-12, atol=1e-12)
    canonical = balance(model, found)
    torch.testing.assert_close(functional_call(model, canonical, (x,)), model(x), rtol=1e-12, atol=1e-12)
    pair = found.pairs[0]
    torch.testing.assert_close(pair.G.read(canonical).norm(dim=1), pair.H.read(canonical).norm(dim=1))


def test_translations_can_be_left_out_and_parameters_need_symmetries() -> None:
    model = BY_NAME["BERT"].build()
    name = "encoder.layer.0.attention.output.dense.bias"
    own = model.get_parameter(name)
    assert torch.equal(random_move(model, translations=False)[name], own)
    assert not torch.equal(random_move(model)[name], own)
    with pytest.raises(ValueError, match="give the model, or its symmetries"):
        balance(dict(model.named_parameters()))


@pytest.mark.parametrize("broken", ["meta", "int8", "nan"])
def test_broken_weights_are_named(broken: str) -> None:
    model = BY_NAME["torch"].build()
    found = find_symmetries(model)
    params = {name: w.detach().clone() for name, w in model.named_parameters()}
    bad = {"meta": lambda w: w.to("meta"), "int8": lambda w: w.to(torch.int8), "nan": lambda w: w * torch.nan}
    params["attention.in_proj_weight"] = bad[broken](params["attention.in_proj_weight"])
    for call in (random_move, balance):
        with pytest.raises(ValueError, match=r"parameter 'attention.in_proj_weight'"):
            call(params, found)


# --- on disk ---------------------------------------------------------------------------------------------------------


def call(*arguments: object) -> Any:
    testing = pytest.importorskip("click.testing")
    from quotient_manifolds.cli.app import cli

    return testing.CliRunner().invoke(cli, ["move", *map(str, arguments)])


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    pytest.importorskip("transformers")
    from tests.hugging_face import bert_classifier

    directory = bert_classifier(tmp_path / "bert", shard="20KB")
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text("{}")
    return directory


@pytest.mark.parametrize("how", ["--seed=3", "--balance"])
def test_a_directory_is_moved(bert: Path, tmp_path: Path, how: str) -> None:
    from quotient_manifolds.load import load_model

    out = tmp_path / "out"
    before = {file.name: file.read_bytes() for file in bert.iterdir() if file.is_file()}
    assert len([name for name in before if name.endswith(".safetensors")]) > 1
    shown = call(bert, out, how)
    assert shown.exit_code == 0, shown.output
    assert "4 pairs and 4 translations moved; the output changed by" in " ".join(shown.output.split())
    old, new = load_model(bert), load_model(out)
    found = find_symmetries(old)
    for name, w in old.named_parameters():
        assert new.get_parameter(name).dtype == w.dtype
        if name not in found.moved or w.any():  # biases are zero before training
            assert torch.equal(new.get_parameter(name), w) == (name not in found.moved)
    ids = {"input_ids": torch.arange(11)[None]}
    with torch.no_grad():
        torch.testing.assert_close(new(**ids).logits, old(**ids).logits, rtol=1e-3, atol=1e-4)
    assert before == {file.name: file.read_bytes() for file in bert.iterdir() if file.is_file()}
    assert (out / "tokenizer.json").read_bytes() == before["tokenizer.json"]
    assert (out / "1_Pooling" / "config.json").is_file()
    assert not [path for path in tmp_path.iterdir() if path not in (bert, out)]


def test_half_precision_stays_half_precision(bert: Path, tmp_path: Path) -> None:
    from quotient_manifolds.load import load_model

    half = tmp_path / "half"
    load_model(bert).to(torch.bfloat16).save_pretrained(half)
    shown = call(half, tmp_path / "out", "--balance")
    assert shown.exit_code == 0, shown.output
    assert {w.dtype for w in load_model(tmp_path / "out").parameters()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_nothing_is_written_when_something_is_wrong(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quotient_manifolds import load, symmetries

    out = tmp_path / "out"

    def refused(message: str, *arguments: object) -> None:
        shown = call(*arguments)
        assert shown.exit_code == 2, shown.output
        assert message in " ".join(shown.output.split())
        assert not [path for path in tmp_path.iterdir() if path != bert]

    refused("Expected a Hugging Face directory", tmp_path / "nowhere", out)
    refused("is there already", bert, bert)
    refused("is no directory to write", bert, tmp_path / "a" / "b")
    refused("positive number. Found 0", bert, out, "--scale", 0)
    with monkeypatch.context() as patch:
        patch.setattr(
            symmetries, "random_move", lambda model, *_, **__: {n: 2 * w for n, w in model.named_parameters()}
        )
        refused("should have the same output, but it changes by", bert, out)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.copytree", eval("lambda *_, **__: 1 / 0"))  # from no file: no code of a user
        assert call(bert, out).exit_code == 1  # a defect
        assert not [path for path in tmp_path.iterdir() if path != bert]
    with monkeypatch.context() as patch:
        patch.setattr("shutil.copytree", lambda old, new, **_: load.load_model(old).save_pretrained(new))
        refused("would not hold bert.encoder.layer.0", bert, out)
    (bert / "config.json").unlink()
    refused("is no Hugging Face model: it has no config.json", bert, out)
