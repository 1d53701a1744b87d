"""How much measures change along the whole orbit: small models before and after random elements of their group."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import quotient_manifolds as qm
from quotient_manifolds.demo.zoo import one_thread
from quotient_manifolds.geometry import Quotient
from quotient_manifolds.messages import Progress
from quotient_manifolds.sharpness import SharpnessWarning
from quotient_manifolds.symmetries import Symmetries, find_symmetries, random_representative
from quotient_manifolds.symmetries.double_precision import DoublePrecision
from studies.common import Record, Tables, power, resume
from studies.fibres import FAST, names, small_model

METRICS = ("inv", "mix")
MEASURES = ("worst case", "average case", "gradient norm", "trace", "top eigenvalue")
TARGETS: Final = {"float64": 1e-9, "float32": 1e-3}
MOVES = ((0.3, 0), (1.0, 1), (3.0, 2), (3.0, 3))  # log-scales, each with a seed
RADIUS, STEPS, SAMPLES = 0.05, 5, 4
OFF = 1e-3  # relative, of parameters drawn in float32: sums of those lie where float32 rounds either way
ENOUGH = 3  # times: what explains most of a change, and what nearly cancels


@final
@dataclass(frozen=True)
class Subject:
    """Hold a model at one place of its orbit, in one precision, with a batch that fits."""

    model: nn.Module
    batch: Any

    @classmethod
    def of(cls, name: str) -> Subject:
        """Return the model of this name in float64, at a generic point."""
        model, batch = small_model(name)
        model = model.double()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for w in model.parameters():
                w.mul_(1 + OFF * torch.randn(w.shape, generator=generator, dtype=w.dtype))
        return cls(model, _cast(batch, torch.float64))

    def to(self, precision: str) -> Subject:
        """Return a copy in "float32" or "float64"."""
        dtype = getattr(torch, precision)
        return Subject(copy.deepcopy(self.model).to(dtype), _cast(self.batch, dtype))

    def at(self, params: Mapping[str, Tensor]) -> Subject:
        """Return a copy with these parameters."""
        model = copy.deepcopy(self.model)
        model.load_state_dict(params, strict=False)
        return Subject(model, self.batch)

    def symmetries(self) -> Symmetries:
        """Find all that leaves the loss alone and moves nothing that is frozen."""
        frozen = [name for name, w in self.model.named_parameters() if not w.requires_grad]
        return find_symmetries(self.model, self.batch, evaluate=loss).beside(frozen)

    def adaptive(self) -> float:
        """Compute the gradient norm of adaptive sharpness, which is not invariant."""
        return qm.gradient_norm(self.model, loss, [self.batch], geometry="adaptive").mean


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the cross-entropy of logits with fixed words, or the mean squares of what else is put out to targets."""
    out = model(**batch) if isinstance(batch, Mapping) else model(*batch)
    logits = out.get("logits") if isinstance(out, Mapping) else None
    if isinstance(logits, Tensor):
        words = torch.randint(logits.shape[-1], logits.shape[:-1], generator=torch.Generator().manual_seed(0))
        return nn.functional.cross_entropy(logits.flatten(0, -2), words.flatten())
    outputs = [out] if isinstance(out, Tensor) else [each for each in out.values() if isinstance(each, Tensor)]
    targets = (torch.randn(each.shape, generator=torch.Generator().manual_seed(k)) for k, each in enumerate(outputs))
    return torch.stack([(x - y.to(x)).square().mean() for x, y in zip(outputs, targets, strict=True)]).sum()


