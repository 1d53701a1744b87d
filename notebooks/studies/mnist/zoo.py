"""A full factorial zoo of small vision transformers on MNIST, and how measures rank it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import torch
from joblib import cpu_count
from torch import nn

from quotient_manifolds.demo.zoo import one_thread
from quotient_manifolds.messages import Progress
from studies.common import Tables, table
from studies.mnist.images import Images, load_mnist, training_set
from studies.mnist.training import ARCHITECTURE, Recipe, train
from studies.zoos.measuring import Zoo, load_zoo, run_zoo
from studies.zoos.models import Model, make_zoo, score_of, scores_of
from studies.zoos.ranking import GAP
from studies.zoos.tables import (
    COMPETITORS,
    MAIN,
    Ranked,
    convergence_table,
    parts_table,
    radius_table,
    ranking_table,
    tau_table,
)

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
    """Say how large a study is; specs: the YAML files beside this one that say together what is measured.

    All but the first of these are for the models of the first seed alone.
    """

    factors: Mapping[str, tuple[Any, ...]]
    architecture: Mapping[str, Any]
    most: int  # steps of training
    specs: tuple[str, ...]

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
"""Models outside the zoo, of other data, whose increase in loss chooses the radii."""


def _name(cell: Mapping[str, Any]) -> str:
    """Return points128-noise0.2-shift1-rate0.001-decay0-seed1 for all factors."""
    return "-".join(f"{factor.split('_')[-1]}{value:g}" for factor, value in cell.items())


def prepare(folder: Path, size: Size, progress: Progress, *, workers: int = 1) -> list[Path]:
    """Train (once) and write, for each training set, models/, train.npz, scores.csv and zoo.yaml; return the latter."""
    pool, test = load_mnist()
    texts = [Path(__file__).with_name(name).read_text(encoding="utf-8") for name in size.specs]
    models: list[Model] = []
    specs: dict[str, str] = {}
    for name, recipe in size.recipes.items():
        part, images = _name({factor: getattr(recipe, factor) for factor in OF_DATA}), _images(pool, recipe)
        others = {"architecture": dict(size.architecture), "most": size.most}
        others["data"] = images.write(folder / part / "train.npz")
        models.append(Model(part, name, recipe, others, partial(make_model, recipe, images, test, size)))
        specs[part] = "".join(texts if recipe.seed == size.factors["seed"][0] else texts[:1])
    return make_zoo(folder, models, specs, workers=workers, progress=progress)


def _images(pool: Images, recipe: Recipe) -> Images:
    return training_set(pool, points=recipe.points, noise=recipe.noise, seed=recipe.seed)


@one_thread()
@torch.no_grad()
def make_model(recipe: Recipe, images: Images, test: Images, size: Size, folder: Path) -> dict[str, float]:
    """Train a model, write it, and return its scores.

    Scores on test images are expectations over labels as noisy as those in training: train and test are of one
    distribution. clean_test_error is that of the labels as they are.
    """
    with torch.enable_grad():
        model, steps = train(recipe, images.images, images.labels, size.architecture, size.most)
    model.save_pretrained(folder, safe_serialization=True)
    here = score_of(model(pixel_values=images.images).logits, images.labels)
    logits = model(pixel_values=test.images).logits
    found = scores_of(model, here, {"": score_of(logits, test.labels, recipe.noise)})
    return {"steps": steps, "clean_test_error": score_of(logits, test.labels).error, **found}


def pilot_models(images: int) -> dict[str, Any]:
    """Return, by recipe, what trains a pilot and returns it with the batch of so many images it is measured on."""
    pool, _ = load_mnist()

    def load_pilot(recipe: Recipe) -> tuple[nn.Module, Any]:
        own = _images(pool, recipe)
        model, _ = train(recipe, own.images, own.labels, FULL.architecture, FULL.most)
        return model, {"pixel_values": own.images[:images], "labels": own.labels[:images]}

    return {str(recipe): partial(load_pilot, recipe) for recipe in PILOTS}


# ---- the study


def run(out: Path, *, fast: bool, command: str, progress: Progress) -> Zoo:
    """Train each model once, measure it once, and write OUT/mnist; an interrupted study continues."""
    workers, models, size = (1, 1, FAST) if fast else (cpu_count(), 12, FULL)
    specs = prepare(out, size, progress, workers=workers)
    return run_zoo(specs, out / "mnist", models=models, command=command, workers=workers, progress=progress)


def load(folder: Path) -> Zoo:
    """Read the record in a folder."""
    return load_zoo(folder / "mnist")


def ranked(found: Zoo) -> Ranked:
    """Return the design of the zoo: a task is a number of images, a share of noise and an augmentation."""
    return Ranked(found.comparison, tuple(FACTORS), tuple(FACTORS)[:-1], tuple(FACTORS)[:3])


def tables(found: Zoo) -> Tables:
    """Return the tables of the zoo; of one without the whole design, only how far its ascents had converged."""
    zoo = ranked(found)
    design, rows = zoo.design, "inv, pairs with biases as rows"
    if len(design.frame) < len(FULL.recipes):
        return {"convergence": convergence_table(found)}
    differences = {
        "Primary: |Psi| of inv minus |Psi| of adaptive": design.psi_difference("inv", "adaptive"),
        "|tau| of inv minus |tau| of inv on pairs alone": design.tau_difference("inv", rows, design.within),
        "|tau| of inv minus |tau| of steps of training": design.tau_difference(
            "inv", "steps of training", design.within
        ),
    }
    cells = {
        factor: {f"{factor} {value:g}": (design.within & design.where(factor, value), GAP) for value in FACTORS[factor]}
        for factor in ("noise", "seed")
    }
    apart = {factor.replace("_", " "): (design.apart(factor), GAP) for factor in design.along}
    return {
        "comparisons": table(["Difference", "Here"], [[name, str(each)] for name, each in differences.items()]),
        "ranking": ranking_table(zoo, zoo.shown),
        "measures": ranking_table(zoo, zoo.measures),
        "noise": tau_table(zoo, cells["noise"], MAIN),
        "factors": tau_table(zoo, apart, [*MAIN, *COMPETITORS]),
        "seeds": tau_table(zoo, cells["seed"], MAIN),
        "radius": radius_table(zoo),
        "parts": parts_table(zoo),
        "convergence": convergence_table(found),
    }
