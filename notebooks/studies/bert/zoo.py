"""A zoo of BERTs fine-tuned to say whether one sentence entails another, and the spec that compares it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

from quotient_manifolds.experiments.kept import Scores, digest, keep, kept_scores, write_rows
from quotient_manifolds.files import write_text
from quotient_manifolds.load import load_object
from quotient_manifolds.progress import Progress
from studies.bert.sentences import Pair, test_pairs, training_pairs, write_pairs
from studies.bert.spec import fast_spec, full_spec
from studies.bert.training import (
    Recipe,
    draw_recipe,
    fine_tune,
    pretrained_encoder,
    save,
    score,
)

SEED = 6  # of sentences and recipes
TRAINING, TEST = 10, 10  # pairs of a template: 240 to train on, 480 to test


@final
@dataclass(frozen=True)
class Size:
    """How large a study is."""

    models: int
    epochs: int | None  # None: as each recipe has it
    architecture: Mapping[str, Any] | None  # None: the pretrained encoder
    test: int  # pairs of a template
    learned: float  # models of a larger error in training are left out
    spec: str


FULL = Size(28, None, None, TEST, 0.4, full_spec())  # a few collapse and answer everything alike
# Weights large enough that models so small tell one pair from another.
TINY = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "initializer_range": 0.5,
}
FAST = Size(4, 1, TINY, 1, 1.0, fast_spec())


def prepare(folder: Path, size: Size, progress: Progress) -> Path:
    """Trains (once) and writes models/, train.jsonl, test.jsonl, scores.csv and zoo.yaml, which is returned.

    What is there already and is as it should be stays as it is: a comparison knows its models by their files. The gaps
    of scores.csv are those of all pairs, where sharpness is measured on a few. Models that have not learned the
    training pairs lie in unlearned/.
    """
    folder.mkdir(parents=True, exist_ok=True)
    train, test = training_pairs(TRAINING, SEED), test_pairs(size.test, SEED)
    write_pairs(folder / "train.jsonl", train)
    write_pairs(folder / "test.jsonl", test)
    recipes = {f"bert-{index:02}": draw_recipe(index, seed=SEED, epochs=size.epochs) for index in range(size.models)}
    scores = train_models(folder, recipes, train, test, size, progress)
    learned = [name for name in recipes if scores[name].train_error <= size.learned]
    write_rows(folder / "scores.csv", (_row(name, recipes[name], scores[name]) for name in learned))
    write_text(folder / "zoo.yaml", size.spec)
    return folder / "zoo.yaml"


def _row(name: str, recipe: Recipe, scores: Scores) -> dict[str, Any]:
    gaps = {"error_gap": scores.error_gap, "loss_gap": scores.loss_gap}
    return {"checkpoint": name, **asdict(recipe), **asdict(scores), **gaps}


def train_models(
    folder: Path,
    recipes: Mapping[str, Recipe],
    train: Sequence[Pair],
    test: Sequence[Pair],
    size: Size,
    progress: Progress,
) -> dict[str, Scores]:
    """models/NAME or unlearned/NAME for every name, and its scores; several processes share the work."""
    (folder / "locks").mkdir(parents=True, exist_ok=True)
    common = {"data": _digest([*train, *test]), "start": size.architecture or digest(pretrained_encoder())}
    places = folder / "models", folder / "unlearned"
    found: dict[str, Scores] = {}
    for index, name in enumerate(_free_first(folder / "locks", list(recipes))):
        progress("training", index, len(recipes))
        directory = next((place / name for place in places if (place / name).is_dir()), places[0] / name)
        made_by = {"recipe": asdict(recipes[name]), **common}
        make = partial(_make, recipes[name], train, test, size.architecture)
        scores = found[name] = kept_scores(directory, made_by) or keep(directory, made_by, make, work=folder)
        home = places[scores.train_error > size.learned] / name
        if directory != home:
            home.parent.mkdir(exist_ok=True)
            os.replace(directory, home)
    progress("training", len(recipes), len(recipes))
    return found


def _make(
    recipe: Recipe, train: Sequence[Pair], test: Sequence[Pair], architecture: Mapping[str, Any] | None, folder: Path
) -> Scores:
    model = fine_tune(recipe, train, architecture)
    save(model, folder)
    return score(model, train, test)


def _free_first(locks: Path, names: Sequence[str]) -> Iterator[str]:
    """Each name while this process has its lock; those that others have come last, and are waited for."""
    lock = load_object("filelock:FileLock", "locks")  # by name, for the library itself is imported behind one door
    later = []
    for name in names:
        try:
            with lock(locks / name, timeout=0):
                yield name
        except TimeoutError:
            later.append(name)
    for name in later:
        with lock(locks / name):
            yield name


def _digest(pairs: Sequence[Pair]) -> str:
    texts = [(pair.premise, pair.hypothesis, pair.label) for pair in pairs]
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()
