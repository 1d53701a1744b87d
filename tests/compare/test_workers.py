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
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import dask
import psutil
import pytest
import torch
from click.testing import CliRunner

from quotient_manifolds.cli.app import cli
from quotient_manifolds.compare import Comparison, Store, run, run_comparison
from tests.zoos import HEAD, write_spec, write_zoo

MEASURES = (
    "measure: worst-case, geometry: inv, radius: [0.02, 0.05], steps: 1, warm_start: true",
    "measure: average-case, geometry: adaptive, sigma: 0.05, samples: 2",
    "measure: gradient-norm, geometry: [euclidean, mix]",
)
UNITS = 4 * (4 + 1 + 5 * 4)  # of 4 models: scores on 4 batches and on test data, 5 measures on 4 batches
ROOT = Path(__file__).parents[2]
KILLS = 12  # of processes amid a comparison
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    """A folder in memory, where there is such a disk: every unit is synchronised twice."""
    disk = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=disk if os.access(disk, os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def spec(memory: Path) -> Path:
    write_zoo(memory, examples=32)
    return write_spec(memory, *MEASURES)


Table = tuple[list[tuple[Any, ...]], bytes]


@pytest.fixture(scope="module")
def expected(spec: Path) -> Table:
    """What one process that nobody disturbs writes."""
    measure(spec, spec.parent / "whole")
    return table(spec.parent / "whole")


def measure(spec: Path, out: Path, *options: str) -> int:
    """The exit code of the command, in this process, with one thread as a worker has."""
    torch.set_num_threads(1)
    line = ["compare", str(spec), "--out", str(out), "--quiet", *options]
    return CliRunner().invoke(cli, line, catch_exceptions=False).exit_code


def table(out: Path) -> Table:
    """Units and payloads, read without the package, and comparison.json; the store is sound."""
    connection = sqlite3.connect(out / "store.sqlite")
    try:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        columns = "key, checkpoint, measure, geometry, radius, batch, settings, payload"
        rows = connection.execute(f"SELECT {columns} FROM results ORDER BY key").fetchall()
    finally:
        connection.close()
    return rows, (out / "comparison.json").read_bytes()


def count(out: Path) -> int:
    """Units that are finished. (Opened for reading only: nothing is repaired.)"""
    try:
        connection = sqlite3.connect(f"file:{out / 'store.sqlite'}?mode=ro", uri=True, timeout=60)
        try:
            return int(connection.execute("SELECT count(*) FROM results").fetchone()[0])
        finally:
            connection.close()
    except sqlite3.OperationalError:  # not made yet
        return 0


# Forks of this process, which has imported everything.


def start(work: Callable[..., None], *arguments: Any) -> int:
    """The process id of a fork that does this work and exits with 0, or prints its error and exits with 1."""
    with warnings.catch_warnings():
        # pytest-xdist has threads; the child calls nothing that they could have locked.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        return child
    try:
        work(*arguments)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def end_of(child: int) -> int:
    """Its exit status, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def noting(spec: Path, out: Path, log: Path, workers: int = 0) -> None:
    """The command, with a note of every unit that is written."""
    finish = Store.finish

    def noted(self: Store, unit: Any, *what: Any) -> bool:
        new = finish(self, unit, *what)
        with log.open("a") as notes:
            notes.write(f"{unit.key}\n")
        return new

    Store.finish = noted  # type: ignore[method-assign]
    if workers:
        start_workers_in_no_time()
        run.ATTEMPTS = 1000  # chance kills three workers at one unit: what then happens is another test
    assert measure(spec, out, *(["--workers", str(workers)] if workers else [])) == 0


def start_workers_in_no_time() -> None:
    """Fork the workers of this process from a server that has imported what they need; call it in a fork only."""
    from distributed.utils import get_mp_context

    dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"})
    get_mp_context()
    multiprocessing.set_forkserver_preload(["distributed", "transformers.models.vit", "quotient_manifolds.compare"])


def written(log: Path) -> Counter[str]:
    return Counter(log.read_text().split()) if log.exists() else Counter()


@needs_fork
def test_kills_of_the_only_process_change_nothing(spec: Path, expected: Table) -> None:
    draw = random.Random(0)
    kills, amid, runs = 0, 0, 0
    while kills < KILLS:
        out, log, killed = spec.parent / f"killed_{runs}", spec.parent / f"killed_{runs}.log", 0
        last = 0  # kills when only the report is left
        while True:
            before = written(log).total()
            child = start(noting, spec, out, log)
            if count(out) < UNITS:
                kill_after(child, log, before + draw.randint(0, 6), draw.uniform(0, 0.05))
            elif last < 3:
                kill_after(child, log, before, draw.uniform(0, 1))
            if end_of(child) == 0:
                break
            killed += 1
            last += count(out) == UNITS
            amid += written(log).total() > before and count(out) < UNITS
        assert table(out) == expected
        assert set(written(log).values()) == {1}  # nothing that was on disk is measured again
        kills, runs = kills + killed, runs + 1
    assert len(expected[0]) == UNITS
    assert amid >= KILLS // 3  # the others: while it starts, loads, or writes its report
    print(f"{kills} kills, {amid} of them amid measuring, in {runs} runs")


def kill_after(child: int, log: Path, units: int, seconds: float) -> None:
    """Kill the process when so many units have been written, and some time has passed, if it has not ended by then."""
    while written(log).total() < units and not os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        time.sleep(0.005)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)


def workers_of(child: int) -> list[psutil.Process]:
    """The processes that measure for this one: children of its fork server."""
    with suppress(psutil.NoSuchProcess):
        return [each for one in psutil.Process(child).children() for each in one.children()]
    return []


@needs_fork
def test_kills_of_workers_and_of_who_leads_them_change_nothing(spec: Path, expected: Table) -> None:
    """Who leads leaves no worker behind."""
    draw = random.Random(1)
    kills = runs = 0
    while kills < KILLS // 2:
        kills += killing_workers(spec, spec.parent / f"led_{runs}", draw)
        assert table(spec.parent / f"led_{runs}") == expected
        runs += 1
    print(f"{kills} kills of workers, {2 * runs} of who led them")


def killing_workers(spec: Path, out: Path, draw: random.Random) -> int:
    """Measure all, and kill workers meanwhile, and twice who leads them; how many workers were killed."""
    log, kills = out.with_suffix(".log"), 0
    for leads in (True, True, False):
        child = start(noting, spec, out, log, 2)
        begun = written(log).total()
        wait_until(lambda: written(log).total() > begun)  # noqa: B023
        while written(log).total() < begun + 15:
            time.sleep(draw.uniform(0, 0.02))
            if kills < KILLS // 4 * (2 - leads) and (alive := workers_of(child)):
                with suppress(psutil.NoSuchProcess):
                    draw.choice(alive).kill()
                    kills += 1
                    seen = written(log).total()
                    wait_until(lambda: written(log).total() > seen or count(out) == UNITS)  # noqa: B023
        if leads:
            alive = workers_of(child)
            os.kill(child, signal.SIGKILL)
            assert end_of(child) == -signal.SIGKILL
            psutil.wait_procs(alive, timeout=60)
            assert not any(each.is_running() for each in alive)
    assert end_of(child) == 0
    return kills


def wait_until(holds: Callable[[], bool], seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


@needs_fork
def test_a_second_process_says_that_there_is_a_first(spec: Path, expected: Table) -> None:
    out = spec.parent / "second"
    with Store(out / "store.sqlite"):
        done = CliRunner().invoke(cli, ["compare", str(spec), "--out", str(out)])
        assert done.exit_code == 2
        (said,) = done.stderr.strip().splitlines()
        assert "Another process is measuring into" in said
        with Store(out / "store.sqlite", make=False) as reader:
            assert reader.results() == []
    assert measure(spec, out) == 0
    assert table(out) == expected


# Processes of their own.

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}


def command(spec: Path, out: Path, *options: str) -> subprocess.Popen[str]:
    line = ["-m", "quotient_manifolds", "compare", str(spec), "--out", str(out), *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *line], cwd=ROOT, env=ENVIRONMENT, text=True, **pipes)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize("options", [[], ["--workers", "2"]], ids=["alone", "workers"])
def test_an_interrupted_command_says_how_to_go_on(spec: Path, expected: Table, options: list[str]) -> None:
    """Also where Ctrl-C goes to the workers too, as a terminal sends it; started anew by spawn, as on any system."""
    out = spec.parent / f"interrupted{len(options)}"
    running = command(spec, out, *options)
    wait_until(lambda: count(out) >= 3)
    children = psutil.Process(running.pid).children(recursive=True)
    for each in [*children, running]:
        each.send_signal(signal.SIGINT)
    said, complained = running.communicate(timeout=180)
    assert running.returncode == 130, complained
    assert said == ""
    assert complained.endswith("Interrupted: what was measured is kept. The same command goes on from here.\n")
    assert "Traceback" not in complained
    assert 3 <= count(out) < UNITS
    _, left = psutil.wait_procs(children, timeout=60)
    assert not any(each.status() != psutil.STATUS_ZOMBIE for each in left)
    assert measure(spec, out) == 0
    assert table(out) == expected


@needs_fork
def test_a_unit_that_kills_its_workers_is_a_failure_and_the_rest_goes_on(spec: Path) -> None:
    deadly, out = write_deadly(spec.parent), spec.parent / "dead"
    assert end_of(start(joining, deadly, out)) == 0
    (spec.parent / "die").unlink()
    assert run_comparison(deadly, out).failures == ()


def write_deadly(folder: Path) -> Path:
    """Write a spec of two models, the second of which kills its worker whenever it is measured on its one batch."""
    head = HEAD.replace("models/*", "'models/m_[01]', loader: tests.zoos:deadly").replace("size: 8", "size: 32")
    (folder / "die").touch()
    return write_spec(folder, "measure: gradient-norm, geometry: euclidean", head=head, name="deadly")


def joining(spec: Path, out: Path) -> None:
    """Measure on workers of a running cluster, joined by its address, of which one unit kills three."""
    from distributed import LocalCluster

    start_workers_in_no_time()
    # Else a worker that dies again, some seconds after it died, is not started again.
    dask.config.set({"distributed.scheduler.allowed-failures": 0, "distributed.deploy.lost-worker-timeout": "1 day"})
    settings = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None, "silence_logs": 50}
    with LocalCluster(**settings) as running:
        found = run_comparison(spec, out, scheduler=running.scheduler_address)
    (failed,) = found.failure_groups
    assert failed.checkpoints == ("m_1",)
    assert "3 workers died over it" in failed.message


@needs_fork
def test_a_cluster_of_dead_workers_is_not_waited_for_without_end(spec: Path) -> None:
    assert end_of(start(without_new_workers, spec, spec.parent / "none_left")) == 0


def without_new_workers(spec: Path, out: Path) -> None:
    """The first worker kills itself, and Dask starts none in its place."""
    from distributed import Nanny

    from quotient_manifolds.compare import cluster

    start_workers_in_no_time()
    cluster.PATIENCE = 1.0
    Nanny._on_worker_exit_sync = lambda self, exitcode: None
    with pytest.raises(ConnectionError, match="All workers have died"):
        run_comparison(write_deadly(spec.parent), out, workers=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": 0}, "workers must be a whole number, at least 1"),
        ({"workers": True}, "workers must be a whole number, at least 1"),
        ({"workers": "2"}, "workers must be a whole number, at least 1"),
        ({"scheduler": 8786}, "scheduler must be the address of one"),
        ({"workers": 1, "scheduler": "tcp://127.0.0.1:1"}, "not both"),
        ({"workers": 99, "device": "cuda"}, "Every worker needs a GPU of its own"),
        ({"scheduler": "nowhere"}, "No Dask scheduler could be joined at nowhere"),
    ],
)
def test_workers_that_cannot_be_had(spec: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run_comparison(spec, spec.parent / "none", **options)


@pytest.mark.parametrize("address", ["", "nowhere", "tcp://127.0.0.1", "http://127.0.0.1:8786", "ucx://node:1"])
def test_an_address_that_is_none_is_refused_at_once(spec: Path, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Before a client is made of it, which would wait for a minute when it is thrown away."""
    monkeypatch.setattr("distributed.Client", None)
    with pytest.raises(ValueError, match="No Dask scheduler could be joined"):
        run_comparison(spec, spec.parent / "none", scheduler=address)


def test_a_scheduler_that_ends_amid_measuring_is_told_in_one_sentence(spec: Path) -> None:
    out = spec.parent / "no_scheduler"
    with subprocess.Popen(
        [
            sys.executable,
            "-m",
            "distributed.cli.dask_scheduler",
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--no-dashboard",
        ],
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
    ) as scheduler:
        try:
            assert scheduler.stderr is not None
            said = next(line for line in scheduler.stderr if "Scheduler at:" in line)
            running = command(spec, out, "--quiet", "--scheduler", said.split()[-1])
            while "Receive client connection" not in next(scheduler.stderr):
                pass
            time.sleep(2)  # it has been given the jobs
        finally:
            scheduler.kill()
    _, complained = running.communicate(timeout=120)
    assert running.returncode == 2
    assert complained == "Error: The Dask scheduler is gone. What was measured is kept: run again.\n"


def test_a_scheduler_that_ends_while_it_is_asked_for_its_workers() -> None:
    from quotient_manifolds.compare import cluster

    class Client:
        def nthreads(self) -> None:
            raise OSError("in <TCP (closed)>: Connection reset by peer")

    with pytest.raises(ConnectionError, match="The Dask scheduler is gone"):
        _ = cluster.Cluster(Client(), local=False).size


def test_a_script_that_its_workers_would_run_is_told_so(spec: Path, tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    call = f"run_comparison({str(spec)!r}, {str(tmp_path / 'out')!r}, workers=1)"
    script.write_text(f"from quotient_manifolds.compare import run_comparison\n{call}\n")
    environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ValueError: No worker could be started")
    assert "__main__" in last


def test_dask_is_wanted_for_workers_only(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ImportError, match=r'pip install "quotient-manifolds\[distributed\]"'):
        run_comparison(spec, spec.parent / "none", workers=1)


def test_the_report_of_a_comparison_is_that_of_its_table(spec: Path, expected: Table) -> None:
    """`expected` is worth something: all values are there."""
    comparison = Comparison.load(spec.parent / "whole")
    assert comparison.known == (20, 20)
    assert len(comparison.rankings) == 5 * 2 * 4
    assert comparison.failures == ()
