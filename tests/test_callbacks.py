"""Sharpness in the logs of Hugging Face's Trainer: what it measures, and that training does not notice."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import quotient_manifolds as qm
from tests.counters import recorded_runs

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
MEASURED: dict[str, Any] = {"geometry": "mix", "radius": 0.05, "steps": 3}


@pytest.fixture(scope="module")
def start() -> nn.Module:
    """A causal language model with dropout."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model: nn.Module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=1))
    return model


def sequences(count: int) -> torch.Tensor:
    return torch.randint(30, (count, 6), generator=torch.Generator().manual_seed(1))


def trainer_of(model: nn.Module, folder: Path, **settings: Any) -> Any:
    rows = [{"input_ids": ids, "labels": ids} for ids in sequences(16)]
    chosen = {"max_steps": 4, "per_device_train_batch_size": 4, "use_cpu": True, "report_to": [], "disable_tqdm": True}
    chosen["save_strategy"] = "no"
    arguments = transformers.TrainingArguments(output_dir=str(folder), seed=0, **{**chosen, **settings})
    return transformers.Trainer(model, arguments, train_dataset=rows)


def added(trainer: Any, **options: Any) -> qm.SharpnessCallback:
    batches = options.pop("batches", [{"input_ids": sequences(4)}])
    chosen: dict[str, Any] = {"every": 2, **MEASURED, **options}
    callback = qm.SharpnessCallback(trainer, qm.next_token_cross_entropy, batches, **chosen)
    trainer.add_callback(callback)
    return callback


def test_it_logs_what_the_measure_says_and_training_does_not_notice(start: nn.Module, tmp_path: Path) -> None:
    model, twin = copy.deepcopy(start), copy.deepcopy(start)
    trainer_of(twin, tmp_path / "twin").train()
    trainer = trainer_of(model, tmp_path / "run")
    callback = added(trainer)
    trainer.train()
    for name, p in model.named_parameters():
        assert torch.equal(p, twin.get_parameter(name)), name
    assert all(module.training for module in model.modules())
    logged = {row["step"]: row["sharpness_mix_second_order"] for row in trainer.state.log_history if len(row) == 3}
    assert logged == {step: found.mean for step, found in callback.results.items()}
    assert list(logged) == [0, 2, 4]
    batch = [{"input_ids": sequences(4)}]
    for step, weights in ((0, start), (4, model)):
        measured = qm.worst_case_sharpness(
            copy.deepcopy(weights).eval(), qm.next_token_cross_entropy, batch, **MEASURED
        )
        assert logged[step] == pytest.approx(measured.mean, rel=1e-5)


