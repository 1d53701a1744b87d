"""How much measures change along the whole orbit: small models before and after random elements of their group."""

from __future__ import annotations

import copy
import statistics
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from quotient_manifolds.demo.zoo import one_thread
from quotient_manifolds.geometry import Quotient
from quotient_manifolds.progress import Progress
from quotient_manifolds.report import Table
from quotient_manifolds.sharpness import gradient_norm
from quotient_manifolds.sharpness.average_case import AverageCase, GradientNorm
from quotient_manifolds.sharpness.curvature import HessianTrace, TopEigenvalue
from quotient_manifolds.sharpness.losses import Loss
from quotient_manifolds.sharpness.measure import Measure
from quotient_manifolds.sharpness.prepared_model import PreparedModel
from quotient_manifolds.sharpness.worst_case import WorstCase
from quotient_manifolds.symmetries import Symmetries, propose_symmetries, random_move
from quotient_manifolds.symmetries.double_precision import DoublePrecision
from quotient_manifolds.version import VERSION
from studies.common import Saves, numbers, resume
from studies.fibres.cases import FAST, kind_of, names, small_model

METRICS = ("inv", "mix")
MEASURES = ("worst case", "average case", "gradient norm", "trace", "top eigenvalue")
TARGETS = {"float64": 1e-9, "float32": 1e-3}
MOVES = ((0.3, 0), (1.0, 1), (3.0, 2), (3.0, 3))  # log-scales, each with a seed
RADIUS, STEPS, SAMPLES = 0.05, 5, 4

ENOUGH = 3  # times: what explains most of a change, and what nearly cancels

Values = dict[str, dict[str, float]]
"""By metric, by measure."""


# ---- the model, its loss, and what that loss does not depend on

OFF = 1e-3  # relative, of parameters drawn in float32: sums of those lie where float32 rounds either way


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

    def to(self, dtype: torch.dtype) -> Subject:
        """Return a copy in another precision."""
        return Subject(copy.deepcopy(self.model).to(dtype), _cast(self.batch, dtype))

    @property
    def single(self) -> bool:
        """Return whether the model is in float32."""
        return next(self.model.parameters()).dtype == torch.float32

    def at(self, params: Mapping[str, Tensor]) -> Subject:
        """Return a copy with these parameters."""
        model = copy.deepcopy(self.model)
        model.load_state_dict(params, strict=False)
        return Subject(model, self.batch)

    def loss(self) -> float:
        """Compute the loss."""
        with torch.no_grad():
            return float(loss(self.model, self.batch))

    def symmetries(self) -> Symmetries:
        """Find all that leaves the loss alone."""
        return propose_symmetries(self.model, self.batch, evaluate=loss)


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the cross-entropy of logits with fixed words, or the mean squares of what else is put out to targets."""
    out = model(**batch) if isinstance(batch, Mapping) else model(*batch)
    logits = out.get("logits") if isinstance(out, Mapping) else None
    if isinstance(logits, Tensor):
        words = torch.randint(logits.shape[-1], logits.shape[:-1], generator=torch.Generator().manual_seed(0))
        return nn.functional.cross_entropy(logits.flatten(0, -2), words.flatten())
    outputs = [out] if isinstance(out, Tensor) else [each for each in out.values() if isinstance(each, Tensor)]
    return torch.stack([_distance(each, seed) for seed, each in enumerate(outputs)]).sum()


def uncast_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the same in float64 throughout, where the model casts to float32 inside."""
    with DoublePrecision():
        return loss(model, batch)


def _distance(output: Tensor, seed: int) -> Tensor:
    target = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed))
    return (output - target.to(output)).square().mean()


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each, batch)


# ---- rows


