"""A full factorial zoo of small vision transformers on MNIST, and how measures rank it.

Every model is trained until the loss on its own, noisy labels falls below one number for all.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import pandas as pd
import torch
from joblib import cpu_count
from torch import Tensor, nn

from quotient_manifolds.demo import zoo
from quotient_manifolds.demo.zoo import one_thread, shifted
from quotient_manifolds.messages import Progress
from studies.common import Record, Tables
from studies.zoos.data import Images, load_mnist, training_set
from studies.zoos.ranks import (
    COMPETITORS,
    GAP,
    MAIN,
    Ranked,
    convergence_table,
    parts_table,
    radius_table,
    ranking_table,
    tau_table,
)
from studies.zoos.zoo import Model, Zoo, load_zoo, make_zoo, run_zoo, score_of, scores_of, spec_text

# ---- training

# 2 layers, 3 heads of 16, 17 tokens: 41,770 parameters. See demo.zoo for the deviation of the weights.
ARCHITECTURE: dict[str, Any] = zoo.ARCHITECTURE | {"image_size": 28, "patch_size": 7, "initializer_range": 0.08}
ARCHITECTURE |= {"num_hidden_layers": 2, "num_attention_heads": 3}
BATCH = 64
WARM_UP = 50  # steps over which the learning rate rises; then it stays
TARGET = 0.1  # nats: where training stops
OFTEN, RARELY = 2, 20  # steps between looks at the loss, near the target and far from it


@final
@dataclass(frozen=True)
class Recipe:
    """Hold a cell of the design: images, share of noisy labels, shifts, AdamW's settings, seed of data and weights."""

    points: int
    noise: float
    shift: int  # pixels up to which every image is moved at random, each time it is seen
    learning_rate: float
    weight_decay: float
    seed: int

    def name(self, *factors: str) -> str:
        """Return points128-noise0.2-shift1-rate0.001-decay0-seed1 for all factors."""
        return "-".join(f"{factor.split('_')[-1]}{getattr(self, factor):g}" for factor in factors)

    def draw(self, pool: Images) -> Images:
        """Return the training set."""
        return training_set(pool, points=self.points, noise=self.noise, seed=self.seed)


