"""Show the whole path on real models: train a small zoo of vision transformers, and compare it."""

from __future__ import annotations

import os
from dataclasses import asdict
from importlib import resources
from pathlib import Path

from quotient_manifolds.demo.digits import load_digits
from quotient_manifolds.demo.zoo import draw_recipe, one_thread, train_zoo, write_scores
from quotient_manifolds.files import write_text
from quotient_manifolds.progress import Progress

__all__ = ["cores", "one_thread", "prepare"]

TRAIN_POINTS = 256  # few, so that generalisation gaps spread


def cores() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prepare(
    out: Path,
    *,
    models: int,
    seed: int = 0,
    training_steps: int | None = None,
    workers: int = 1,
    progress: Progress | None = None,
) -> Path:
    """Train the zoo and write what `compare` needs of it; return the spec.

    Written: models/vit-00, vit-01, ... (each once, see `train_zoo`), train.npz, test.npz, scores.csv with how each was
    trained, and zoo.yaml. training_steps replaces every recipe's number of steps. Raises ValueError for fewer than two
    models, which cannot be ranked.
    """
    if models < 2:
        raise ValueError(f"Ranking needs at least 2 models, found models={models}.")
    load_digits(train_points=TRAIN_POINTS, seed=seed).write(out)
    recipes = {f"vit-{index:02}": draw_recipe(index, seed=seed, steps=training_steps) for index in range(models)}
    train_zoo(out / "models", recipes, out / "train.npz", workers=workers, progress=progress)
    write_scores(out / "scores.csv", ({"checkpoint": name, **asdict(recipe)} for name, recipe in recipes.items()))
    spec = resources.files(__package__).joinpath("zoo.yaml").read_text(encoding="utf-8")
    write_text(out / "zoo.yaml", spec)
    return out / "zoo.yaml"
