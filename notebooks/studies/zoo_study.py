"""What the studies of zoos share: measuring a zoo as `compare` does, and a record of what was found."""

from __future__ import annotations

import csv
import gzip
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

import torch

from quotient_manifolds.demo.zoo import one_thread, write_scores
from quotient_manifolds.files import whole, write_text
from quotient_manifolds.progress import Progress
from quotient_manifolds.report import Page, render

if TYPE_CHECKING:
    from quotient_manifolds.compare import Comparison, Run

COMPARISON, COSTS, SPEC = "comparison.json.gz", "costs.csv", "zoo.yaml"


@final
@dataclass(frozen=True)
class Cost:
    """What a measure took: seconds of wall time of all its units together."""

    measure: str
    units: int
    seconds: float


@one_thread()
def measure_zoo(
    out: Path, page: Callable[[Comparison, tuple[Cost, ...]], Page], *, command: str, progress: Progress
) -> Comparison:
    """Measures what out/zoo.yaml asks for and out/store.sqlite does not have yet, and writes all that was found.

    Written are the files of `compare` (report.html, comparison.json, models.csv, units.csv), study.html, and record/,
    which `load_record` reads. Several processes at it share the work.
    """
    from quotient_manifolds.compare import Run, Store, Worker, analyse, read_spec, write_comparison

    spec = read_spec(out / SPEC)
    with Store(out / "store.sqlite") as store:
        run = Run(spec, store, Worker(0, 1, torch.device("cpu")), progress)
        run.measure_all()
        comparison = analyse(run, command=command, report=progress)
        write_comparison(comparison, run, out)
        costs = _costs(run)
    write_text(out / "study.html", render(page(comparison, costs)))
    write_record(out / "record", comparison, costs)
    shutil.copyfile(out / SPEC, out / "record" / SPEC)
    return comparison


def write_record(folder: Path, comparison: Comparison, costs: Sequence[Cost]) -> None:
    """comparison.json.gz, the same bytes for the same numbers, and costs.csv."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(comparison.to_dict(), allow_nan=False, separators=(",", ":"))
    with whole(folder / COMPARISON) as unfinished:
        unfinished.write_bytes(gzip.compress(text.encode(), mtime=0))
    write_scores(folder / COSTS, ({**asdict(each), "seconds": f"{each.seconds:.4g}"} for each in costs))


def load_record(folder: Path) -> tuple[Comparison, tuple[Cost, ...]]:
    """What `write_record` wrote: the comparison to the bit, and what each measure cost."""
    from quotient_manifolds.compare import Comparison

    comparison = Comparison.from_dict(json.loads(gzip.decompress((folder / COMPARISON).read_bytes())))
    with (folder / COSTS).open(encoding="utf-8", newline="") as file:
        costs = [Cost(row["measure"], int(row["units"]), float(row["seconds"])) for row in csv.DictReader(file)]
    return comparison, tuple(costs)


def _costs(run: Run) -> tuple[Cost, ...]:
    """By measure: how many units were measured, and the seconds of all of them together."""
    from quotient_manifolds.compare.units import MeasureUnit

    seconds = {each.unit.key: each.seconds for each in run.store.results(run.all_units())}
    found: dict[str, list[float]] = {each.label: [] for each in run.spec.measures}
    for checkpoint in run.spec.checkpoints:
        identity = run.identity(checkpoint)
        for each in [] if identity is None else run.units(checkpoint, identity):
            if isinstance(each, MeasureUnit) and each.unit.key in seconds:
                found[each.measured.label].append(seconds[each.unit.key])
    return tuple(Cost(name, len(each), sum(each)) for name, each in found.items())
