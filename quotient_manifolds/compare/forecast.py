"""Tell what a comparison would measure, and about how long that takes, before hours are spent on it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import final

import pandas as pd
import torch

from quotient_manifolds.compare.analysis import unmatched
from quotient_manifolds.compare.run import jobs_of
from quotient_manifolds.compare.spec import MeasureEntry, Spec
from quotient_manifolds.compare.store import Store
from quotient_manifolds.compare.worker import Identity, Loaded, attempt, load, tasks_of
from quotient_manifolds.sharpness import HessianTrace, TopEigenvalue
from quotient_manifolds.sharpness.objective import autograd_available

LANCZOS = 40  # products that a top eigenvalue is taken to need; it may need fewer, or many more
SCORES = "loss and error"


@final
@dataclass(frozen=True, eq=False)
class Forecast:
    """Say what there is to measure, and about how long it takes.

    measures, by label, with a row for the scores: `tasks` (a checkpoint and a batch), how many are `left`, the `passes`
    that one is taken to need (forward with backward), the `seconds` of a pass, and the `time` left (NaN: could not be
    timed). timed: the checkpoint that was loaded; loading: the seconds that took; to_load: how many are to be loaded.
    notes and failures: sentences.
    """

    measures: pd.DataFrame
    timed: str | None
    loading: float
    to_load: int
    failures: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """Return the seconds of all that is left and could be timed, with loading."""
        return float(self.measures["time"].sum()) + self.to_load * self.loading


def forecast(spec: Spec, out: str | Path, device: str | torch.device = "cpu") -> Forecast:
    """Count the tasks of a comparison, finished (those in out/store.sqlite) and left, and time one checkpoint.

    Checkpoints are loaded until one of them is read; on its first batch one pass is timed in every geometry, whose
    symmetries are verified there, as they will be for every other. One that was never loaded is taken to have as many
    batches as the one that was. Nothing is measured or kept.
    """
    jobs, failures, timed, loading = jobs_of(spec, str(device)), list[str](), None, 0.0
    loaded: Loaded | str = ""
    for job in jobs:
        start = time.perf_counter()
        loaded = attempt(partial(load, job))
        if not isinstance(loaded, str):
            timed, loading = job.checkpoint.name, time.perf_counter() - start
            break
        failures.append(f"{job.checkpoint.name}: {loaded}")
    place, to_load, rows = Path(out) / "store.sqlite", 0, list[tuple[str, bool]]()
    store = Store(place, alone=False) if place.is_file() else None
    for job in jobs:
        record = None if store is None else store.recall(job.fingerprint)
        identity = Identity(**record) if record is not None else loaded.identity if isinstance(loaded, Loaded) else None
        tasks = [] if identity is None else tasks_of(spec, identity)
        finished = set() if store is None else store.finished(each.key for each in tasks if record is not None)
        rows += [(SCORES if each.entry is None else each.label, each.key not in finished) for each in tasks]
        to_load += record is None or spec.calls_functions or len(finished) < len(tasks)
    if store is not None:
        store.close()
    counts = pd.DataFrame(rows, columns=["measure", "left"]).groupby("measure")["left"].agg(["count", "sum"])
    measures = counts.reindex([SCORES, *spec.labels], fill_value=0).set_axis(["tasks", "left"], axis=1)
    known: dict[object, float | str] = {}  # seconds of a pass in a geometry, or what is wrong
    for entry in (None, *spec.measures):
        if isinstance(loaded, str):
            break
        setting, label = (None, SCORES) if entry is None else (entry.setting, entry.label)
        if setting not in known:
            known[setting] = attempt(partial(_seconds, loaded, entry))
            if isinstance(known[setting], str):
                failures.append(f"{timed}, {label}: {known[setting]}")
        if not isinstance(known[setting], str):
            measures.loc[label, ["passes", "seconds"]] = _passes(entry, loaded), known[setting]
    measures = measures.reindex(columns=["tasks", "left", "passes", "seconds"])
    measures["time"] = measures["left"] * measures["passes"] * measures["seconds"]
    notes = loaded.identity.notes if isinstance(loaded, Loaded) else {}
    said = (f"{timed}, {split}: {each}" for split, sentences in notes.items() for each in sentences)
    names = [each.name for each in spec.checkpoints]
    return Forecast(measures, timed, loading, to_load, tuple(failures), (*said, *unmatched(names, spec.scores)))


def _seconds(loaded: Loaded, entry: MeasureEntry | None) -> float:
    """Time a pass in the geometry of a measure, or of the scores for None: the third, for the first pay for set-up."""
    prepared = None if entry is None else loaded.prepared(entry)
    if isinstance(prepared, str):
        raise ValueError(prepared)
    objective = None if prepared is None else prepared.objective(0)
    start = 0.0
    with autograd_available():
        for _ in range(3):
            start = time.perf_counter()
            if objective is None:
                loaded.score("data", 0)
            else:
                objective.value_and_gradient(objective.zero())
            if any(w.is_cuda for w in loaded.model.parameters()):
                torch.cuda.synchronize()
    return time.perf_counter() - start


def _passes(entry: MeasureEntry | None, loaded: Loaded) -> int:
    """Return how many forward passes, with a backward pass each, a task is taken to need.

    A product with the Hessian counts twice; what stops early is counted to its end.
    """
    measure = None if entry is None else entry.measure
    if isinstance(measure, (TopEigenvalue, HessianTrace)):
        return 1 + 2 * (measure.samples if isinstance(measure, HessianTrace) else LANCZOS)
    return 1 if measure is None else measure.ticks(loaded.model)
