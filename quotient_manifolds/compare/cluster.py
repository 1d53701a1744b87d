"""Run jobs on the processes of a Dask cluster; the one module that imports `distributed`, once asked."""

from __future__ import annotations

import json
import logging
import queue
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, final

import torch

from quotient_manifolds.compare.worker import Emit, Job, measure_job

OFTEN = 0.2  # seconds between two messages on how far a worker is
PATIENCE = 120.0  # seconds without any worker on this machine, after which none is hoped for
GONE = "The Dask scheduler is gone. What was measured is kept: run again."
_SILENT = logging.CRITICAL + 1  # a connection that closes amid a Ctrl-C is logged as critical, with a traceback
_SETTINGS = {
    # A unit whose worker died is tried again here, without those that were finished before it.
    "distributed.scheduler.allowed-failures": 0,
    # Dask gives up a worker for good that is not there so long after it died: also one that is just being started for
    # the second time. Here dead workers are always started again.
    "distributed.deploy.lost-worker-timeout": "365 days",
}
# A terminal sends Ctrl-C to the workers too; they are to be ended by the process that started them, without a word.
_DEAF_TO_CTRL_C = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
_ONE_AT_A_TIME = threading.Lock()  # random states and the number of a process's threads are shared by its threads


@final
class Cluster:
    """Run jobs on the workers of a cluster, as many at once as there are workers."""

    def __init__(self, client: Any, *, local: bool) -> None:
        self._client, self._local = client, local

    @property
    def size(self) -> int:
        """Return how many jobs run at once; at least one, for workers may still be about to join."""
        return max(1, self._workers())

    def _workers(self) -> int:
        try:
            return len(self._client.nthreads())
        except (OSError, TimeoutError) as error:
            raise ConnectionError(GONE) from error

    def run(self, jobs: Iterator[Job], emit: Emit, lost: Callable[[Job], Job | None]) -> None:
        """Hand out the jobs and emit what their workers emit, in this thread.

        lost: what to do instead of a job whose worker died, None for nothing.
        """
        inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        topic = f"quotient-manifolds-{uuid.uuid4().hex}"
        self._client.subscribe_topic(topic, lambda event: inbox.put(event[1]))
        running: dict[str, tuple[Any, Job]] = {}

        def submit(job: Job) -> None:
            future = self._client.submit(
                _work, job, topic, self._local, key=f"{job.checkpoint.name}-{uuid.uuid4().hex}"
            )
            running[future.key] = future, job
            future.add_done_callback(inbox.put)

        def fill() -> None:
            while len(running) < self.size and (job := next(jobs, None)) is not None:
                submit(job)

        fill()
        seen = time.monotonic()  # when there was a worker
        while running:
            try:
                message = inbox.get(timeout=5)
            except queue.Empty:
                if self._workers():
                    seen = time.monotonic()
                elif self._local and time.monotonic() - seen > PATIENCE:
                    raise ConnectionError(
                        "All workers have died, and no other could be started. What was measured is kept: run again."
                    ) from None
                else:
                    emit({"kind": "progress", "what": "waiting for a worker", "done": 0, "total": 1})
                fill()  # workers may have joined
                continue
            seen = time.monotonic()
            if isinstance(message, str):
                emit(json.loads(message))
                continue
            _, job = running.pop(message.key)
            # What is finished came one by one; where one of those messages was lost, it is here.
            if message.status == "finished":
                for each in message.result():
                    emit(json.loads(each))
            elif message.status != "error":
                raise ConnectionError(GONE)
            elif type(message.exception()).__name__ != "KilledWorker":
                raise message.exception()
            elif (again := lost(job)) is not None:
                submit(again)
            fill()
        self._client.unsubscribe_topic(topic)


def _work(job: Job, topic: str, local: bool) -> list[str]:
    """Measure a job in a worker; every message is sent when it is made, and what is not mere progress returned too."""
    from distributed import get_worker

    worker = get_worker()
    key, sent, last = worker.get_current_task(), [], 0.0

    def emit(message: dict[str, Any]) -> None:
        nonlocal last
        if worker.state.tasks[key].state == "cancelled":  # by the end of the process that asked
            raise RuntimeError("Nobody waits for this any more.")
        if message["kind"] == "progress":
            if time.monotonic() - last < OFTEN and message["done"] < message["total"]:
                return
            last, message = time.monotonic(), {**message, "what": f"worker {worker.name}"}
        text = json.dumps(message)
        worker.log_event(topic, text)
        if message["kind"] != "progress":
            sent.append(text)

    if local and job.device == "cuda":
        job = replace(job, device=f"cuda:{worker.name}")
    with _ONE_AT_A_TIME:
        measure_job(job, emit)
    return sent


@contextmanager
def cluster(workers: int | None, scheduler: str | None, device: str) -> Iterator[Cluster]:
    """Start `workers` processes on this machine, or join the cluster at `scheduler`.

    A process computes with one thread, or as many as OMP_NUM_THREADS says; on CUDA each has a device of its own. They
    end with this process, however it ends. Raises ValueError for what cannot be started or joined, ImportError without
    Dask.
    """
    try:
        import dask
        from distributed import Client, LocalCluster
        from distributed.comm.addressing import get_address_host_port
    except ImportError as error:
        raise ImportError(
            "Several workers need dask.distributed, which is not installed: "
            'pip install "quotient-manifolds[distributed]".'
        ) from error
    if workers is not None and (not isinstance(workers, int) or isinstance(workers, bool) or workers < 1):
        raise ValueError(f"workers must be a whole number, at least 1. Found {workers!r}")
    if workers is not None and scheduler is not None:
        raise ValueError(
            "Give workers, to start some on this machine, or scheduler, to join a running cluster; not both"
        )
    if scheduler is not None and not isinstance(scheduler, str):
        raise ValueError(f"scheduler must be the address of one, such as 'tcp://node1:8786'. Found {scheduler!r}")
    if workers is not None and device.startswith("cuda") and workers > (devices := torch.cuda.device_count()):
        raise ValueError(f"Every worker needs a GPU of its own, and this machine has {devices}: give {devices} workers")
    for name in ("distributed", "distributed.client"):  # Dask gives the second a level of its own
        logging.getLogger(name).setLevel(_SILENT)  # that a worker or scheduler died is said in words of ours
    with ExitStack() as stack:
        stack.enter_context(dask.config.set(_SETTINGS))
        if scheduler is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            try:
                address = stack.enter_context(
                    LocalCluster(
                        n_workers=workers,
                        threads_per_worker=1,
                        memory_limit=0,
                        dashboard_address="127.0.0.1:0",  # a second command's is not in the way of a first's
                        local_directory=folder,
                        silence_logs=_SILENT,
                        preload=[_DEAF_TO_CTRL_C],
                    )
                )
            except RuntimeError as error:
                raise ValueError(
                    f"No worker could be started ({error}) A script that gives workers needs "
                    "`if __name__ == '__main__':` around what it does, for every worker imports it."
                ) from error
        else:
            address = scheduler
        try:
            if scheduler is not None and not scheduler.startswith("inproc://"):
                get_address_host_port(scheduler)  # a client that finds this out itself takes a minute to end
            client = stack.enter_context(Client(address, set_as_default=False))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"No Dask scheduler could be joined at {scheduler}: {' '.join(str(error).split())}"
            ) from error
        yield Cluster(client, local=scheduler is None)
