"""A causal language model, built and trained here, goes through the callback, measure, orbit and compare."""

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
from tests import hugging_face
from tests.command_line import call as invoke

WORDS = hugging_face.VOCABULARY[5:]
TEXT = " ".join(WORDS[(place * place) % len(WORDS)] for place in range(400))
MEASURED: dict[str, Any] = {"geometry": "mix", "radius": 0.05, "steps": 3}

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    vocabulary = {token: i for i, token in enumerate(hugging_face.VOCABULARY)}
    transformers.BertTokenizerFast(vocab=vocabulary).save_pretrained(folder)
    return folder


def test_all_the_way(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    marks = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    vocabulary = len(hugging_face.VOCABULARY)
    config = transformers.LlamaConfig(vocab_size=vocabulary, num_key_value_heads=2, **sizes, **marks)
    model = transformers.LlamaForCausalLM(config)
    (tmp_path / "text.txt").write_text(TEXT)
    before = saved(model, tmp_path / "before")
    source = DataSource(tmp_path / "text.txt", task="causal", max_length=16, batch_size=4)
    batches = list(source.batches(load_model(before)))

    rows = [
        {name: rows[row] for name, rows in batch.items()} for batch in batches for row in range(len(batch["labels"]))
    ]
    arguments = transformers.TrainingArguments(
        str(tmp_path / "run"), max_steps=30, learning_rate=1e-2, save_strategy="no", use_cpu=True, report_to=[],
        disable_tqdm=True, per_device_train_batch_size=4,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    callback = qm.SharpnessCallback(trainer, qm.next_token_cross_entropy, batches[:1], every=30, **MEASURED)
    trainer.add_callback(callback)
    trainer.train()
    first, last = (callback.results[step].mean for step in (0, 30))
    after = saved(model.eval(), tmp_path / "after")

    options = ["--task", "causal", "--max-length", 16, "--batch-size", 4, "--examples", 4, "--steps", 3]
    chosen = ["--data", tmp_path / "text.txt", *options, "--geometry", "mix:0.05", "--out", tmp_path / "measured"]
    done = invoke("measure", after, *chosen)
    assert done.exit_code == 0, done.output
    assert list(Comparison.load(tmp_path / "measured").values["mean"]) == pytest.approx([last], rel=1e-3)

    done = invoke("orbit", after, "--scale", 10.0, "--steps", 3, "--out", tmp_path / "orbit.json")
    assert done.exit_code == 0, done.output
    orbit = json.loads((tmp_path / "orbit.json").read_text())["rows"]
    for name, same in (("adaptive", False), ("inv (second order)", True), ("mix (second order)", True)):
        values = [row["value"] for row in orbit if row["measure"] == name]
        assert len(values) == 4  # before and after, in two precisions
        assert (max(values) / min(values) - 1 < 1e-4) == same, (name, values)

    (tmp_path / "spec.yaml").write_text(
        "checkpoints: {paths: [before, after]}\n"
        "data: {path: text.txt, task: causal, max_length: 16, batch_size: 4, max_batches: 1}\n"
        "measures: [{measure: worst-case, geometry: mix, radius: 0.05, steps: 3}]\n"
    )
    done = invoke("compare", tmp_path / "spec.yaml", "--out", tmp_path / "compared")
    assert done.exit_code == 0, done.output
    found = Comparison.load(tmp_path / "compared")
    trained, untrained = found.column("loss")  # by name
    assert trained < untrained - 0.5
    assert found.column(found.labels[0]) == pytest.approx([last, first], rel=1e-3)
