"""Run a comparison in this process or on a Dask cluster, or forecast its tasks and time."""

from __future__ import annotations

import logging
import queue
import shlex
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from quotient_manifolds.check import needs
from quotient_manifolds.compare.analysis import analyse, unmatched
from quotient_manifolds.compare.code import code_on_disk
from quotient_manifolds.compare.comparison import Comparison
from quotient_manifolds.compare.identity import Identity, files_fingerprint, files_in
from quotient_manifolds.compare.report import REPORTS, write_comparison
from quotient_manifolds.compare.spec import MeasureEntry, Spec
from quotient_manifolds.compare.spec_file import read_spec
from quotient_manifolds.compare.store import Store
from quotient_manifolds.compare.worker import (
    Job,
    Loaded,
    attempt,
    load,
    measure_checkpoint,
    tasks_of,
)
from quotient_manifolds.files import check_file
from quotient_manifolds.load import Checkpoint
from quotient_manifolds.messages import Progress
from quotient_manifolds.sharpness import HessianTrace, Measure, PreparedModel, TopEigenvalue
from quotient_manifolds.sharpness.objective import autograd_available
from quotient_manifolds.sharpness.suggest import suggested
from quotient_manifolds.version import MEANING, VERSION

# Passes that a tick is estimated to need: a product with the Hessian takes two, an eigenvalue 40 products or many more.
PASSES: dict[type[Measure], int] = {HessianTrace: 2, TopEigenvalue: 80}
SCORES = "loss and error"
Measured = tuple[int, list[dict[str, str]]]  # what `measure_checkpoint` returns
_SILENT = logging.CRITICAL + 1  # Dask logs a connection that closes during Ctrl-C as critical, with a traceback
_SETTINGS = {
    "distributed.scheduler.allowed-failures": 2,  # a checkpoint fails when one more worker than this has died over it
    # Dask gives up a dead worker that is not back after this time, even one that is just being restarted a second time.
    # Here dead workers are always restarted.
    "distributed.deploy.lost-worker-timeout": "365 days",
}
# A terminal sends Ctrl-C to the workers, too. They ignore it, because the process that started them ends them quietly.
_DEAF_TO_CTRL_C = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"


def run_comparison(
    spec: Spec | str | Path,
    out: str | Path | None = None,
    *,
    device: str | torch.device = "cpu",
    workers: int | None = None,
    scheduler: str | None = None,
    progress: Progress | None = None,
    command: str | None = None,
) -> Comparison:
    """Measure the checkpoints of a spec, except for values that are stored already, and return the comparison.

    spec: a `Spec`, or the path of a YAML file.
    out: the directory that receives store.sqlite (every value as soon as it is computed), report.html, comparison.json
    (for `Comparison.load`) and values.csv (a row for each measure of each checkpoint). None: nothing is written. After
    an interruption, a crash or a change of the spec, the same call measures only missing values.
    workers: the number of processes to start on this machine. Each measures one checkpoint at a time, on CUDA on its
    own device. They import the main module, so a script that gives `workers` needs `if __name__ == "__main__":`.
    scheduler: the address of a Dask cluster, whose workers must have the checkpoints, the data and `out` under the same
    paths. Without `workers` and `scheduler`, everything runs in this process and Dask is not needed.
    progress: called with the current activity, the number of finished parts, and their total.
    command: the command that the report quotes for repeating the comparison.

    Values agree bit for bit between processes with the same number of torch threads; a worker has one, or
    OMP_NUM_THREADS. A failure does not stop the other tasks; `Comparison.failures` lists them with reasons.

    Raises ValueError, in one sentence, for an invalid spec or unavailable workers; `StoreError` for a store that cannot
    be used, or that another process measures into.
    """
    wanted, device = spec if isinstance(spec, Spec) else read_spec(spec), str(device)
    progress = progress or (lambda what, done, total: None)
    if workers is not None and scheduler is not None:
        raise ValueError("workers or scheduler must be given, not both: start some here, or join a running cluster")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()) if out is None else out)
        store = stack.enter_context(Store(folder / "store.sqlite"))
        for name in REPORTS:
            check_file(folder / name)
        wanted, said = with_radii(wanted, device, store)
        jobs = jobs_of(wanted, device)
        left = [job for job in jobs if _left(job, store)]
        made: dict[str, Measured] = {}  # by checkpoint
        if workers is None and scheduler is None:
            for done, job in enumerate(left):
                progress("checkpoints", done, len(left))
                made[job.checkpoint.name] = measure_checkpoint(job, store, progress)
            progress("checkpoints", len(left), len(left))
        elif left:
            client = stack.enter_context(_cluster(workers, scheduler, device))
            made = _measure_on(client, left, store, progress, local=scheduler is None)
        redo = command or shlex.join(["quotient-manifolds", "compare", str(wanted.path or wanted.name)])
        failures = [row for job in left for row in made[job.checkpoint.name][1]]
        found = analyse(wanted, jobs, failures, store, command=redo, progress=progress)
        found = replace(found, notes=(*said, *found.notes))
        if out is not None:
            write_comparison(found, folder)
    return replace(found, measured_now=sum(count for count, _ in made.values()))


