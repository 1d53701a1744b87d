"""Tell what a comparison would measure, and about how long that takes, before hours are spent on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import final

import pandas as pd
import torch

from quotient_manifolds.compare.measure_entries import MeasureEntry
from quotient_manifolds.compare.run import jobs_of
from quotient_manifolds.compare.scores import unmatched
from quotient_manifolds.compare.spec import Spec
from quotient_manifolds.compare.store import Store
from quotient_manifolds.compare.worker import Identity, Job, Loaded, load, tasks_of
from quotient_manifolds.messages import sentence
from quotient_manifolds.sharpness import HessianTrace, TopEigenvalue
from quotient_manifolds.sharpness.objective import autograd_available

LANCZOS = 40  # products that a top eigenvalue is taken to need; it may need fewer, or many more
SCORES = "loss and error"


@final
@dataclass(frozen=True, eq=False)
class Forecast:
    """Say what there is to measure, and about how long it takes.

    measures, by label, and the scores in a row of their own: `tasks` (a checkpoint and a batch), how many are `left`,
    the `passes` that one is taken to need (forward with backward), the seconds of a pass, and the `time` left (NaN:
    could not be timed). timed: the checkpoint that was loaded; loading: the seconds that took; to_load: how many are
    to be loaded. notes and failures: sentences.
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
    symmetries are verified there, as they will be for every other. Nothing is measured or kept.
    """
    jobs, failures = jobs_of(spec, str(device)), list[str]()
    loaded, timed, loading = None, None, 0.0
    for job in jobs:
        try:
            loaded, loading = _loaded(job)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the model is the user's
            failures.append(f"{job.checkpoint.name}: {sentence(error)}")
            continue
        timed = job.checkpoint.name
        break
    place = Path(out) / "store.sqlite"
    with ExitStack() as stack:
        store = stack.enter_context(Store(place, alone=False)) if place.is_file() else None
        counts, to_load = _counted(jobs, store, None if loaded is None else loaded.identity)
    costs: dict[str, tuple[int, float]] = {}
    known: dict[object, float | str] = {}  # seconds of a pass in a geometry, or what is wrong
    for entry in (None, *spec.measures) if loaded is not None else ():
        setting = None if entry is None else entry.setting
        if setting not in known:
            known[setting] = _timed(loaded, entry)
            if isinstance(said := known[setting], str):
                failures.append(f"{timed}, {SCORES if entry is None else entry.label}: {said}")
        if not isinstance(seconds := known[setting], str):
            costs[SCORES if entry is None else entry.label] = (_passes(entry, loaded), seconds)
    measures = counts.join(pd.DataFrame.from_dict(costs, orient="index", columns=["passes", "seconds"]))
    measures["time"] = measures["left"] * measures["passes"] * measures["seconds"]
    notes = {} if loaded is None else loaded.identity.notes
    said = (f"{timed}, {split}: {each}" for split, sentences in notes.items() for each in sentences)
    names = [each.name for each in spec.checkpoints]
    return Forecast(measures, timed, loading, to_load, tuple(failures), (*said, *unmatched(names, spec.scores)))


def _loaded(job: Job) -> tuple[Loaded, float]:
    load(job)  # pays for what is imported once
    start = time.perf_counter()
    return load(job), time.perf_counter() - start


def _counted(jobs: list[Job], store: Store | None, like: Identity | None) -> tuple[pd.DataFrame, int]:
    """Count tasks by label, those without value, and the checkpoints that will be loaded.

    A checkpoint that was never loaded is taken to have as many batches as the one that was.
    """
    labels = [SCORES, *jobs[0].spec.labels]
    rows: list[dict[str, object]] = []
    to_load = 0
    for job in jobs:
        record = None if store is None else store.recall(job.fingerprint)
        identity = like if record is None else Identity(**record)
        tasks = [] if identity is None else tasks_of(job.spec, identity)
        finished = set() if store is None or record is None else store.finished(each.key for each in tasks)
        rows += [
            {"measure": SCORES if each.entry is None else each.label, "left": each.key not in finished}
            for each in tasks
        ]
        to_load += record is None or job.spec.calls_functions or len(finished) < len(tasks)
    found = pd.DataFrame(rows, columns=["measure", "left"]).groupby("measure")["left"].agg(["count", "sum"])
    return found.reindex(labels, fill_value=0).set_axis(["tasks", "left"], axis=1), to_load


def _timed(loaded: Loaded, entry: MeasureEntry | None) -> float | str:
    """Return the seconds of a pass in the geometry of a measure, or of the scores for None; or what is wrong."""
    try:
        if entry is None:
            return _seconds(loaded, lambda: loaded.score("data", 0))
        prepared = loaded.prepared(entry)
        if isinstance(prepared, str):
            return prepared
        objective = prepared.objective(0)
        with autograd_available():
            return _seconds(loaded, lambda: objective.value_and_gradient(objective.zero()))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the model is the user's
        return sentence(error)


def _seconds(loaded: Loaded, work: Callable[[], object]) -> float:
    """Return the mean of as many calls as fit into half a second, after one that pays for what is set up once."""
    on_gpu = any(w.is_cuda for w in loaded.model.parameters())
    start, calls = time.perf_counter(), -1
    while calls < 1 or (calls < 100 and time.perf_counter() - start < 0.5):
        work()
        if on_gpu:
            torch.cuda.synchronize()
        calls += 1
        if calls == 0:
            start = time.perf_counter()
    return (time.perf_counter() - start) / calls


def _passes(entry: MeasureEntry | None, loaded: Loaded) -> int:
    """Return how many forward passes, with a backward pass each, a task is taken to need.

    A product with the Hessian counts twice; what stops early is counted to its end.
    """
    measure = None if entry is None else entry.measure
    if measure is None:
        return 1
    if isinstance(measure, TopEigenvalue):
        return 1 + 2 * LANCZOS
    if isinstance(measure, HessianTrace):
        return 1 + 2 * measure.samples
    return measure.ticks(loaded.model)
