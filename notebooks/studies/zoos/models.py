"""Make the models of a zoo, each once, and score them: losses, errors, margins, the norm of the weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import pandas as pd
import torch
from torch import Tensor, nn

from quotient_manifolds.demo.zoo import each_finished, make_once
from quotient_manifolds.files import write_text
from quotient_manifolds.messages import Progress

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
    progress("training", 0, len(jobs))
    for finished, _ in enumerate(each_finished(jobs, workers), 1):
        progress("training", finished, len(jobs))
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
