"""Measure sharpness during training with Hugging Face's Trainer. This module needs transformers."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from typing import Any, final

import torch
from torch import Tensor, nn

from quotient_manifolds.batches import mapped
from quotient_manifolds.check import check_integer, needs
from quotient_manifolds.geometry import Geometry, KnownSymmetries, as_geometry
from quotient_manifolds.messages import sentence
from quotient_manifolds.optim import SAM
from quotient_manifolds.sharded import is_sharded
from quotient_manifolds.sharpness import Loss, Result, WorstCase
from quotient_manifolds.sharpness.caution import warned
from quotient_manifolds.sharpness.prepared_model import listed

with needs("A callback of Hugging Face's Trainer", "transformers", "transformers"):
    from transformers import TrainerCallback

__all__ = ["SAMTrainerMixin", "SharpnessCallback"]


@final
class SharpnessCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Measure worst-case sharpness before training and after every `every` steps, and log it with the trainer.

        trainer.add_callback(SharpnessCallback(trainer, loss, batches, geometry="mix", radius=0.05, every=100))

    trainer: a `transformers.Trainer`, whose logs receive the sharpness under `name`.
    loss, batches, geometry, radius and options (steps, restarts, seed, ascent, progress): as for
    `worst_case_sharpness`. Batches are kept in memory; a few of the training set suffice.
    every: optimizer steps between measurements.
    name: by default "sharpness_" and the geometry's name; it must differ between callbacks.

    `results` holds the measurements by step. The model is measured in eval mode, in the trainer's precision and on its
    device, by the first process alone. Training ends at the same weights as without the callback. If a measurement
    fails, it warns and training goes on. Raises ValueError for models that are sharded over processes.
    """

    def __init__(
        self,
        trainer: Any,
        loss: Loss,
        batches: Iterable[Any],
        *,
        geometry: Geometry | str | float,
        radius: float,
        every: int = 100,
        name: str | None = None,
        **options: Any,
    ) -> None:
        check_integer("every", every, 1)
        _check_whole(trainer, "measure its checkpoints")
        self._trainer, self._loss, self._batches = trainer, loss, listed(batches)
        self._sharpness = WorstCase(as_geometry(geometry), radius, **options)
        self._every, self._known = every, KnownSymmetries()
        self.name = name or f"sharpness_{re.sub('[^a-z0-9]+', '_', self._sharpness.geometry.name.lower()).strip('_')}"
        self.results: dict[int, Result] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Measure before the first step, also of a resumed run, unless the logs have this step already."""
        if not any(row.get("step") == state.global_step and self.name in row for row in state.log_history):
            self._measure(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Measure after every `every` steps."""
        if state.global_step % self._every == 0:
            self._measure(state)

    def _measure(self, state: Any) -> None:
        """Log sharpness, or warn why it cannot be measured; no error may end a training run."""
        if not state.is_world_process_zero:
            return
        try:
            found = self._measured()
        except Exception as error:  # the user's loss may raise anything
            warnings.warn(f"sharpness after step {state.global_step}: {sentence(error)}", stacklevel=3)
            return
        self.results[state.global_step] = found
        errors = {} if found.standard_error is None else {f"{self.name}_standard_error": found.standard_error}
        self._trainer.log({self.name: found.mean, **errors})

    def _measured(self) -> Result:
        model: nn.Module = self._trainer.accelerator.unwrap_model(self._trainer.model)
        device = next(model.parameters()).device
        batches = mapped(lambda tensor: tensor.to(device), self._batches)
        modes = {module: module.training for module in model.modules()}
        model.eval()
        try:
            with torch.enable_grad():
                return warned(self._sharpness.of(model, self._loss, batches, self._known.elsewhere()))
        finally:
            for module, training in modes.items():
                module.training = training


class SAMTrainerMixin:
    """Train by sharpness-aware minimization, `SAM`, in Hugging Face's Trainer; list this base class before Trainer.

        class SAMTrainer(qm.SAMTrainerMixin, transformers.Trainer): ...

        trainer = SAMTrainer(model, arguments, train_dataset=data, geometry="adaptive", radius=0.05)

    geometry, radius: as for `SAM`; all other arguments are the trainer's. Each training step takes two forward and
    backward passes. The trainer's optimizer, schedule, clipping and scaling use the gradients of the second. With
    gradient accumulation, each micro-batch has its own perturbation. The logged loss is the loss at the unperturbed
    weights. Raises ValueError for models that are sharded over processes.
    """

    def __init__(
        self, *arguments: Any, geometry: Geometry | str | float = "euclidean", radius: float, **settings: Any
    ) -> None:
        super().__init__(*arguments, **settings)
        _check_whole(self, "train it by SAM in a loop of your own")
        self._ball: dict[str, Any] = {"geometry": as_geometry(geometry), "radius": radius}
        self._sam: SAM | None = None

    def training_step(self, model: nn.Module, inputs: Any, *others: Any, **named: Any) -> Tensor:
        """Return the loss at the weights, and add the gradients at the perturbed weights to the existing gradients."""
        trainer: Any = self
        step: Any = super().training_step  # type: ignore[misc]
        own: nn.Module = trainer.accelerator.unwrap_model(trainer.model)
        base = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # accelerate wraps it
        if self._sam is None or self._sam.base is not base:
            self._sam = SAM(base, own, **self._ball)
        before = {p: p.grad for p in own.parameters() if p.grad is not None}  # gradients of earlier micro-batches
        own.zero_grad()
        loss: Tensor = step(model, {**inputs}, *others, **named)
        with self._sam.perturbed():
            own.zero_grad()
            step(model, {**inputs}, *others, **named)
        for p, grad in before.items():
            p.grad = grad if p.grad is None else p.grad.add_(grad)
        return loss


def _check_whole(trainer: Any, instead: str) -> None:
    """Raise ValueError if a trainer shards its model over processes."""
    spread = getattr(trainer, "is_fsdp_enabled", False) or getattr(trainer, "is_deepspeed_enabled", False)
    if spread or is_sharded(trainer.model):
        raise ValueError(f"The model must be whole. Found a trainer that spreads this one over processes; {instead}")
