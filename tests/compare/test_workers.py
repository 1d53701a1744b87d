"""Processes at one comparison: killed, interrupted, several at once, under torchrun; the table is always the same."""

from __future__ import annotations

import os
import random
import re
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
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from quotient_manifolds.cli.app import cli
from quotient_manifolds.compare import Comparison, Store, Worker, joined
from tests.zoos import HEAD, write_spec, write_zoo

MEASURES = (
    "measure: worst-case, geometry: inv, radius: [0.02, 0.05], steps: 1, warm_start: true",
    "measure: average-case, geometry: adaptive, radius: 0.05, samples: 2",
    "measure: gradient-norm, geometry: [euclidean, mix]",
)
UNITS = 4 * (4 + 1 + 5 * 4)  # of 4 models: scores on 4 batches and on test data, 5 measures on 4 batches
ROOT = Path(__file__).parents[2]
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


def measure(spec: Path, out: Path) -> int:
    """The exit code of the command, in this process."""
    return (
        CliRunner().invoke(cli, ["compare", str(spec), "--out", str(out), "--quiet"], catch_exceptions=False).exit_code
    )


def table(out: Path) -> Table:
    """Units and payloads, read without the package, and comparison.json; the store is sound and no claim left."""
    connection = sqlite3.connect(out / "store.sqlite")
    try:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("SELECT count(*) FROM claims").fetchone() == (0,)
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


def noting(spec: Path, out: Path, log: Path) -> None:
    """The command, with a note of every unit that it begins."""
    claim = Store.claim

    def noted(self: Store, units: Any, at_most: int | None = 1) -> Any:
        taken = claim(self, units, at_most)
        with log.open("a") as notes:
            notes.writelines(f"{each.key}\n" for each in taken)
        return taken

    Store.claim = noted  # type: ignore[method-assign]
    assert measure(spec, out) == 0


def begun(log: Path) -> Counter[str]:
    return Counter(log.read_text().split()) if log.exists() else Counter()


@needs_fork
def test_fifty_kills_at_random_moments_change_nothing(spec: Path, expected: Table) -> None:
    draw = random.Random(0)
    kills, amid, runs = 0, 0, 0
    while kills < 50:
        out, log, killed = spec.parent / f"killed_{runs}", spec.parent / f"killed_{runs}.log", 0
        last = 0  # kills when only the report is left
        while True:
            before = begun(log).total()
            child = start(noting, spec, out, log)
            if count(out) < UNITS:
                kill_after(child, log, before + draw.randint(0, 6), draw.uniform(0, 0.05))
            elif last < 3:
                kill_after(child, log, before, draw.uniform(0, 1))
            if end_of(child) == 0:
                break
            killed += 1
            last += count(out) == UNITS
            amid += begun(log).total() > before and count(out) < UNITS
        assert table(out) == expected
        # A kill costs the unit in flight, no more.
        assert set(begun(log)) == {row[0] for row in expected[0]}
        assert begun(log).total() <= UNITS + killed
        kills, runs = kills + killed, runs + 1
    assert len(expected[0]) == UNITS
    assert amid >= 25  # the others: while it starts, loads, or writes its report
    print(f"{kills} kills, {amid} of them amid measuring, in {runs} runs")


def kill_after(child: int, log: Path, units: int, seconds: float) -> None:
    """Kill the process when so many units have been begun, and some time has passed; if it has not ended by then."""
    while begun(log).total() < units and not os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        time.sleep(0.005)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)


