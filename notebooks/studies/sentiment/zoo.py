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

import pandas as pd
from joblib import cpu_count
from torch import nn

from quotient_manifolds.files import write_text
from quotient_manifolds.load.huggingface import load_tokenizer
from quotient_manifolds.messages import Progress
from studies.common import Tables, pretrained_encoder, table
from studies.sentiment.sentences import Sentence, fetched, read_sentences
from studies.sentiment.training import Recipe, encode, fine_tune, score
from studies.zoos.measuring import Zoo, load_zoo, run_zoo
from studies.zoos.models import Model, make_zoo, scores_of
from studies.zoos.ranking import GAP
from studies.zoos.tables import MAIN, WORST, Ranked, convergence_table, radius_table, tau_table

TRAINING = 256
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


def _recipes() -> Iterator[tuple[str, Recipe]]:
    for seed in range(SEEDS):
        yield f"seed-{seed:02}", replace(PLAIN, seed=seed)
    for place, values in enumerate(itertools.product(*GRID.values())):
        chosen = dict(zip(GRID, values, strict=True))
        yield f"setting-{place:02}", replace(PLAIN, group="settings", seed=1000 + place, **chosen)


PILOTS: Final = tuple(
    replace(PLAIN, group="pilot", learning_rate=rate, seed=2000 + place)
    for place, rate in enumerate(GRID["learning_rate"][:3])
)
"""Models outside the zoo, whose increase in loss chooses the radii."""
FULL = Size(dict(_recipes()), None, TESTS, "zoo.yaml")
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

    Sharpness is measured on a few training sentences; losses, errors and gaps of scores.csv are those of all sentences.
    archive: the sentences' source distribution, see `read_sentences`.
    """
    sources = read_sentences(archive, pretrained_encoder())
    train, rest = sources[OWN][:TRAINING], sources[OWN][TRAINING:]
    tests = {source: (rest if source == OWN else sources[source])[:count] for source, count in size.tests.items()}
    every = [asdict(each) for each in (*train, *itertools.chain(*tests.values()))]
    weights = pretrained_encoder() / "model.safetensors"
    start = size.architecture or hashlib.sha256(weights.read_bytes()).hexdigest()
    others = {"data": hashlib.sha256(json.dumps(every).encode()).hexdigest(), "start": start}
    models = [
        Model(recipe.group, name, recipe, others, partial(_make, recipe, train, tests, size.architecture))
        for name, recipe in size.recipes.items()
    ]
    spec = Path(__file__).with_name(size.spec).read_text(encoding="utf-8")
    specs = dict.fromkeys((each.part for each in models), spec)
    for group in specs:
        (folder / group).mkdir(parents=True, exist_ok=True)
        write_text(folder / group / "train.jsonl", pd.DataFrame(train).to_json(orient="records", lines=True))
    return make_zoo(folder, models, specs, workers=workers, progress=progress)


def _make(
    recipe: Recipe,
    train: Sequence[Sentence],
    tests: Mapping[str, Sequence[Sentence]],
    architecture: Mapping[str, Any] | None,
    folder: Path,
) -> dict[str, float]:
    model = fine_tune(recipe, train, architecture)
    model.save_pretrained(folder, safe_serialization=True)
    load_tokenizer(pretrained_encoder()).save_pretrained(folder)
    there = {"" if name == OWN else f"{name}_": score(model, sentences) for name, sentences in tests.items()}
    return scores_of(model, score(model, train), there)


def pilot_models(archive: Path, sentences: int = 32) -> dict[str, Any]:
    """Return, by recipe, what fine-tunes a pilot and returns it with the batch it is measured on."""
    train = read_sentences(archive, pretrained_encoder())[OWN][:TRAINING]

    def load(recipe: Recipe) -> tuple[nn.Module, Any]:
        return fine_tune(recipe, train), encode(train[:sentences])

    return {str(recipe): partial(load, recipe) for recipe in PILOTS}


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
    return run_zoo(specs, out / "sentiment", models=models, command=command, workers=workers, progress=progress)


def load(folder: Path) -> Zoo:
    """Read the record in a folder."""
    return load_zoo(folder / "sentiment")


def ranked(found: Zoo, group: str) -> Ranked:
    """Return one of the two groups: "settings", a factorial design, or "seeds", which differ by their seed alone."""
    whole = found.comparison
    scores = whole.scores[whole.scores["group"] == group]
    values = whole.values[whole.values["checkpoint"].isin(scores.index)]
    return Ranked(replace(whole, scores=scores, values=values), tuple(GRID), tuple(GRID), ())


def tables(found: Zoo) -> Tables:
    """Return the tables of the zoo; of one without all models, only how far its ascents had converged."""
    if len(found.comparison.scores) < len(FULL.recipes):
        return {"convergence": convergence_table(found)}
    seeds, settings = (ranked(found, group) for group in ("seeds", "settings"))
    difference = seeds.design.tau_difference("inv", "adaptive", seeds.design.same())
    apart = {factor.replace("_", " "): (settings.design.apart(factor), GAP) for factor in GRID}
    own = {name: (seeds.design.same(), gap) for name, gap in ON.items()}
    return {
        "comparisons": table(
            ["Difference", "Here"], [["Primary: |tau| of inv minus |tau| of adaptive", str(difference)]]
        ),
        "seeds": tau_table(seeds, own, seeds.shown),
        "measures": tau_table(seeds, own, seeds.measures),
        "settings": tau_table(
            settings,
            {name: (settings.design.same(), gap) for name, gap in ON.items()},
            [*MAIN, *settings.shown[len(WORST) :]],
        ),
        "factors": tau_table(settings, apart, MAIN),
        "radius": radius_table(seeds),
        "convergence": convergence_table(found),
    }