def with_radii(spec: Spec, device: str, store: Store | None) -> tuple[Spec, tuple[str, ...]]:
    """Return the spec with all suggested radii filled in, and a sentence on each of them.

    A radius is suggested once, on the first batch of the first checkpoint; a store keeps it for all runs. Raises
    ValueError if that checkpoint cannot be measured.
    """
    first, measures, said = spec.checkpoints[0], list[MeasureEntry](), list[str]()
    code = code_on_disk(spec.code_of(first))
    loaded: Loaded | None = None
    for entry in spec.measures:
        if not entry.suggested:
            measures.append(entry)
            continue
        key = repr(
            ("suggested radius", entry.measure.geometry, spec.loss, spec.dtype, sorted(code.items()), VERSION, MEANING)
        )
        known = None if store is None else store.recall(key)
        if known is None:
            if loaded is None:
                loaded = load(Job(spec, first, device, fingerprint="", code=code))
            batches = loaded.batches["data"][:1]
            prepared = PreparedModel.of(
                loaded.model, spec.loss_of(), batches, entry.measure.geometry, known=loaded.known
            )
            known = {"radius": suggested(prepared), "checkpoint": first.name}
            if store is not None:
                store.remember(key, known)
        own: Any = entry.measure  # a worst case, which has a radius
        chosen = MeasureEntry(replace(own, radius=known["radius"]))
        measures.append(chosen)
        said.append(f"The radius of {chosen.label} was suggested on {known['checkpoint']} (suggest_radius).")
    return replace(spec, measures=measures), tuple(said)


def jobs_of(spec: Spec, device: str) -> list[Job]:
    """Return a job for each checkpoint; its fingerprint shows, without loading, whether anything has changed."""
    data = [None if split is None else split.fingerprint() for split in (spec.data, spec.test)]
    settings, listed = (VERSION, MEANING, spec.dtype, spec.loss, *data), cache(files_in)
    codes = cache(code_on_disk)

    def job(checkpoint: Checkpoint) -> Job:
        code, files = codes(spec.code_of(checkpoint)), files_fingerprint(checkpoint.path, listed)
        return Job(spec, checkpoint, device, repr((*settings, checkpoint.loader, files, sorted(code.items()))), code)

    return list(map(job, spec.checkpoints))


def _left(job: Job, store: Store) -> bool:
    """Return whether a checkpoint may have tasks without a stored value."""
    record = store.recall(job.fingerprint)
    if record is None or job.spec.calls_functions:
        return True
    keys = {each.key for each in tasks_of(job.spec, Identity(**record))}
    return bool(keys - store.finished(keys))


def _measure_on(
    client: Any, jobs: Sequence[Job], store: Store, progress: Progress, *, local: bool
) -> dict[str, Measured]:
    """Measure one checkpoint at a time on each worker, into the store; return values added and failures by name.

    If a worker dies, Dask gives its checkpoint to another worker, which reuses the stored values. Raises OSError if the
    scheduler is gone.
    """
    arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
    waiting, running, made = list(reversed(jobs)), dict[Any, str](), dict[str, Measured]()
    while waiting or running:
        progress("checkpoints", len(made), len(jobs))
        while waiting and len(running) < max(1, len(client.nthreads())):
            job = waiting.pop()
            future = client.submit(_work, job, str(store.path), local, pure=False)
            running[future] = job.checkpoint.name
            future.add_done_callback(arrived.put)
        try:
            future = arrived.get(timeout=5)
        except queue.Empty:
            client.nthreads()
            continue
        name = running.pop(future)
        try:
            made[name] = future.result()  # if the worker has just died, this waits until another has recomputed it
        except Exception as error:
            if type(error).__name__ != "KilledWorker":
                raise ConnectionError("The Dask scheduler is gone. What was measured is kept: run again.") from error
            why = "All workers that measured it died, as processes do that are killed or have no memory left."
            made[name] = 0, [{"checkpoint": name, "what": "", "message": why}]
    progress("checkpoints", len(jobs), len(jobs))
    return made


def _work(job: Job, store: str, local: bool) -> Measured:
    """Measure a checkpoint in a worker."""
    from distributed import get_worker

    if local and job.device == "cuda":
        job = replace(job, device=f"cuda:{get_worker().name}")
    with Store(store, alone=False) as opened:
        return measure_checkpoint(job, opened)


