"""A causal language model goes through the function, measure, orbit and compare. The callback: test_callbacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import quotient_manifolds as qm
from quotient_manifolds.compare import Comparison
from quotient_manifolds.load import DataSource, load_model
from tests.command_line import call as invoke
from tests.nets import hugging_face
from tests.nets.net import shaken

WORDS = hugging_face.VOCABULARY[5:]
TEXT = " ".join(WORDS[(place * place) % len(WORDS)] for place in range(400))


def test_all_the_way(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
    marks = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    vocabulary = {token: i for i, token in enumerate(hugging_face.VOCABULARY)}
    config = transformers.LlamaConfig(vocab_size=len(vocabulary), num_key_value_heads=2, **sizes, **marks)
    (tmp_path / "text.txt").write_text(TEXT)
    models = []
    for seed, name in enumerate(("one", "other")):
        torch.manual_seed(seed)
        model = shaken(transformers.LlamaForCausalLM(config), 0.1)
        model.save_pretrained(tmp_path / name)
        transformers.BertTokenizerFast(vocab=vocabulary).save_pretrained(tmp_path / name)
        models.append(load_model(tmp_path / name))
    source = DataSource(tmp_path / "text.txt", task="causal", max_length=16, batch_size=4)
    batch = next(iter(source.batches(models[0])))
    asked: dict[str, Any] = {"geometry": "mix", "radius": 0.05, "steps": 3}
    expected = [qm.worst_case_sharpness(model, qm.next_token_cross_entropy, [batch], **asked).mean for model in models]
    losses = [float(qm.next_token_cross_entropy(model, batch).detach()) for model in models]

    options = ["--task", "causal", "--max-length", 16, "--batch-size", 4, "--examples", 4, "--steps", 3]
    chosen = ["--data", tmp_path / "text.txt", *options, "--geometry", "mix:0.05", "--out", tmp_path / "measured"]
    done = invoke("measure", tmp_path / "one", *chosen)
    assert done.exit_code == 0, done.output
    assert list(Comparison.load(tmp_path / "measured").values["mean"]) == pytest.approx(expected[:1], rel=1e-5)

    done = invoke("orbit", tmp_path / "one", "--scale", 10.0, "--steps", 3, "--out", tmp_path / "orbit.json")
    assert done.exit_code == 0, done.output
    orbit = json.loads((tmp_path / "orbit.json").read_text())["rows"]
    for name, same in (("adaptive", False), ("inv (second order)", True), ("mix (second order)", True)):
        values = [row["value"] for row in orbit if row["measure"] == name]
        assert len(values) == 4  # before and after, in two precisions
        assert (max(values) / min(values) - 1 < 1e-4) == same, (name, values)

    (tmp_path / "spec.yaml").write_text(
        "checkpoints: {paths: [one, other]}\n"
        "data: {path: text.txt, task: causal, max_length: 16, batch_size: 4, max_batches: 1}\n"
        "measures: [{measure: worst-case, geometry: mix, radius: 0.05, steps: 3}]\n"
    )
    done = invoke("compare", tmp_path / "spec.yaml", "--out", tmp_path / "compared")
    assert done.exit_code == 0, done.output
    found = Comparison.load(tmp_path / "compared")
    assert found.frame()["loss"].tolist() == pytest.approx(losses, rel=1e-5)
    assert found.frame()[found.labels[0]].tolist() == pytest.approx(expected, rel=1e-5)
