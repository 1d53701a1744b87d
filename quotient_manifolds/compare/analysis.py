"""Make a comparison of the finished units of a store: means over batches, gaps, correlations, agreement."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from typing import Any

from quotient_manifolds.compare.comparison import (
    ComparedMeasure,
    ComparedModel,
    Comparison,
    Failure,
    MeanValue,
    Ranking,
    default_targets,
)
from quotient_manifolds.compare.inventory import Inventory
from quotient_manifolds.compare.measure_entries import MeasureEntry
from quotient_manifolds.compare.scores import Scores, pooled, unmatched, with_gaps
from quotient_manifolds.compare.store import Store
from quotient_manifolds.compare.unit import unit_key
from quotient_manifolds.compare.worker import SPLITS, Task
from quotient_manifolds.load import Checkpoint
from quotient_manifolds.progress import Progress
from quotient_manifolds.sharpness import BatchResult
from quotient_manifolds.statistics import COEFFICIENTS, Correlation, agreement, correlation
from quotient_manifolds.version import VERSION


def analyse(inventory: Inventory, *, command: str, progress: Progress, remember: bool = True) -> Comparison:
    """Compare all that the store knows of a spec's checkpoints; remember: whether its correlations are kept there."""
    spec = inventory.spec
    rows = tuple(_row(inventory, checkpoint, spec.scores.get(checkpoint.name, {})) for checkpoint in spec.checkpoints)
    targets = spec.against or default_targets(rows, spec.given)
    comparison = Comparison(
        spec=spec.name,
        version=VERSION,
        command=command,
        measures=tuple(_named(each, spec.symmetries) for each in spec.measures),
        rows=rows,
        rankings=(),
        agreement=None,
        failures=_failures(inventory),
        symmetries=spec.symmetries,
        notes=_notes(inventory),
    )
    rankings = _rankings(inventory, comparison, targets, progress, remember)
    labels = comparison.labels
    agreed = agreement({label: comparison.column(label) for label in labels}) if len(labels) > 1 else None
    return replace(comparison, rankings=rankings, agreement=agreed)


def _named(each: MeasureEntry, symmetries: str | None) -> ComparedMeasure:
    measure, geometry = each.measure, each.measure.geometry.to_dict()
    settings = {**measure.settings, "normalise_logits": each.normalise_logits, "warm_start": each.warm_start}
    if symmetries is not None and "symmetries" in geometry:
        geometry, settings = {**geometry, "symmetries": "given"}, {**settings, "symmetries": symmetries}
    return ComparedMeasure(each.label, each.family, each.radius, measure.name, geometry, settings)


def _row(inventory: Inventory, checkpoint: Checkpoint, listed: Scores) -> ComparedModel:
    tasks = inventory.tasks(checkpoint)
    if not tasks:
        return ComparedModel(
            checkpoint.name, dict(listed), dict.fromkeys((each.label for each in inventory.spec.measures), None)
        )
    payloads = {each.unit.key: each.payload for each in inventory.store.results(task.unit for task in tasks)}
    scores: Scores = {}
    for split in SPLITS:
        batches = [payloads.get(each.unit.key) for each in tasks if each.entry is None and each.unit.geometry == split]
        if batches and all(batch is not None for batch in batches):
            scores |= pooled(split, [batch for batch in batches if batch is not None])
    values = {entry.label: _value(entry, tasks, payloads) for entry in inventory.spec.measures}
    return ComparedModel(checkpoint.name, with_gaps(scores) | listed, values)


def _value(entry: MeasureEntry, tasks: Sequence[Task], payloads: Mapping[str, Any]) -> MeanValue | None:
    """Return the mean over batches; None if one is missing, for the mean of the others is another measure."""
    found = [payloads.get(each.unit.key) for each in tasks if each.entry == entry]
    if not found or any(payload is None for payload in found):
        return None
    result = entry.measure.result(tuple(BatchResult.from_dict(each) for each in found if each is not None))
    return MeanValue(
        result.mean,
        result.standard_error,
        result.reach,
        beyond_reach=bool(result.beyond_reach),
        late_rise=result.late_rise,
        rounded=result.rounding_warning is not None,
    )


