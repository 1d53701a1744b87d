"""A zoo of vision transformers fine-tuned on few digits, shifted and noisy, and the spec that compares it.

The 1797 digits of scikit-learn are split once: 500 for the starting points, 256 for fine-tuning, 1041 for testing. So
no starting point has seen an image that a fine-tuned model is trained or tested on.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from quotient_manifolds.experiments.digits import Digits, load_digits, shifted
from quotient_manifolds.experiments.kept import write_rows
from quotient_manifolds.experiments.zoo import ARCHITECTURE, Recipe, TrainedModel, draw_recipe, train_zoo
from quotient_manifolds.files import whole, write_text
from quotient_manifolds.progress import Progress
from studies.vit_spec import fast_spec, full_spec

START_POINTS = 500
POINTS = 256
SHIFT = 1  # pixels, up to
NOISE = 0.3  # standard deviation, where that of the clean pixels is 1
SEED = 6  # of split, disturbance and recipes

START_RECIPE = Recipe(2e-3, 1e-2, batch_size=32, label_smoothing=0.0, shift=0, steps=400, seed=0)

RELATED: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "rotated": lambda images, labels: (images.rot90(1, (2, 3)), labels),
    "inverted": lambda images, labels: (-images, labels),
    "paired": lambda images, labels: (images, labels // 2),  # 0 or 1, 2 or 3, ...
}
"""The tasks of the starting points: images and labels of the clean digits made into others."""


@final
@dataclass(frozen=True)
class Size:
    """How large a study is."""

    models: int
    steps: int | None  # of training; None: as each recipe has it
    architecture: dict[str, Any]
    spec: str


FULL = Size(48, None, ARCHITECTURE, full_spec())
FAST = Size(
    4, 4, ARCHITECTURE | {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
    fast_spec(),
)  # fmt: skip


def related_digits(name: str) -> Digits:
    """The task of a starting point; its test images are the first of the study's, not disturbed, and only scored."""
    clean = _clean()
    make = RELATED[name]
    train = make(clean.train_images[:START_POINTS], clean.train_labels[:START_POINTS])
    return Digits(*train, *make(clean.test_images, clean.test_labels))


def few_shot_digits() -> Digits:
    """256 training and 1041 test images, each shifted by up to a pixel and noisy, once and for all."""
    clean = _clean()
    few = replace(clean, train_images=clean.train_images[START_POINTS:], train_labels=clean.train_labels[START_POINTS:])
    top = float(clean.train_images.max())

    def disturbed(images: Tensor, seed: int) -> Tensor:
        draw = torch.Generator().manual_seed(seed)
        moved = shifted(images, SHIFT, clean.blank, draw)
        # Clipped, so that the darkest value is still that of the background.
        return (moved + NOISE * torch.randn(moved.shape, generator=draw)).clamp(clean.blank, top)

    return replace(
        few,
        train_images=disturbed(few.train_images, 2 * SEED),
        test_images=disturbed(few.test_images, 2 * SEED + 1),
    )


def _clean() -> Digits:
    return load_digits(train_points=START_POINTS + POINTS, seed=SEED)


def prepare(folder: Path, size: Size, progress: Progress) -> Path:
    """Trains (once) and writes models/, train.npz, test.npz, scores.csv and zoo.yaml, which is returned.

    What is there already and is as it should be stays as it is: a comparison knows its models by their files.
    """
    cache = folder / "cache"
    starts = _starting_points(cache, size, progress)
    digits = few_shot_digits()
    names = [tuple(starts)[index % len(starts)] for index in range(size.models)]
    recipes = [draw_recipe(index, seed=SEED, steps=size.steps) for index in range(size.models)]
    zoo = train_zoo(
        recipes,
        digits,
        cache,
        architecture=size.architecture,
        starts=[starts[name] for name in names],
        progress=progress,
    )
    for index, model in enumerate(zoo):
        _place(model.directory, folder / "models" / f"vit-{index:02}")
    _write_points(folder / "train.npz", digits.train_images, digits.train_labels)
    _write_points(folder / "test.npz", digits.test_images, digits.test_labels)
    write_rows(folder / "scores.csv", _rows(zoo, names))
    write_text(folder / "zoo.yaml", size.spec)
    return folder / "zoo.yaml"


def _starting_points(cache: Path, size: Size, progress: Progress) -> dict[str, TrainedModel]:
    found: dict[str, TrainedModel] = {}
    for place, name in enumerate(RELATED):
        progress("starting points", place, len(RELATED))
        steps = START_RECIPE.steps if size.steps is None else size.steps
        recipe = replace(START_RECIPE, seed=place, steps=steps)
        (found[name],) = train_zoo([recipe], related_digits(name), cache, architecture=size.architecture)
    progress("starting points", len(RELATED), len(RELATED))
    return found


def _place(source: Path, target: Path) -> None:
    """A copy of a directory, unless it is there."""
    copies = {each: target / each.name for each in source.iterdir()}
    if all(copy.is_file() and copy.read_bytes() == each.read_bytes() for each, copy in copies.items()):
        return
    shutil.rmtree(target, ignore_errors=True)
    unfinished = target.parent.with_name(f".unfinished-{target.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, unfinished)
    os.replace(unfinished, target)


def _write_points(path: Path, images: Tensor, labels: Tensor) -> None:
    """images (N, 1, 8, 8) and labels (N,), unless they are there."""
    if path.is_file():
        with np.load(path, allow_pickle=False) as kept:
            if np.array_equal(kept["images"], images.numpy()) and np.array_equal(kept["labels"], labels.numpy()):
                return
    with whole(path) as unfinished, unfinished.open("wb") as file:
        np.savez(file, images=images.numpy(), labels=labels.numpy())


def _rows(zoo: list[TrainedModel], starts: list[str]) -> Iterator[dict[str, Any]]:
    for index, (model, start) in enumerate(zip(zoo, starts, strict=True)):
        yield {"checkpoint": f"vit-{index:02}", "start": start, **asdict(model.recipe)}
