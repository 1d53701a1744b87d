"""Build a comparison from the values in a store: means over batches, gaps, correlations, failures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pandas as pd

from quotient_manifolds.compare.comparison import Comparison, listing, table
from quotient_manifolds.compare.identity import Identity
from quotient_manifolds.compare.spec import GAPS, MeasureEntry, Spec
from quotient_manifolds.compare.store import Store, task_key
from quotient_manifolds.compare.worker import Job, Task, tasks_of
from quotient_manifolds.messages import Progress
from quotient_manifolds.sharpness import BatchResult, WorstCase
from quotient_manifolds.sharpness.result import nested
from quotient_manifolds.statistics import COEFFICIENTS, FEWEST_MODELS, correlation, holm
from quotient_manifolds.version import VERSION

Kept = Mapping[str, tuple[Mapping[str, Any], float]]  # payload and seconds, by key


def analyse(
    spec: Spec, jobs: Sequence[Job], failures: Sequence[Any], store: Store, *, command: str, progress: Progress
) -> Comparison:
    """Compare the stored values of a spec's checkpoints; a checkpoint that was never loaded has none."""
    known = {job.checkpoint.name: store.recall(job.fingerprint) for job in jobs}
    identities = {name: Identity(**record) for name, record in known.items() if record is not None}
    tasks = {name: tasks_of(spec, identities[name]) if name in identities else [] for name in known}
    kept = store.values(each.key for some in tasks.values() for each in some)
    rows = [_scores(some, kept) | dict(spec.scores.get(name, {})) for name, some in tasks.items()]
    scores = pd.DataFrame(rows, index=pd.Index(list(tasks), name="checkpoint"))
    scores = scores.astype({name: "float64" for name in scores if scores[name].isna().all()})
    settings = [each.columns for each in spec.measures]
    measures = pd.DataFrame(settings, index=pd.Index(spec.labels, name="label"), dtype=object)
    values = (row for name, some in tasks.items() for row in _values(name, spec.measures, some, kept))
    notes = (*_notes(identities), *_groups(tasks, kept), *unmatched(list(tasks), spec.scores))
    tables = (table("values", values), table("rankings", []), table("failures", failures))
    found = Comparison(
        spec.name, VERSION, command, measures.astype({"radius": "float64"}), scores, *tables, notes=notes
    )
    varying = [name for name in scores.select_dtypes("number") if scores[name].nunique() > 1]
    usual = [gap for gap in GAPS if gap in scores] or [name for name in varying if name not in spec.given]
    rankings = table("rankings", _rankings(found.frame(), spec, spec.against or usual, store, progress))
    for _, alike in rankings.groupby(["kind", rankings["given"] != ""]):
        corrected = holm([None if pd.isna(p) else float(p) for p in alike["p_value"]])
        rankings.loc[alike.index, "p_holm"] = np.array(corrected, dtype=np.float64)
    return replace(found, rankings=rankings)


def _scores(tasks: Sequence[Task], kept: Kept) -> dict[str, Any]:
    """Return mean loss and error of each split whose batches are all computed, and the gaps between the splits."""
    scores: dict[str, Any] = {}
    for split in ("data", "test"):
        keys = [each.key for each in tasks if each.entry is None and each.split == split]
        if keys and all(key in kept for key in keys):
            batches = pd.DataFrame([kept[key][0] for key in keys])
            means = batches.mul(batches["examples"], axis=0).sum() / batches["examples"].sum()
            prefix = "test_" if split == "test" else ""
            scores |= {f"{prefix}{what}": float(means[what]) for what in ("loss", "error") if what in means}
    for gap in GAPS:
        here, there = scores.get(gap.removesuffix("_gap")), scores.get(f"test_{gap.removesuffix('_gap')}")
        if here is not None and there is not None:
            scores[gap] = there - here
    return scores


def unmatched(names: Sequence[str], scores: Mapping[str, Any]) -> list[str]:
    """Return a sentence on checkpoints without scores; it also lists rows of scores that match no checkpoint."""
    lacking, others = [name for name in names if name not in scores], [name for name in scores if name not in names]
    more = f" Rows of scores that name no checkpoint: {listing(others)}." if others else ""
    said = f"Without a row of scores, so in no correlation with them: {listing(lacking)}.{more}"
    return [said] if scores and lacking else []


