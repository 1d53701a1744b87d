"""A zoo of BERTs fine-tuned to tell good from bad in film reviews, and the spec that compares it."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, final

from torch import nn

from quotient_manifolds.demo.zoo import digest, each_finished, make_once, write_scores
from quotient_manifolds.files import write_text
from quotient_manifolds.load import load_model
from quotient_manifolds.progress import Progress
from studies.encoder import pretrained_encoder
from studies.sentiment.sentences import Sentence, read_sentences, write_sentences
from studies.sentiment.training import Recipe, encode, fine_tune, save, score
from studies.zoos.scores import gaps, weight_norm

TRAINING = 256
SCORES = "scores.json"  # beside a model's weights
TESTS = {"films": 1500, "products": 500, "editorials": 300, "tweets": 500}
OWN = "films"
PLAIN = Recipe("seeds", learning_rate=1e-4, batch_size=16, dropout=0.1, epochs=6, seed=0)
SEEDS = 30
GRID: Final[dict[str, list[Any]]] = {
    "learning_rate": [5e-5, 1e-4, 2e-4, 4e-4],
    "batch_size": [8, 32],
    "dropout": [0.0, 0.1],
    "epochs": [4, 12],
}


@final
@dataclass(frozen=True)
class Size:
    """Say how large a study is; spec is the YAML file beside this one that says what is measured."""

    recipes: Mapping[str, Recipe]
    architecture: Mapping[str, Any] | None  # None: the pretrained encoder
    tests: Mapping[str, int]
    spec: str


def _seeds() -> Iterator[tuple[str, Recipe]]:
    for seed in range(SEEDS):
        yield f"seed-{seed:02}", Recipe(**{**asdict(PLAIN), "seed": seed})


def _settings() -> Iterator[tuple[str, Recipe]]:
    for place, values in enumerate(itertools.product(*GRID.values())):
        chosen = dict(zip(GRID, values, strict=True))
        yield f"setting-{place:02}", Recipe(**{**asdict(PLAIN), "group": "settings", **chosen, "seed": 1000 + place})


def pilots() -> dict[str, Recipe]:
    """Return models outside the zoo, whose rises of the loss choose the radii."""
    rates = GRID["learning_rate"][:3]
    return {
        f"pilot-{place}": Recipe(**{**asdict(PLAIN), "group": "pilot", "learning_rate": rate, "seed": 2000 + place})
        for place, rate in enumerate(rates)
    }


FULL = Size({**dict(_seeds()), **dict(_settings())}, None, TESTS, "zoo.yaml")
# Weights large enough that models so small tell one sentence from another.
TINY = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
FAST = Size(
    {f"model-{seed}": Recipe("seeds", 1e-3, 32, 0.0, 1, seed) for seed in range(4)},
    {**TINY, "initializer_range": 0.5},
    dict.fromkeys(TESTS, 32),
    "trial.yaml",
)


def prepare(folder: Path, size: Size, progress: Progress, *, archive: Path, workers: int = 1) -> list[Path]:
    """Train (once) and write, for each group, models/, train.jsonl, scores.csv and zoo.yaml; return the latter.

    What is there already and is as it should be stays as it is: a comparison knows its models by their files. Sharpness
    is measured on a few training sentences; losses, errors and gaps of scores.csv are those of all sentences.
    archive: the sentences' source distribution, see `read_sentences`.
    """
    sources = read_sentences(archive, pretrained_encoder())
    train, rest = sources[OWN][:TRAINING], sources[OWN][TRAINING:]
    tests = {source: (rest if source == OWN else sources[source])[:count] for source, count in size.tests.items()}
    data = _digest([*train, *itertools.chain(*tests.values())])
    common = {"data": data, "start": size.architecture or digest(pretrained_encoder())}
    models = {name: folder / recipe.group / "models" / name for name, recipe in size.recipes.items()}
    jobs = [
        partial(
            make_once,
            models[name],
            {"recipe": asdict(recipe), **common},
            partial(_make, recipe, train, tests, size.architecture),
        )
        for name, recipe in size.recipes.items()
    ]
    progress("training", 0, len(jobs))
    for finished, _ in enumerate(each_finished(jobs, workers), 1):
        progress("training", finished, len(jobs))
    groups = dict.fromkeys(recipe.group for recipe in size.recipes.values())
    for group in groups:
        write_sentences(folder / group / "train.jsonl", train)
        write_scores(
            folder / group / "scores.csv",
            (
                {"checkpoint": name, **asdict(recipe), **json.loads((models[name] / SCORES).read_text("utf-8"))}
                for name, recipe in size.recipes.items()
                if recipe.group == group
            ),
        )
        write_text(folder / group / "zoo.yaml", Path(__file__).with_name(size.spec).read_text(encoding="utf-8"))
    return [folder / group / "zoo.yaml" for group in groups]


def _make(
    recipe: Recipe,
    train: Sequence[Sentence],
    tests: Mapping[str, Sequence[Sentence]],
    architecture: Mapping[str, Any] | None,
    folder: Path,
) -> None:
    model = fine_tune(recipe, train, architecture)
    save(model, folder)
    here = score(model, train)
    found: dict[str, float] = {"train_loss": here.loss, "train_error": here.error, "margin": here.margin}
    found["weight_norm"] = weight_norm(model)
    for source, sentences in tests.items():
        there = score(model, sentences)
        prefix = "" if source == OWN else f"{source}_"
        found |= {f"{prefix}test_loss": there.loss, f"{prefix}test_error": there.error, **gaps(here, there, prefix)}
    write_text(folder / SCORES, json.dumps(found, indent=1) + "\n")


def _digest(sentences: Sequence[Sentence]) -> str:
    return hashlib.sha256(json.dumps([(each.text, each.label) for each in sentences]).encode()).hexdigest()


def pilot_models(folder: Path, archive: Path, sentences: int = 32) -> dict[str, Any]:
    """Return, by recipe, what fine-tunes a pilot and returns it with the batch it is measured on."""
    train = read_sentences(archive, pretrained_encoder())[OWN][:TRAINING]

    def load(recipe: Recipe) -> tuple[nn.Module, Any]:
        model = fine_tune(recipe, train)
        save(model, folder)
        return load_model(folder), encode(train[:sentences])

    return {str(recipe): partial(load, recipe) for recipe in pilots().values()}
