"""Train on few examples, with and without the kinds of SAM, at an equal number of passes.

The tasks are images for a small vision transformer, and sentences for the upper layers of an encoder.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from quotient_manifolds.demo.zoo import one_thread
from quotient_manifolds.geometry import Adaptive, Euclidean, Quotient
from quotient_manifolds.load import load_object
from quotient_manifolds.optim import SAM
from quotient_manifolds.symmetries import Symmetries, find_symmetries
from studies.common import Record
from studies.mnist import ARCHITECTURE
from studies.sentiment import share_of_rate
from studies.training.reviews import LOST, logits_of, outcome, read_reviews, symmetries_of, upper_layers
from studies.zoos.images import load_mnist, training_set

BARE, SHORT = "none", "none, half the passes"
UNITS: Final = {BARE: 0.0, SHORT: 0.0, "euclidean": 1.0, "adaptive": 10.0, "inv": 3.0, "mix": 1.0}
"""The kinds of SAM, and what a radius is multiplied by: the pilots of the zoo of vision transformers have like rises
of the loss at like multiples. SAM makes half as many steps as the bare optimizer of as many passes, and to stop early
is good for few examples by itself: so the bare one is run for as many steps, too."""


class Few(NamedTuple):
    """Hold how many examples there are, how many of them in a batch, AdamW's learning rate, and passes.

    unit: of radii. Runs of seed 0 chose it, so that the radii tried have the best one between them.
    """

    examples: int
    batch: int
    rate: float
    passes: int
    unit: float


TASKS: Final = {"images": Few(250, 64, 1e-3, 400, 1.0), "sentences": Few(64, 16, 1e-4, 96, 0.1)}


class Ball(NamedTuple):
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


@one_thread()
def train_ball(ball: Ball, archive: Path, sizes: tuple[int, ...]) -> Record:
    """Make all runs of a ball; an outcome for each seed."""
    return {"ball": ball._asdict(), "outcomes": [_trained(ball, seed, archive, sizes) for seed in ball.seeds]}


def _trained(ball: Ball, seed: int, archive: Path, sizes: tuple[int, ...]) -> Record:
    few = TASKS[ball.task]
    subject = _images(seed) if ball.task == "images" else _sentences(seed, archive, sizes)
    below = AdamW(subject.model.parameters(), lr=few.rate, weight_decay=0.0, fused=True)
    metric: Any = ball.kind
    known: dict[str, Any] = {"euclidean": Euclidean(), "adaptive": Adaptive(0.01)}
    geometry = known.get(ball.kind) or Quotient(metric, symmetries=subject.symmetries) if UNITS[ball.kind] else None
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
                return LOST
        except ValueError as error:
            if not re.search("finite|NaN", str(error)):
                raise
            return LOST  # SAM refuses what others step to
        schedule.step()
    return subject.judge()


class Subject(NamedTuple):
    """Hold a model to train, its symmetries, how many examples it has, the loss of some, and how it is judged."""

    model: nn.Module
    symmetries: Symmetries
    examples: int
    loss: Callable[[Tensor], Tensor]
    judge: Callable[[], Record]


def _images(seed: int) -> Subject:
    examples = TASKS["images"].examples  # rows are below that: the rest of the pool is to choose by
    pool, test = _mnist()
    drawn, model = training_set(pool, points=len(pool.labels), noise=0.0, seed=seed), _vision_transformer(seed)

    def loss(rows: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(pixel_values=drawn.images[rows]).logits, drawn.labels[rows])

    @torch.no_grad()
    def judge() -> Record:
        rest = (drawn.images[examples:], drawn.labels[examples:])
        return outcome([(model(pixel_values=x).logits, y) for x, y in (rest, (test.images, test.labels))])

    return Subject(model, _symmetries_of_vision(), examples, loss, judge)


_mnist = functools.cache(load_mnist)


def _vision_transformer(seed: int) -> Any:
    config = load_object("transformers:ViTConfig", "a model's configuration")(**ARCHITECTURE)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return load_object("transformers:ViTForImageClassification", "a vision transformer")(config).eval()


@functools.cache
def _symmetries_of_vision() -> Symmetries:
    side = ARCHITECTURE["image_size"]
    images = torch.randn(2, 1, side, side, generator=torch.Generator().manual_seed(0))
    return find_symmetries(_vision_transformer(0), {"pixel_values": images})


def _sentences(seed: int, archive: Path, sizes: tuple[int, ...]) -> Subject:
    pool, *parts = read_reviews(archive, sizes)
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(seed))
    drawn, model = pool.at(order[: TASKS["sentences"].examples]), upper_layers(seed)

    def judge() -> Record:
        return outcome([(logits_of(model, part), part.labels) for part in parts])

    symmetries = symmetries_of(upper_layers, 0)
    return Subject(model, symmetries, len(drawn), lambda rows: drawn.at(rows).loss(model), judge)
