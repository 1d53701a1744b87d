"""Measure a zoo part by part, as `compare` does, and keep a record: values, costs, and whether ascents converged."""

from __future__ import annotations

import gzip
import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, final

import click
import numpy as np
import pandas as pd

from quotient_manifolds.compare import Comparison, MeasureEntry, read_spec, run_comparison
from quotient_manifolds.demo.zoo import each_finished, one_thread
from quotient_manifolds.files import whole
from quotient_manifolds.geometry import KnownSymmetries, Quotient
from quotient_manifolds.load import load_checkpoint
from quotient_manifolds.progress import Progress
from quotient_manifolds.report import Table
from quotient_manifolds.sharpness import WorstCase, cross_entropy
from studies.common import Saves, numbers, write_rows

COMPARISON, COSTS, CONVERGENCE = "comparison.json.gz", "costs.csv", "convergence.json"
MORE: Final = {"four times the steps": (4, 0), "these and two restarts": (4, 2)}
"""By words, the longer ascents that a zoo's are compared with: how many times the steps, and how many restarts."""


@final
@dataclass(frozen=True)
class Ascent:
    """Hold what ascents found in one ball around one model: as in the zoo, and with more of what `MORE` says (nats)."""

    model: str
    measure: str
    value: float
    more: tuple[float, ...]


@final
@dataclass(frozen=True)
class Convergence(Saves):
    """Hold ascents from some models of a zoo beside longer ones."""

    zoo: str
    command: str
    climbs: tuple[Ascent, ...]

    def table(self) -> Table:
        """Return what the zoo's ascents found over what longer ones found: the median over models, and the least."""
        rows = []
        for measure in dict.fromkeys(each.measure for each in self.climbs):
            chosen = [each for each in self.climbs if each.measure == measure]
            shares = zip(*([each.value / more for more in each.more] for each in chosen), strict=True)
            rows.append([measure, *(f"{statistics.median(column):.3f} ({min(column):.3f})" for column in shares)])
        return numbers("convergence", "", ["Measure", *(f"over {words}" for words in MORE)], rows)


@final
@dataclass(frozen=True)
class Zoo:
    """Hold the record of a zoo: its models with all values, and how far their ascents had converged."""

    comparison: Comparison
    convergence: Convergence


def run_zoo(
    specs: Sequence[Path], folder: Path, *, name: str, models: int, command: str, workers: int, progress: Progress
) -> Zoo:
    """Measure what the specs ask for and is not measured yet, and write `folder`, which `load_zoo` reads.

    Each spec is that of a part of the zoo, in a folder of its own, where the files of `compare` go. models: how many of
    them the longer ascents begin at. Raises ClickException, after everything is written, if measurements failed.
    """
    jobs = [partial(_measure_part, spec, command, progress if workers == 1 else None) for spec in specs]
    progress("parts", 0, len(jobs))
    for finished, _ in enumerate(each_finished(jobs, workers), 1):
        progress("parts", finished, len(jobs))
    found = gather(specs, folder, name=name, command=command)
    converged = check_convergence(specs, zoo=name, models=models, command=command, progress=progress)
    converged.save(folder / CONVERGENCE)
    if len(found.failures):
        raise click.ClickException(f"{len(found.failures)} measurements failed: see report.html of the parts.")
    return Zoo(found, converged)


def load_zoo(folder: Path) -> Zoo:
    """Return what `run_zoo` wrote."""
    text = gzip.decompress((folder / COMPARISON).read_bytes())
    return Zoo(Comparison.from_dict(json.loads(text)), Convergence.load(folder / CONVERGENCE))


def gather(specs: Sequence[Path], folder: Path, *, name: str, command: str) -> Comparison:
    """Write the models of all parts as one comparison, without rankings, and the seconds that each measure took."""
    parts = [Comparison.load(spec.parent) for spec in specs if (spec.parent / "comparison.json").is_file()]
    measures = pd.concat([part.measures for part in parts])  # one part may have more than another
    found = replace(
        parts[0],
        spec=name,
        command=command,
        measures=measures[~measures.index.duplicated()],
        scores=pd.concat([part.scores for part in parts]),
        values=pd.concat([part.values for part in parts], ignore_index=True),
        rankings=parts[0].rankings.iloc[:0],
        failures=pd.concat([part.failures for part in parts], ignore_index=True),
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
    )
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(found.to_dict(), allow_nan=False, separators=(",", ":"))
    with whole(folder / COMPARISON) as unfinished:
        unfinished.write_bytes(gzip.compress(text.encode(), mtime=0))  # the same bytes for the same numbers
    write_rows(folder / COSTS, _costs(found))
    return found


@one_thread()
def _measure_part(spec: Path, command: str, progress: Progress | None) -> None:
    run_comparison(spec, spec.parent, progress=progress, command=command)


def _costs(found: Comparison) -> Iterator[dict[str, object]]:
    """Yield on how many batches each measure was computed, and the seconds of all of them together."""
    costs = found.values.groupby("label")[["batches", "seconds"]].sum()
    for label in costs.index.intersection(found.labels, sort=False):
        batches, seconds = costs.loc[label]
        yield {"measure": label, "units": int(batches), "seconds": f"{seconds:.4g}"}


def check_convergence(specs: Sequence[Path], *, zoo: str, models: int, command: str, progress: Progress) -> Convergence:
    """Ascend again from models drawn from a zoo, one a part in turn, with more steps and starts.

    That is in every geometry that a spec takes at several radii, at the middle one of the first three.
    """
    draw = np.random.default_rng(0)
    order = [specs[place] for place in draw.permutation(len(specs))]
    ascents: list[Ascent] = []
    for number in range(models):
        spec = read_spec(order[number % len(order)])
        checkpoint = spec.checkpoints[int(draw.integers(len(spec.checkpoints)))]
        model, known = load_checkpoint(checkpoint), KnownSymmetries()
        batches = spec.data.batches(model, checkpoint)
        for label, measure in _middles(spec.measures).items():
            values = [
                WorstCase(measure.geometry, measure.radius, steps=times * measure.steps, restarts=restarts)
                .of(model, cross_entropy, batches, known=known)
                .mean
                for times, restarts in ((1, 0), *MORE.values())
            ]
            ascents.append(Ascent(checkpoint.name, label, values[0], tuple(values[1:])))
        progress("models", number + 1, models)
    return Convergence(zoo, command, tuple(ascents))


def _middles(entries: Iterable[MeasureEntry]) -> dict[str, WorstCase]:
    """Return by label the measures to climb again."""
    families: dict[str, dict[str, WorstCase]] = {}
    for each in entries:
        measure = each.measure
        whole = not isinstance(measure.geometry, Quotient) or measure.geometry.symmetries == "all"
        if isinstance(measure, WorstCase) and whole:
            families.setdefault(each.family, {})[each.label] = measure
    return dict(list(family.items())[:3][1] for family in families.values() if len(family) > 1)