@needs_fork
def test_two_processes_at_once_measure_every_unit_once(spec: Path, expected: Table) -> None:
    out = spec.parent / "two"
    logs = [spec.parent / "one.log", spec.parent / "other.log"]
    children = [start(noting, spec, out, log) for log in logs]
    assert [end_of(child) for child in children] == [0, 0]
    assert sum(map(begun, logs), Counter()) == Counter(row[0] for row in expected[0])
    assert all(begun(log).total() > UNITS // 5 for log in logs)
    assert measure(spec, out) == 0  # one of the two wrote its report before the other had finished
    assert table(out) == expected


@needs_fork
def test_what_a_killed_process_was_at_is_measured_by_the_one_beside_it(spec: Path, expected: Table) -> None:
    """Without being told: it has claims that nobody's lock stands behind."""
    out, log = spec.parent / "beside", spec.parent / "beside.log"

    def hang() -> None:
        with Store(out / "store.sqlite") as store:
            finish = store.finish
            seen = iter(range(99))
            Store.finish = lambda self, *what: finish(*what) if next(seen) < 10 else time.sleep(60)  # type: ignore[method-assign,assignment,return-value]
            measure(spec, out)

    stuck = start(hang)
    wait_until(lambda: count(out) == 10)
    worker = start(noting, spec, out, log)
    wait_until(lambda: count(out) >= UNITS // 2)
    os.kill(stuck, signal.SIGKILL)
    end_of(stuck)
    assert end_of(worker) == 0
    assert table(out) == expected
    assert begun(log).total() == UNITS - 10


def wait_until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


# Processes of their own.

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}


def command(spec: Path, out: Path) -> list[str]:
    return ["-m", "quotient_manifolds", "compare", str(spec), "--out", str(out)]


def torchrun(spec: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """Two processes on this host, met on a port that is free."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*run, *command(spec, out)], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=300
    )


def test_an_interrupted_command_says_how_to_go_on(spec: Path, expected: Table) -> None:
    out = spec.parent / "interrupted"
    running = subprocess.Popen(
        [sys.executable, *command(spec, out)],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: count(out) >= 3)
    running.send_signal(signal.SIGINT)
    said, complained = running.communicate(timeout=60)
    assert running.returncode == 130
    assert said == ""
    assert complained.endswith("Interrupted: what was measured is kept. The same command goes on from here.\n")
    assert "Traceback" not in complained
    assert 3 <= count(out) < UNITS
    assert measure(spec, out) == 0
    assert table(out) == expected


def test_torchrun_gives_the_table_of_one_process(spec: Path, expected: Table) -> None:
    out = spec.parent / "torchrun"
    done = torchrun(spec, out)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Report: ") == 1
    assert f"Measured now: {UNITS}, counting each batch. Known: 20 of 20 values." in done.stdout  # by both
    assert done.stdout.count("Measures over the checkpoints") == 1
    assert table(out) == expected


def test_a_rank_that_dies_leaves_the_store_to_the_next_run(spec: Path) -> None:
    deadly = write_spec(
        spec.parent, *MEASURES, head=HEAD.replace("models/*", "models/*, loader: tests.zoos:deadly"), name="deadly"
    )
    measure(deadly, spec.parent / "alive")
    out = spec.parent / "dead"
    (spec.parent / "die").touch()
    done = torchrun(deadly, out)
    (spec.parent / "die").unlink()
    assert done.returncode != 0
    assert "Signal 9 (SIGKILL)" in done.stderr
    assert 0 < count(out) < UNITS
    assert measure(deadly, out) == 0
    assert table(out) == table(spec.parent / "alive")


def test_what_all_ranks_find_wrong_is_said_once(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = spec.parent / "bad.yaml"
    bad.write_text(spec.read_text() + "no: 1\n")
    said = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        done = CliRunner().invoke(cli, ["compare", str(bad), "--out", str(spec.parent / "bad")])
        assert done.exit_code == 2
        said.append(done.output)
    assert re.search(r"bad\.yaml, line \d+: unknown key 'no'", said[0])
    assert said[1] == ""


# Alone.


def test_every_rank_begins_elsewhere_and_sees_all() -> None:
    for world in (1, 2, 3, 8, 100):
        orders = [Worker(rank, world, torch.device("cpu")).own_first(range(72)) for rank in range(world)]
        assert all(sorted(order) == list(range(72)) for order in orders)
        firsts = [order[0] for order in orders]
        assert firsts == sorted(firsts)
        assert len(set(firsts)) == min(world, 72)


def test_alone_there_is_nothing_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with joined(torch.device("cpu")) as worker:
        assert (worker.rank, worker.world, worker.leads, worker.total(7)) == (0, 1, True, 7)
    assert not torch.distributed.is_initialized()


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=r"GPU of its own, and this host has 1: give --nproc-per-node 1"):
        joined(torch.device("cuda")).__enter__()


def test_the_report_of_a_comparison_is_that_of_its_table(spec: Path, expected: Table) -> None:
    """`expected` is worth something: all values are there."""
    comparison = Comparison.load(spec.parent / "whole")
    assert comparison.known == (20, 20)
    assert len(comparison.rankings) == 5 * 2 * 4
    assert comparison.troubles == ()