def _values(name: str, measures: Sequence[MeasureEntry], tasks: Sequence[Task], kept: Kept) -> Iterator[dict[str, Any]]:
    """Yield means over batches of the measures that are known on all batches; other means are not comparable."""
    keys = {entry: [each.key for each in tasks if each.entry == entry] for entry in measures}
    known = [entry for entry, own in keys.items() if own and all(key in kept for key in own)]
    found = {entry: [BatchResult.from_dict(kept[key][0]) for key in keys[entry]] for entry in known}
    for entry, batches in _nested(found).items():
        result = entry.measure.result(tuple(batches))
        names = ("mean", "standard_error", "reach", "relative_gap", "promise_kept")
        costs = {"batches": len(batches), "seconds": sum(kept[key][1] for key in keys[entry])}
        flags = {
            "beyond_reach": result.truncation_warning is not None,
            "not_converged": result.convergence_warning is not None,
            "rounded": result.rounding_warning is not None,
        }
        yield {
            "checkpoint": name,
            "label": entry.label,
            **{each: getattr(result, each) for each in names},
            **costs,
            **flags,
        }


def _nested(found: Mapping[MeasureEntry, list[BatchResult]]) -> dict[MeasureEntry, list[BatchResult]]:
    """Apply `nested`, batch by batch, to worst-case measures that differ only in their radius."""
    families = dict[str, list[MeasureEntry]]()
    for entry in found:
        if isinstance(entry.measure, WorstCase):
            families.setdefault(entry.family, []).append(entry)
    best = dict(found)
    for family in families.values():
        ascending = sorted(family, key=lambda each: each.radius or 0.0)
        radii = [each.radius or 0.0 for each in ascending]
        columns = [nested(radii, each) for each in zip(*(found[entry] for entry in ascending), strict=True)]
        best |= dict(zip(ascending, map(list, zip(*columns, strict=True)), strict=True))
    return best


def _rankings(
    frame: pd.DataFrame, spec: Spec, targets: Sequence[str], store: Store, progress: Progress
) -> Iterator[dict[str, Any]]:
    """Yield correlations over the models that have both values; fewer than five models yield no correlation.

    A partial correlation is kept as undefined if too few models have the hyperparameter that it holds fixed. A score
    that no model has is left out. Results for equal columns are cached in the store: resampling a zoo takes seconds.
    """
    wanted = [(label, target) for label in spec.labels for target in targets if target in frame]
    held = [name for name in spec.given if name in frame]
    for done, (label, target) in enumerate(wanted, 1):
        x, y = frame[label].tolist(), frame[target].tolist()
        if (frame[label].notna() & frame[target].notna()).sum() < FEWEST_MODELS:  # they have no interval either
            continue
        asked = [*((kind, "") for kind in COEFFICIENTS), *(("kendall-b", name) for name in held)]
        for kind, name in asked:
            given = {name: frame[name].tolist()} if name else {}
            key = task_key({"what": "correlation", "columns": repr((kind, x, y, given)), "version": VERSION})
            if (record := store.recall(key)) is None:
                record = asdict(correlation(x, y, kind, given=given))
                store.remember(key, record)
            if record["models"] < FEWEST_MODELS:
                record = record | {"value": None, "p_value": None}
            yield {"measure": label, "against": target, "given": name, **record}
        progress("correlations", done, len(wanted))


def _notes(identities: Mapping[str, Identity]) -> list[str]:
    """Return the notes on checkpoints; a note that several checkpoints share appears once."""
    found: dict[str, list[str]] = {}
    for name, identity in identities.items():
        for split, sentences in identity.notes.items():
            for sentence in sentences:
                found.setdefault(f"{split}: {sentence}", []).append(name)
    return [f"{listing(names)}, {said}" for said, names in found.items()]


def _groups(tasks: Mapping[str, Sequence[Task]], kept: Kept) -> Iterator[str]:
    """Yield a sentence, in each geometry, for checkpoints whose symmetry group differs from the most common one."""
    rows = [
        (each.entry.measure.geometry.name, kept[each.key][0].get("group"), name)
        for name, some in tasks.items()
        for each in some
        if each.entry is not None and each.key in kept
    ]
    found = pd.DataFrame(rows, columns=["geometry", "group", "name"]).dropna().drop_duplicates()
    for geometry, alike in found.groupby("geometry"):
        groups = alike.groupby("group")["name"].agg(list)
        usual = groups.map(len).idxmax()
        for group, names in groups.drop(usual).items():
            yield f"{listing(names)}, {geometry}: another group ({group}) than {listing(groups[usual])} ({usual})"