@final
@dataclass(frozen=True)
class Row:
    """Hold how far random moves of the whole group change the measures of one model: the largest relative change.

    moved: the dimension of the group. adaptive: after / before of the gradient norm of adaptive sharpness, the farthest
    from 1, which shows that the moves are none. loss: the change of the loss itself, by precision. changes: by
    precision, metric and measure. Of rows where float64 misses its target, uncast: the same without the casts to
    float32 inside the model. Of rows where float32 misses its target, stored: the same in float64, of weights that were
    stored in float32; spread: standard errors of means over directions, relative to the means. absent: measures that
    there are none of, with the reason.
    """

    name: str
    kind: str
    seconds: float
    failure: str = ""
    moved: int = 0
    adaptive: float = 1.0
    loss: dict[str, float] | None = None
    changes: dict[str, Values] | None = None
    uncast: Values | None = None
    stored: Values | None = None
    spread: Values | None = None
    absent: dict[str, str] | None = None

    def worst(self, precision: str) -> float:
        """Return the largest change of any measure in this precision."""
        return _largest((self.changes or {})[precision])

    def misses(self, precision: str) -> list[tuple[str, str]]:
        """Return the metrics and measures that change by more than the target of this precision."""
        return [
            (metric, measure)
            for metric, values in (self.changes or {}).get(precision, {}).items()
            for measure, change in values.items()
            if not change <= TARGETS[precision]
        ]

    @property
    def cast(self) -> list[tuple[str, str]]:
        """Return those misses in float64 that are none without the casts to float32 inside the model."""
        target = TARGETS["float64"]
        return [
            (metric, measure)
            for metric, measure in self.misses("float64")
            if self.uncast is not None and self.uncast[metric][measure] <= target
        ]

    @property
    def stored_apart(self) -> dict[tuple[str, str], float]:
        """Return how far what misses in float32 changes in float64, of weights stored in float32, if that is why."""
        found = {(metric, measure): (self.stored or {})[metric][measure] for metric, measure in self.misses("float32")}
        single = (self.changes or {})["float32"] if found else {}
        return {place: change for place, change in found.items() if ENOUGH * change > single[place[0]][place[1]]}

    @property
    def cancelling(self) -> dict[tuple[str, str], float]:
        """Return the relative standard errors of those misses in float32 that are means which nearly cancel."""
        found = {
            (metric, measure): (self.spread or {}).get(metric, {}).get(measure, 0.0)
            for metric, measure in self.misses("float32")
        }
        return {place: ratio for place, ratio in found.items() if ratio > ENOUGH}


@final
@dataclass(frozen=True)
class Invariance(Saves):
    """Hold all rows."""

    rows: tuple[Row, ...]
    moves: tuple[tuple[float, int], ...]
    command: str
    version: str
    torch: str
    transformers: str


@one_thread()
def run(out: Path, *, fast: bool, command: str, progress: Progress) -> Invariance:
    """Measure all models and write OUT/invariance.json; a run continues from OUT/rows, which has a file for each."""
    import transformers

    moves = MOVES[-1:] if fast else MOVES
    cells = {name: partial(row_of, name, moves) for name in (FAST if fast else names())}
    made = resume(out / "rows", cells, what="invariance", settings=moves, progress=progress)
    rows = TypeAdapter(tuple[Row, ...]).validate_python(made)
    found = Invariance(rows, moves, command, VERSION, torch.__version__, transformers.__version__)
    found.save(out / "invariance.json")
    return found


def load(folder: Path) -> Invariance:
    """Read the record in a folder."""
    return Invariance.load(folder / "invariance.json")


def row_of(name: str, moves: Sequence[tuple[float, int]] = MOVES) -> Row:
    """Return the row of a model; a failure is told in it."""
    began = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            row = _row(name, moves)
    except Exception as error:  # of any model
        row = Row(name, "", 0.0, failure=" ".join(f"{type(error).__name__}: {error}".split()))
    return replace(row, kind=kind_of(name), seconds=round(time.perf_counter() - began, 1))


def _row(name: str, moves: Sequence[tuple[float, int]]) -> Row:
    here = Subject.of(name)
    found, start = here.symmetries(), _adaptive(here)
    absent: dict[str, str] = {}
    errors: Values = {}
    before = {precision: (each.loss(), _measured(each, absent, errors)) for precision, each in _precisions(here)}
    losses, changes = dict.fromkeys(TARGETS, 0.0), {precision: Values() for precision in TARGETS}
    ratio, uncast, stored = 1.0, None, None
    for scale, seed in moves:
        there = here.at(random_move(here.model, found, seed=seed, log_scale=scale))
        ratio = max(ratio, _adaptive(there) / start, key=lambda each: max(each, 1 / each))
        for precision, each in _precisions(there):
            loss_before, values = before[precision]
            losses[precision] = max(losses[precision], abs(each.loss() / loss_before - 1))
            change = _change(_measured(each, absent), values)
            changes[precision] = _larger(changes[precision], change)
            if precision == "float64" and not _largest(change) <= TARGETS[precision]:
                free = (_measured(where, absent, function=uncast_loss) for where in (there, here))
                uncast = _larger(uncast or {}, _change(*free))
            if precision == "float32" and not _largest(change) <= TARGETS[precision]:
                rounded = _measured(each.to(torch.float64), absent)
                stored = _larger(stored or {}, _change(rounded, before["float64"][1]))
    spread = None if stored is None else errors
    return Row(name, "", 0.0, "", _dimension(found), ratio, losses, changes, uncast, stored, spread, absent)


def _precisions(subject: Subject) -> Iterator[tuple[str, Subject]]:
    for precision in TARGETS:
        yield precision, subject.to(getattr(torch, precision))


