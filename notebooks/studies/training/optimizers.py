"""The optimizers that train the adapters; the classifier has AdamW's steps in all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from quotient_manifolds.optim import QuotientAdam
from quotient_manifolds.symmetries import Symmetries
from studies.audit import adapter_pairs

HEAD_RATE = 1e-3
LORA_PLUS = 16.0  # the rate of B over that of A which its paper proposes

Make = Callable[[nn.Module, Symmetries, float], Optimizer]


@final
@dataclass(frozen=True)
class Candidate:
    """Hold an optimizer of adapters: who wrote it, the middle of its learning rates, and how it is made."""

    source: str
    middle: float
    make: Make


def optimizers_of(
    candidate: Candidate, model: nn.Module, symmetries: Symmetries, rate: float
) -> tuple[Optimizer, Optimizer]:
    """Return the optimizer of the adapters and that of the classifier."""
    head = [p for name, p in model.named_parameters() if p.requires_grad and "lora_" not in name]
    return candidate.make(model, symmetries, rate), AdamW(head, lr=HEAD_RATE, weight_decay=0.0)


def _factors(model: nn.Module) -> list[nn.Parameter]:
    """Return A, B, A, B, ..."""
    return [p for pair in adapter_pairs(model) for p in pair]


def _adamw(model: nn.Module, symmetries: Symmetries, rate: float) -> Optimizer:
    return AdamW(_factors(model), lr=rate, weight_decay=0.0)


def _lora_plus(model: nn.Module, symmetries: Symmetries, rate: float) -> Optimizer:
    pairs = adapter_pairs(model)
    groups = [{"params": [A for A, _ in pairs], "lr": rate}, {"params": [B for _, B in pairs], "lr": LORA_PLUS * rate}]
    return AdamW(groups, weight_decay=0.0)


def _preconditioned(model: nn.Module, symmetries: Symmetries, rate: float) -> Optimizer:
    from peft.optimizers import create_riemannian_optimizer

    adapted: Any = model
    made = create_riemannian_optimizer(adapted, AdamW, lr=rate, weight_decay=0.0)
    factors = {id(p) for p in _factors(model)}
    for group in made.param_groups:  # it takes all that is trained
        group["params"] = [p for p in group["params"] if id(p) in factors]
    return made


def _lora_rite(model: nn.Module, symmetries: Symmetries, rate: float) -> Optimizer:
    import pytorch_optimizer as third

    made: Optimizer = third.LoRARite(_factors(model), lr=rate)
    return made


def _muon(model: nn.Module, symmetries: Symmetries, rate: float) -> Optimizer:
    return torch.optim.Muon(_factors(model), lr=rate, weight_decay=0.0)


def _quotient(metric: Any) -> Make:
    def make(model: nn.Module, symmetries: Symmetries, rate: float) -> Optimizer:
        named = [(name, p) for name, p in model.named_parameters() if "lora_" in name]
        return QuotientAdam(named, symmetries, lr=rate, metric=metric)

    return make


ADAMW = "AdamW"
OURS = "QuotientAdam, mix"

CANDIDATES: dict[str, Candidate] = {
    ADAMW: Candidate("torch", 3.16e-3, _adamw),
    "LoRA+": Candidate("AdamW of torch, B 16 times as fast as A", 3.16e-4, _lora_plus),
    "preconditioned AdamW": Candidate("peft", 3.16e-3, _preconditioned),
    "LoRA-RITE": Candidate("pytorch_optimizer", 1e-3, _lora_rite),
    "Muon": Candidate("torch", 1e-2, _muon),
    OURS: Candidate("quotient_manifolds", 1e-3, _quotient("mix")),
    "QuotientAdam, inv": Candidate("quotient_manifolds", 1e-3, _quotient("inv")),
}
