"""Make the models of a zoo, each once, score and measure them, and keep a record of all values."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import click
import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from quotient_manifolds import cross_entropy
from quotient_manifolds.compare import Comparison, read_spec, run_comparison
from quotient_manifolds.demo.zoo import make_once, one_thread, run_jobs
from quotient_manifolds.files import atomic_file, write_text
from quotient_manifolds.geometry import KnownSymmetries, Quotient
from quotient_manifolds.load import load_checkpoint
from quotient_manifolds.messages import Progress
from quotient_manifolds.sharpness import WorstCase
from studies.common import Record, load

# ---- models and their scores

SCORES = "scores.json"  # beside a model's weights


def spec_text(name: str) -> str:
    """Return what is measured, a spec of `compare` beside this file."""
    return Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8")


@final
@dataclass(frozen=True)
class Model:
    """Say how a model of a zoo is made: its part of the zoo, its name, its recipe, and what else decides it.

    make: writes the model into a folder and returns its scores.
    """

    part: str
    name: str
    recipe: Any
    others: Mapping[str, Any]
    make: Callable[[Path], Mapping[str, float]]


def make_zoo(
    folder: Path, models: Sequence[Model], specs: Mapping[str, str], *, workers: int, progress: Progress
) -> list[Path]:
    """Make each model once, in folder/PART/models, write scores.csv and zoo.yaml of each part, and return the latter.

    specs: the text of zoo.yaml by part. A model that is there and was made in the same way stays as it is.
    """
    places = [folder / each.part / "models" / each.name for each in models]
    jobs = [
        partial(make_once, place, {"recipe": asdict(each.recipe), **each.others}, partial(_scored, each.make))
        for each, place in zip(models, places, strict=True)
    ]
    run_jobs(jobs, workers, "training", progress)
    for part, spec in specs.items():
        rows = [
            {"checkpoint": each.name, **asdict(each.recipe), **json.loads((place / SCORES).read_text("utf-8"))}
            for each, place in zip(models, places, strict=True)
            if each.part == part
        ]
        write_text(folder / part / "scores.csv", pd.DataFrame(rows).to_csv(index=False))
        write_text(folder / part / "zoo.yaml", spec)
    return [folder / part / "zoo.yaml" for part in specs]


def _scored(make: Callable[[Path], Mapping[str, float]], folder: Path) -> None:
    write_text(folder / SCORES, json.dumps(make(folder), indent=1) + "\n")


# ---- scores


@final
@dataclass(frozen=True)
class Scores:
    """Hold mean cross-entropy (nats), share of wrong answers, and the margin that a tenth of the examples lie below.

    The margin of an example is the logit of its class minus the largest of the others.
    """

    loss: float
    error: float
    margin: float


def score_of(logits: Tensor, labels: Tensor, noise: float = 0.0) -> Scores:
    """Compute scores of logits (N, classes) and labels (N,); expected ones, if labels are noisy.

    noise: the probability that a label is replaced by one of the others, each with the same probability. Loss and error
    are then expectations over it, exactly; the margin is that of the labels as they are.
    """
    classes = logits.shape[1]
    losses = -logits.double().log_softmax(1)  # (N, classes): of each label there could be
    right = logits.argmax(1, keepdim=True) == torch.arange(classes)
    chances = torch.full_like(losses, noise / (classes - 1)).scatter_(1, labels[:, None], 1 - noise)
    own = logits.gather(1, labels[:, None])[:, 0]
    rest = logits.scatter(1, labels[:, None], -torch.inf).amax(1)
    return Scores(
        loss=float((chances * losses).sum(1).mean()),
        error=float(1 - (chances * right).sum(1).mean()),
        margin=float((own - rest).double().quantile(0.1)),
    )


def scores_of(model: nn.Module, train: Scores, tests: Mapping[str, Scores]) -> dict[str, float]:
    """Return scores on training data, the norm of all parameters, and scores and gaps on test data by prefix."""
    norms = torch.stack([each.detach().double().norm() for each in model.parameters()])
    found = {"train_loss": train.loss, "train_error": train.error, "margin": train.margin}
    found["weight_norm"] = float(norms.norm())
    for prefix, test in tests.items():
        found |= {f"{prefix}test_loss": test.loss, f"{prefix}test_error": test.error}
        gaps = {"error_gap": test.error - train.error, "loss_gap": test.loss - train.loss}
        found |= {prefix + name: gap for name, gap in gaps.items()}
    return found


# ---- measures

MORE: Final = {"four times the steps": (4, 0), "these and two restarts": (4, 2)}
"""The longer ascents that a zoo's are compared with: how many times the steps, and how many restarts."""
PARTS: Final = ("measures", "scores", "values", "failures")