def _measured(subject: Subject, absent: dict[str, str], errors: Values | None = None, function: Loss = loss) -> Values:
    """Measure the model as it is, by symmetries that are found where it is.

    absent: takes what has no value; errors: the relative standard errors of means.
    """
    proved: Any = Quotient(symmetries=subject.symmetries()).verified(subject.model, function, [subject.batch])
    found: Values = {}
    for metric in METRICS:
        geometry = replace(proved, metric=metric, verify="none")
        prepared = PreparedModel.of(subject.model, function, [subject.batch], geometry)
        found[metric] = {}
        for name, measure in _measures(geometry, subject.single).items():
            try:
                result = measure.on(prepared, 0, lambda: None, {})
            except ValueError as error:
                absent[name] = str(error)
                continue
            found[metric][name] = result.value
            if errors is not None and result.standard_error is not None:
                errors.setdefault(metric, {})[name] = abs(result.standard_error / result.value)
    return found


def _change(after: Values, before: Values) -> Values:
    return {
        metric: {measure: abs(value / before[metric][measure] - 1) for measure, value in values.items()}
        for metric, values in after.items()
    }


def _larger(first: Values, second: Values) -> Values:
    return {
        metric: {measure: max(value, first.get(metric, {}).get(measure, 0.0)) for measure, value in values.items()}
        for metric, values in second.items()
    }


def _largest(values: Values) -> float:
    return max((value for each in values.values() for value in each.values()), default=0.0)


def _measures(geometry: Quotient, single: bool) -> dict[str, Measure]:
    measures = (
        WorstCase(geometry, radius=RADIUS, steps=STEPS),
        AverageCase(geometry, sigma=RADIUS, samples=SAMPLES),
        GradientNorm(geometry),
        HessianTrace(geometry, samples=SAMPLES),
        TopEigenvalue(geometry, tolerance=1e-6 if single else 1e-12, restarts=300),
    )
    return dict(zip(MEASURES, measures, strict=True))


def _adaptive(subject: Subject) -> float:
    return gradient_norm(subject.model, loss, [subject.batch], geometry="adaptive").mean


def _dimension(symmetries: Symmetries) -> int:
    pairs = sum(pair.group_dimension for pair in symmetries.pairs)
    translations = sum(shift.dimension for shift in symmetries.translations)
    return pairs + translations + sum(sum(freedom.families.values()) for freedom in symmetries.freedoms)


# ---- tables


def tables(found: Invariance) -> list[Table]:
    """Return by measure the largest changes, the models that miss a target and why, and a row for every model."""
    rows = [row for row in found.rows if not row.failure]
    spread = []
    for measure in MEASURES:
        cells = [measure]
        for precision, target in TARGETS.items():
            changes = [
                max(each[measure] for each in (row.changes or {})[precision].values() if measure in each)
                for row in rows
                if measure not in (row.absent or {})
            ]
            within = sum(change <= target for change in changes)
            cells += [power(statistics.median(changes)), power(max(changes)), f"{within} of {len(changes)}"]
        spread.append(cells)
    heads = (f"{words}, {precision}" for precision in TARGETS for words in ("median", "largest", "within target"))
    models = [[row.name, str(row.moved), power(max(row.adaptive, 1 / row.adaptive)), *_cells(row)] for row in rows]
    columns = [
        f"{measure}, {metric}, {precision}" for measure in MEASURES for metric in METRICS for precision in TARGETS
    ]
    misses = [[row.name, *why] for row in rows for why in _why(row)]
    return [
        numbers("measures", "", ["Measure", *heads], spread),
        Table("misses", "", ["Model", "Precision", "Reason", "Change"], misses, [False, False, False, True]),
        numbers("models", "", ["Model", "Dimension", "Adaptive gradient norm, factor", *columns], models),
    ]


def _cells(row: Row) -> list[str]:
    changes = row.changes or {}
    return [
        power(changes[precision][metric].get(measure))
        for measure in MEASURES
        for metric in METRICS
        for precision in TARGETS
    ]


def _why(row: Row) -> Iterator[tuple[str, str, str]]:
    """Yield for each precision where a target is missed a reason, and the change that it explains."""
    if row.cast:
        largest = max((row.uncast or {})[metric][measure] for metric, measure in row.cast)
        yield "float64", "the model casts to float32 inside; without the casts", power(largest)
    if stored := row.stored_apart:
        yield (
            "float32",
            "transformed weights are rounded when stored; this alone, in float64",
            power(max(stored.values())),
        )
    for (metric, measure), ratio in row.cancelling.items():
        yield "float32", f"{measure} of {metric} nearly cancels; standard error over mean", f"{ratio:.0f}"
    for precision, known in (("float64", {*row.cast}), ("float32", {*row.stored_apart, *row.cancelling})):
        for metric, measure in row.misses(precision):
            if (metric, measure) not in known:
                yield (
                    precision,
                    f"{measure} of {metric}: unexplained",
                    power((row.changes or {})[precision][metric][measure]),
                )


def power(value: float | None) -> str:
    """Return a change by its order of magnitude, such as 3e-12; "none" where there is no value."""
    if value is None:
        return "none"
    return (
        f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
        if value and (value < 0.01 or value >= 100)
        else f"{value:.3g}"
    )
