"""A zoo of BERTs fine-tuned to tell good from bad in film reviews, and how measures rank it."""

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
import torch
from joblib import cpu_count
from torch import Tensor, nn

from quotient_manifolds.demo.zoo import one_thread
from quotient_manifolds.files import write_text
from quotient_manifolds.load import load_model
from quotient_manifolds.load.huggingface import load_tokenizer
from quotient_manifolds.messages import Progress
from studies.common import Record, Tables, pretrained_encoder
from studies.zoos.data import LONGEST, Sentence, fetched, read_sentences
from studies.zoos.ranks import GAP, MAIN, WORST, Ranked, convergence_table, radius_table, tau_table
from studies.zoos.zoo import Model, Scores, Zoo, load_zoo, make_zoo, run_zoo, score_of, scores_of, spec_text

# ---- fine-tuning

WARM_UP = 0.1  # of the steps: over them the rates rise, then they fall to 0, both linearly


@final
@dataclass(frozen=True)
class Recipe:
    """Hold what decides a fine-tuned model besides the data: AdamW's settings, batches, dropout, epochs, seed.

    group: "seeds" for models that differ by their seed alone, "settings" for those of the factorial design.
    """

    group: str
    learning_rate: float
    batch_size: int
    dropout: float
    epochs: int
    seed: int


@one_thread()
def fine_tune(recipe: Recipe, sentences: Sequence[Sentence], architecture: Mapping[str, Any] | None = None) -> Any:
    """Train and return a BERT that says whether sentences are good; torch's global generator is left alone.

    architecture: of a model with random weights in place of the pretrained one.
    """
    generator = torch.Generator().manual_seed(recipe.seed)
    encoded = encode(sentences)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)  # of the classifier and of dropout
        model = _fresh_model(recipe.dropout, architecture).train()
        optimizer = torch.optim.AdamW(model.parameters(), recipe.learning_rate, weight_decay=0.01, fused=True)
        steps = recipe.epochs * -(-len(sentences) // recipe.batch_size)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: share_of_rate(step, steps))
        for _ in range(recipe.epochs):
            for rows in torch.randperm(len(sentences), generator=generator).split(recipe.batch_size):
                batch = _rows(encoded, rows)
                labels = batch.pop("labels")
                loss = nn.functional.cross_entropy(model(**batch).logits, labels)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                schedule.step()
    return model.eval()


def share_of_rate(step: int, steps: int) -> float:
    """Return the learning rate of a step, from 0 on, over the highest."""
    rising = round(WARM_UP * steps)
    return (step + 1) / (rising + 1) if step < rising else (steps - step) / (steps - rising)


def _fresh_model(dropout: float, architecture: Mapping[str, Any] | None) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    drop: dict[str, Any] = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout, "num_labels": 2}
    if architecture is not None:
        return BertForSequenceClassification(BertConfig(**architecture, **drop))
    model = BertForSequenceClassification(BertConfig.from_pretrained(pretrained_encoder(), **drop))
    model.bert.load_state_dict(load_model(pretrained_encoder()).state_dict())
    return model


def encode(sentences: Sequence[Sentence]) -> dict[str, Tensor]:
    """Return tokens and labels of all sentences, padded to the longest."""
    tokens = load_tokenizer(pretrained_encoder())
    texts = [each.text for each in sentences]
    batch = tokens(texts, padding=True, truncation=True, max_length=LONGEST, return_tensors="pt")
    return {**batch, "labels": torch.tensor([each.label for each in sentences])}


