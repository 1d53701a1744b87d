"""Processes at one comparison: killed, interrupted, several workers, two by mistake; the table is always the same."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import dask
import psutil
import pytest
import torch

from quotient_manifolds.compare import Comparison, Store, run_comparison
from quotient_manifolds.compare.run import _SETTINGS, _measure_on, jobs_of
from quotient_manifolds.compare.spec_file import read_spec
from tests.nets.zoos import end_of, needs_fork, run, start, write_seeds, write_spec

HEAD = "checkpoints: {paths: models/*, loader: tests.nets.zoos:LOADER}\ndata: {path: train.npz, batch_size: 2}"
MEASURES = (
    "measure: worst-case, geometry: adaptive, radius: [0.02, 0.05], steps: 2",
    "measure: average-case, geometry: adaptive, sigma: 0.05, samples: 2",
    "measure: gradient-norm, geometry: [euclidean, adaptive]",
)
MODELS = 6
VALUES = MODELS * 4 * (1 + 5)  # of 6 models on 4 batches: scores and 5 measures
ROOT = Path(__file__).parents[2]
KILLS = 5  # of processes amid a comparison

Table = tuple[list[tuple[Any, ...]], dict[str, Any]]


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    """A folder in memory, where there is such a disk: every value is synchronised twice."""
    disk = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=disk if os.access(disk, os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def spec(memory: Path) -> Path:
    write_seeds(memory, MODELS)
    return write_spec(memory, *MEASURES, head=HEAD.replace("LOADER", "small"))


@pytest.fixture(scope="module")
def expected(spec: Path) -> Table:
    """What one process that nobody disturbs writes: all there is."""
    measure(spec, spec.parent / "whole")
    found = Comparison.load(spec.parent / "whole")
    assert (found.known, len(found.failures)) == ((MODELS * 5, MODELS * 5), 0)
    return table(spec.parent / "whole")


def measure(spec: Path, out: Path, **options: Any) -> None:
    """Compare in this process, with one thread as a worker has."""
    torch.set_num_threads(1)
    assert run_comparison(spec, out, **options).failures.empty


def table(out: Path) -> Table:
    """Values, read without the package, and comparison.json but for seconds; the store is sound."""
    connection = sqlite3.connect(out / "store.sqlite")
    try:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        rows = connection.execute("SELECT key, checkpoint, batch, payload FROM results ORDER BY key").fetchall()
    finally:
        connection.close()
    found = Comparison.load(out)
    return rows, replace(found, values=found.values.drop(columns="seconds")).to_dict()


def count(out: Path) -> int:
    """Values that are there. (Opened for reading only: nothing is repaired.)"""
    try:
        connection = sqlite3.connect(f"file:{out / 'store.sqlite'}?mode=ro", uri=True, timeout=60)
        try:
            return int(connection.execute("SELECT count(*) FROM results").fetchone()[0])
        finally:
            connection.close()
    except sqlite3.OperationalError:  # not made yet
        return 0


def wait_until(holds: Callable[[], bool], seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def noting(spec: Path, out: Path, log: Path) -> None:
    """Compare, with a note of every value that is written."""
    finish = Store.finish

    def noted(self: Store, key: str, *what: Any) -> bool:
        new = finish(self, key, *what)
        with log.open("a") as notes:
            notes.write(f"{key}\n")
        return new

    Store.finish = noted  # type: ignore[method-assign]
    measure(spec, out)


def written(log: Path) -> Counter[str]:
    return Counter(log.read_text().split()) if log.exists() else Counter()


def ended(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


@needs_fork
def test_kills_of_the_only_process_change_nothing(spec: Path, expected: Table) -> None:
    draw = random.Random(0)
    kills = amid = runs = 0
    while kills < KILLS:
        out, log = spec.parent / f"killed_{runs}", spec.parent / f"killed_{runs}.log"
        while True:
            before = written(log).total()
            child = start(noting, spec, out, log)
            wanted = before + draw.randint(0, 40)
            wait_until(lambda: written(log).total() >= wanted or ended(child))  # noqa: B023
            time.sleep(draw.uniform(0, 0.02))
            if count(out) < VALUES or draw.random() < 0.5:  # else it writes its report
                os.kill(child, signal.SIGKILL)
            if end_of(child) == 0:
                break
            kills += 1
            amid += before < written(log).total() < VALUES
        assert table(out) == expected
        assert set(written(log).values()) == {1}  # nothing that was on disk is measured again
        runs += 1
    assert len(expected[0]) == VALUES
    assert amid >= 1  # the others: while it starts, loads, or writes its report


def start_workers_in_no_time() -> None:
    """Fork the workers of this process from a server that has imported what they need; call it in a fork only."""
    from distributed.utils import get_mp_context

    dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"})
    get_mp_context()
    multiprocessing.set_forkserver_preload(["distributed", "quotient_manifolds.compare"])


def on_workers(spec: Path, out: Path) -> None:
    start_workers_in_no_time()
    _SETTINGS["distributed.scheduler.allowed-failures"] = 100  # chance may kill three workers at one checkpoint
    measure(spec, out, workers=2)


@needs_fork
def test_kills_of_workers_and_of_who_leads_them_change_nothing(spec: Path, expected: Table) -> None:
    """A checkpoint whose worker died is measured by another, which finds in the store what was finished."""
    draw, out, kills = random.Random(1), spec.parent / "led", 0
    for leads in (True, False):
        child = start(on_workers, spec, out)
        begun = count(out)
        while count(out) < (VALUES * 2 // 3 if leads else VALUES) and not ended(child):
            time.sleep(draw.uniform(0, 0.2))
            if count(out) > begun and kills < 4 and (alive := workers_of(child)):
                with suppress(psutil.NoSuchProcess):
                    draw.choice(alive).kill()
                    kills, begun = kills + 1, count(out) + 5
        if leads:
            alive = workers_of(child)
            os.kill(child, signal.SIGKILL)
            assert end_of(child) == -signal.SIGKILL
            psutil.wait_procs(alive, timeout=60)
            assert not any(each.is_running() for each in alive)  # no worker is left behind
    assert end_of(child) == 0
    assert kills > 0
    assert table(out) == expected


def workers_of(child: int) -> list[psutil.Process]:
    """The processes that measure for this one: children of its fork server."""
    with suppress(psutil.NoSuchProcess):
        return [each for one in psutil.Process(child).children() for each in one.children()]
    return []


@needs_fork
def test_a_checkpoint_that_kills_its_workers_is_a_failure_and_the_rest_goes_on(tmp_path: Path) -> None:
    write_seeds(tmp_path, 3)
    spec = write_spec(tmp_path, MEASURES[2], head=HEAD.replace("LOADER", "deadly"))
    (tmp_path / "die").touch()
    assert end_of(start(joining, spec, tmp_path / "out")) == 0
    (tmp_path / "die").unlink()
    assert run(spec).failures.empty


def joining(spec: Path, out: Path) -> None:
    """Measure on workers of a running cluster, joined by its address, of which one checkpoint kills three."""
    from distributed import LocalCluster

    start_workers_in_no_time()
    dask.config.set(_SETTINGS)
    settings = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None, "silence_logs": 50}
    with LocalCluster(**settings) as cluster:
        found = run_comparison(spec, out, scheduler=cluster.scheduler_address)
    ((name, what, why),) = found.failures.itertuples(index=False, name=None)
    assert (name, what) == ("m_1", "")
    assert "All workers that measured it died" in why
    assert found.known == (4, 6)


class Lost:
    """A future whose worker dies between its end and the fetching of its result: another worker finds that again."""

    status = "lost"

    def add_done_callback(self, call: Callable[[Any], None]) -> None:
        call(self)

    def exception(self) -> None: ...

    def result(self) -> Any:
        return 4, []


def test_what_a_worker_had_found_when_it_died_is_found_again(spec: Path, tmp_path: Path) -> None:
    client = type("Client", (), {"nthreads": lambda self: {"one": 1}, "submit": lambda self, *args, **keywords: Lost()})
    jobs = jobs_of(read_spec(spec), "cpu")
    with Store(tmp_path / "store.sqlite") as store:
        made = _measure_on(client(), jobs, store, lambda what, done, total: None, local=False)
    assert made == {job.checkpoint.name: (4, []) for job in jobs}


def test_an_interruption_of_workers_leaves_what_was_measured(spec: Path, expected: Table, tmp_path: Path) -> None:
    """Where Ctrl-C goes to the workers too, as a terminal sends it; started anew by spawn, as on any system."""
    out, program = spec.parent / "interrupted", tmp_path / "program.py"
    call = f"run_comparison({str(spec)!r}, {str(out)!r}, workers=1)"
    program.write_text(f'from quotient_manifolds.compare import run_comparison\nif __name__ == "__main__": {call}\n')
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT)}
    running = subprocess.Popen([sys.executable, str(program)], env=environment, text=True, stderr=subprocess.PIPE)
    wait_until(lambda: count(out) >= 3)
    children = psutil.Process(running.pid).children(recursive=True)
    for each in [*children, running]:
        with suppress(psutil.NoSuchProcess):
            each.send_signal(signal.SIGINT)
    _, complained = running.communicate(timeout=180)
    assert complained.splitlines()[-1] == "KeyboardInterrupt"
    _, left = psutil.wait_procs(children, timeout=60)
    assert not any(each.status() != psutil.STATUS_ZOMBIE for each in left)
    measure(spec, out)
    assert table(out) == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": 1, "scheduler": "tcp://127.0.0.1:1"}, "not both"),
        ({"workers": 99, "device": "cuda"}, "workers must have a GPU each"),
    ],
)
def test_workers_that_cannot_be_had(spec: Path, tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run_comparison(spec, tmp_path, **options)