def uncast_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the same in float64 throughout, where the model casts to float32 inside."""
    with DoublePrecision():
        return loss(model, batch)


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each, batch)


# ---- the study


@one_thread()
def run(out: Path, *, fast: bool, progress: Progress) -> Record:
    """Measure all models; a run continues from OUT/rows, which has a file for each."""
    import transformers

    moves = MOVES[-1:] if fast else MOVES
    cells = {name: partial(row_of, name, moves) for name in (FAST if fast else names())}
    rows = resume(out / "rows", cells, what="invariance", settings=moves, progress=progress)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"rows": rows, "moves": moves, **versions}


def row_of(name: str, moves: Sequence[tuple[float, int]] = MOVES) -> Record:
    """Return how far random elements of the whole group change the measures of one model; a failure is told in it.

    moved: the dimension of the group. adaptive: after / before of the gradient norm of adaptive sharpness, the farthest
    from 1, which shows that the changes of the weights are large. changes: for each metric and measure the largest
    relative change in float64 and in float32; failure: why an element is left out in float32. Where float64 misses its
    target, uncast: the same without the casts to float32 inside the model. Where float32 misses its target, stored: the
    same in float64, of weights that were stored in float32; spread: standard errors of means over directions, relative
    to the means.
    """
    try:
        return {"name": name, **_row(name, moves)}
    except ValueError as error:
        return {"name": name, "failure": str(error), "changes": []}


def _row(name: str, moves: Sequence[tuple[float, int]]) -> Record:
    here = Subject.of(name)
    found, start, ratio, failure = here.symmetries(), here.adaptive(), 1.0, dict[str, str]()
    before = {precision: _measured(here.to(precision)) for precision in TARGETS}
    changes = pd.DataFrame(np.nan, index=before["float64"].index, columns=[*TARGETS, "uncast", "stored"])

    def keep(column: str, after: pd.DataFrame, first: pd.DataFrame) -> bool:
        change = (after["value"] / first["value"] - 1).abs()
        changes[column] = np.fmax(changes[column], change)
        return bool((change <= TARGETS.get(column, 0.0)).all())

    for scale, seed in moves:
        there = here.at(random_representative(here.model, found, seed=seed, log_scale=scale))
        ratio = max(ratio, there.adaptive() / start, key=lambda each: max(each, 1 / each))
        single = there.to("float32")
        if not keep("float64", _measured(there), before["float64"]):
            keep("uncast", _measured(there, uncast_loss), _measured(here, uncast_loss))
        try:
            after = _measured(single)
        except ValueError as error:  # a pair has lost rank where its weights are stored in float32
            failure = {"failure": str(error)}
            continue
        if not keep("float32", after, before["float32"]):
            keep("stored", _measured(single.to("float64")), before["float64"])
    changes["spread"] = before["float32"]["spread"].where(changes["stored"].notna())
    lines = [line.dropna().to_dict() for _, line in changes.reset_index().iterrows()]
    return {"moved": sum(found.families.values()), "adaptive": ratio, **failure, "changes": lines}


def _measured(subject: Subject, function: Callable[[nn.Module, Any], Tensor] = loss) -> pd.DataFrame:
    """Measure the model as it is, by symmetries that are found where it is.

    Returns for each metric and measure the value, and of means over directions the relative standard error, spread.
    """
    model, batches = subject.model, [subject.batch]
    given = Quotient(symmetries=subject.symmetries(), verify="full")
    proved: Any = given.verified(model, function, batches)
    single = next(model.parameters()).dtype == torch.float32
    measures: dict[str, Callable[..., qm.Result]] = {
        "worst case": partial(qm.worst_case_sharpness, radius=RADIUS, steps=STEPS),
        "average case": partial(qm.average_case_sharpness, sigma=RADIUS, samples=SAMPLES),
        "gradient norm": qm.gradient_norm,
        "trace": partial(qm.hessian_trace, samples=SAMPLES),
        "top eigenvalue": partial(qm.top_eigenvalue, tolerance=1e-6 if single else 1e-12, restarts=300),
    }
    lines = []
    for metric in METRICS:
        geometry = replace(proved, metric=metric, verify="none")
        for name, measure in measures.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SharpnessWarning)  # of values that are compared, not read
                result = measure(model, function, batches, geometry=geometry)
            spread = np.nan if result.standard_error is None else abs(result.standard_error / result.mean)
            lines.append({"metric": metric, "measure": name, "value": result.mean, "spread": spread})
    return pd.DataFrame(lines).set_index(["metric", "measure"])


# ---- tables


def changes_of(found: Record) -> pd.DataFrame:
    """Return a line for each measure of a model in a metric and precision: its change, whether it misses, and why.

    cast: the miss is gone without the casts to float32 inside the model. rounded: the change is that of weights stored
    in float32, which is `stored` in float64. cancels: the mean nearly cancels, its relative standard error is `spread`.
    """
    lines = [{"model": row["name"], **change} for row in found["rows"] for change in row["changes"]]
    wide = pd.DataFrame(lines, columns=["model", "metric", "measure", *TARGETS, "uncast", "stored", "spread"])
    keys = [column for column in wide if column not in TARGETS]
    frame = wide.melt(keys, list(TARGETS), "precision", "change")
    double = frame["precision"] == "float64"
    frame["missed"] = ~(frame["change"] <= frame["precision"].map(TARGETS))
    frame["cast"] = frame["missed"] & double & (frame["uncast"] <= TARGETS["float64"])
    frame["rounded"] = frame["missed"] & ~double & (ENOUGH * frame["stored"] > frame["change"])
    frame["cancels"] = frame["missed"] & ~double & (frame["spread"] > ENOUGH)
    return frame


def tables(found: Record) -> Tables:
    """Return by measure the largest changes, the models that miss a target and why, and a row for every model."""
    frame, rows = changes_of(found), [row for row in found["rows"] if row["changes"]]
    largest = frame.pivot_table(index="model", columns=["measure", "precision"], values="change", aggfunc="max")
    spread = []
    for measure in MEASURES:
        line = {"Measure": measure}
        for precision, target in TARGETS.items():
            changes = largest[measure, precision]
            line[f"median, {precision}"], line[f"largest, {precision}"] = map(size, (changes.median(), changes.max()))
            line[f"within target, {precision}"] = f"{(changes <= target).sum()} of {len(changes)}"
        spread.append(line)
    wide = frame.pivot(index="model", columns=["measure", "metric", "precision"], values="change").map(size)
    order = [(measure, metric, each) for measure in MEASURES for metric in METRICS for each in TARGETS]
    models = wide[order].set_axis([*map(", ".join, order)], axis=1).loc[[row["name"] for row in rows]].reset_index()
    factors = [size(max(row["adaptive"], 1 / row["adaptive"])) for row in rows]
    models = models.rename(columns={"model": "Model"})
    models.insert(1, "Dimension", [row["moved"] for row in rows])
    models.insert(2, "Adaptive gradient norm, factor", factors)
    missed = dict(iter(frame[frame["missed"]].groupby("model")))
    misses = [[name, *why] for row in rows if (name := row["name"]) in missed for why in _why(missed[name])]
    return {
        "measures": pd.DataFrame(spread),
        "misses": pd.DataFrame(misses, columns=["Model", "Precision", "Reason", "Change"]),
        "models": models,
    }


def _why(missed: pd.DataFrame) -> Iterator[tuple[str, str, str]]:
    """Yield for each precision where a model misses a target a reason, and the change that it explains."""
    if missed["cast"].any():
        largest = missed.loc[missed["cast"], "uncast"].max()
        yield "float64", "the model casts to float32 inside; without the casts", size(largest)
    if missed["rounded"].any():
        largest = missed.loc[missed["rounded"], "stored"].max()
        yield "float32", "transformed weights are rounded when stored; this alone, in float64", size(largest)
    for each in missed[missed["cancels"]].itertuples():
        why = f"{each.measure} of {each.metric} nearly cancels; standard error over mean"
        yield "float32", why, f"{each.spread:.0f}"
    for each in missed[~missed[["cast", "rounded", "cancels"]].any(axis=1)].itertuples():
        yield each.precision, f"{each.measure} of {each.metric}: unexplained", size(each.change)


def size(value: float) -> str:
    """Return three digits, and a small or large change by its order of magnitude."""
    return f"{value:.3g}" if not value or 0.01 <= value < 100 else power(value)