def test_symmetries_are_found_once_in_a_run(start: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(copy.deepcopy(start), tmp_path)
    callback, runs = added(trainer, every=1), recorded_runs(monkeypatch)
    trainer.train()
    assert (len(callback.results), len(runs)) == (5, 1)


def test_it_measures_in_the_precision_of_the_run(start: nn.Module, tmp_path: Path) -> None:
    trainer = trainer_of(copy.deepcopy(start), tmp_path, bf16=True, max_steps=1)
    callback = added(trainer, geometry=qm.Euclidean(), name="rise", radius=0.5)
    trainer.train()
    batch, ball = [{"input_ids": sequences(4)}], {"geometry": "euclidean", "radius": 0.5, "steps": 3}
    plain = qm.worst_case_sharpness(copy.deepcopy(start).eval(), qm.next_token_cross_entropy, batch, **ball)
    found = callback.results[0].mean
    assert found != plain.mean
    assert found == pytest.approx(plain.mean, rel=0.1)
    assert any(row.get("rise") == found for row in trainer.state.log_history)


def test_a_measurement_that_fails_late_does_not_end_the_run(start: nn.Module, tmp_path: Path) -> None:
    calls = 0

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        value = qm.next_token_cross_entropy(model, batch)
        return value if calls < 50 else value * torch.nan

    trainer = trainer_of(copy.deepcopy(start), tmp_path)
    batches = [{"input_ids": sequences(4)}]
    callback = qm.SharpnessCallback(trainer, loss, batches, every=1, **{**MEASURED, "geometry": "euclidean"})
    trainer.add_callback(callback)
    calls = 0
    trainer.train()
    assert 0 in callback.results
    calls = 1000
    with pytest.warns(UserWarning, match=r"sharpness after step \d: The loss"):
        callback.on_step_end(trainer.args, trainer.state, trainer.control)
    trainer.state.log_history.clear()
    with pytest.warns(UserWarning, match="finite"):
        callback.on_train_begin(trainer.args, trainer.state, trainer.control)
    assert trainer.state.global_step == 4


@pytest.mark.parametrize("error", [KeyError("labels"), AssertionError(), NotImplementedError("none"), OSError("gone")])
def test_a_measurement_that_never_works_does_not_end_the_run(start: nn.Module, tmp_path: Path, error: Any) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        raise error

    trainer = trainer_of(copy.deepcopy(start), tmp_path, max_steps=2)
    batches, settings = [{"input_ids": sequences(4)}], {**MEASURED, "geometry": "euclidean"}
    callback = qm.SharpnessCallback(trainer, loss, batches, every=2, **settings)
    trainer.add_callback(callback)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    said = [str(each.message) for each in caught if str(each.message).startswith("sharpness")]
    assert [each.partition(":")[0] for each in said] == ["sharpness after step 0", "sharpness after step 2"]
    assert all(str(error).strip("'") in each for each in said)
    assert (trainer.state.global_step, callback.results) == (2, {})
    assert all(module.training for module in trainer.model.modules())


def test_what_other_callbacks_raise_is_not_taken_for_a_measurement_that_fails(start: nn.Module, tmp_path: Path) -> None:
    class Ends(transformers.TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_log(self, *args: Any, **given: Any) -> None:
            raise RuntimeError("no disk")

    trainer = trainer_of(copy.deepcopy(start), tmp_path)
    added(trainer)
    trainer.add_callback(Ends())
    with pytest.raises(RuntimeError, match="no disk"):
        trainer.train()


@pytest.mark.parametrize("adapted", [False, True])
def test_a_run_with_gradient_checkpointing_is_measured_as_one_without(
    start: nn.Module, tmp_path: Path, adapted: bool
) -> None:
    values = []
    for checkpointing in (False, True):
        model = copy.deepcopy(start)
        if adapted:
            peft = pytest.importorskip("peft")
            torch.manual_seed(0)
            settings = {"target_modules": ["c_attn"], "fan_in_fan_out": True, "init_lora_weights": False}
            model = peft.get_peft_model(model, peft.LoraConfig(r=2, **settings))
        if checkpointing:
            model.gradient_checkpointing_enable()
            model.enable_input_require_grads()
        trainer = trainer_of(model, tmp_path, max_steps=1, gradient_checkpointing=checkpointing)
        callback = added(trainer, every=1)
        trainer.train()
        values.append([callback.results[step].mean for step in (0, 1)])
    assert values[1] == pytest.approx(values[0], rel=1e-4)


def test_a_run_that_is_taken_up_again_logs_no_step_twice(start: nn.Module, tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    trainer = trainer_of(copy.deepcopy(start), tmp_path, **settings)
    added(trainer)
    trainer.train()
    again = trainer_of(copy.deepcopy(start), tmp_path, **settings)
    callback = added(again)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    logged = [row["step"] for row in again.state.log_history if callback.name in row]
    assert logged == [0, 2, 4]
    assert list(callback.results) == [4]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"radius": -1.0}, "radius"),
        ({"geometry": "round"}, "geometry"),
        ({"paces": 3}, "paces"),
        ({"every": 0}, "every must be an integer"),
        ({"batches": {"input_ids": sequences(4)}}, r"Found one dict; wrap it: \[batch\]"),
        ({"fsdp": True}, "spreads this one over processes"),
    ],
)
def test_settings_are_refused_before_training(
    settings: dict[str, Any], message: str, start: nn.Module, tmp_path: Path
) -> None:
    trainer = trainer_of(copy.deepcopy(start), tmp_path)
    trainer.is_fsdp_enabled = "fsdp" in settings
    with pytest.raises((ValueError, TypeError), match=message):
        added(trainer, **{name: value for name, value in settings.items() if name != "fsdp"})


