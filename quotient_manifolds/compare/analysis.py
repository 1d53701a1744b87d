"""Make a comparison of what a store knows: means over batches, gaps, correlations, failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import pandas as pd

from quotient_manifolds.compare.comparison import FAILURES, RANKINGS, VALUES, Comparison, table
from quotient_manifolds.compare.measure_entries import MeasureEntry
from quotient_manifolds.compare.scores import default_targets, listing, pooled, unmatched, with_gaps
from quotient_manifolds.compare.spec import Spec
from quotient_manifolds.compare.store import Store, task_key
from quotient_manifolds.compare.worker import SPLITS, Identity, Job, Task, tasks_of
from quotient_manifolds.progress import Progress
from quotient_manifolds.sharpness import BatchResult
from quotient_manifolds.statistics import COEFFICIENTS, Correlation, correlation, holm
from quotient_manifolds.version import VERSION

FEWEST = 5  # models that a ranking is of; fewer have no interval either

Kept = Mapping[str, tuple[Mapping[str, Any], float]]  # payload and seconds, by key


def analyse(spec: Spec, jobs: Sequence[Job], store: Store, *, command: str, progress: Progress) -> Comparison:
    """Compare all that the store knows of a spec's checkpoints."""
    identities = {
        job.checkpoint.name: Identity(**record) for job in jobs if (record := store.recall(job.fingerprint)) is not None
    }
    tasks = {job.checkpoint.name: [] for job in jobs} | {  # of those that were never loaded, nothing is known
        name: tasks_of(spec, identity) for name, identity in identities.items()
    }
    kept = store.values(each.key for some in tasks.values() for each in some)
    scores = pd.DataFrame(
        [_scores(some, kept) | dict(spec.scores.get(name, {})) for name, some in tasks.items()],
        index=pd.Index(list(tasks), name="checkpoint"),
    )
    scores = scores.astype({name: "float64" for name in scores if scores[name].isna().all()})
    rows = [each.columns for each in spec.measures]
    measures = pd.DataFrame(rows, index=pd.Index(spec.labels, name="label"), dtype=object).astype({"radius": "float64"})
    rows = [
        {"checkpoint": name, "label": entry.label, **value}
        for name, some in tasks.items()
        for entry in spec.measures
        if (value := _value(entry, some, kept)) is not None
    ]
    values = table("values", rows, VALUES)
    names = list(tasks)
    notes = [*_notes(identities), *_groups(tasks, kept), *unmatched(names, spec.scores)]
    failures = table("failures", _failures(tasks, store), FAILURES)
    found = Comparison(spec.name, VERSION, command, measures, scores, values, _corrected([]), failures, tuple(notes))
    targets = spec.against or default_targets(scores, spec.given)
    return replace(found, rankings=_corrected(list(_rankings(found.frame(), spec, targets, store, progress))))


def _scores(tasks: Sequence[Task], kept: Kept) -> dict[str, Any]:
    """Return loss and error of each split all of whose batches are known, and the gaps."""
    scores: dict[str, Any] = {}
    for split in SPLITS:
        batches = [kept.get(each.key) for each in tasks if each.entry is None and each.split == split]
        known = [batch[0] for batch in batches if batch is not None]
        if known and len(known) == len(batches):
            scores |= pooled(split, known)
    return with_gaps(scores)


def _value(entry: MeasureEntry, tasks: Sequence[Task], kept: Kept) -> dict[str, Any] | None:
    """Return the mean over batches; None if one is missing, for the mean of the others is another measure."""
    keys = [each.key for each in tasks if each.entry == entry]
    if not keys or any(key not in kept for key in keys):
        return None
    result = entry.measure.result(tuple(BatchResult.from_dict(kept[key][0]) for key in keys))
    return {
        "mean": result.mean,
        "standard_error": result.standard_error,
        "batches": len(keys),
        "seconds": sum(kept[key][1] for key in keys),
        "reach": result.reach,
        "late_rise": result.late_rise,
        "beyond_reach": bool(result.beyond_reach),
        "rounded": result.rounding_warning is not None,
    }


