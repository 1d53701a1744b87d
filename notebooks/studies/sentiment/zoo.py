"""A zoo of BERTs fine-tuned to tell good from bad in film reviews, and the spec that compares it."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, final

from joblib import cpu_count
from torch import nn

from quotient_manifolds.demo.zoo import each_finished, make_once
from quotient_manifolds.files import write_text
from quotient_manifolds.load import load_model
from quotient_manifolds.plots import Plot
from quotient_manifolds.progress import Progress
from quotient_manifolds.report import Table
from studies.common import numbers, pretrained_encoder, write_rows
from studies.sentiment.sentences import Sentence, fetched, read_sentences, write_sentences
from studies.sentiment.training import Recipe, encode, fine_tune, save, score
from studies.zoos.measuring import Zoo, load_zoo, run_zoo
from studies.zoos.scores import gaps, weight_norm
from studies.zoos.tables import MAIN, WORST, Ranked, gaps_table, intervals_figure, pairs_table, radius_table

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
    common = {"data": data, "start": size.architecture or _encoder_digest()}
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
        write_rows(
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


def _encoder_digest() -> str:
    files = [pretrained_encoder() / name for name in ("config.json", "model.safetensors")]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


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


# ---- the study

ON: Final = {
    "films (own source)": "error_gap",
    "products": "products_error_gap",
    "editorials": "editorials_error_gap",
    "tweets": "tweets_error_gap",
}
"""By source of the test sentences, the gap."""


def run(out: Path, *, fast: bool, command: str, progress: Progress) -> Zoo:
    """Fine-tune each model once, measure it once, and write OUT/sentiment; an interrupted study continues."""
    workers, models, size = (1, 1, FAST) if fast else (cpu_count(), 3, FULL)
    specs = prepare(out, size, progress, archive=fetched(), workers=workers)
    return run_zoo(
        specs, out / "sentiment", name="sentiment", models=models, command=command, workers=workers, progress=progress
    )


def load(folder: Path) -> Zoo:
    """Read the record in a folder."""
    return load_zoo(folder / "sentiment")


def ranked(found: Zoo, group: str) -> Ranked:
    """Return one of the two groups: "settings", a factorial design, or "seeds", which differ by their seed alone."""
    scores = found.comparison.scores
    scores, values = scores[scores["group"] == group], found.comparison.values
    own = replace(found.comparison, scores=scores, values=values[values["checkpoint"].isin(scores.index)])
    return Ranked(own, tuple(GRID), tuple(GRID), ())


def tables(found: Zoo) -> list[Table]:
    """Return the tables of the zoo; of one without all models, only how far its ascents had converged."""
    if len(found.comparison.scores) < len(FULL.recipes):
        return [found.convergence.table()]
    seeds, settings = (ranked(found, group) for group in ("seeds", "settings"))
    difference = seeds.tau_difference("inv", "adaptive", seeds.design.everywhere)
    primary = [["Primary: |tau| of inv minus |tau| of adaptive, by seed alone", str(difference)]]
    apart = {factor.replace("_", " "): settings.design.along(factor) for factor in GRID}
    return [
        numbers("comparisons", "", ["Difference", "Here"], primary),
        gaps_table("seeds", "", seeds, ON, [*seeds.measures]),
        gaps_table("settings", "", settings, ON, [*MAIN, "norm of the weights", "training loss", "margin"]),
        pairs_table("factors", "", settings, apart, MAIN),
        radius_table(seeds),
        found.convergence.table(),
    ]


def figure(found: Zoo) -> Plot:
    """Draw tau of measures at their middle radii, with the gap on each source of sentences."""
    zoo = ranked(found, "seeds")
    names: list[str] = [*WORST, "norm of the weights", "training loss", "margin"]
    columns = {words: {name: zoo.tau(name, zoo.design.everywhere, gap) for name in names} for words, gap in ON.items()}
    return intervals_figure(columns, f"{zoo.design.models} BERTs on film reviews that differ by seed alone")
