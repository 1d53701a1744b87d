"""Measure model after model before and after random moves of the whole group, and go on where a run stopped."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch

from quotient_manifolds.demo.zoo import one_thread
from quotient_manifolds.geometry import Quotient
from quotient_manifolds.progress import Progress
from quotient_manifolds.sharpness import gradient_norm
from quotient_manifolds.sharpness.average_case import AverageCase, GradientNorm
from quotient_manifolds.sharpness.curvature import HessianTrace, TopEigenvalue
from quotient_manifolds.sharpness.losses import Loss
from quotient_manifolds.sharpness.measure import Measure
from quotient_manifolds.sharpness.prepared_model import PreparedModel
from quotient_manifolds.sharpness.worst_case import WorstCase
from quotient_manifolds.symmetries import Symmetries, random_move
from quotient_manifolds.version import VERSION
from studies.fibres.cases import kind_of
from studies.invariance.subject import Subject, loss, uncast_loss
from studies.records import read_record, save_record

METRICS = ("inv", "mix")
MEASURES = ("worst case", "average case", "gradient norm", "trace", "top eigenvalue")
TARGETS = {"float64": 1e-9, "float32": 1e-3}
MOVES = ((0.3, 0), (1.0, 1), (3.0, 2), (3.0, 3))  # log-scales, each with a seed
RADIUS, STEPS, SAMPLES = 0.05, 5, 4

ENOUGH = 3  # times: what explains most of a change, and what nearly cancels

Values = dict[str, dict[str, float]]
"""By metric, by measure."""


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
class Invariance:
    """Hold all rows; `save` and `load` are inverse to each other."""

    rows: tuple[Row, ...]
    moves: tuple[tuple[float, int], ...]
    command: str
    version: str
    torch: str
    transformers: str

    def save(self, path: Path) -> None:
        save_record(path, self)

    @classmethod
    def load(cls, path: Path) -> Invariance:
        return read_record(cls, path)


@one_thread()
def study_invariance(
    out: Path, models: Sequence[str], *, fast: bool = False, command: str = "", progress: Progress | None = None
) -> Invariance:
    """Move and measure the models of these names; OUT/rows holds one file for each that is done, which is not redone.

    fast: one move each, to try the code.
    """
    import transformers

    folder = out / "rows"
    folder.mkdir(parents=True, exist_ok=True)
    moves = MOVES[-1:] if fast else MOVES
    rows: list[Row] = []
    for index, name in enumerate(models):
        if progress is not None:
            progress(f"invariance, {name}", index, len(models))
        path = folder / f"{re.sub(r'[^a-z0-9]+', '_', name.lower())}.json"
        if not path.exists():
            save_record(path, row_of(name, moves))
        rows.append(read_record(Row, path))
    if progress is not None:
        progress("invariance", len(models), len(models))
    return Invariance(tuple(rows), moves, command, VERSION, torch.__version__, transformers.__version__)


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