def _rankings(
    inventory: Inventory, comparison: Comparison, targets: Sequence[str], progress: Progress, remember: bool
) -> tuple[Ranking, ...]:
    if len(comparison.rows) < 2:
        return ()
    found: list[Ranking] = []
    given = inventory.spec.given
    total = len(comparison.labels) * len(targets) * (len(COEFFICIENTS) + len(given))
    for measure, target in product(comparison.labels, targets):
        x, y = comparison.column(measure), comparison.column(target)
        computed: list[tuple[tuple[str, ...], list[Any], Callable[[], Correlation]]] = [
            ((), [kind, x, y], partial(correlation, x, y, kind)) for kind in COEFFICIENTS
        ]
        for name in given:
            values = comparison.column(name)
            computed.append(((name,), [name, values, x, y], partial(correlation, x, y, given={name: values})))
        for names, columns, compute in computed:
            known = _remembered(inventory.store, columns, compute, remember)
            found.append(Ranking(measure, target, names, known))
            progress("correlations", len(found), total)
    return tuple(found)


def _remembered(
    store: Store, columns: Sequence[Any], compute: Callable[[], Correlation], remember: bool
) -> Correlation:
    """Return what these columns gave before, if they did: resampling takes seconds for a zoo."""
    key = unit_key({"what": "correlation", "columns": columns, "version": VERSION})
    if (record := store.recall(key)) is not None:
        return Correlation(**record)
    made = compute()
    if remember:
        store.remember(key, asdict(made))
    return made


def _failures(inventory: Inventory) -> tuple[Failure, ...]:
    """Return the failures of this comparison's checkpoints and units; a store may hold others'.

    A unit is known by its key: one that failed stands for every checkpoint of the same weights. What failed alike on
    several batches is one failure.
    """
    messages = inventory.store.failures()
    of_units = {key: message for (_, key), message in messages.items() if key is not None}
    found: list[Failure] = []
    for checkpoint in inventory.spec.checkpoints:
        if (checkpoint.name, None) in messages:
            found.append(Failure(checkpoint.name, None, messages[checkpoint.name, None]))
        alike: dict[tuple[str, str], list[int]] = {}
        for each in inventory.tasks(checkpoint):
            if each.unit.key in of_units:
                alike.setdefault((each.label, of_units[each.unit.key]), []).append(each.unit.batch)
        found += [
            Failure(checkpoint.name, f"{what}, {_batches(batches)}", message)
            for (what, message), batches in alike.items()
        ]
    return tuple(found)


def _notes(inventory: Inventory) -> tuple[str, ...]:
    """Return what must be said beside the numbers of some checkpoints; what is said of several, once."""
    spec = inventory.spec
    found: dict[str, list[str]] = {}
    for checkpoint in spec.checkpoints:
        identity = inventory.identity(checkpoint)
        for split, sentences in ({} if identity is None else identity.notes).items():
            for sentence in sentences:
                found.setdefault(f"{split}: {sentence}", []).append(checkpoint.name)
    names = [each.name for each in spec.checkpoints]
    said = (f"{_who(some)}, {said}" for said, some in found.items())
    return (*said, *_groups(inventory), *unmatched(names, spec.scores))


def _groups(inventory: Inventory) -> Iterator[str]:
    """Yield a sentence for checkpoints that are quotiented by another group than most, in each geometry."""
    store = inventory.store
    tasks = {each.name: inventory.tasks(each) for each in inventory.spec.checkpoints}
    units = [task.unit for some in tasks.values() for task in some]
    payloads = {one.unit.key: one.payload for one in store.results(units)}
    for name in dict.fromkeys(unit.geometry for unit in units):
        groups: dict[str, list[str]] = {}
        for checkpoint, some in tasks.items():
            own = (payloads.get(task.unit.key, {}).get("group") for task in some if task.unit.geometry == name)
            if (group := next(filter(None, own), None)) is not None:
                groups.setdefault(group, []).append(checkpoint)
        if len(groups) > 1:
            most = max(groups, key=lambda group: len(groups[group]))
            usual = store.recall(most) or []
            for group in (each for each in groups if each != most):
                other = store.recall(group) or []
                lacking, more = [x for x in usual if x not in other], [x for x in other if x not in usual]
                differs = " and ".join(f"{how} {_some(x)}" for how, x in (("without", lacking), ("with", more)) if x)
                yield f"{_who(groups[group])}, {name}: quotiented by another group than {_who(groups[most])}, {differs}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _who(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} more checkpoints"


def _batches(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"batch {numbers[0]}"
    if list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"batches {numbers[0]} to {numbers[-1]}"
    return f"batches {', '.join(map(str, numbers))}"
