"""Measure a zoo part by part, as `compare` does, and keep a record: values, and whether ascents converged."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import click
import numpy as np
import pandas as pd

from quotient_manifolds import cross_entropy
from quotient_manifolds.compare import Comparison, read_spec, run_comparison
from quotient_manifolds.demo.zoo import each_finished, one_thread
from quotient_manifolds.files import whole
from quotient_manifolds.geometry import KnownSymmetries, Quotient
from quotient_manifolds.load import load_checkpoint
from quotient_manifolds.messages import Progress
from quotient_manifolds.sharpness import WorstCase
from studies.common import Record, load

MORE: Final = {"four times the steps": (4, 0), "these and two restarts": (4, 2)}
"""The longer ascents that a zoo's are compared with: how many times the steps, and how many restarts."""
PARTS: Final = ("measures", "scores", "values", "failures")


@final
@dataclass(frozen=True)
class Zoo:
    """Hold the record of a zoo: its models with all values, and ascents from some of them beside longer ones."""

    comparison: Comparison
    record: Record


def run_zoo(name: str, specs: Sequence[Path], out: Path, *, models: int, workers: int, progress: Progress) -> Record:
    """Measure what the specs ask for and is not measured yet; write all values to OUT/NAME.json.gz.

    Each spec is that of a part of the zoo, in a folder of its own, where the files of `compare` go. models: how many of
    them the longer ascents begin at, which are returned. Raises ClickException if measurements failed.
    """
    jobs = [partial(_measure_part, spec, progress if workers == 1 else None) for spec in specs]
    progress("parts", 0, len(jobs))
    for finished, _ in enumerate(each_finished(jobs, workers), 1):
        progress("parts", finished, len(jobs))
    parts = [Comparison.load(spec.parent) for spec in specs]
    tables = {name: pd.concat([getattr(part, name) for part in parts], sort=False) for name in PARTS}
    tables["measures"] = tables["measures"].groupby(level=0, sort=False).first()  # one part may have more than another
    notes = tuple(dict.fromkeys(note for part in parts for note in part.notes))
    found = replace(parts[0], spec=name, **tables, rankings=parts[0].rankings[:0], notes=notes)
    text = json.dumps(found.to_dict(), allow_nan=False, separators=(",", ":"))
    with whole(out / f"{name}.json.gz") as unfinished:
        unfinished.write_bytes(gzip.compress(text.encode(), mtime=0))  # the same bytes for the same numbers
    if len(found.failures):
        raise click.ClickException(f"{len(found.failures)} measurements failed: see report.html of the parts.")
    return {"climbs": check_convergence(specs, models=models, progress=progress)}


def load_zoo(name: str, folder: Path) -> Zoo:
    """Return the record of a zoo with its values."""
    text = gzip.decompress((folder / f"{name}.json.gz").read_bytes())
    return Zoo(Comparison.from_dict(json.loads(text)), load(name, folder))


@one_thread()
def _measure_part(spec: Path, progress: Progress | None) -> None:
    run_comparison(spec, spec.parent, progress=progress)


def check_convergence(specs: Sequence[Path], *, models: int, progress: Progress) -> list[Record]:
    """Ascend again from models drawn from a zoo, one a part in turn, with more steps and starts.

    That is in every geometry that a spec takes at several radii, at the middle one of the first three. Returns the
    values in nats, as in the zoo and with more of what `MORE` says.
    """
    draw = np.random.default_rng(0)
    order = [specs[place] for place in draw.permutation(len(specs))]
    ascents = []
    for number in range(models):
        spec = read_spec(order[number % len(order)])
        checkpoint = spec.checkpoints[int(draw.integers(len(spec.checkpoints)))]
        model, known = load_checkpoint(checkpoint), KnownSymmetries()
        batches = list(spec.data.batches(model, checkpoint))
        for label, measure in _middles(spec.measures).items():
            value, *more = (
                WorstCase(measure.geometry, measure.radius, steps=times * measure.steps, restarts=restarts)
                .of(model, cross_entropy, batches, known=known)
                .mean
                for times, restarts in ((1, 0), *MORE.values())
            )
            ascents.append({"model": checkpoint.name, "measure": label, "value": value, "more": more})
        progress("models", number + 1, models)
    return ascents


def _middles(entries: Iterable[Any]) -> dict[str, WorstCase]:
    """Return by label the measures to ascend again."""
    families: dict[str, dict[str, WorstCase]] = {}
    for each in entries:
        measure = each.measure
        every = not isinstance(measure.geometry, Quotient) or measure.geometry.symmetries == "all"
        if isinstance(measure, WorstCase) and every:
            families.setdefault(each.family, {})[each.label] = measure
    return dict(list(family.items())[:3][1] for family in families.values() if len(family) > 1)
