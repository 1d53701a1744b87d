"""From the finished units of a store to a comparison: means over batches, gaps, correlations, agreement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from quotient_manifolds.compare.comparison import Comparison, Named, Ranking, Row, Trouble, Value, default_targets
from quotient_manifolds.compare.measures import Measured
from quotient_manifolds.compare.run import Run
from quotient_manifolds.compare.scores import Scores, pooled, unmatched, with_gaps
from quotient_manifolds.compare.store import Store
from quotient_manifolds.compare.unit import unit_key
from quotient_manifolds.compare.units import PARTS, MeasureUnit, ScoreUnit
from quotient_manifolds.load import Checkpoint
from quotient_manifolds.progress import Progress
from quotient_manifolds.sharpness import BatchResult
from quotient_manifolds.statistics import KINDS, Correlation, agreement, correlation, partial_correlation
from quotient_manifolds.version import VERSION


def analyse(run: Run, *, command: str, report: Progress) -> Comparison:
    """Everything the store knows of the run's checkpoints."""
    spec = run.spec
    rows = tuple(_row(run, checkpoint, spec.scores.get(checkpoint.name, {})) for checkpoint in spec.checkpoints)
    targets = spec.against or default_targets(rows, spec.given)
    comparison = Comparison(
        spec=spec.path.name,
        version=VERSION,
        command=command,
        measures=tuple(_named(each, spec.symmetries) for each in spec.measures),
        rows=rows,
        rankings=(),
        agreement=None,
        troubles=_troubles(run),
        symmetries=spec.symmetries,
        notes=_notes(run),
    )
    rankings = _rankings(run, comparison, targets, report)
    labels = comparison.labels
    agreed = agreement({label: comparison.column(label) for label in labels}) if len(labels) > 1 else None
    return Comparison(**{**vars(comparison), "rankings": rankings, "agreement": agreed})


def _named(each: Measured, symmetries: str | None) -> Named:
    measure, geometry = each.measure, each.measure.geometry.to_dict()
    settings = {**measure.settings, "normalise_logits": each.normalise_logits, "warm_start": each.warm_start}
    if symmetries is not None and "symmetries" in geometry:
        geometry, settings = {**geometry, "symmetries": "given"}, {**settings, "symmetries": symmetries}
    return Named(each.label, each.family, each.radius, measure.name, geometry, settings)


def _row(run: Run, checkpoint: Checkpoint, listed: Scores) -> Row:
    identity = run.identity(checkpoint)
    if identity is None:
        return Row(checkpoint.name, dict(listed), dict.fromkeys((each.label for each in run.spec.measures), None))
    units = run.units(checkpoint, identity)
    payloads = {each.unit.key: each.payload for each in run.store.results(each.unit for each in units)}
    scores: Scores = {}
    for part in PARTS:
        batches = [payloads.get(each.unit.key) for each in units if isinstance(each, ScoreUnit) and each.part == part]
        if batches and all(batch is not None for batch in batches):
            scores |= pooled(part, [batch for batch in batches if batch is not None])
    values = {
        measured.label: _value(measured, [each for each in units if isinstance(each, MeasureUnit)], payloads)
        for measured in run.spec.measures
    }
    return Row(checkpoint.name, with_gaps(scores) | listed, values)


def _value(measured: Measured, units: Sequence[MeasureUnit], payloads: Mapping[str, Any]) -> Value | None:
    """The mean over batches; None if one of them is missing, for the mean of others is another measure."""
    found = [payloads.get(each.unit.key) for each in units if each.measured == measured]
    if not found or any(payload is None for payload in found):
        return None
    batches = tuple(BatchResult.from_dict(payload) for payload in found if payload is not None)
    measurement = measured.measure.result(batches)
    return Value(
        measurement.mean,
        measurement.standard_error,
        measurement.reach,
        beyond_reach=bool(measurement.beyond_reach),
        late_rise=measurement.late_rise,
        rounded=measurement.rounding_warning is not None,
    )


def _rankings(run: Run, comparison: Comparison, targets: Sequence[str], report: Progress) -> tuple[Ranking, ...]:
    covariates = {name: comparison.column(name) for name in run.spec.given}
    found: list[Ranking] = []
    total = len(comparison.labels) * len(targets) * (len(KINDS) + len(covariates))
    if len(comparison.rows) < 2:
        return ()
    for measure in comparison.labels:
        x = comparison.column(measure)
        for target in targets:
            y = comparison.column(target)
            for kind in KINDS:
                known = _remembered(run.store, [kind, x, y], partial(correlation, x, y, kind))
                found.append(Ranking(measure, target, (), known))
                report("correlations", len(found), total)
            for name, values in covariates.items():
                held = partial(partial_correlation, x, y, {f"the score {name}": values})  # which may be called x
                found.append(Ranking(measure, target, (name,), _remembered(run.store, [name, values, x, y], held)))
                report("correlations", len(found), total)
    return tuple(found)


def _remembered(store: Store, columns: Sequence[Any], make: Callable[[], Correlation]) -> Correlation:
    """Resampling takes seconds for a zoo: what these columns gave before is not computed again."""
    key = unit_key({"what": "correlation", "columns": columns, "version": VERSION})
    record = store.recall(key)
    if record is None:
        store.remember(key, record := asdict(make()))
    return Correlation(**record)


def _troubles(run: Run) -> tuple[Trouble, ...]:
    """The failures of this comparison's checkpoints and units; a store may hold others'.

    A unit is known by its key: one that failed stands for every checkpoint of the same weights. What failed alike on
    several batches is one trouble.
    """
    failures = run.store.failures()
    whole = {each.checkpoint: each.message for each in failures if each.unit is None}
    messages = {each.unit.key: each.message for each in failures if each.unit is not None}
    found: list[Trouble] = []
    for checkpoint in run.spec.checkpoints:
        if checkpoint.name in whole:
            found.append(Trouble(checkpoint.name, None, whole[checkpoint.name]))
        identity = run.identity(checkpoint)
        alike: dict[tuple[str, str], list[int]] = {}
        for each in [] if identity is None else run.units(checkpoint, identity):
            if each.unit.key in messages:
                alike.setdefault((_what(each), messages[each.unit.key]), []).append(each.unit.batch)
        found += [
            Trouble(checkpoint.name, f"{what}, {_batches(batches)}", message)
            for (what, message), batches in alike.items()
        ]
    return tuple(found)


def _notes(run: Run) -> tuple[str, ...]:
    """What must be said beside the numbers of some checkpoints, the same of several once."""
    found: dict[str, list[str]] = {}
    for checkpoint in run.spec.checkpoints:
        identity = run.identity(checkpoint)
        for part, sentences in ({} if identity is None else identity.notes).items():
            for sentence in sentences:
                found.setdefault(f"{part}: {sentence}", []).append(checkpoint.name)
    names = [each.name for each in run.spec.checkpoints]
    return (*(f"{_who(some)}, {said}" for said, some in found.items()), *unmatched(names, run.spec.scores))


def _who(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} more checkpoints"


def _what(each: ScoreUnit | MeasureUnit) -> str:
    return each.measured.label if isinstance(each, MeasureUnit) else f"loss and error on {each.part}"


def _batches(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"batch {numbers[0]}"
    if list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"batches {numbers[0]} to {numbers[-1]}"
    return f"batches {', '.join(map(str, numbers))}"