@final
@dataclass(frozen=True)
class Zoo:
    """Hold the record of a zoo: its models with all values, and ascents from some of them beside longer ones."""

    comparison: Comparison
    record: Record


def run_zoo(name: str, specs: Sequence[Path], out: Path, *, models: int, workers: int, progress: Progress) -> Record:
    """Measure what the specs ask for and is not measured yet; write all values to OUT/NAME.json.gz.

    Each spec is that of a part of the zoo, in a folder of its own, where the files of `compare` go. models: how many of
    them the longer ascents begin at, which are returned. Raises ClickException if measurements failed.
    """
    jobs = [partial(_measure_part, spec, progress if workers == 1 else None) for spec in specs]
    run_jobs(jobs, workers, "parts", progress)
    parts = [Comparison.load(spec.parent) for spec in specs]
    tables = {name: pd.concat([getattr(part, name) for part in parts], sort=False) for name in PARTS}
    tables["measures"] = tables["measures"].groupby(level=0, sort=False).first()  # one part may have more than another
    notes = tuple(dict.fromkeys(note for part in parts for note in part.notes))
    found = replace(parts[0], spec=name, **tables, rankings=parts[0].rankings[:0], notes=notes)
    text = json.dumps(found.to_dict(), allow_nan=False, separators=(",", ":"))
    with atomic_file(out / f"{name}.json.gz") as unfinished:
        unfinished.write_bytes(gzip.compress(text.encode(), mtime=0))  # the same bytes for the same numbers
    if len(found.failures):
        raise click.ClickException(f"{len(found.failures)} measurements failed: see report.html of the parts.")
    return {"climbs": check_convergence(specs, models=models, progress=progress)}


def load_zoo(name: str, folder: Path) -> Zoo:
    """Return the record of a zoo with its values.

    Worst cases of the committed records are by Auto-PGD (`settings.ascent`), then the default and so not in labels, and
    have no gaps. All their ascents, the released ones too, are `not_converged` where over 5 % of the increase came in
    the last quarter of the steps (`late_rise`).
    """
    text = gzip.decompress((folder / f"{name}.json.gz").read_bytes())
    return Zoo(Comparison.from_dict(json.loads(text)), load(name, folder))


@one_thread()
def _measure_part(spec: Path, progress: Progress | None) -> None:
    run_comparison(spec, spec.parent, progress=progress)


def check_convergence(specs: Sequence[Path], *, models: int, progress: Progress) -> list[Record]:
    """Ascend again from models drawn from a zoo, one a part in turn, with more steps and starts.

    That is in every geometry that a spec takes at several radii, at the middle one of the first three. Returns the
    values in nats, as in the zoo and with more of what `MORE` says.
    """
    draw = np.random.default_rng(0)
    order = [specs[place] for place in draw.permutation(len(specs))]
    ascents = []
    for number in range(models):
        spec = read_spec(order[number % len(order)])
        checkpoint = spec.checkpoints[int(draw.integers(len(spec.checkpoints)))]
        model, known = load_checkpoint(checkpoint), KnownSymmetries()
        batches = list(spec.data.batches(model, checkpoint))
        for label, measure in _middles(spec.measures).items():
            value, *more = (
                WorstCase(measure.geometry, measure.radius, steps=times * measure.steps, restarts=restarts)
                .of(model, cross_entropy, batches, known=known)
                .mean
                for times, restarts in ((1, 0), *MORE.values())
            )
            ascents.append({"model": checkpoint.name, "measure": label, "value": value, "more": more})
        progress("models", number + 1, models)
    return ascents


def _middles(entries: Iterable[Any]) -> dict[str, WorstCase]:
    """Return by label the measures to ascend again."""
    families: dict[str, dict[str, WorstCase]] = {}
    for each in entries:
        measure = each.measure
        every = not isinstance(measure.geometry, Quotient) or measure.geometry.symmetries == "all"
        if isinstance(measure, WorstCase) and every:
            families.setdefault(each.family, {})[each.label] = measure
    return dict(list(family.items())[:3][1] for family in families.values() if len(family) > 1)