def _rankings(
    frame: pd.DataFrame, spec: Spec, targets: Sequence[str], store: Store, progress: Progress
) -> Iterator[dict[str, Any]]:
    """Yield correlations over the models that have both values; of fewer than five models nothing is claimed."""
    wanted = [(label, target) for label in spec.labels for target in targets]
    for done, (label, target) in enumerate(wanted):
        x, y = frame[label].tolist(), frame[target].tolist()
        computed: list[tuple[str, list[Any], Callable[[], Correlation]]] = [
            ("", [kind, x, y], partial(correlation, x, y, kind)) for kind in COEFFICIENTS
        ]
        for name in spec.given:
            held = [None if pd.isna(value) else value for value in frame[name]]
            computed.append((name, [name, held, x, y], partial(correlation, x, y, given={name: held})))
        for given, columns, compute in computed:
            found = _remembered(store, columns, compute)
            if found.models >= FEWEST:
                yield {"measure": label, "against": target, "given": given, **asdict(found)}
        progress("correlations", done + 1, len(wanted))


def _corrected(rankings: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return the table of rankings, with Holm's p-values among all of one kind that hold nothing fixed."""
    found = table("rankings", [dict(each) for each in rankings], RANKINGS)
    for _, alike in found[found["given"] == ""].groupby("kind"):
        p_values = [None if pd.isna(p) else float(p) for p in alike["p_value"]]
        found.loc[alike.index, "p_holm"] = pd.Series(holm(p_values), index=alike.index, dtype="float64")
    return found


def _remembered(store: Store, columns: Sequence[Any], compute: Callable[[], Correlation]) -> Correlation:
    """Return what these columns gave before, if they did: resampling takes seconds for a zoo."""
    key = task_key({"what": "correlation", "columns": repr(columns), "version": VERSION})
    if (record := store.recall(key)) is not None:
        return Correlation(**record)
    made = compute()
    store.remember(key, asdict(made))
    return made


def _failures(tasks: Mapping[str, Sequence[Task]], store: Store) -> list[dict[str, Any]]:
    """Return the failures of these checkpoints and tasks; a store may hold others'.

    A task is known by its key: one that failed stands for every checkpoint of the same weights. What failed alike on
    several batches is one failure.
    """
    messages = store.failures()
    of_tasks = {key: message for (_, key), message in messages.items() if key is not None}
    found: list[dict[str, Any]] = []
    for name, some in tasks.items():
        if (name, None) in messages:
            found.append({"checkpoint": name, "what": "", "message": messages[name, None]})
        alike: dict[tuple[str, str], list[str]] = {}
        for each in some:
            if each.key in of_tasks:
                alike.setdefault((each.label, of_tasks[each.key]), []).append(str(each.batch))
        found += [
            {"checkpoint": name, "what": f"{label}, batch {', '.join(batches)}", "message": message}
            for (label, message), batches in alike.items()
        ]
    return found


def _notes(identities: Mapping[str, Identity]) -> list[str]:
    """Return what must be said beside the numbers of some checkpoints; what is said of several, once."""
    found: dict[str, list[str]] = {}
    for name, identity in identities.items():
        for split, sentences in identity.notes.items():
            for sentence in sentences:
                found.setdefault(f"{split}: {sentence}", []).append(name)
    return [f"{listing(names, 3)}, {said}" for said, names in found.items()]


def _groups(tasks: Mapping[str, Sequence[Task]], kept: Kept) -> Iterator[str]:
    """Yield a sentence for checkpoints that are quotiented by another group than most, in each geometry."""
    groups: dict[str, dict[str, list[str]]] = {}
    for name, some in tasks.items():
        own = {
            each.entry.measure.geometry.name: group
            for each in some
            if each.entry is not None and each.key in kept and (group := kept[each.key][0].get("group"))
        }
        for geometry, group in own.items():
            groups.setdefault(geometry, {}).setdefault(group, []).append(name)
    for geometry, found in groups.items():
        usual = max(found, key=lambda group: len(found[group]))
        for group, names in found.items():
            if group != usual:
                most = listing(found[usual], 3)
                yield f"{listing(names, 3)}, {geometry}: another group ({group}) than that of {most} ({usual})"
