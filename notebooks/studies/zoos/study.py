"""Measure a zoo part by part, as `compare` does, and keep a record of what was found."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import final

from quotient_manifolds.compare import ComparedMeasure, Comparison, run_comparison
from quotient_manifolds.demo.zoo import each_finished, one_thread, write_scores
from quotient_manifolds.files import whole
from quotient_manifolds.progress import Progress

COMPARISON, COSTS = "comparison.json.gz", "costs.csv"


@final
@dataclass(frozen=True)
class Cost:
    """Hold what a measure took: seconds of wall time of all its units together."""

    measure: str
    units: int
    seconds: float


def measure_zoo(
    specs: Sequence[Path], record: Path, *, name: str, command: str, workers: int, progress: Progress
) -> Comparison:
    """Measure what the specs ask for and is not measured yet, and write `record`, which `load_record` reads.

    Each spec is that of a part of the zoo, in a folder of its own, where the files of `compare` go. Returned are the
    models of all parts in one comparison; it has no rankings, for those of the parts do not add up.
    """
    jobs = [partial(_measure_part, spec, command, progress if workers == 1 else None) for spec in specs]
    progress("parts", 0, len(jobs))
    for finished, _ in enumerate(each_finished(jobs, workers), 1):
        progress("parts", finished, len(jobs))
    return gather(specs, record, name=name, command=command)


def gather(specs: Sequence[Path], record: Path, *, name: str, command: str) -> Comparison:
    """Write the record of all that the parts of a zoo have found so far, and return it."""
    parts = [Comparison.load(spec.parent) for spec in specs if (spec.parent / "comparison.json").is_file()]
    measures = {each.label: each for part in parts for each in part.measures}  # one part may have more than another
    rows = [row for part in parts for row in part.rows]
    found = replace(
        parts[0],
        spec=name,
        command=command,
        measures=tuple(measures.values()),
        rows=tuple(replace(row, values={label: row.values.get(label) for label in measures}) for row in rows),
        rankings=(),
        agreement=None,
        failures=tuple(failure for part in parts for failure in part.failures),
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
    )
    write_record(record, found, list(_costs([spec.parent / "units.csv" for spec in specs], found.measures)))
    return found


@one_thread()
def _measure_part(spec: Path, command: str, progress: Progress | None) -> None:
    run_comparison(spec, spec.parent, progress=progress, command=command)


def write_record(folder: Path, comparison: Comparison, costs: Sequence[Cost]) -> None:
    """Write comparison.json.gz, the same bytes for the same numbers, and costs.csv."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(comparison.to_dict(), allow_nan=False, separators=(",", ":"))
    with whole(folder / COMPARISON) as unfinished:
        unfinished.write_bytes(gzip.compress(text.encode(), mtime=0))
    write_scores(folder / COSTS, ({**asdict(each), "seconds": f"{each.seconds:.4g}"} for each in costs))


def load_record(folder: Path) -> tuple[Comparison, tuple[Cost, ...]]:
    """Return what `write_record` wrote: the comparison to the bit, and what each measure cost."""
    comparison = Comparison.from_dict(json.loads(gzip.decompress((folder / COMPARISON).read_bytes())))
    with (folder / COSTS).open(encoding="utf-8", newline="") as file:
        costs = [Cost(row["measure"], int(row["units"]), float(row["seconds"])) for row in csv.DictReader(file)]
    return comparison, tuple(costs)


def _costs(files: Sequence[Path], measures: Sequence[ComparedMeasure]) -> Iterator[Cost]:
    """Yield how many units of each measure were measured, and the seconds of all of them together."""
    texts = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
    rows = [row for text in texts for row in csv.DictReader(io.StringIO(text))]
    for each in measures:
        asked = {**(each.settings or {}), "eps": (each.geometry or {}).get("eps", 0.0)}
        settings = {f"settings.{key}": str(value) for key, value in asked.items()}
        seconds = [
            float(row["seconds"])
            for row in rows
            if (row["measure"], row["geometry"]) == (each.measure, each.geometry_name)
            and all(row[key] in ("", value) for key, value in settings.items() if key in row)
        ]
        yield Cost(each.label, len(seconds), sum(seconds))