def _rows(encoded: Mapping[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    """Return some rows, without columns that are padding only."""
    length = int(encoded["attention_mask"][rows].sum(1).max())
    return {name: value[rows, :length] if value.ndim == 2 else value[rows] for name, value in encoded.items()}


@one_thread()
@torch.no_grad()
def score(model: nn.Module, sentences: Sequence[Sentence]) -> Scores:
    """Return what a model in eval mode does with sentences, of which the short ones are read first."""
    encoded = encode(sentences)
    labels = encoded.pop("labels")
    order = encoded["attention_mask"].sum(1).argsort()
    logits = torch.cat([model(**_rows(encoded, rows)).logits for rows in order.split(64)])
    return score_of(logits, labels[order])


# ---- the zoo

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
ON: Final = {
    "films (own source)": "error_gap",
    "products": "products_error_gap",
    "editorials": "editorials_error_gap",
    "tweets": "tweets_error_gap",
}
"""By source of the test sentences, the gap."""


@final
@dataclass(frozen=True)
class Size:
    """Say how large a study is; spec: the YAML file of `zoos` that says what is measured."""

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
FULL = Size(dict(_recipes()), None, TESTS, "sentiment")
# Weights large enough that models so small tell one sentence from another.
TINY = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
FAST = Size(
    {f"model-{seed}": Recipe("seeds", 1e-3, 32, 0.0, 1, seed) for seed in range(2)},
    {**TINY, "initializer_range": 0.5},
    dict.fromkeys(TESTS, 32),
    "sentiment_trial",
)


def _make(
    recipe: Recipe, train: Sequence[Sentence], tests: Mapping[str, Sequence[Sentence]], size: Size, folder: Path
) -> dict[str, float]:
    """Fine-tune a model, write it, and return its scores on all sentences."""
    model = fine_tune(recipe, train, size.architecture)
    model.save_pretrained(folder, safe_serialization=True)
    load_tokenizer(pretrained_encoder()).save_pretrained(folder)
    there = {"" if name == OWN else f"{name}_": score(model, sentences) for name, sentences in tests.items()}
    return scores_of(model, score(model, train), there)


def pilot_models(sentences: int) -> dict[str, Any]:
    """Return, by recipe, what fine-tunes a pilot and returns it with the batch it is measured on."""
    train = read_sentences(fetched(), pretrained_encoder())[OWN][:TRAINING]

    def load_pilot(recipe: Recipe) -> tuple[nn.Module, Any]:
        return fine_tune(recipe, train), encode(train[:sentences])

    return {str(recipe): partial(load_pilot, recipe) for recipe in PILOTS}


def run(out: Path, *, fast: bool, progress: Progress) -> Record:
    """Fine-tune each model once and measure it once, a part of the zoo for each group.

    Sharpness is measured on a few training sentences; losses, errors and gaps are those of all sentences.
    """
    workers, again, size = (1, 1, FAST) if fast else (cpu_count(), 3, FULL)
    sources = read_sentences(fetched(), pretrained_encoder())
    train, rest = sources[OWN][:TRAINING], sources[OWN][TRAINING:]
    tests = {source: (rest if source == OWN else sources[source])[:count] for source, count in size.tests.items()}
    every = [asdict(each) for each in (*train, *itertools.chain(*tests.values()))]
    weights = pretrained_encoder() / "model.safetensors"
    start = size.architecture or hashlib.sha256(weights.read_bytes()).hexdigest()
    others = {"data": hashlib.sha256(json.dumps(every).encode()).hexdigest(), "start": start}
    models = [
        Model(recipe.group, name, recipe, others, partial(_make, recipe, train, tests, size))
        for name, recipe in size.recipes.items()
    ]
    specs = dict.fromkeys((each.part for each in models), spec_text(size.spec))
    for group in specs:
        (out / group).mkdir(parents=True, exist_ok=True)
        write_text(out / group / "train.jsonl", pd.DataFrame(train).to_json(orient="records", lines=True))
    paths = make_zoo(out, models, specs, workers=workers, progress=progress)
    return run_zoo("sentiment", paths, out, models=again, workers=workers, progress=progress)


load = partial(load_zoo, "sentiment")


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
    own, across = ({name: (each.design.same(), gap) for name, gap in ON.items()} for each in (seeds, settings))
    return {
        "comparisons": pd.DataFrame(
            {"Difference": ["Primary: |tau| of inv minus |tau| of adaptive"], "Here": [difference]}
        ),
        "seeds": tau_table(seeds, own, [*MAIN, *seeds.shown[len(WORST) :]]),
        "measures": tau_table(seeds, own, seeds.measures),
        "settings": tau_table(settings, across, [*MAIN, *settings.shown[len(WORST) :]]),
        "factors": tau_table(settings, apart, MAIN),
        "radius": radius_table(seeds),
        "convergence": convergence_table(found),
    }