@one_thread()
def train(
    recipe: Recipe, images: Tensor, labels: Tensor, architecture: Mapping[str, Any] = ARCHITECTURE, most: int = 60_000
) -> tuple[Any, int]:
    """Train until the loss on all training images, not shifted, is below `TARGET`; return the model and its steps.

    After `most` steps training stops wherever it is. torch's global generator is left alone.
    """
    from transformers import ViTConfig, ViTForImageClassification

    generator = torch.Generator().manual_seed(recipe.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = ViTForImageClassification(ViTConfig(**architecture)).train()
    rate, decay = recipe.learning_rate, recipe.weight_decay
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=decay, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
    blank, pause, step = float(images.min()), RARELY, 0
    while step < most:
        for _ in range(pause):
            rows = torch.randint(len(labels), (BATCH,), generator=generator)
            chosen = images[rows] if recipe.shift == 0 else shifted(images[rows], recipe.shift, blank, generator)
            loss = nn.functional.cross_entropy(model(pixel_values=chosen).logits, labels[rows])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
        step += pause
        with torch.no_grad():
            now = float(nn.functional.cross_entropy(model(pixel_values=images).logits, labels))
        if now < TARGET:
            break
        pause = OFTEN if now < 2 * TARGET else RARELY
    return model.eval(), step


# ---- the zoo

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
    """Say how large a study is; specs: the YAML files of `zoos` that say together what is measured.

    All but the first of these are for the models of the first seed alone.
    """

    factors: Mapping[str, tuple[Any, ...]]
    architecture: Mapping[str, Any]
    most: int  # steps of training
    specs: tuple[str, ...]

    @property
    def recipes(self) -> dict[str, Recipe]:
        """Return every cell of the design by its name."""
        cells = itertools.product(*self.factors.values())
        recipes = [Recipe(**dict(zip(self.factors, values, strict=True))) for values in cells]
        return {recipe.name(*FACTORS): recipe for recipe in recipes}


FULL = Size(FACTORS, ARCHITECTURE, 60_000, ("mnist", "mnist_parts"))
FAST = Size(
    {"points": (64,), "noise": (0.0, 0.4), "shift": (1,), "learning_rate": (1e-3,), "weight_decay": (0.0,)}
    | {"seed": (1,)},
    ARCHITECTURE | {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
    20,
    ("mnist_trial",),
)
PILOTS: Final = tuple(
    Recipe(points, noise, shift, rate, 0.0, seed=0)
    for points, noise, shift, rate in [
        (100, 0.0, 0, 1e-3), (250, 0.4, 0, 1e-4), (250, 0.2, 1, 1e-3), (100, 0.4, 1, 1e-3), (250, 0.0, 1, 1e-2),
    ]
)  # fmt: skip
"""Models outside the zoo, of other data, whose increase in loss chooses the radii."""


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
        own = recipe.draw(pool)
        model, _ = train(recipe, own.images, own.labels)
        return model, {"pixel_values": own.images[:images], "labels": own.labels[:images]}

    return {str(recipe): partial(load_pilot, recipe) for recipe in PILOTS}


def run(out: Path, *, fast: bool, progress: Progress) -> Record:
    """Train each model once and measure it once, a part of the zoo for each training set."""
    workers, again, size = (1, 1, FAST) if fast else (cpu_count(), 12, FULL)
    pool, test = load_mnist()
    models: list[Model] = []
    specs: dict[str, str] = {}
    for name, recipe in size.recipes.items():
        part, images = recipe.name(*OF_DATA), recipe.draw(pool)
        others = {"architecture": dict(size.architecture), "most": size.most}
        others["data"] = images.write(out / part / "train.npz")
        models.append(Model(part, name, recipe, others, partial(make_model, recipe, images, test, size)))
        first = recipe.seed == size.factors["seed"][0]
        specs[part] = "".join(map(spec_text, size.specs if first else size.specs[:1]))
    paths = make_zoo(out, models, specs, workers=workers, progress=progress)
    return run_zoo("mnist", paths, out, models=again, workers=workers, progress=progress)


load = partial(load_zoo, "mnist")


def ranked(found: Zoo) -> Ranked:
    """Return the design of the zoo: a task is a number of images, a share of noise and an augmentation."""
    return Ranked(found.comparison, tuple(FACTORS), tuple(FACTORS)[:-1], tuple(FACTORS)[:3])


def tables(found: Zoo) -> Tables:
    """Return the tables of the zoo; of one without the whole design, only how far its ascents had converged."""
    ranks = ranked(found)
    design, within = ranks.design, ranks.design.within
    if len(design.frame) < len(FULL.recipes):
        return {"convergence": convergence_table(found)}
    differences = {"Primary: |Psi| of inv minus |Psi| of adaptive": design.psi_difference("inv", "adaptive")}
    others = {"inv on pairs alone": "inv, pairs with biases as rows", "steps of training": "steps of training"}
    for said, name in others.items():
        differences[f"|tau| of inv minus |tau| of {said}"] = design.tau_difference("inv", name, within)
    cells = {
        factor: {f"{factor} {value:g}": (within & design.where(factor, value), GAP) for value in FACTORS[factor]}
        for factor in ("noise", "seed")
    }
    apart = {factor.replace("_", " "): (design.apart(factor), GAP) for factor in design.along}
    return {
        "comparisons": pd.DataFrame(differences.items(), columns=["Difference", "Here"]),
        "ranking": ranking_table(ranks, ranks.shown),
        "measures": ranking_table(ranks, ranks.measures),
        "noise": tau_table(ranks, cells["noise"], MAIN),
        "factors": tau_table(ranks, apart, [*MAIN, *COMPETITORS]),
        "seeds": tau_table(ranks, cells["seed"], MAIN),
        "radius": radius_table(ranks),
        "parts": parts_table(ranks),
        "convergence": convergence_table(found),
    }
