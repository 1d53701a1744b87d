"""A zoo of BERTs fine-tuned to say whether one sentence entails another, and the spec that compares it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

from quotient_manifolds.demo.zoo import digest, each_finished, make_once, write_scores
from quotient_manifolds.files import write_text
from quotient_manifolds.progress import Progress
from studies.bert.sentences import Pair, test_pairs, training_pairs, write_pairs
from studies.bert.training import (
    FineTuningRecipe,
    Scores,
    draw_recipe,
    fine_tune,
    pretrained_encoder,
    save,
    score,
)

SEED = 6  # of sentences and recipes
SCORES = "scores.json"  # beside a model's weights
TRAINING, TEST = 10, 10  # pairs of a template: 240 to train on, 480 to test


@final
@dataclass(frozen=True)
class Size:
    """Say how large a study is; spec is the YAML file beside this one that says what is measured."""

    models: int
    epochs: int | None  # None: as each recipe has it
    architecture: Mapping[str, Any] | None  # None: the pretrained encoder
    test: int  # pairs of a template
    learned: float  # models of a larger error in training are left out
    spec: str


FULL = Size(28, None, None, TEST, 0.4, "zoo.yaml")  # a few collapse and answer everything alike
# Weights large enough that models so small tell one pair from another.
TINY = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "initializer_range": 0.5,
}
FAST = Size(4, 1, TINY, 1, 1.0, "trial.yaml")


def prepare(folder: Path, size: Size, progress: Progress, *, workers: int = 1) -> Path:
    """Train (once) and write models/, train.jsonl, test.jsonl, scores.csv and zoo.yaml, which is returned.

    What is there already and is as it should be stays as it is: a comparison knows its models by their files. The gaps
    of scores.csv are those of all pairs, where sharpness is measured on a few. Models that have not learned the
    training pairs lie in unlearned/.
    """
    folder.mkdir(parents=True, exist_ok=True)
    train, test = training_pairs(TRAINING, SEED), test_pairs(size.test, SEED)
    write_pairs(folder / "train.jsonl", train)
    write_pairs(folder / "test.jsonl", test)
    recipes = {f"bert-{index:02}": draw_recipe(index, seed=SEED, epochs=size.epochs) for index in range(size.models)}
    train_models(folder, recipes, train, test, size, progress, workers)
    rows = []
    for name, recipe in recipes.items():
        place = next(each for each in _places(folder, name) if each.is_dir())
        scores = Scores(**json.loads((place / SCORES).read_text(encoding="utf-8")))
        home = _places(folder, name)[scores.train_error > size.learned]
        home.parent.mkdir(exist_ok=True)
        os.replace(place, home)
        if scores.train_error <= size.learned:
            gaps = {
                "error_gap": scores.test_error - scores.train_error,
                "loss_gap": scores.test_loss - scores.train_loss,
            }
            rows.append({"checkpoint": name, **asdict(recipe), **asdict(scores), **gaps})
    write_scores(folder / "scores.csv", rows)
    write_text(folder / "zoo.yaml", Path(__file__).with_name(size.spec).read_text(encoding="utf-8"))
    return folder / "zoo.yaml"


def _places(folder: Path, name: str) -> tuple[Path, Path]:
    """Return where a model lies that has learned the training pairs, and one that has not."""
    return folder / "models" / name, folder / "unlearned" / name


def train_models(
    folder: Path,
    recipes: Mapping[str, FineTuningRecipe],
    train: Sequence[Pair],
    test: Sequence[Pair],
    size: Size,
    progress: Progress,
    workers: int,
) -> None:
    """Make models/NAME or unlearned/NAME for every name, in so many processes."""
    common = {"data": _digest([*train, *test]), "start": size.architecture or digest(pretrained_encoder())}
    jobs = []
    for name, recipe in recipes.items():
        directory = next((each for each in _places(folder, name) if each.is_dir()), _places(folder, name)[0])
        make = partial(_make, recipe, train, test, size.architecture)
        jobs.append(partial(make_once, directory, {"recipe": asdict(recipe), **common}, make))
    progress("training", 0, len(jobs))
    for finished, _ in enumerate(each_finished(jobs, workers), 1):
        progress("training", finished, len(jobs))


def _make(
    recipe: FineTuningRecipe,
    train: Sequence[Pair],
    test: Sequence[Pair],
    architecture: Mapping[str, Any] | None,
    folder: Path,
) -> None:
    model = fine_tune(recipe, train, architecture)
    save(model, folder)
    write_text(folder / SCORES, json.dumps(asdict(score(model, train, test))))


def _digest(pairs: Sequence[Pair]) -> str:
    texts = [(pair.premise, pair.hypothesis, pair.label) for pair in pairs]
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()
