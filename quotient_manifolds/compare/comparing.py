"""The one way to run a comparison: measure what is missing, analyse, and write the results."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import torch

from quotient_manifolds.compare.analysis import analyse
from quotient_manifolds.compare.comparison import Comparison
from quotient_manifolds.compare.page import write_comparison
from quotient_manifolds.compare.run import Run
from quotient_manifolds.compare.spec import Spec, read_spec
from quotient_manifolds.compare.store import Store
from quotient_manifolds.compare.workers import joined
from quotient_manifolds.progress import Progress


def run_comparison(
    spec: Spec | str | Path,
    out: str | Path,
    *,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
    command: str | None = None,
) -> Comparison:
    """Measure every checkpoint of a spec that is not measured yet, and write what was found into the directory `out`.

    `out` receives store.sqlite (every value as it is finished), report.html, comparison.json, models.csv (a row for
    each checkpoint) and units.csv (a row for each measure on each batch). Call it again after an interruption, a crash
    or a change of the spec, and only what is missing is measured. What fails does not stop the rest:
    `Comparison.failures` says what and why.

    spec: a `Spec`, or the path of a YAML file. progress is called with what is being done, how much of it is finished,
    and the total. command: how the report says that it can be made again.

    Raises ValueError, in one sentence, for a spec that is wrong; `StoreError` for a store that cannot be used.
    """
    wanted = spec if isinstance(spec, Spec) else read_spec(spec)
    report = progress or (lambda what, finished, total: None)
    with Store(Path(out) / "store.sqlite") as store, joined(torch.device(device)) as worker:
        run = Run(wanted, store, worker, report)
        run.measure_all()
        measured = worker.total(run.done)
        redo = command or shlex.join(["quotient-manifolds", "compare", str(wanted.path)])
        comparison = replace(analyse(run, command=redo, report=report), measured_now=measured)
        if worker.leads:
            write_comparison(comparison, run, Path(out))
    return comparison
