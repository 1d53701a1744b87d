"""The command `move`: a model on disk becomes another with the same function, or nothing is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from quotient_manifolds import symmetries
from quotient_manifolds.load import load_model
from quotient_manifolds.symmetries import find_symmetries, make_generic
from tests.command_line import call, digest, refused
from tests.nets import hugging_face


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return hugging_face.bert_classifier(tmp_path / "bert", shard="20KB")


def test_a_directory_is_moved(sharded: Path, tmp_path: Path) -> None:
    out, before = tmp_path / "out", digest(sharded)
    assert len([name for name in before if name.endswith(".safetensors")]) > 1
    shown = call("move", sharded, out, "--seed=3")
    assert shown.exit_code == 0, shown.output
    assert "4 pairs and " in " ".join(shown.output.split())
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


def difference(model: torch.nn.Module, folder: Path, *how: str, **inputs: torch.Tensor) -> float:
    """How much of its size the output of a model changes when it is moved."""
    model.eval().save_pretrained(folder / "in")  # type: ignore[operator]
    shown = call("move", folder / "in", folder / "out", "--seed", 1, *how)
    assert shown.exit_code == 0, shown.output
    old, new = (load_model(folder / each) for each in ("in", "out"))
    assert {w.dtype for w in new.parameters()} == {w.dtype for w in old.parameters()}
    assert any(not torch.equal(w, new.get_parameter(name)) for name, w in old.named_parameters())
    with torch.no_grad():
        change = (new(**inputs)[0] - old(**inputs)[0]).abs().max() / old(**inputs)[0].abs().max()
    return float(change)


IDS = torch.randint(1, 40, (8, 12), generator=torch.Generator().manual_seed(0))
PIXELS = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
SWITCH = {"vocab_size": 40, "d_model": 8, "d_kv": 4, "d_ff": 6, "num_heads": 2, "num_experts": 6, "num_layers": 1}
SPARSE = {"num_sparse_encoder_layers": 1, "expert_capacity": 64}


def test_half_precision_stays_half_precision(tmp_path: Path) -> None:
    half = load_model(hugging_face.gpt2(tmp_path / "gpt2")).to(torch.bfloat16)
    assert difference(half, tmp_path, "--balance", input_ids=IDS) < 0.1
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def switch() -> torch.nn.Module:
    return transformers.SwitchTransformersEncoderModel(transformers.SwitchTransformersConfig(**SWITCH, **SPARSE))


def masked_vit() -> torch.nn.Module:
    config = transformers.ViTConfig(**{**hugging_face.TINY_VIT, "num_hidden_layers": 1}, encoder_stride=8)
    return transformers.ViTForMaskedImageModeling(config)


def test_idle_experts_see_no_change(tmp_path: Path) -> None:
    assert difference(make_generic(switch()), tmp_path, input_ids=IDS) < 1e-3


def test_optional_inputs_see_no_change(tmp_path: Path) -> None:
    masked = torch.arange(12).view(3, 4) % 3 == 0
    assert difference(make_generic(masked_vit()), tmp_path, pixel_values=PIXELS, bool_masked_pos=masked) < 1e-3


def test_nothing_is_written_when_something_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, out = hugging_face.gpt2(tmp_path / "gpt2"), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(
            symmetries, "random_representative", lambda params, *_, **__: {n: 2 * w for n, w in params.items()}
        )
        refused(call("move", model, out), "must compute the same on held-out inputs")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.copytree", lambda *_, **__: 1 / 0)
        assert call("move", model, out).exit_code == 1  # a defect
    with monkeypatch.context() as patch:
        patch.setattr("shutil.copytree", lambda old, new, **_: load_model(old).save_pretrained(new))
        refused(call("move", model, out), "must hold transformer.")
    assert [*tmp_path.iterdir()] == [model]