class SAMTrainer(qm.SAMTrainerMixin, transformers.Trainer):  # type: ignore[misc, unused-ignore]
    pass


def by_sam(start: nn.Module, folder: Path, radius: float, **settings: Any) -> nn.Module:
    rows = [{"input_ids": ids, "labels": ids} for ids in sequences(16)]
    chosen = {"max_steps": 3, "per_device_train_batch_size": 4, "use_cpu": True, "report_to": [], "disable_tqdm": True}
    arguments = transformers.TrainingArguments(str(folder), seed=0, save_strategy="no", **{**chosen, **settings})
    model = copy.deepcopy(start)
    trainer = SAMTrainer(model, arguments, train_dataset=rows, geometry="adaptive", radius=radius)
    trainer.train()
    return model


def without_dropout() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 0}
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model: nn.Module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **none, eos_token_id=1))
    return model


def furthest(one: nn.Module, other: nn.Module) -> float:
    return max(float((p - other.get_parameter(name)).detach().abs().max()) for name, p in one.named_parameters())


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_trainer_with_sam_does_what_a_loop_with_sam_does(tmp_path: Path, accumulated: int) -> None:
    start = without_dropout()
    settings = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
    rows = sequences(1).repeat(16, 1)  # one micro-batch, whatever the order
    labels = rows.clone()
    labels[:, 0] = -100  # which is never predicted, and a trainer counts it as if it were
    model, twin = copy.deepcopy(start), copy.deepcopy(start).train()
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        seed=0,
        save_strategy="no",
        max_steps=3,
        per_device_train_batch_size=16,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        gradient_accumulation_steps=accumulated,
        **settings,
    )
    data = [{"input_ids": ids, "labels": to} for ids, to in zip(rows, labels, strict=True)] * accumulated
    SAMTrainer(model, arguments, train_dataset=data, geometry="adaptive", radius=0.05).train()
    sam = qm.SAM(torch.optim.SGD(twin.parameters(), lr=0.1), twin, geometry="adaptive", radius=0.05)

    def closure() -> torch.Tensor:
        sam.zero_grad()
        loss: torch.Tensor = twin(input_ids=rows, labels=labels).loss
        loss.backward()
        return loss.detach()

    for _ in range(3):
        sam.step(closure)
    assert furthest(start, twin) > 1e-3
    assert furthest(model, twin) < 1e-6


def test_sam_changes_a_run_and_radius_0_does_not(tmp_path: Path) -> None:
    start = without_dropout()
    plain = copy.deepcopy(start)
    trainer_of(plain, tmp_path, max_steps=3).train()
    assert furthest(by_sam(start, tmp_path, 0.0), plain) == 0
    assert furthest(by_sam(start, tmp_path, 0.05), plain) > 1e-6


@pytest.mark.parametrize("clipped", [1.0, 0.0])
def test_the_trainers_clipping_is_said_of_optimizers_that_it_makes_depend_on_factors(
    start: nn.Module, tmp_path: Path, clipped: float
) -> None:
    model = copy.deepcopy(start)
    found = qm.find_symmetries(model.eval(), {"input_ids": sequences(4)})
    optimizer = qm.QuotientAdam(model.named_parameters(), found, lr=1e-3)
    trainer = trainer_of(model, tmp_path, max_grad_norm=clipped)
    trainer.create_optimizer_and_scheduler = lambda num_training_steps: None
    trainer.optimizer, trainer.lr_scheduler = optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    said = [str(each.message) for each in caught if "clipped to norm 1" in str(each.message)]
    assert len(said) == (clipped == 1.0)
