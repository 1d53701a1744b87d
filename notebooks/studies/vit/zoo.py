"""A zoo of vision transformers fine-tuned on few digits, shifted and noisy, and the spec that compares it.

The 1797 digits of scikit-learn are split once: 500 for the starting points, 256 for fine-tuning, 1041 for testing. So
no starting point has seen an image that a fine-tuned model is trained or tested on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from quotient_manifolds.demo.digits import Digits, load_digits, shifted
from quotient_manifolds.demo.zoo import ARCHITECTURE, TrainingRecipe, draw_recipe, train_zoo, write_scores
from quotient_manifolds.files import write_text
from quotient_manifolds.progress import Progress

START_POINTS = 500
POINTS = 256
SHIFT = 1  # pixels, up to
NOISE = 0.3  # standard deviation, where that of the clean pixels is 1
SEED = 6  # of split, disturbance and recipes

START_RECIPE = TrainingRecipe(2e-3, 1e-2, batch_size=32, label_smoothing=0.0, shift=0, steps=400, seed=0)

RELATED: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "rotated": lambda images, labels: (images.rot90(1, (2, 3)), labels),
    "inverted": lambda images, labels: (-images, labels),
    "paired": lambda images, labels: (images, labels // 2),  # 0 or 1, 2 or 3, ...
}
"""The tasks of the starting points: images and labels of the clean digits made into others."""


@final
@dataclass(frozen=True)
class Size:
    """Say how large a study is; spec is the YAML file beside this one that says what is measured."""

    models: int
    steps: int | None  # of training; None: as each recipe has it
    architecture: dict[str, Any]
    spec: str


FULL = Size(48, None, ARCHITECTURE, "zoo.yaml")
FAST = Size(
    4, 4, ARCHITECTURE | {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
    "trial.yaml",
)  # fmt: skip


def related_digits(name: str) -> Digits:
    """Return the task of a starting point; its test images are those of the study, not disturbed."""
    clean = _clean()
    make = RELATED[name]
    train = make(clean.train_images[:START_POINTS], clean.train_labels[:START_POINTS])
    return Digits(*train, *make(clean.test_images, clean.test_labels))


def few_shot_digits() -> Digits:
    """Compute 256 training and 1041 test images, each shifted by up to a pixel and noisy, once and for all."""
    clean = _clean()
    few = replace(clean, train_images=clean.train_images[START_POINTS:], train_labels=clean.train_labels[START_POINTS:])
    blank, top = float(clean.train_images.min()), float(clean.train_images.max())

    def disturbed(images: Tensor, seed: int) -> Tensor:
        draw = torch.Generator().manual_seed(seed)
        moved = shifted(images, SHIFT, blank, draw)
        # Clipped, so that the darkest value is still that of the background.
        return (moved + NOISE * torch.randn(moved.shape, generator=draw)).clamp(blank, top)

    return replace(
        few,
        train_images=disturbed(few.train_images, 2 * SEED),
        test_images=disturbed(few.test_images, 2 * SEED + 1),
    )


def _clean() -> Digits:
    return load_digits(train_points=START_POINTS + POINTS, seed=SEED)


def prepare(folder: Path, size: Size, progress: Progress, *, workers: int = 1) -> Path:
    """Train (once) and write models/, train.npz, test.npz, scores.csv and zoo.yaml, which is returned.

    What is there already and is as it should be stays as it is: a comparison knows its models by their files.
    """
    shared: dict[str, Any] = {"architecture": size.architecture, "workers": workers, "progress": progress}
    steps = START_RECIPE.steps if size.steps is None else size.steps
    for place, name in enumerate(RELATED):
        related_digits(name).write(folder / "starts" / name)
        recipe = replace(START_RECIPE, seed=place, steps=steps)
        train_zoo(folder / "starts" / name, {"model": recipe}, folder / "starts" / name / "train.npz", **shared)
    few_shot_digits().write(folder)
    recipes = {f"vit-{index:02}": draw_recipe(index, seed=SEED, steps=size.steps) for index in range(size.models)}
    starts = dict(zip(recipes, itertools.cycle(RELATED), strict=False))
    places = {name: folder / "starts" / start / "model" for name, start in starts.items()}
    train_zoo(folder / "models", recipes, folder / "train.npz", starts=places, **shared)
    rows = ({"checkpoint": name, "start": starts[name], **asdict(recipe)} for name, recipe in recipes.items())
    write_scores(folder / "scores.csv", rows)
    write_text(folder / "zoo.yaml", Path(__file__).with_name(size.spec).read_text(encoding="utf-8"))
    return folder / "zoo.yaml"
