"""Tasks of few examples: images for a small vision transformer, and sentences for the upper layers of an encoder."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from quotient_manifolds.load import load_object
from quotient_manifolds.symmetries import Symmetries, find_symmetries
from studies.mnist.images import Images, load_mnist, training_set
from studies.mnist.training import ARCHITECTURE
from studies.training.outcome import Outcome, logits_of, outcome_of_logits
from studies.training.reviews import read_reviews, symmetries_of_upper, upper_layers


@final
@dataclass(frozen=True)
class Few:
    """Hold how many examples there are, how many of them in a batch, AdamW's learning rate, and passes.

    unit: of radii. Runs of seed 0 chose it, so that the radii tried have the best one between them.
    """

    examples: int
    batch: int
    rate: float
    passes: int
    unit: float


IMAGES, SENTENCES = "images", "sentences"
TASKS: Final = {IMAGES: Few(250, 64, 1e-3, 400, 1.0), SENTENCES: Few(64, 16, 1e-4, 96, 0.1)}


@final
@dataclass(frozen=True)
class Setting:
    """Hold a model to train, its symmetries, the loss of some of its examples, and how a model is judged."""

    model: nn.Module
    symmetries: Symmetries
    examples: int
    loss: Callable[[Tensor], Tensor]
    judge: Callable[[], Outcome]


def setting(task: str, seed: int, archive: Path, sizes: tuple[int, ...]) -> Setting:
    """Return the model and the examples of a seed."""
    examples = TASKS[task].examples
    return _images(examples, seed) if task == IMAGES else _sentences(examples, seed, archive, sizes)


def _images(examples: int, seed: int) -> Setting:
    pool, test = _mnist()
    drawn = training_set(pool, points=len(pool.labels), noise=0.0, seed=seed)
    model = _vision_transformer(seed)

    def loss(rows: Tensor) -> Tensor:  # rows are below the number of examples: the rest of the pool is to choose by
        return nn.functional.cross_entropy(model(pixel_values=drawn.images[rows]).logits, drawn.labels[rows])

    @torch.no_grad()
    def judge() -> Outcome:
        chosen = model(pixel_values=drawn.images[examples:]).logits
        return outcome_of_logits(
            (chosen, drawn.labels[examples:]), (model(pixel_values=test.images).logits, test.labels)
        )

    return Setting(model, _symmetries_of_vision(), examples, loss, judge)


@functools.cache
def _mnist() -> tuple[Images, Images]:
    return load_mnist()


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


def _sentences(examples: int, seed: int, archive: Path, sizes: tuple[int, ...]) -> Setting:
    pool, validation, test = read_reviews(archive, sizes)
    drawn = pool.at(torch.randperm(len(pool), generator=torch.Generator().manual_seed(seed))[:examples])
    model = upper_layers(seed)

    def loss(rows: Tensor) -> Tensor:
        batch = drawn.at(rows)
        return nn.functional.cross_entropy(model(batch.hidden, batch.mask), batch.labels)

    def judge() -> Outcome:
        return outcome_of_logits(*((logits_of(model, part), part.labels) for part in (validation, test)))

    return Setting(model, symmetries_of_upper(), len(drawn), loss, judge)
