"""The store of a zoo: what is finished stays, is measured once, and is the same number when it is read again."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
import random
import shutil
import signal
import sqlite3
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quotient_manifolds.compare.database import FORMAT
from quotient_manifolds.compare.store import Result, Store, StoreError, Unit, unit_key

FINITE = st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | FINITE | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")


def unit(batch: int = 0, **changes: Any) -> Unit:
    identity: dict[str, Any] = {
        "checkpoint": "model_0",
        "measure": "worst-case sharpness",
        "geometry": "inv",
        "radius": 0.1,
        "settings": {"steps": 20},
    } | changes
    return Unit(unit_key(identity | {"batch": batch}), batch=batch, **identity)


def bits(value: Any) -> Any:
    """`value` with every float as its bytes, so that -0.0 differs from 0.0 and 1.0 from 1."""
    if isinstance(value, dict):
        return {key: bits(each) for key, each in value.items()}
    if isinstance(value, list):
        return [bits(each) for each in value]
    return struct.pack("<d", value) if isinstance(value, float) else (type(value), value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "zoo.sqlite"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with Store(path) as opened:
        yield opened


# What is kept.


def test_a_finished_unit_is_found_again_by_another_opening(path: Path) -> None:
    first, second = unit(0), unit(1, radius=None, checkpoint="модель 一/ö")
    with Store(path) as store:
        assert store.finish(first, {"value": 0.1, "losses": (1.0, 2.0)}, seconds=1.5)
    with Store(path, make=False) as store:
        assert store.finished([first.key, second.key]) == {first.key}
        assert store.get(first.key) == {"value": 0.1, "losses": [1.0, 2.0]}
        assert store.get(second.key) is None
        store.finish(second, {"value": 0.2}, 0.5)
        assert store.results() == [
            Result(first, {"value": 0.1, "losses": [1.0, 2.0]}, 1.5),
            Result(second, {"value": 0.2}, 0.5),
        ]


def test_the_first_result_stays(store: Store) -> None:
    assert store.finish(unit(), {"value": 1.0}, 1.0)
    assert not store.finish(unit(), {"value": 2.0}, 2.0)
    assert [(result.payload, result.seconds) for result in store.results()] == [({"value": 1.0}, 1.0)]


def test_sqlite_is_set_to_survive_a_loss_of_power_and_to_wait(path: Path) -> None:
    with Store(path, patience=7.0) as store:
        connection = store._database._connection
        assert connection is not None
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("truncate",)
        assert connection.execute("PRAGMA busy_timeout").fetchone() == (7000,)


def test_results_of_units_come_in_their_order_and_under_their_names(store: Store) -> None:
    for batch in range(3):
        store.finish(unit(batch), {"value": float(batch)}, 1.0)
    asked = [replace(unit(2), checkpoint="renamed"), unit(7), unit(0)]
    assert [(result.unit, result.payload["value"]) for result in store.results(asked)] == [
        (asked[0], 2.0),
        (asked[2], 0.0),
    ]


def test_results_are_ordered_by_identity_not_by_time(store: Store) -> None:
    units = [unit(batch, checkpoint=name, radius=radius) for name in "ab" for radius in (0.1, 0.2) for batch in (0, 1)]
    for each in random.Random(0).sample(units, len(units)):
        store.finish(each, {"value": 1.0}, 1.0)
    assert [result.unit for result in store.results()] == units


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store(tmp_path_factory.mktemp("scratch") / "zoo.sqlite") as opened:
        yield opened


@given(payload=st.dictionaries(TEXT, JSON, max_size=4), radius=FINITE.map(lambda x: x + 0.0), name=TEXT)
def test_what_is_kept_comes_back_bit_for_bit(scratch: Store, payload: dict[str, Any], radius: float, name: str) -> None:
    kept = unit(radius=radius, checkpoint=name, settings={"payload": payload, "name": name})
    scratch.finish(kept, payload, abs(radius))
    (result,) = [result for result in scratch.results() if result.unit.key == kept.key]
    assert bits(result.payload) == bits(payload)
    assert bits(result.unit.settings) == bits(kept.settings)
    assert (result.unit, bits(result.unit.radius), bits(result.seconds)) == (kept, bits(radius), bits(abs(radius)))
    scratch.remember("payload", payload)
    assert bits(scratch.recall("payload")) == bits(payload)


def test_numbers_of_numpy_keep_their_bits(store: Store) -> None:
    value = np.float64(0.1) + np.float64(0.2)
    store.finish(unit(), {"value": value}, 1.0)
    assert bits(store.get(unit().key)) == bits({"value": float(value)})


@pytest.mark.parametrize(
    ("payload", "culprit"),
    [
        ({"value": math.nan}, r"payload\.value must be plain JSON .* Found float nan"),
        ({"losses": [1.0, -math.inf]}, r"payload\.losses\[1\] .* Found float -inf"),
        ({"value": torch.tensor(1.0)}, r"payload\.value .* Found Tensor tensor\(1\.\)"),
        ({"value": np.float32(1)}, r"payload\.value .* Found float32"),
        ({"a": {3: 1.0}}, r"payload\.a .* Found dict \{3: 1\.0\}"),
        ({"a": "\udcff"}, r"payload\.a .* Found str '\\udcff'"),
    ],
)
def test_what_would_not_come_back_is_refused(store: Store, payload: dict[str, Any], culprit: str) -> None:
    assert store.claim([unit()]) == [unit()]
    with pytest.raises(ValueError, match=culprit):
        store.finish(unit(), payload, 1.0)
    assert store.results() == []


def test_a_unit_itself_must_be_plain() -> None:
    with pytest.raises(ValueError, match=r"radius must be plain JSON .* Found float inf"):
        unit(radius=math.inf)
    with pytest.raises(ValueError, match=r"checkpoint must be plain JSON"):
        replace(unit(), checkpoint=os.fsdecode(b"\xff"))


# Keys.


@given(mapping=st.dictionaries(TEXT, JSON, max_size=4), seed=st.randoms(use_true_random=False))
def test_a_key_does_not_depend_on_the_order(mapping: dict[str, Any], seed: random.Random) -> None:
    names = list(mapping)
    seed.shuffle(names)
    assert unit_key({name: mapping[name] for name in names}) == unit_key(mapping)


@given(first=st.dictionaries(TEXT, JSON, max_size=2), second=st.dictionaries(TEXT, JSON, max_size=2))
def test_keys_are_equal_exactly_where_mappings_are(first: dict[str, Any], second: dict[str, Any]) -> None:
    for a in (first, second):
        for b in (second, {**first, "more": None}):
            # Python says True == 1; JSON does not, and `repr` of a bool differs from that of a number.
            same = a == b and _bools(a) == _bools(b)
            assert (unit_key(a) == unit_key(b)) == same


def _bools(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _bools(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_bools(each) for each in value]
    return isinstance(value, bool)


def test_a_key_is_the_hash_of_canonical_json() -> None:
    text = r"""{"a":1,"b":[null,"\u00f6"],"c":0.1}"""
    assert unit_key({"c": 0.1, "b": (None, "ö"), "a": 1.0}) == hashlib.sha256(text.encode()).hexdigest()
    with pytest.raises(ValueError, match=r"deciding\.radius must be plain JSON .* Found float nan"):
        unit_key({"radius": math.nan})


# Claims.


def test_a_claim_is_of_one_store_at_a_time(path: Path) -> None:
    units = [unit(batch) for batch in range(4)]
    with Store(path) as one, Store(path) as two:
        one.finish(units[0], {"value": 0.0}, 1.0)
        assert one.claim(units) == [units[1]]
        assert one.claim(units[:2]) == []
        assert two.claim(units[:2]) == []
        assert two.claimed(units) == {units[1].key: f"process {os.getpid()} on {os.uname().nodename}"}
        assert one.claimed(units) == {}
        assert two.claim(units, at_most=None) == units[2:]
        one.finish(units[1], {"value": 1.0}, 1.0)
        assert two.claimed(units) == {}
        two.close()
        assert one.claim([*units, *units], at_most=None) == units[2:]


def test_a_unit_that_was_finished_a_moment_ago_is_not_taken(store: Store) -> None:
    store.finish(unit(), {"value": 1.0}, 1.0)
    assert store._claims._insert([unit(), unit(1)]) == [unit(1)]  # from a list of free units that is out of date


def test_no_lock_files_stay_behind(path: Path) -> None:
    with Store(path) as one, Store(path) as two:
        one.claim([unit()])
        two.claim([unit()])
        assert len(list(lives(path))) == 2
    assert list(lives(path)) == []


def lives(path: Path) -> Iterator[Path]:
    return path.with_name(f"{path.name}.living").iterdir()


def test_a_failure_is_tried_again_by_the_next_run_only(path: Path) -> None:
    with Store(path) as one, Store(path) as two:
        one.claim([unit()])
        one.fail(unit(), "loss is nan")
        assert one.claim([unit(), unit(1)]) == [unit(1)]
        assert two.claim([unit()]) == []
        assert two.claimed([unit()]) == {}
        two.fail(unit(5), "later")
    with Store(path) as rerun:
        assert rerun.finished([unit().key]) == set()
        assert rerun.claim([unit(), unit(5)], at_most=None) == [unit(), unit(5)]


# Failures.


def test_a_failure_lasts_until_a_success(store: Store) -> None:
    store.fail("model_0", "cannot be read")
    store.fail("model_1", "no such file \udcff")
    store.fail(unit(), "first")
    store.fail(unit(), "second")
    assert [(each.checkpoint, each.unit, each.message) for each in store.failures()] == [
        ("model_0", None, "cannot be read"),
        ("model_1", None, "no such file \\udcff"),
        ("model_0", unit(), "second"),
    ]
    store.finish(unit(), {"value": 1.0}, 1.0)
    assert [each.checkpoint for each in store.failures()] == ["model_1"]
    store.fail(unit(), "too late")
    store.mend("model_1")
    assert store.failures() == []
    assert store.get(unit().key) == {"value": 1.0}


def test_a_checkpoint_that_failed_does_not_hide_units(path: Path) -> None:
    with Store(path) as one, Store(path) as two:
        one.fail("model_7", "cannot be read")
        assert two.claim([unit()]) == [unit()]


def test_the_newest_memory_counts(store: Store) -> None:
    assert store.recall("file") is None
    store.remember("file", {"weights": "a", "batches": ["b"]})
    store.remember("file", {"weights": "c", "batches": []})
    assert store.recall("file") == {"weights": "c", "batches": []}


# Processes: forked here, so that each is ready in milliseconds.


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


def kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    assert end_of(child) in (-signal.SIGKILL, 0)  # 0: it was done before


def value_of(each: Unit) -> dict[str, Any]:
    """Stands for a measurement: full of digits, and the same in every process."""
    draw = random.Random(each.key)
    return {"value": draw.random(), "losses": [draw.gauss(0, 1e-5) for _ in range(20)]}


def fill(path: Path, units: Sequence[Unit], log: Path, measuring: Callable[[], Any] = lambda: None) -> None:
    """A worker: measures what is free, waits for what others have claimed, until nothing is left; notes all."""
    with Store(path) as store, log.open("a") as notes:
        while len(store.finished([each.key for each in units])) < len(units):
            for each in store.claim(units):
                notes.write(f"{each.key}\n")
                notes.flush()
                measuring()
                store.finish(each, value_of(each), seconds=float(each.batch))


def measured(log: Path) -> Counter[str]:
    return Counter(log.read_text().split()) if log.exists() else Counter()


def content(path: Path) -> list[tuple[Any, ...]]:
    """The table as it stands in the file, read without the package, and that the file is sound."""
    connection = sqlite3.connect(path)
    try:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("SELECT count(*) FROM claims").fetchone() == (0,)
        return connection.execute("SELECT * FROM results ORDER BY key").fetchall()
    finally:
        connection.close()


@pytest.fixture
def units() -> list[Unit]:
    return [unit(batch, checkpoint=f"model_{batch // 8}") for batch in range(48)]


@needs_fork
def test_sixty_kills_at_random_moments_change_nothing(tmp_path: Path, units: list[Unit]) -> None:
    whole = tmp_path / "whole.sqlite"
    fill(whole, units, tmp_path / "whole.log")
    expected = content(whole)
    draw, kills, runs = random.Random(0), 0, 0
    while kills < 60:
        path, log, killed = tmp_path / f"{runs}.sqlite", tmp_path / f"{runs}.log", 0
        while True:
            child = start(fill, path, units, log)
            time.sleep(draw.uniform(0, 0.06))
            os.kill(child, signal.SIGKILL)
            if end_of(child) == 0:
                break
            killed += 1
        assert content(path) == expected
        # A kill costs the unit in flight, no more.
        assert set(measured(log)) == {each.key for each in units}
        assert measured(log).total() <= len(units) + killed
        kills, runs = kills + killed, runs + 1


@needs_fork
@pytest.mark.parametrize("step", range(7))
def test_killed_at_every_step_of_finishing(path: Path, step: int) -> None:
    def finish_and_die() -> None:
        store = Store(path)
        store.claim([unit()])
        store.fail(unit(1), "earlier")
        steps = iter(range(7))
        connection = store._database._connection
        assert connection is not None
        connection.set_trace_callback(lambda _: os.kill(os.getpid(), signal.SIGKILL) if next(steps) == step else None)
        store.finish(unit(), {"value": 1.0}, 1.0)

    ended = end_of(start(finish_and_die))
    with Store(path) as store:
        assert store.claim([unit()]) == ([] if ended == 0 else [unit()])
        assert len(store.results()) == (1 if ended == 0 else 0)
        assert len(store.failures()) == 1
    assert (ended == 0) == (step >= 6)


@needs_fork
@pytest.mark.parametrize("workers", [2, 4])
def test_workers_at_once_measure_every_unit_once(tmp_path: Path, units: list[Unit], workers: int) -> None:
    path, logs = tmp_path / "zoo.sqlite", [tmp_path / f"{worker}.log" for worker in range(workers)]

    def together() -> None:  # no first unit ends before every worker has one
        wait_until(lambda: all(measured(log) for log in logs))
        time.sleep(0.002)

    children = [start(fill, path, units, log, together) for log in logs]
    assert [end_of(child) for child in children] == [0] * workers
    assert sum(map(measured, logs), Counter()) == Counter(each.key for each in units)
    fill(tmp_path / "alone.sqlite", units, tmp_path / "alone.log")
    assert content(path) == content(tmp_path / "alone.sqlite")


@needs_fork
@pytest.mark.parametrize("workers", [2, 4])
def test_what_a_killed_worker_had_claimed_is_measured_by_the_others(
    tmp_path: Path, units: list[Unit], workers: int
) -> None:
    path, logs = tmp_path / "zoo.sqlite", [tmp_path / f"{worker}.log" for worker in range(workers)]
    victim = start(fill, path, units, logs[0], lambda: time.sleep(60))  # at its first unit until it is killed
    wait_until(lambda: measured(logs[0]).total() == 1)
    others = [start(fill, path, units, log, lambda: time.sleep(0.002)) for log in logs[1:]]
    wait_until(lambda: sum(measured(log).total() for log in logs[1:]) >= len(units) // 2)
    kill(victim)
    assert [end_of(child) for child in others] == [0] * (workers - 1)
    assert sum(map(measured, logs[1:]), Counter()) == Counter(each.key for each in units)
    assert len(content(path)) == len(units)
    assert list(lives(path)) == []


@needs_fork
def test_a_rerun_begins_with_what_was_in_flight(tmp_path: Path, path: Path, units: list[Unit]) -> None:
    child = start(fill, path, units, tmp_path / "log", lambda: time.sleep(60))
    wait_until(lambda: measured(tmp_path / "log").total() == 1)
    kill(child)
    with Store(path) as store:
        assert list(store.claimed(units)) == [units[0].key]
        assert store.claim(units) == [units[0]]


@needs_fork
def test_a_worker_that_is_stopped_keeps_its_claim(tmp_path: Path, path: Path) -> None:
    child = start(fill, path, [unit()], tmp_path / "log", lambda: time.sleep(60))
    wait_until(lambda: measured(tmp_path / "log").total() == 1)
    os.kill(child, signal.SIGSTOP)
    with Store(path) as store:
        assert store.claim([unit()]) == []
        assert list(store.claimed([unit()]).values()) == [f"process {child} on {os.uname().nodename}"]
        kill(child)
        assert store.claim([unit()]) == [unit()]


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


@needs_fork
def test_a_child_that_outlives_its_parent_does_not_hold_its_claims(tmp_path: Path, path: Path) -> None:
    note = tmp_path / "note"

    def claim_and_fork() -> None:
        store = Store(path)
        store.claim([unit()])
        child = start(time.sleep, 60)
        note.write_text(f"{child}\n")
        time.sleep(60)

    parent = start(claim_and_fork)
    wait_until(lambda: note.exists() and note.read_text().endswith("\n"))
    with Store(path) as store:
        assert store.claim([unit()]) == []
        kill(parent)
        assert store.claim([unit()]) == [unit()]
    os.kill(int(note.read_text()), signal.SIGKILL)


@needs_fork
def test_a_forked_child_can_neither_use_nor_lose_what_its_parent_has(path: Path, capfd: Any) -> None:
    def misuse(store: Store) -> None:
        store.close()
        living = set(lives(path))
        for use in (lambda: store.claim([unit(1)]), lambda: store.finish(unit(), {"value": 1.0}, 1.0), store.failures):
            with pytest.raises(StoreError, match=r"was opened by process \d+, .* open it anew in process"):
                use()
        assert set(lives(path)) == living  # it has locked nothing under its parent's name
        sys.exit(3)  # an exit that runs Python's finalisers

    with Store(path) as store, Store(path) as other:
        assert store.claim([unit()]) == [unit()]
        assert end_of(start(misuse, store)) == 1
        assert "SystemExit: 3" in capfd.readouterr().err
        assert other.claim([unit()]) == []
        assert store.finish(unit(), {"value": 1.0}, 1.0)
    with Store(path) as unclaimed:
        assert end_of(start(misuse, unclaimed)) == 1  # refused before there is a claim, too
        assert "SystemExit: 3" in capfd.readouterr().err
        assert unclaimed.claim([unit(2)]) == [unit(2)]


# What can be wrong with a file.


def test_a_full_disk_loses_nothing(path: Path) -> None:
    with Store(path) as store:
        store.finish(unit(0), {"value": 0.1}, 1.0)
        connection = store._database._connection
        assert connection is not None
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")
        assert store.claim([unit(1)]) == [unit(1)]
        with pytest.raises(StoreError, match=r"zoo\.sqlite has no room left on its disk: free some and run again"):
            store.finish(unit(1), {"losses": [0.1] * 10_000}, 1.0)
        assert store.get(unit(0).key) == {"value": 0.1}
        assert store.finished([unit(1).key]) == set()
    with Store(path) as store:
        assert store.claim([unit(0), unit(1)]) == [unit(1)]
        assert store.finish(unit(1), {"losses": [0.1] * 10_000}, 1.0)


@pytest.mark.parametrize("content", [b"checkpoint,value\nmodel_0,0.1\n" * 50, os.urandom(5000)], ids=["text", "noise"])
def test_a_file_that_is_no_store(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"zoo\.sqlite is not a store: give the path of one"):
        Store(path)
    assert path.read_bytes() == content


def test_another_programs_database(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE results (key TEXT)")
    connection.commit()
    connection.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match=r"zoo\.sqlite is not a store: give the path of one"):
        Store(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(("found", "age"), [(FORMAT + 1, "a newer"), (FORMAT - 1, "an older")])
def test_a_store_of_another_format(path: Path, found: int, age: str) -> None:
    Store(path).close()
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {found}")
    connection.close()
    with pytest.raises(
        StoreError, match=rf"Expected a store of format {FORMAT}, found format {found} in .* {age} version"
    ):
        Store(path)


@pytest.mark.parametrize("harm", ["cut short", "overwritten"])
def test_a_damaged_store_is_found_out_before_anything_is_measured(path: Path, harm: str) -> None:
    with Store(path) as store:
        for batch in range(50):
            store.finish(unit(batch), {"losses": [0.1] * 200}, 1.0)
    whole = path.read_bytes()
    middle = len(whole) // 2 // 4096 * 4096
    path.write_bytes(
        whole[:middle] if harm == "cut short" else whole[:middle] + b"\xa5" * 8192 + whole[middle + 8192 :]
    )
    with pytest.raises(StoreError, match=r"zoo\.sqlite is damaged: restore a copy, or move it away and run again"):
        Store(path)


def test_a_damaged_payload_is_a_sentence(path: Path) -> None:
    with Store(path) as store:
        store.finish(unit(), {"value": 1.0}, 1.0)
        with store._database.transaction() as connection:
            connection.execute("UPDATE results SET payload = '{\"value\": 1.'")
        with pytest.raises(StoreError, match=r"zoo\.sqlite is damaged \(.*\): restore a copy"):
            store.get(unit().key)


def test_a_store_that_is_locked_for_too_long(path: Path) -> None:
    with Store(path) as one, Store(path, patience=0.05) as two:
        two.claim([unit()])
        with one._database.transaction():
            with pytest.raises(StoreError, match=r"has been locked by another process for longer than 0\.05 s"):
                two.finish(unit(), {"value": 1.0}, 1.0)
            assert two.results() == []
        assert two.finish(unit(), {"value": 1.0}, 1.0)


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that other users can reach, which pytest's own are not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@needs_fork
def test_a_place_that_cannot_be_written(public: Path, capfd: Any) -> None:
    folder = public / "zoo"
    with Store(folder / "zoo.sqlite") as store:
        store.finish(unit(), {"value": 0.1}, 1.0)

    def read_and_try_to_write() -> None:
        if os.getuid() == 0:
            os.setuid(65534)  # root may write anywhere
        with Store(folder / "zoo.sqlite") as store:
            assert store.results()[0].payload == {"value": 0.1}
            with pytest.raises(StoreError, match=r"zoo\.sqlite cannot be written: allow writing"):
                store.finish(unit(1), {"value": 0.2}, 1.0)
            with pytest.raises(
                StoreError, match=r"No file could be locked in .*zoo\.sqlite\.living .*Permission denied"
            ):
                store.claim([unit(1)])
        with pytest.raises(StoreError, match=r"new\.sqlite cannot be opened: check that .* its folder exists"):
            Store(folder / "new.sqlite")

    folder.chmod(0o555)
    (folder / "zoo.sqlite").chmod(0o444)
    ended = end_of(start(read_and_try_to_write))
    folder.chmod(0o755)
    assert ended == 0, capfd.readouterr().err


def test_places_where_no_store_can_be(path: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"There is no store at .*zoo\.sqlite\."):
        Store(path, make=False)
    assert not path.exists()
    with pytest.raises(StoreError, match=r"cannot be opened: check that it is a file"):
        Store(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot be opened: check that it is a file and that its folder exists"):
        Store(tmp_path / "file" / "zoo.sqlite")
    with Store(tmp_path / "new" / "deeper" / "zoo.sqlite") as store:  # folders are made
        assert store.results() == []


def test_an_empty_file_is_a_new_store_but_not_an_old_one(path: Path) -> None:
    path.touch()
    with pytest.raises(StoreError, match="is not a store"):
        Store(path, make=False)
    with Store(path) as store:
        assert store.results() == []


def test_a_closed_store_says_so(path: Path) -> None:
    store = Store(path)
    store.close()
    store.close()
    with pytest.raises(StoreError, match="is closed: open it again"):
        store.claim([unit()])


def test_an_error_or_ctrl_c_gives_claims_back(path: Path) -> None:
    def interrupted() -> None:
        with Store(path) as store:
            store.claim([unit()])
            with store._database.transaction() as connection:
                connection.execute("INSERT INTO memory VALUES ('half', '1')")
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert content(path) == []
    with Store(path) as store:
        assert store.recall("half") is None


def test_a_copy_of_a_store_in_use_can_be_used(path: Path, tmp_path: Path) -> None:
    with Store(path) as store:
        store.claim([unit()])
        copy = tmp_path / "elsewhere" / "copy.sqlite"
        copy.parent.mkdir()
        shutil.copy(path, copy)
        with Store(copy) as other:
            assert other.claim([unit()]) == [unit()]


# Tables and files.


@pytest.fixture
def mixed(store: Store) -> Store:
    """Results with every kind of value: text of many scripts, None, whole numbers beyond floats, lists, mixtures."""
    big = 2**53 + 1
    first = {
        "value": 0.1 + 0.2,
        "passes": 7,
        "seed": big,
        "exact": True,
        "mix": 1,
        "losses": [0.1, 1e-300],
        "note": 'ö, "x"\n',
    }
    second = {
        "value": -0.0,
        "passes": None,
        "seed": 3,
        "exact": None,
        "mix": "eins",
        "losses": [],
        "extra": {"a": 5e-324},
    }
    store.finish(unit(0, checkpoint="模型/α,β", radius=None, settings={"eta": 0.01, "name": "a"}), first, 0.1)
    store.finish(unit(1, settings={"eta": None, "measure": 3, "nested": {"x": 1.7976931348623157e308}}), second, 2 / 3)
    return store


COLUMNS = [
    *("key", "checkpoint", "measure", "geometry", "radius", "batch"),
    *("settings.eta", "settings.measure", "settings.nested.x", "value", "passes", "seed", "exact", "mix", "losses"),
    *("extra.a", "seconds", "settings.name", "note"),
]


def test_a_frame_has_a_row_a_unit_and_numbers_as_numbers(mixed: Store) -> None:
    frame = mixed.frame()
    assert list(frame.columns) == COLUMNS
    assert list(frame["checkpoint"]) == ["model_0", "模型/α,β"]
    assert frame["radius"].dtype == np.float64
    assert math.isnan(frame["radius"][1])
    assert bits(frame["value"].tolist()) == bits([-0.0, 0.1 + 0.2])
    assert frame["passes"].dtype == "Int64"
    assert frame["passes"].tolist() == [pd.NA, 7]
    assert frame["seed"].tolist() == [3, 2**53 + 1]
    assert frame["exact"].tolist() == [pd.NA, True]
    assert frame["mix"].tolist() == ['"eins"', "1"]
    assert frame["losses"].tolist() == ["[]", "[0.1, 1e-300]"]
    assert frame["extra.a"][0] == 5e-324
    assert mixed.frame([unit(9)]).shape == (0, 7)


def test_a_frame_rounds_no_whole_number(store: Store) -> None:
    store.finish(unit(0), {"count": 2**53 + 1, "seed": 2**64}, 1.0)
    store.finish(unit(1), {"count": 0.5, "seed": 1}, 1.0)
    frame = store.frame()
    assert frame["count"].tolist() == ["9007199254740993", "0.5"]
    assert frame["seed"].tolist() == ["18446744073709551616", "1"]


def test_names_of_the_payload_do_not_hide_the_identity(store: Store) -> None:
    store.finish(unit(), {"measure": "mine", "value": 1.0, "settings": {"steps": 3}}, 1.0)
    (row,) = store.frame().to_dict("records")
    assert (row["measure"], row["payload.measure"]) == ("worst-case sharpness", "mine")
    assert (row["settings.steps"], row["payload.settings.steps"]) == (20, 3)


def test_csv_keeps_every_bit(mixed: Store, tmp_path: Path) -> None:
    mixed.export(tmp_path / "zoo.csv")
    with (tmp_path / "zoo.csv").open(encoding="utf-8", newline="") as file:
        first, second = csv.DictReader(file)
    assert list(first) == COLUMNS
    assert second["checkpoint"] == "模型/α,β"
    assert second["note"] == 'ö, "x"\n'
    assert bits([float(first["value"]), float(second["value"])]) == bits([-0.0, 0.1 + 0.2])
    assert float(first["seconds"]) == 2 / 3
    assert float(first["settings.nested.x"]) == 1.7976931348623157e308
    assert (second["radius"], first["passes"], second["seed"]) == ("", "", str(2**53 + 1))


def test_json_keeps_what_was_stored(mixed: Store, tmp_path: Path) -> None:
    mixed.export(tmp_path / "zoo.json")
    records = json.loads((tmp_path / "zoo.json").read_text(encoding="utf-8"))
    results = mixed.results()
    assert [bits(record["payload"]) for record in records] == [bits(dict(result.payload)) for result in results]
    assert [Unit(**{k: v for k, v in record.items() if k not in ("payload", "seconds")}) for record in records] == [
        result.unit for result in results
    ]
    assert [record["seconds"] for record in records] == [2 / 3, 0.1]


def test_parquet_reads_back_as_the_frame(mixed: Store, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    mixed.export(tmp_path / "zoo.parquet")
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "zoo.parquet"), mixed.frame(), check_exact=True)


@given(values=st.lists(FINITE, min_size=1, max_size=5))
def test_every_format_returns_the_same_floats(tmp_path_factory: pytest.TempPathFactory, values: list[float]) -> None:
    pytest.importorskip("pyarrow")
    folder = tmp_path_factory.mktemp("floats")
    with Store(folder / "zoo.sqlite") as store:
        for batch, value in enumerate(values):
            store.finish(unit(batch), {"value": value}, 1.0)
        for suffix in ("csv", "json", "parquet"):
            store.export(folder / f"zoo.{suffix}")
    with (folder / "zoo.csv").open(newline="") as file:
        assert bits([float(row["value"]) for row in csv.DictReader(file)]) == bits(values)
    assert bits(pd.read_parquet(folder / "zoo.parquet")["value"].tolist()) == bits(values)
    assert bits([row["payload"]["value"] for row in json.loads((folder / "zoo.json").read_text())]) == bits(values)


@pytest.mark.parametrize("suffix", ["csv", "json", "parquet"])
def test_an_empty_store_exports_an_empty_table(store: Store, tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("pyarrow")
    store.export(tmp_path / f"zoo.{suffix}")
    read: Callable[[Path], pd.DataFrame] = getattr(pd, f"read_{suffix}")
    assert len(read(tmp_path / f"zoo.{suffix}")) == 0


def test_an_export_that_fails_leaves_the_old_file(
    mixed: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "zoo.csv"
    target.write_text("old")

    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(csv.DictWriter, "writerows", fails)
    with pytest.raises(OSError, match="No space left"):
        mixed.export(target)
    assert target.read_text() == "old"
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(".zoo")]


def test_only_known_suffixes(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"exported as \.csv, \.parquet, \.json\. Found 'zoo\.xlsx'"):
        store.export(tmp_path / "zoo.xlsx")


@pytest.mark.parametrize(
    ("package", "use"),
    [
        ("pandas", lambda store, folder: store.frame()),
        ("pyarrow", lambda store, folder: store.export(folder / "zoo.parquet")),
        ("filelock", lambda store, folder: store.claim([unit()])),
    ],
)
def test_a_missing_package_is_named(
    mixed: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, use: Callable[[Store, Path], Any]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ImportError, match=rf'{package}, which is not installed: pip install "quotient-manifolds\[compare\]"'
    ):
        use(mixed, tmp_path)
    assert not list(tmp_path.glob("*.parquet*"))


def test_csv_and_json_need_no_other_package(mixed: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("pandas", "pyarrow", "filelock"):
        monkeypatch.setitem(sys.modules, package, None)
    mixed.export(tmp_path / "zoo.csv")
    mixed.export(tmp_path / "zoo.json")
