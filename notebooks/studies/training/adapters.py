"""Train adapters, one run for every optimizer, learning rate, rank, start and seed."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from quotient_manifolds.demo.zoo import one_thread
from studies.training.optimizers import CANDIDATES, optimizers_of
from studies.training.outcome import Outcome, outcome_of
from studies.training.reviews import Reviews, adapted_layers, read_reviews, symmetries_of_adapted

BATCH = 16
WARM_UP = 0.1  # of the steps: over them the rates rise, then they fall to 0, both linearly


@final
@dataclass(frozen=True)
class Cell:
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


@final
@dataclass(frozen=True)
class Trained:
    """Hold a cell and its outcomes, a seed each."""

    cell: Cell
    outcomes: tuple[Outcome, ...]


@one_thread()
def train_cell(cell: Cell, archive: Path, sizes: tuple[int, ...]) -> Trained:
    """Make all runs of a cell."""
    return Trained(cell, tuple(_trained(cell, seed, *read_reviews(archive, sizes)) for seed in cell.seeds))


def _trained(cell: Cell, seed: int, training: Reviews, validation: Reviews, test: Reviews) -> Outcome:
    model = adapted_layers(cell.rank, cell.scale, seed)
    made = optimizers_of(CANDIDATES[cell.optimizer], model, symmetries_of_adapted(cell.rank), cell.rate)
    schedules = [LambdaLR(each, lambda step: share_of_rate(step, cell.steps)) for each in made]
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(training), generator=generator)
    for step in range(cell.steps):
        first = step * BATCH % len(order)
        loss = _loss(model, training.at(order[first : first + BATCH]))
        if not bool(loss.isfinite()):
            return Outcome(None, None, None)
        loss.backward()
        try:
            for each in made:
                each.step()
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined] # as of factorisations of what is not finite
            return Outcome(None, None, None)
        except ValueError as error:
            if "finite" not in str(error):
                raise
            return Outcome(None, None, None)  # ours refuses what others step to
        for each in made:
            each.zero_grad()
        for schedule in schedules:
            schedule.step()
    return outcome_of(model, validation, test)


def share_of_rate(step: int, steps: int) -> float:
    """Return the learning rate of a step, from 0 on, over the highest."""
    rising = round(WARM_UP * steps)
    return (step + 1) / (rising + 1) if step < rising else (steps - step) / (steps - rising)


def _loss(model: nn.Module, batch: Reviews) -> Tensor:
    return nn.functional.cross_entropy(model(batch.hidden, batch.mask), batch.labels)


@final
@dataclass(frozen=True)
class Cost:
    """Hold milliseconds of one processor core: of the passes at a rank, and of an optimizer's step; medians."""

    optimizer: str
    rank: int
    passes: float
    step: float


@one_thread()
def measure_costs(rank: int, archive: Path, sizes: tuple[int, ...], rounds: int) -> tuple[Cost, ...]:
    """Measure what a step of every optimizer costs, in turn, so that whatever else the machine does hits all alike."""
    batch = read_reviews(archive, sizes)[0].at(slice(BATCH))
    symmetries = symmetries_of_adapted(rank)
    models = {name: adapted_layers(rank, 1.0, 0) for name in CANDIDATES}
    made = {name: CANDIDATES[name].make(model, symmetries, 1e-4) for name, model in models.items()}
    passes: list[float] = []
    steps: dict[str, list[float]] = {name: [] for name in CANDIDATES}
    for number in range(rounds + 3):
        for name, model in models.items():
            before = time.process_time()
            _loss(model, batch).backward()
            between = time.process_time()
            made[name].step()
            after = time.process_time()
            model.zero_grad()
            if number >= 3:  # the first ones set up
                passes.append(between - before)
                steps[name].append(after - between)
    return tuple(
        Cost(name, rank, 1e3 * statistics.median(passes), 1e3 * statistics.median(found))
        for name, found in steps.items()
    )