@contextmanager
def _cluster(workers: int | None, scheduler: str | None, device: str) -> Iterator[Any]:
    """Start `workers` processes on this machine, or join the cluster at `scheduler`; yield its client.

    Each process computes with one thread, or with OMP_NUM_THREADS. The processes end with this one, however it ends.
    Raises ValueError for more workers than GPUs, OSError if no scheduler answers, ImportError without Dask.
    """
    with needs("Measuring by several workers", "dask.distributed", "distributed"):
        import dask
        from distributed import Client, LocalCluster
    if workers is not None and device.startswith("cuda") and workers > (devices := torch.cuda.device_count()):
        raise ValueError(f"workers must have a GPU each. Found {devices} for {workers}; give {devices} workers")
    for name in ("distributed", "distributed.client"):  # Dask sets a separate level for the second
        logging.getLogger(name).setLevel(_SILENT)  # our own messages report that a worker or the scheduler died
    with ExitStack() as stack:
        stack.enter_context(dask.config.set(_SETTINGS))
        address: Any = scheduler
        if scheduler is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            where = {"dashboard_address": "127.0.0.1:0", "local_directory": folder}
            size = {"n_workers": workers, "threads_per_worker": 1, "memory_limit": 0}
            quiet = {"silence_logs": _SILENT, "preload": [_DEAF_TO_CTRL_C]}
            address = stack.enter_context(LocalCluster(**where, **size, **quiet))
        yield stack.enter_context(Client(address, set_as_default=False))


@dataclass(frozen=True, eq=False)
class Forecast:
    """Hold the number of tasks of a comparison, and an estimate of the time they take.

    measures, by label, and a row for the scores, which are not timed: the number of `tasks` (a checkpoint and a batch),
    the number `left`, the estimated `passes` (forward and backward) per task, the `seconds` per pass, and the `time`
    left (NaN: could not be timed). Empty if the first checkpoint does not load. notes and failures: sentences.
    """

    measures: pd.DataFrame
    failures: tuple[str, ...]
    notes: tuple[str, ...]


def forecast(spec: Spec, out: str | Path, device: str | torch.device = "cpu") -> Forecast:
    """Count the tasks of a comparison, finished (in out/store.sqlite) and left, and time the first checkpoint.

    One pass on its first batch is timed in every geometry, after verification of the symmetries. A checkpoint that was
    never loaded is assumed to have as many batches as the first. Nothing is measured. Only suggested radii are stored,
    if there is a store.
    """
    place = Path(out) / "store.sqlite"
    with ExitStack() as stack:
        store = stack.enter_context(Store(place, alone=False)) if place.is_file() else None
        spec, said = with_radii(spec, str(device), store)
        jobs, rows = jobs_of(spec, str(device)), list[tuple[str, bool]]()
        name, loaded = jobs[0].checkpoint.name, attempt(partial(load, jobs[0]))
        if isinstance(loaded, str):
            return Forecast(pd.DataFrame(), (f"{name}: {loaded}",), ())
        for job in jobs:
            record = None if store is None else store.recall(job.fingerprint)
            tasks = tasks_of(spec, loaded.identity if record is None else Identity(**record))
            finished = set() if store is None or record is None else store.finished(each.key for each in tasks)
            rows += [(SCORES if each.entry is None else each.label, each.key not in finished) for each in tasks]
    counts = pd.DataFrame(rows, columns=["measure", "left"]).groupby("measure")["left"].agg(tasks="count", left="sum")
    measures = counts.reindex(index=[SCORES, *spec.labels], columns=["tasks", "left", "passes", "seconds"])
    first = {each.setting: each for each in reversed(spec.measures)}
    timed = {setting: attempt(partial(_seconds, loaded, each)) for setting, each in first.items()}
    failures = [f"{name}, {first[key].label}: {said}" for key, said in timed.items() if isinstance(said, str)]
    for entry in spec.measures:
        if not isinstance(seconds := timed[entry.setting], str):
            passes = entry.measure.ticks * PASSES.get(type(entry.measure), 1)
            measures.loc[entry.label, ["passes", "seconds"]] = passes, seconds
    measures["time"] = measures["left"] * measures["passes"] * measures["seconds"]
    notes = [*said]
    notes += [f"{name}, {split}: {each}" for split, said in loaded.identity.notes.items() for each in said]
    notes += unmatched([each.name for each in spec.checkpoints], spec.scores)
    return Forecast(measures, tuple(failures), tuple(notes))


def _seconds(loaded: Loaded, entry: MeasureEntry) -> float:
    """Return the time of a pass in the geometry of a measure: the third pass, as the first ones include set-up."""
    if isinstance(prepared := loaded.prepared(entry), str):
        raise ValueError(prepared)
    objective, start = replace(prepared.objective(0), start=None), 0.0
    with autograd_available():
        for _ in range(3):
            start = time.perf_counter()
            objective.value_and_gradient(objective.zero())  # a GPU may finish one backward pass during the next
    return time.perf_counter() - start
