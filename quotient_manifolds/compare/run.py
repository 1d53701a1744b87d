"""Coordinate a comparison: one process hands out what is to be measured, and alone writes what comes back."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, final

import torch

from quotient_manifolds.compare.analysis import analyse
from quotient_manifolds.compare.cluster import cluster
from quotient_manifolds.compare.comparison import Comparison
from quotient_manifolds.compare.inventory import Inventory
from quotient_manifolds.compare.report import write_comparison
from quotient_manifolds.compare.spec import Spec, read_spec
from quotient_manifolds.compare.store import Store
from quotient_manifolds.compare.unit import Unit
from quotient_manifolds.compare.worker import Emit, Identity, Job, job_of, measure_job, setting_of, tasks_of
from quotient_manifolds.load import Checkpoint
from quotient_manifolds.progress import Progress

ATTEMPTS = 3  # workers that may die over one unit until it is a failure


def run_comparison(
    spec: Spec | str | Path,
    out: str | Path,
    *,
    device: str | torch.device = "cpu",
    workers: int | None = None,
    scheduler: str | None = None,
    progress: Progress | None = None,
    command: str | None = None,
) -> Comparison:
    """Measure every checkpoint of a spec that is not measured yet, and write what was found into the directory `out`.

    `out` receives store.sqlite (every value as it is finished), report.html, comparison.json, models.csv (a row for
    each checkpoint) and units.csv (a row for each measure on each batch). Call it again after an interruption, a crash
    or a change of the spec, and only what is missing is measured. What fails does not stop the rest:
    `Comparison.failures` says what and why.

    spec: a `Spec`, or the path of a YAML file. workers: measure in so many processes on this machine (on CUDA each has
    a device of its own); scheduler: on the workers of the Dask cluster with this address; neither: in this process,
    which needs no Dask. Values are the same bit for bit, given the same number of torch's threads: a worker has one, or
    as many as OMP_NUM_THREADS says. Started processes import the main module, so a script that gives `workers` needs
    `if __name__ == "__main__":`. progress is called with what is being done, how much of it is finished, and the total.
    command: what the report says to redo it by.

    Raises ValueError, in one sentence, for a spec that is wrong and workers that cannot be had; `StoreError` for a
    store that cannot be used, or that another process measures into.
    """
    wanted, out, device = spec if isinstance(spec, Spec) else read_spec(spec), Path(out), str(device)
    with Store(out / "store.sqlite") as store:
        alone = workers is None and scheduler is None
        pool: AbstractContextManager[_Pool] = (
            nullcontext(_InProcess()) if alone else cluster(workers, scheduler, device)
        )
        redo = command or shlex.join(["quotient-manifolds", "compare", str(wanted.path or wanted.name)])
        with pool as opened:
            coordinator = _Coordinator(wanted, store, device, progress or (lambda what, done, total: None))
            coordinator.measure_all(opened)
        comparison = analyse(coordinator.inventory, command=redo, progress=coordinator.progress)
        write_comparison(comparison, coordinator.inventory, out)
    return replace(comparison, measured_now=coordinator.measured)


class _Pool(Protocol):
    """Measure jobs: in this process, or on a cluster."""

    @property
    def size(self) -> int: ...

    def run(self, jobs: Iterator[Job], emit: Emit, lost: Callable[[Job], Job | None]) -> None: ...


@final
class _InProcess:
    size = 1

    def run(self, jobs: Iterator[Job], emit: Emit, lost: Callable[[Job], Job | None]) -> None:
        for job in jobs:
            measure_job(job, emit)


@final
class _Coordinator:
    def __init__(self, spec: Spec, store: Store, device: str, progress: Progress) -> None:
        self.inventory = Inventory(spec, store)
        self.progress = progress
        self.measured = 0
        self._device = device
        self._fingerprints: dict[str, str] = {}
        self._failed: set[str] = set()  # keys of units that failed in this run, which does not try them again
        self._deaths = Counter[str]()

    def measure_all(self, pool: _Pool) -> None:
        """Measure whatever has no value yet."""
        pool.run(self._jobs(pool.size), self._receive, self._lost)

    def _jobs(self, workers: int) -> Iterator[Job]:
        """Yield a job for each checkpoint; towards the end one for each setting of it, so that no worker waits."""
        spec = self.inventory.spec
        todo = [each for each in spec.checkpoints if self._left(each) != set()]
        settings = [tuple(each for each in spec.measures if setting_of(each) == one) for one in _settings(spec)]
        for place, checkpoint in enumerate(todo):
            self.progress("checkpoints", place, len(todo))
            shares = settings if workers > 1 and len(todo) - place <= workers else [spec.measures]
            for number, entries in enumerate(shares):
                # Before loading: what is written meanwhile makes another fingerprint, and is loaded by the next run.
                self._fingerprints.setdefault(checkpoint.name, self.inventory.fingerprint(checkpoint))
                job = replace(job_of(spec, checkpoint, self._device), entries=entries, scores=number == 0)
                if (ready := self._without_finished(job)) is not None:
                    yield ready
        self.progress("checkpoints", len(todo), len(todo))

    def _left(self, checkpoint: Checkpoint) -> set[str] | None:
        """Return the keys of what is left to measure; None if the checkpoint must be loaded to know."""
        if self.inventory.current(checkpoint) is None:
            return None
        keys = {each.unit.key for each in self.inventory.tasks(checkpoint)}
        left: set[str] = keys - self.inventory.store.finished(keys) - self._failed
        if not left:
            self.inventory.store.mend(checkpoint.name)
        return left

    def _without_finished(self, job: Job) -> Job | None:
        """Return the job for what is left of it now; None if nothing is."""
        identity = self.inventory.current(job.checkpoint)
        if identity is None:
            return replace(job, finished=frozenset(self.inventory.store.finished() | self._failed))
        keys = {each.unit.key for each in tasks_of(job.checkpoint.name, identity, job.entries, job.scores)}
        finished = self.inventory.store.finished(keys) | (self._failed & keys)
        return replace(job, finished=frozenset(finished)) if keys - finished else None

    def _receive(self, message: dict[str, Any]) -> None:
        """Write what a worker has to say; on disk when this returns."""
        if message["kind"] == "progress":
            self.progress(message["what"], message["done"], message["total"])
        elif message["kind"] == "loaded":
            name = message["checkpoint"]
            self.inventory.learn(name, Identity.from_dict(message["identity"]), self._fingerprints[name])
        elif message["kind"] == "group":
            self.inventory.store.remember(message["group"], message["names"])
        elif message["kind"] == "finished":
            unit = Unit(**message["unit"])
            self.measured += self.inventory.store.finish(unit, message["payload"], message["seconds"])
        else:
            self._fail(message["checkpoint"], message["key"], message["message"])

    def _fail(self, checkpoint: str, key: str | None, why: str) -> None:
        self.inventory.store.fail(checkpoint, key, why)
        if key is not None:
            self._failed.add(key)

    def _lost(self, job: Job) -> Job | None:
        """Return what to do instead of a job whose worker died: what is left of it, but for a unit that is deadly."""
        left = self._without_finished(job)
        if left is None:
            return None
        name, identity = job.checkpoint.name, self.inventory.current(job.checkpoint)
        tasks = [] if identity is None else tasks_of(name, identity, job.entries, job.scores)
        key = next((each.unit.key for each in tasks if each.unit.key not in left.finished), None)
        self._deaths[key or name] += 1
        if self._deaths[key or name] < ATTEMPTS:
            return left
        why = f"{ATTEMPTS} workers died over it, as processes do that are killed or have no memory left."
        self._fail(name, key, why)
        return None if key is None else self._without_finished(job)


def _settings(spec: Spec) -> list[object]:
    return list(dict.fromkeys(setting_of(each) for each in spec.measures))
