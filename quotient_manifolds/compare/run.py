"""Run a comparison: find what is not measured yet, measure it in this process or on a Dask cluster, and write files."""

from __future__ import annotations

import logging
import queue
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quotient_manifolds.compare.analysis import analyse
from quotient_manifolds.compare.comparison import Comparison
from quotient_manifolds.compare.identity import files_fingerprint
from quotient_manifolds.compare.report import write_comparison
from quotient_manifolds.compare.spec import Spec
from quotient_manifolds.compare.spec_file import read_spec
from quotient_manifolds.compare.store import Store
from quotient_manifolds.compare.worker import Identity, Job, measure_checkpoint, tasks_of
from quotient_manifolds.messages import Progress
from quotient_manifolds.version import MEANING, VERSION

_SILENT = logging.CRITICAL + 1  # a connection that closes amid a Ctrl-C is logged as critical, with a traceback
_SETTINGS = {
    "distributed.scheduler.allowed-failures": 2,  # workers that may die over a checkpoint, but one
    # Dask gives up a worker for good that is not there so long after it died: also one that is just being started for
    # the second time. Here dead workers are always started again.
    "distributed.deploy.lost-worker-timeout": "365 days",
}
# A terminal sends Ctrl-C to the workers too; they are to be ended by the process that started them, without a word.
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
    """Measure every checkpoint of a spec that is not measured yet, and return what was found.

    out: the directory that receives store.sqlite (every value as it is finished), report.html, comparison.json (which
    `Comparison.load` reads) and values.csv (a row for each measure of each checkpoint); None: nothing is written. Call
    it again after an interruption, a crash or a change of the spec, and only what is missing is measured. What fails
    does not stop the rest: `Comparison.failures` says what and why.

    spec: a `Spec`, or the path of a YAML file. workers: measure in so many processes on this machine, a checkpoint at a
    time in each (on CUDA each has a device of its own); scheduler: on the workers of the Dask cluster with this
    address, which must see the checkpoints, the data and `out` under the same paths; neither: in this process, which
    needs no Dask. Values are the same bit for bit, given the same number of torch's threads: a worker has one, or as
    many as OMP_NUM_THREADS says. Started processes import the main module, so a script that gives `workers` needs
    `if __name__ == "__main__":`. progress is called with what is being done, how much of it is finished, and the total.
    command: what the report says to redo it by.

    Raises ValueError, in one sentence, for a spec that is wrong and workers that cannot be had; `StoreError` for a
    store that cannot be used, or that another process measures into.
    """
    wanted, device = spec if isinstance(spec, Spec) else read_spec(spec), str(device)
    progress = progress or (lambda what, done, total: None)
    if workers is not None and scheduler is not None:
        raise ValueError("workers or scheduler must be given, not both: start some here, or join a running cluster")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()) if out is None else out)
        store = stack.enter_context(Store(folder / "store.sqlite"))
        jobs = jobs_of(wanted, device)
        left = [job for job in jobs if _left(job, store)]
        measured = 0
        if workers is None and scheduler is None:
            for done, job in enumerate(left):
                progress("checkpoints", done, len(left))
                measured += measure_checkpoint(job, store, progress)
            progress("checkpoints", len(left), len(left))
        elif left:
            client = stack.enter_context(_cluster(workers, scheduler, device))
            measured = _measure_on(client, left, store, progress, local=scheduler is None)
        redo = command or shlex.join(["quotient-manifolds", "compare", str(wanted.path or wanted.name)])
        found = analyse(wanted, jobs, store, command=redo, progress=progress)
        if out is not None:
            write_comparison(found, folder)
    return replace(found, measured_now=measured)


def jobs_of(spec: Spec, device: str) -> list[Job]:
    """Return a job for each checkpoint, with a fingerprint that says, without loading, that all is as it was."""
    data = [None if split is None else split.fingerprint() for split in (spec.data, spec.test)]
    settings = (VERSION, MEANING, spec.dtype, spec.loss, *data)
    return [
        Job(spec, each, device, repr((*settings, each.loader, files_fingerprint(each.path))))
        for each in spec.checkpoints
    ]


