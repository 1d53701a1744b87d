"""The command `move`: a model on disk becomes another with the same function, or nothing is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from quotient_manifolds.load import load_model, make_generic
from quotient_manifolds.symmetries import find_symmetries
from tests import hugging_face
from tests.command_line import call, digest, refused


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return hugging_face.bert_classifier(tmp_path / "bert", shard="20KB")


@pytest.mark.parametrize("how", ["--seed=3", "--balance"])
def test_a_directory_is_moved(sharded: Path, tmp_path: Path, how: str) -> None:
    out, before = tmp_path / "out", digest(sharded)
    assert len([name for name in before if name.endswith(".safetensors")]) > 1
    shown = call("move", sharded, out, how)
    assert shown.exit_code == 0, shown.output
    assert "4 pairs, 4 translations and " in " ".join(shown.output.split())
    old, new = load_model(sharded), load_model(out)
    ids = {"input_ids": torch.arange(11)[None]}
    found = find_symmetries(old, ids)
    for name, w in old.named_parameters():
        assert new.get_parameter(name).dtype == w.dtype
        if name not in found.moved:
            assert torch.equal(new.get_parameter(name), w)
        elif name in found.names and w.any():  # biases are zero before training
            assert not torch.equal(new.get_parameter(name), w)
    with torch.no_grad():
        torch.testing.assert_close(new(**ids).logits, old(**ids).logits, rtol=1e-3, atol=1e-4)
    assert digest(sharded) == before
    assert digest(out)["tokenizer.json"] == before["tokenizer.json"]
    assert {*tmp_path.iterdir()} == {sharded, out}


def test_half_precision_stays_half_precision(sharded: Path, tmp_path: Path) -> None:
    half = tmp_path / "half"
    load_model(sharded).to(torch.bfloat16).save_pretrained(half)
    shown = call("move", half, tmp_path / "out", "--balance")
    assert shown.exit_code == 0, shown.output
    assert {w.dtype for w in load_model(tmp_path / "out").parameters()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


SWITCH = {"vocab_size": 40, "d_model": 12, "d_kv": 4, "d_ff": 6, "num_heads": 3, "num_experts": 12, "num_layers": 2}
SPARSE = {"num_decoder_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}


def test_idle_experts_and_optional_inputs_see_no_change(tmp_path: Path) -> None:
    def difference(model: torch.nn.Module, **inputs: torch.Tensor) -> float:
        model.eval().save_pretrained(tmp_path / "in")
        shown = call("move", tmp_path / "in", tmp_path / "out", "--seed", 1)
        assert shown.exit_code == 0, shown.output
        with torch.no_grad():
            old, new = (load_model(tmp_path / each)(**inputs)[0] for each in ("in", "out"))
        for folder in ("in", "out"):
            shutil.rmtree(tmp_path / folder)
        return float((new - old).abs().max() / old.abs().max())

    torch.manual_seed(0)
    ids = torch.randint(1, 40, (8, 12))
    config = transformers.SwitchTransformersConfig(**SWITCH, **SPARSE, expert_capacity=64)
    switch = make_generic(transformers.SwitchTransformersForConditionalGeneration(config))
    assert difference(switch, input_ids=ids, decoder_input_ids=ids[:, :5]) < 1e-3
    gpt2 = make_generic(load_model(hugging_face.gpt2(tmp_path / "gpt2")))
    assert difference(gpt2, input_ids=ids, token_type_ids=ids % 2) < 1e-3
    vit = transformers.ViTForMaskedImageModeling(transformers.ViTConfig(**hugging_face.TINY_VIT, encoder_stride=8))
    pixels, masked = torch.randn(3, 3, 16, 16), torch.rand(3, 4) < 0.5
    assert difference(make_generic(vit), pixel_values=pixels, bool_masked_pos=masked) < 1e-3


def test_nothing_is_written_when_something_is_wrong(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quotient_manifolds import load, symmetries

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(symmetries, "random_move", lambda params, *_, **__: {n: 2 * w for n, w in params.items()})
        refused(call("move", sharded, out), "must compute the same on inputs that its symmetries were not found on")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.copytree", lambda *_, **__: 1 / 0)
        assert call("move", sharded, out).exit_code == 1  # a defect
    with monkeypatch.context() as patch:
        patch.setattr("shutil.copytree", lambda old, new, **_: load.load_model(old).save_pretrained(new))
        refused(call("move", sharded, out), "would not hold bert.")
    assert [*tmp_path.iterdir()] == [sharded]
