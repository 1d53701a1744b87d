"""A full factorial zoo of small vision transformers on MNIST, and the spec that compares it."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import torch
from joblib import cpu_count
from torch import nn

from quotient_manifolds.demo.zoo import each_finished, make_once, one_thread
from quotient_manifolds.files import write_text
from quotient_manifolds.load import load_model
from quotient_manifolds.plots import Plot
from quotient_manifolds.progress import Progress
from quotient_manifolds.report import Table
from studies.common import numbers, write_rows
from studies.mnist.images import Images, load_mnist, training_set
from studies.mnist.training import ARCHITECTURE, Recipe, train
from studies.zoos.measuring import Zoo, load_zoo, run_zoo
from studies.zoos.scores import gaps, score_of, weight_norm
from studies.zoos.tables import (
    GAP,
    MAIN,
    WORST,
    Ranked,
    intervals_figure,
    pairs_table,
    parts_table,
    radius_table,
    ranking_table,
)

SCORES = "scores.json"  # beside a model's weights
FACTORS: Final[dict[str, tuple[Any, ...]]] = {
    "points": (100, 250),
    "noise": (0.0, 0.2, 0.4),
    "shift": (0, 1),
    "learning_rate": (1e-4, 1e-3, 1e-2),
    "weight_decay": (0.0, 0.1),
    "seed": (1, 2, 3),
}
OF_DATA = ("points", "noise", "seed")  # what decides a training set; models of one are compared on the same images


@final
@dataclass(frozen=True)
class Size:
    """Say how large a study is; spec: the YAML files beside this one that say together what is measured.

    All but the first of these are for the models of the first seed alone.
    """

    factors: Mapping[str, tuple[Any, ...]]
    architecture: Mapping[str, Any]
    most: int  # steps of training
    spec: tuple[str, ...]

    @property
    def recipes(self) -> dict[str, Recipe]:
        """Return every cell of the design by its name."""
        cells = (dict(zip(self.factors, values, strict=True)) for values in itertools.product(*self.factors.values()))
        return {_name(cell): Recipe(**cell) for cell in cells}


FULL = Size(FACTORS, ARCHITECTURE, 60_000, ("zoo.yaml", "parts.yaml"))
FAST = Size(
    {"points": (64,), "noise": (0.0, 0.4), "shift": (0, 1), "learning_rate": (1e-3,), "weight_decay": (0.0,)}
    | {"seed": (1,)},
    ARCHITECTURE | {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
    20,
    ("trial.yaml",),
)
PILOTS: Final = tuple(
    Recipe(points, noise, shift, rate, 0.0, seed=0)
    for points, noise, shift, rate in [
        (100, 0.0, 0, 1e-3), (250, 0.4, 0, 1e-4), (250, 0.2, 1, 1e-3), (100, 0.4, 1, 1e-3), (250, 0.0, 1, 1e-2),
    ]
)  # fmt: skip
"""Models outside the zoo, of other data, whose rises of the loss choose the radii."""


def _name(cell: Mapping[str, Any]) -> str:
    """Return points128-noise0.2-shift1-rate0.001-decay0-seed1 for all factors."""
    return "-".join(f"{factor.split('_')[-1]}{value:g}" for factor, value in cell.items())


def prepare(folder: Path, size: Size, progress: Progress, *, workers: int = 1) -> list[Path]:
    """Train (once) and write, for every training set, models/, train.npz, scores.csv and zoo.yaml; return the latter.

    What is there already and is as it should be stays as it is: a comparison knows its models by their files.
    """
    pool, test = load_mnist()
    parts: dict[Path, dict[str, Recipe]] = {}
    for name, recipe in size.recipes.items():
        data_set = _name({factor: getattr(recipe, factor) for factor in OF_DATA})
        parts.setdefault(folder / data_set, {})[name] = recipe
    jobs = []
    for part, recipes in parts.items():
        images = _images(pool, next(iter(recipes.values())))
        images.write(part / "train.npz")
        pixels = hashlib.sha256((part / "train.npz").read_bytes()).hexdigest()
        for name, recipe in recipes.items():
            made_by = {"recipe": asdict(recipe), "architecture": dict(size.architecture), "most": size.most}
            make = partial(make_model, recipe, images, test, size)
            jobs.append(partial(make_once, part / "models" / name, made_by | {"data": pixels}, make))
    progress("training", 0, len(jobs))
    for finished, _ in enumerate(each_finished(jobs, workers), 1):
        progress("training", finished, len(jobs))
    for part, recipes in parts.items():
        write_rows(part / "scores.csv", _rows(part, recipes))
        first = next(iter(recipes.values())).seed == size.factors["seed"][0]
        texts = [
            Path(__file__).with_name(name).read_text(encoding="utf-8") for name in size.spec[: None if first else 1]
        ]
        write_text(part / "zoo.yaml", "".join(texts))
    return [part / "zoo.yaml" for part in parts]


def _images(pool: Images, recipe: Recipe) -> Images:
    return training_set(pool, points=recipe.points, noise=recipe.noise, seed=recipe.seed)


def _rows(part: Path, recipes: Mapping[str, Recipe]) -> Iterable[Mapping[str, Any]]:
    for name, recipe in recipes.items():
        known = json.loads((part / "models" / name / SCORES).read_text(encoding="utf-8"))
        yield {"checkpoint": name, **asdict(recipe), **known}


@one_thread()
def make_model(recipe: Recipe, images: Images, test: Images, size: Size, folder: Path) -> None:
    """Train a model and write it with its scores.

    Scores on test images are expectations over labels as noisy as those in training: train and test are of one
    distribution. clean_test_error is that of the labels as they are.
    """
    model, steps = train(recipe, images.images, images.labels, size.architecture, size.most)
    model.save_pretrained(folder, safe_serialization=True)
    with torch.no_grad():
        here = score_of(model(pixel_values=images.images).logits, images.labels)
        logits = model(pixel_values=test.images).logits
    there, clean = score_of(logits, test.labels, recipe.noise), score_of(logits, test.labels)
    found = {
        "steps": steps,
        "train_loss": here.loss,
        "train_error": here.error,
        "test_loss": there.loss,
        "test_error": there.error,
        "clean_test_error": clean.error,
        **gaps(here, there),
        "margin": here.margin,
        "weight_norm": weight_norm(model),
    }
    write_text(folder / SCORES, json.dumps(found, indent=1) + "\n")


def pilot_models(folder: Path, images: int) -> dict[str, Any]:
    """Return, by recipe, what trains a pilot and returns it with the batch of so many images it is measured on."""
    pool, test = load_mnist()

    def load(recipe: Recipe) -> tuple[nn.Module, Any]:
        own = _images(pool, recipe)
        make_model(recipe, own, test, FULL, folder)
        batch = {"pixel_values": own.images[:images], "labels": own.labels[:images]}
        return load_model(folder), batch

    return {str(recipe): partial(load, recipe) for recipe in PILOTS}


# ---- the study


def run(out: Path, *, fast: bool, command: str, progress: Progress) -> Zoo:
    """Train each model once, measure it once, and write OUT/mnist; an interrupted study continues."""
    workers, models, size = (1, 1, FAST) if fast else (cpu_count(), 12, FULL)
    specs = prepare(out, size, progress, workers=workers)
    return run_zoo(
        specs, out / "mnist", name="mnist", models=models, command=command, workers=workers, progress=progress
    )


def load(folder: Path) -> Zoo:
    """Read the record in a folder."""
    return load_zoo(folder / "mnist")


def ranked(found: Zoo) -> Ranked:
    """Return the design of the zoo: a task is a number of images, a share of noise and an augmentation."""
    along = ("points", "noise", "shift", "learning_rate", "weight_decay")
    return Ranked(found.comparison, (*along, "seed"), along, along[:3])


def tables(found: Zoo) -> list[Table]:
    """Return the tables of the zoo; of one without the whole design, only how far its ascents had converged."""
    zoo = ranked(found)
    if zoo.design.models < len(FULL.recipes):
        return [found.convergence.table()]
    where = {"noise": (0.0, 0.2, 0.4), "seed": (1, 2, 3)}
    cells = {
        factor: {f"{factor} {value:g}": zoo.within & zoo.design.where(**{factor: value}) for value in values}
        for factor, values in where.items()
    }
    apart = {factor.replace("_", " "): zoo.design.along(factor) for factor in zoo.along}
    free = (*MAIN, "norm of the weights", "training loss", "margin", "steps of training")
    return [
        _comparisons(zoo),
        ranking_table(zoo),
        pairs_table("noise", "", zoo, cells["noise"], MAIN),
        pairs_table("factors", "", zoo, apart, free),
        pairs_table("seeds", "", zoo, cells["seed"], MAIN),
        radius_table(zoo),
        parts_table(zoo),
        found.convergence.table(),
    ]


def _comparisons(zoo: Ranked) -> Table:
    """Return the primary comparison, fixed before the zoo was measured, and others."""
    paired = "inv, pairs with biases as rows"
    rows = {
        "Primary: |Psi| of inv minus |Psi| of adaptive": zoo.psi_difference("inv", "adaptive"),
        "|tau| of inv minus |tau| of inv on pairs alone": zoo.tau_difference("inv", paired, zoo.within),
        "|tau| of inv minus |tau| of steps of training": zoo.tau_difference("inv", "steps of training", zoo.within),
    }
    return numbers("comparisons", "", ["Difference", "Here"], [[name, str(each)] for name, each in rows.items()])


def figure(found: Zoo) -> Plot:
    """Draw tau of measures at their middle radii, within cells and granulated."""
    zoo = ranked(found)
    names = [*WORST, "norm of the weights", "training loss", "margin", "steps of training"]
    columns = {
        "Within cells": {name: zoo.design.tau(zoo.measures[name], GAP, zoo.within) for name in names},
        "Granulated": {name: zoo.psi(name) for name in names},
    }
    return intervals_figure(columns, f"{zoo.design.models} vision transformers on MNIST")
