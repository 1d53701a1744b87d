"""What the studies of zoos share: measuring a zoo as `compare` does, and a record of what was found."""

from __future__ import annotations

import csv
import gzip
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from quotient_manifolds.compare import ComparedMeasure, Comparison, run_comparison
from quotient_manifolds.demo.zoo import one_thread, write_scores
from quotient_manifolds.files import whole, write_text
from quotient_manifolds.progress import Progress
from quotient_manifolds.report import render
from studies.zoos.page import Cost, ZooPage

COMPARISON, COSTS, SPEC = "comparison.json.gz", "costs.csv", "zoo.yaml"


@one_thread()
def measure_zoo(out: Path, page: ZooPage, *, fast: bool = False, command: str, progress: Progress) -> Comparison:
    """Measure what out/zoo.yaml asks for and out/store.sqlite does not have yet, and write all that was found.

    Written are the files of `compare` (report.html, comparison.json, models.csv, units.csv), study.html, and record/,
    which `load_record` reads.
    """
    comparison = run_comparison(out / SPEC, out, progress=progress, command=command)
    costs = tuple(_costs(out / "units.csv", comparison.measures))
    write_text(out / "study.html", render(page.page(comparison, costs, fast=fast)))
    write_record(out / "record", comparison, costs)
    shutil.copyfile(out / SPEC, out / "record" / SPEC)
    return comparison


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


def _costs(units: Path, measures: Sequence[ComparedMeasure]) -> Iterator[Cost]:
    """Yield how many units of each measure were measured, and the seconds of all of them together."""
    with units.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
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
