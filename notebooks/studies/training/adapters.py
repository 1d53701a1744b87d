"""Train adapters, one run for every optimizer, learning rate, rank, start and seed; measure what steps cost.

The classifier has AdamW's steps in all of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from quotient_manifolds.demo.zoo import one_thread
from quotient_manifolds.optim import QuotientAdam
from quotient_manifolds.symmetries import Symmetries
from studies.audit import adapter_pairs, factors_of
from studies.common import Record
from studies.sentiment import share_of_rate
from studies.training.reviews import LOST, TARGETS, Reviews, Upper, logits_of, outcome, read_reviews, symmetries_of

BATCH = 16
HEAD_RATE = 1e-3
LORA_PLUS = 16.0  # the rate of B over that of A which its paper proposes

Make = Callable[[nn.Module, Symmetries, float], Optimizer]


def _lora_plus(model: nn.Module, symmetries: Symmetries, rate: float) -> Optimizer:
    pairs = adapter_pairs(model)
    groups = [{"params": [A for A, _ in pairs], "lr": rate}, {"params": [B for _, B in pairs], "lr": LORA_PLUS * rate}]
    return AdamW(groups, weight_decay=0.0)


def _preconditioned(model: nn.Module, symmetries: Symmetries, rate: float) -> Optimizer:
    from peft.optimizers import create_riemannian_optimizer

    adapted: Any = model
    made = create_riemannian_optimizer(adapted, AdamW, lr=rate, weight_decay=0.0)
    factors = {id(p) for p in factors_of(model)}
    for group in made.param_groups:  # it takes all that is trained
        group["params"] = [p for p in group["params"] if id(p) in factors]
    return made


def _lora_rite(model: nn.Module, symmetries: Symmetries, rate: float) -> Optimizer:
    import pytorch_optimizer as third

    made: Optimizer = third.LoRARite(factors_of(model), lr=rate)
    return made


def _plain(kind: Any) -> Make:
    return lambda model, symmetries, rate: kind(factors_of(model), lr=rate, weight_decay=0.0)


def _quotient(metric: Any) -> Make:
    def make(model: nn.Module, symmetries: Symmetries, rate: float) -> Optimizer:
        named = [(name, p) for name, p in model.named_parameters() if "lora_" in name]
        return QuotientAdam(named, symmetries, lr=rate, metric=metric)

    return make


ADAMW, OURS = "AdamW", "QuotientAdam, mix"
CANDIDATES: Final[dict[str, tuple[str, float, Make]]] = {
    ADAMW: ("torch", 3.16e-3, _plain(AdamW)),
    "LoRA+": ("AdamW of torch, B 16 times as fast as A", 3.16e-4, _lora_plus),
    "preconditioned AdamW": ("peft", 3.16e-3, _preconditioned),
    "LoRA-RITE": ("pytorch_optimizer", 1e-3, _lora_rite),
    "Muon": ("torch", 1e-2, _plain(torch.optim.Muon)),
    OURS: ("quotient_manifolds", 1e-3, _quotient("mix")),
    "QuotientAdam, inv": ("quotient_manifolds", 1e-3, _quotient("inv")),
}
"""Who wrote an optimizer, the middle of its learning rates, and how it is made."""


def adapted_layers(rank: int, scale: float, seed: int) -> nn.Module:
    """Return the upper layers, frozen but for the classifier and an adapter B A of every matrix of theirs.

    B = 0 and A is drawn as peft does, and then multiplied by `scale`, which leaves the function as it is.
    """
    import peft

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        rest: dict[str, Any] = {"exclude_modules": r".*pooler.*", "modules_to_save": ["classifier"]}
        lora = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=TARGETS, **rest)
        layers: Any = Upper()
        model: nn.Module = peft.get_peft_model(layers, lora).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_A" in name:
                p.mul_(scale)
    return model


class Cell(NamedTuple):
    """Hold what runs that differ by their seed alone have in common; scale: of A at the start, where B = 0."""

    optimizer: str
    rank: int
    scale: float
    rate: float
    steps: int
    seeds: tuple[int, ...]

    @property
    def name(self) -> str:
        """Return a name for a file."""
        said = self.optimizer.replace(", ", "-").replace(" ", "-")
        return f"{said}-rank{self.rank}-scale{self.scale:g}-rate{self.rate:.2e}-steps{self.steps}-{len(self.seeds)}"


@one_thread()
def train_cell(cell: Cell, archive: Path, sizes: tuple[int, ...]) -> Record:
    """Make all runs of a cell; an outcome for each seed."""
    parts = read_reviews(archive, sizes)
    return {"cell": cell._asdict(), "outcomes": [_trained(cell, seed, *parts) for seed in cell.seeds]}


def _trained(cell: Cell, seed: int, training: Reviews, validation: Reviews, test: Reviews) -> Record:
    model = adapted_layers(cell.rank, cell.scale, seed)
    head = [p for name, p in model.named_parameters() if p.requires_grad and "lora_" not in name]
    symmetries = symmetries_of(adapted_layers, cell.rank, 1.0, 0)
    made = [CANDIDATES[cell.optimizer][2](model, symmetries, cell.rate), AdamW(head, lr=HEAD_RATE, weight_decay=0.0)]
    schedules = [LambdaLR(each, lambda step: share_of_rate(step, cell.steps)) for each in made]
    order = torch.randperm(len(training), generator=torch.Generator().manual_seed(seed))
    for step in range(cell.steps):
        first = step * BATCH % len(order)
        loss = training.at(order[first : first + BATCH]).loss(model)
        if not bool(loss.isfinite()):
            return LOST
        loss.backward()
        try:
            for each in made:
                each.step()
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined] # as of factorisations of what is not finite
            return LOST
        except ValueError as error:
            if "finite" not in str(error):
                raise
            return LOST  # ours refuses what others step to
        for each, schedule in zip(made, schedules, strict=True):
            each.zero_grad()
            schedule.step()
    return outcome([(logits_of(model, part), part.labels) for part in (validation, test)])


@one_thread()
def measure_costs(rank: int, archive: Path, sizes: tuple[int, ...], rounds: int) -> list[Record]:
    """Measure what a step of every optimizer costs, in turn, so that whatever else the machine does hits all alike.

    Milliseconds of one processor core: of the passes at a rank, and of an optimizer's step; medians.
    """
    batch = read_reviews(archive, sizes)[0].at(slice(BATCH))
    models = {name: adapted_layers(rank, 1.0, 0) for name in CANDIDATES}
    symmetries = symmetries_of(adapted_layers, rank, 1.0, 0)
    made = {name: CANDIDATES[name][2](model, symmetries, 1e-4) for name, model in models.items()}
    passes: list[float] = []
    steps: dict[str, list[float]] = {name: [] for name in CANDIDATES}
    for number in range(rounds + 3):
        for name, model in models.items():
            before = time.process_time()
            batch.loss(model).backward()
            between = time.process_time()
            made[name].step()
            after = time.process_time()
            model.zero_grad()
            if number >= 3:  # the first ones set up
                passes.append(between - before)
                steps[name].append(after - between)
    usual = {"rank": rank, "passes": 1e3 * statistics.median(passes)}
    return [{"optimizer": name, **usual, "step": 1e3 * statistics.median(found)} for name, found in steps.items()]
