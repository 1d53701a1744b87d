"""Optimizers where people use them: gradient scalers, accumulation, compiled models, Hugging Face's Trainer."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quotient_manifolds as qm
from quotient_manifolds.optim import OrbitAudit
from tests.optim.cases import apart, backward, made


def loss_of(model: nn.Module, inputs: Any, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(inputs), targets)


def adam(model: nn.Module, found: qm.Symmetries) -> qm.QuotientAdam:
    return qm.QuotientAdam(model.named_parameters(), found, lr=0.01)


def test_a_gradient_scaler_scales_and_skips() -> None:
    model, inputs, targets, found = made("encoder", torch.float32)
    twin = copy.deepcopy(model)
    optimizer, plain = adam(model, found), adam(twin, found)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, inputs, targets)).backward()
        scaler.step(optimizer)
        scaler.update()
        backward(twin, inputs, targets)
        plain.step()
    assert apart(model, twin, inputs) < 1e-6
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.zero_grad()
    scaler.scale(loss_of(model, inputs, targets) * float("inf")).backward()
    scaler.step(optimizer)  # found infinite gradients: no step
    scaler.update()
    assert scaler.get_scale() == 2.0**9
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    name = "0 relu neuron"
    assert torch.equal(optimizer.state[name]["step"], state[name]["step"])


def test_gradients_of_parts_of_a_batch_add_up_also_in_a_compiled_model() -> None:
    model, inputs, targets, found = made("encoder")
    twin = copy.deepcopy(model)
    run = torch.compile(twin, backend="aot_eager")
    optimizer, other = adam(model, found), adam(twin, found)
    for _ in range(2):
        backward(model, inputs, targets)
        optimizer.step()
        other.zero_grad()
        for part in (slice(0, 8), slice(8, 16)):
            (loss_of(run, inputs[part], targets[part]) / 2).backward()
        other.step()
    assert apart(model, twin, inputs) < 1e-9


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_the_trainer_takes_it_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 30, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    dropped = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(num_hidden_layers=1, **sizes, **dropped)
    torch.manual_seed(0)
    lora = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    start = peft.get_peft_model(transformers.BertForSequenceClassification(config), lora)
    rows = [{"input_ids": torch.randint(30, (5,)), "labels": index % 2} for index in range(16)]
    batch = {"input_ids": torch.stack([row["input_ids"] for row in rows])}
    found = qm.find_symmetries(copy.deepcopy(start).eval(), batch)

    def trained(folder: Path, steps: int, resume: Path | None = None) -> nn.Module:
        model = copy.deepcopy(start)
        how: dict[str, Any] = {"per_device_train_batch_size": 8, "save_steps": 2, "max_grad_norm": 0.0, "seed": 0}
        silent: dict[str, Any] = {"use_cpu": True, "report_to": [], "disable_tqdm": True}
        settings = transformers.TrainingArguments(output_dir=str(folder), max_steps=steps, **how, **silent)
        optimizer = adam(model, found)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        trainer = transformers.Trainer(model, settings, train_dataset=rows, optimizers=(optimizer, schedule))
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        return model

    whole = trained(tmp_path / "whole", 4)
    changed = [name for name, p in whole.named_parameters() if not torch.equal(p, start.get_parameter(name))]
    assert any("lora_B" in name for name in changed)
    assert not any("base_layer" in name for name in changed)
    again = trained(tmp_path / "again", 4, resume=tmp_path / "whole" / "checkpoint-2")
    for name, p in whole.named_parameters():
        assert torch.allclose(p, again.get_parameter(name), rtol=1e-5, atol=1e-7)


def test_an_audit_is_printed_as_a_table_a_row_for_each_run() -> None:
    runs = (0.25, math.nan, 0.5), (1e-16, 2e-16, 0.0), 0.125, (0.25, math.nan, 1.5)
    audit = OrbitAudit("AdamW", *runs, precision="float32", rounding=2e-3)
    assert str(audit).splitlines() == [
        "AdamW in float32: median drift 5.0e-01 of the distance trained, rounding explains 2.0e-03; loss 0.125",
        "  at the start  after training  loss",
        "       1.0e-16         2.5e-01  0.25",
        "       2.0e-16             nan  nan",
        "       0.0e+00         5.0e-01  1.5",
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_an_audit_says_what_rounding_explains(dtype: torch.dtype) -> None:
    """AdamW depends on the representative, and the quotient's optimizer only on its rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 3, bias=False), nn.Linear(3, 4, bias=False)).to(dtype)
    batch = torch.randn(32, 6, dtype=dtype), torch.randn(32, 4, dtype=dtype)
    found = qm.find_symmetries(model.eval(), batch[0])

    def audit(make: Any) -> OrbitAudit:
        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            return (model(batch[0]) - batch[1]).square().mean()

        return qm.orbit_audit(make, model, loss, [batch], steps=5, symmetries=found)

    plain = audit(lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2))
    ours = audit(lambda m: qm.QuotientAdam(m.named_parameters(), found, lr=1e-2))
    eps = torch.finfo(dtype).eps
    for each in (plain, ours):
        assert each.precision == str(dtype).removeprefix("torch.")
        assert 0 < each.rounding < 1e4 * eps
    assert plain.drift > 1e-2
    assert ours.drift < 30 * ours.rounding