def _left(job: Job, store: Store) -> bool:
    """Return whether anything of a checkpoint may be left to measure."""
    record = store.recall(job.fingerprint)
    if record is None or job.spec.calls_functions:
        return True
    keys = {each.key for each in tasks_of(job.spec, Identity(**record))}
    if keys - store.finished(keys):
        return True
    store.mend(job.checkpoint.name)
    return False


def _measure_on(client: Any, jobs: Sequence[Job], store: Store, progress: Progress, *, local: bool) -> int:
    """Measure a checkpoint on each worker at a time, each into the store; return how many values were added.

    Where a worker dies, Dask gives its checkpoint to another, which finds in the store what was finished. Raises
    OSError where the scheduler is gone.
    """
    arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
    waiting, running, measured = list(reversed(jobs)), dict[Any, Job](), 0
    while waiting or running:
        progress("checkpoints", len(jobs) - len(waiting) - len(running), len(jobs))
        while waiting and len(running) < max(1, len(client.nthreads())):
            job = waiting.pop()
            future = client.submit(_work, job, str(store.path), local, pure=False)
            running[future] = job
            future.add_done_callback(arrived.put)
        try:
            future = arrived.get(timeout=5)
        except queue.Empty:
            client.nthreads()
            continue
        job = running.pop(future)
        if future.status == "finished":
            measured += future.result()
        elif type(error := future.exception()).__name__ == "KilledWorker":
            why = "All workers that measured it died, as processes do that are killed or have no memory left."
            store.fail(job.checkpoint.name, None, why)
        else:
            raise ConnectionError("The Dask scheduler is gone. What was measured is kept: run again.") from error
    progress("checkpoints", len(jobs), len(jobs))
    return measured


def _work(job: Job, store: str, local: bool) -> int:
    """Measure a checkpoint in a worker."""
    from distributed import get_worker

    if local and job.device == "cuda":
        job = replace(job, device=f"cuda:{get_worker().name}")
    with Store(store, alone=False) as opened:
        return measure_checkpoint(job, opened)


@contextmanager
def _cluster(workers: int | None, scheduler: str | None, device: str) -> Iterator[Any]:
    """Start `workers` processes on this machine, or join the cluster at `scheduler`; yield its client.

    A process computes with one thread, or as many as OMP_NUM_THREADS says. They end with this process, however it ends.
    Raises ValueError for workers that cannot be had, OSError where no scheduler answers, ImportError without Dask.
    """
    try:
        import dask
        from distributed import Client, LocalCluster
    except ImportError as error:
        needed = 'Several workers need dask.distributed: pip install "quotient-manifolds[distributed]".'
        raise ImportError(needed) from error
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be a whole number, at least 1. Found {workers!r}")
    if workers is not None and device.startswith("cuda") and workers > (devices := torch.cuda.device_count()):
        raise ValueError(f"workers must have a GPU each. Found {devices} for {workers}; give {devices} workers")
    for name in ("distributed", "distributed.client"):  # Dask gives the second a level of its own
        logging.getLogger(name).setLevel(_SILENT)  # that a worker or scheduler died is said in words of ours
    with ExitStack() as stack:
        stack.enter_context(dask.config.set(_SETTINGS))
        address: Any = scheduler
        if scheduler is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            settings: dict[str, Any] = {
                "n_workers": workers,
                "threads_per_worker": 1,
                "memory_limit": 0,
                "silence_logs": _SILENT,
            }
            # A second command's dashboard is not in the way of a first's.
            settings |= {"dashboard_address": "127.0.0.1:0", "local_directory": folder, "preload": [_DEAF_TO_CTRL_C]}
            address = stack.enter_context(LocalCluster(**settings))
        yield stack.enter_context(Client(address, set_as_default=False))
