"""The store of a zoo: what is finished stays, is measured once, and is the same number when it is read again."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
import random
import signal
import sqlite3
import struct
import sys
import tempfile
import time
import traceback
import warnings
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

from quotient_manifolds.compare.export import Result
from quotient_manifolds.compare.store import FORMAT, Store, StoreError
from quotient_manifolds.compare.unit import Unit, unit_key

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


# Failures.


def test_a_failure_lasts_until_a_success(store: Store) -> None:
    store.fail("model_0", None, "cannot be read")
    store.fail("model_1", None, "no such file \udcff")
    store.fail("model_0", unit().key, "first")
    store.fail("model_0", unit().key, "second")
    assert store.failures() == {
        ("model_0", None): "cannot be read",
        ("model_1", None): "no such file \\udcff",
        ("model_0", unit().key): "second",
    }
    store.finish(unit(), {"value": 1.0}, 1.0)
    assert list(store.failures()) == [("model_1", None)]
    store.fail("model_0", unit().key, "too late")
    store.mend("model_1")
    assert store.failures() == {}
    assert store.get(unit().key) == {"value": 1.0}


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


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def fill(path: Path, units: Sequence[Unit], log: Path) -> None:
    """Measure what is not finished, as who writes a store does; note all that is begun."""
    with Store(path) as store, log.open("a") as notes:
        finished = store.finished()
        for each in units:
            if each.key not in finished:
                notes.write(f"{each.key}\n")
                notes.flush()
                store.finish(each, value_of(each), seconds=float(each.batch))


def content(path: Path) -> list[tuple[Any, ...]]:
    """The table as it stands in the file, read without the package, and that the file is sound."""
    connection = sqlite3.connect(path)
    try:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        return connection.execute("SELECT * FROM results ORDER BY key").fetchall()
    finally:
        connection.close()


@needs_fork
def test_sixty_kills_at_random_moments_change_nothing(tmp_path: Path) -> None:
    units = [unit(batch, checkpoint=f"model_{batch // 8}") for batch in range(48)]
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
        begun = log.read_text().split()
        assert set(begun) == {each.key for each in units}
        assert len(begun) <= len(units) + killed
        kills, runs = kills + killed, runs + 1


@needs_fork
def test_a_store_is_written_by_one_process_until_that_has_ended(tmp_path: Path, path: Path) -> None:
    note = tmp_path / "note"

    def open_and_wait() -> None:
        with Store(path):
            note.touch()
            time.sleep(60)

    child = start(open_and_wait)
    end = time.monotonic() + 60
    while not note.exists():
        assert time.monotonic() < end
        time.sleep(0.002)
    with pytest.raises(StoreError, match=r"Another process is measuring into .*zoo\.sqlite"):
        Store(path)
    with Store(path, make=False) as reader:
        assert reader.results() == []
    os.kill(child, signal.SIGKILL)
    assert end_of(child) == -signal.SIGKILL
    with Store(path) as store:
        assert store.finish(unit(), {"value": 1.0}, 1.0)


# What can be wrong with a file.


def test_a_full_disk_loses_nothing(path: Path) -> None:
    with Store(path) as store:
        store.finish(unit(0), {"value": 0.1}, 1.0)
        connection = store._connection  # the only way to make a disk small
        assert connection is not None
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(StoreError, match=r"zoo\.sqlite has no room left on its disk: free some and run again"):
            store.finish(unit(1), {"losses": [0.1] * 10_000}, 1.0)
        assert store.get(unit(0).key) == {"value": 0.1}
        assert store.finished([unit(1).key]) == set()
    with Store(path) as store:
        assert store.finish(unit(1), {"losses": [0.1] * 10_000}, 1.0)


@pytest.mark.parametrize(("found", "age"), [(FORMAT + 1, "a newer"), (0, "an older")])
def test_a_store_of_another_format(path: Path, found: int, age: str) -> None:
    Store(path).close()
    _change(path, f"PRAGMA user_version = {found}")
    with pytest.raises(
        StoreError, match=rf"Expected a store of format {FORMAT}, found format {found} in .* {age} version"
    ):
        Store(path)


def test_a_store_of_the_first_format_is_read_and_written(path: Path) -> None:
    with Store(path) as store:
        store.finish(unit(0), {"value": 0.1}, 1.0)
    _change(
        path, "CREATE TABLE claims (key TEXT)", "ALTER TABLE failures ADD COLUMN unit TEXT", "PRAGMA user_version = 1"
    )
    with Store(path) as store:
        assert store.get(unit(0).key) == {"value": 0.1}
        store.fail("model_0", unit(1).key, "no")
        assert store.finish(unit(1), {"value": 0.2}, 1.0)
        assert store.failures() == {}


def _change(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path)
    for each in statements:
        connection.execute(each)
    connection.commit()
    connection.close()


def test_a_damaged_payload_is_a_sentence(path: Path) -> None:
    with Store(path) as store:
        store.finish(unit(), {"value": 1.0}, 1.0)
    _change(path, "UPDATE results SET payload = '{\"value\": 1.'")
    with Store(path) as store, pytest.raises(StoreError, match=r"zoo\.sqlite is damaged \(.*\): restore a copy"):
        store.get(unit().key)


@needs_fork
def test_a_place_that_cannot_be_written(public: Path, capfd: Any) -> None:
    folder = public / "zoo"
    with Store(folder / "zoo.sqlite") as store:
        store.finish(unit(), {"value": 0.1}, 1.0)

    def read_and_try_to_write() -> None:
        if os.getuid() == 0:
            os.setuid(65534)  # root may write anywhere
        with pytest.raises(StoreError, match=r"zoo\.sqlite cannot be written"):
            Store(folder / "zoo.sqlite")
        with pytest.raises(StoreError, match=r"new\.sqlite cannot be"):
            Store(folder / "new.sqlite")

    folder.chmod(0o555)
    (folder / "zoo.sqlite").chmod(0o444)
    (folder / "zoo.sqlite.lock").unlink(missing_ok=True)
    ended = end_of(start(read_and_try_to_write))
    folder.chmod(0o755)
    assert ended == 0, capfd.readouterr().err


def test_a_closed_store_says_so(path: Path) -> None:
    store = Store(path)
    store.close()
    store.close()
    with pytest.raises(StoreError, match="is closed: open it again"):
        store.finish(unit(), {"value": 1.0}, 1.0)


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


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that other users can reach, which pytest's own are not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


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
        ("filelock", lambda store, folder: Store(folder / "new.sqlite")),
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
