"""Train with and without the kinds of SAM at an equal number of passes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from quotient_manifolds.demo.zoo import one_thread
from quotient_manifolds.geometry import Adaptive, Euclidean, Geometry, Quotient
from quotient_manifolds.optim import SAM
from quotient_manifolds.symmetries import Symmetries
from studies.training.adapters import share_of_rate
from studies.training.few import TASKS, setting
from studies.training.outcome import Outcome

BARE, SHORT = "none", "none, half the passes"
UNITS: Final = {BARE: 0.0, SHORT: 0.0, "euclidean": 1.0, "adaptive": 10.0, "inv": 3.0, "mix": 1.0}
"""The kinds of SAM, and what a radius is multiplied by: the pilots of the zoo of vision transformers have like rises
of the loss at like multiples. SAM makes half as many steps as the bare optimizer of as many passes, and to stop early
is good for few examples by itself: so the bare one is run for as many steps, too."""


@final
@dataclass(frozen=True)
class Ball:
    """Hold what runs of one kind of SAM that differ by their seed alone have in common."""

    task: str
    kind: str
    radius: float
    passes: int
    seeds: tuple[int, ...]

    @property
    def name(self) -> str:
        """Return a name for a file."""
        kind = self.kind.replace(", ", "-").replace(" ", "-")
        return f"{self.task}-{kind}-radius{self.radius:g}-passes{self.passes}-{len(self.seeds)}"


@final
@dataclass(frozen=True)
class Flattened:
    """Hold a ball and its outcomes, a seed each."""

    ball: Ball
    outcomes: tuple[Outcome, ...]


@one_thread()
def train_ball(ball: Ball, archive: Path, sizes: tuple[int, ...]) -> Flattened:
    """Make all runs of a ball."""
    return Flattened(ball, tuple(_trained(ball, seed, archive, sizes) for seed in ball.seeds))


def _trained(ball: Ball, seed: int, archive: Path, sizes: tuple[int, ...]) -> Outcome:
    few, subject = TASKS[ball.task], setting(ball.task, seed, archive, sizes)
    below = AdamW(subject.model.parameters(), lr=few.rate, weight_decay=0.0, fused=True)
    geometry = geometry_of(ball.kind, subject.symmetries)
    optimizer = below if geometry is None else SAM(below, subject.model, geometry=geometry, radius=ball.radius)
    steps = ball.passes // (1 if ball.kind == BARE else 2)
    schedule = LambdaLR(below, lambda step: share_of_rate(step, steps))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        rows = torch.randperm(subject.examples, generator=generator)[: few.batch]

        def closure(rows: Tensor = rows) -> Tensor:
            subject.model.zero_grad()
            loss = subject.loss(rows)
            loss.backward()
            return loss.detach()

        try:
            if not bool(optimizer.step(closure).isfinite()):
                return Outcome(None, None, None)
        except ValueError as error:
            if not re.search("finite|NaN", str(error)):
                raise
            return Outcome(None, None, None)  # SAM refuses what others step to
        schedule.step()
    return subject.judge()


def geometry_of(kind: str, symmetries: Symmetries) -> Geometry | None:
    """Return the geometry of SAM, of ASAM, or of the quotient by a metric; None for no SAM."""
    metric: Any = kind
    named: dict[str, Geometry | None] = {BARE: None, SHORT: None, "euclidean": Euclidean(), "adaptive": Adaptive(0.01)}
    return named[kind] if kind in named else Quotient(metric, symmetries=symmetries)
