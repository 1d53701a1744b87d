"""The store: what is finished stays, is there once, and is the same number when it is read again."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quotient_manifolds.compare.store import FORMAT, Store, StoreError, task_key
from tests.nets.zoos import end_of, needs_fork, start

FINITE = st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | FINITE | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


def finish(store: Store, key: str, payload: Any, checkpoint: str = "m_0") -> bool:
    return store.finish(key, checkpoint, "worst-case", 0, payload, 1.5)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "zoo.sqlite"


# What is kept.


def test_the_first_value_of_a_key_stays(path: Path) -> None:
    with Store(path) as store:
        assert finish(store, "a", {"value": 0.1, "losses": [1.0, 2.0]})
        assert not finish(store, "a", {"value": 2.0})
        with pytest.raises(ValueError, match="must be finite"):
            finish(store, "b", {"value": float("nan")})
    with Store(path, alone=False) as store:
        assert store.finished(["a", "b"]) == {"a"}
        assert store.values(["a", "b"]) == {"a": ({"value": 0.1, "losses": [1.0, 2.0]}, 1.5)}
        assert finish(store, "b", {"value": 1.0}, "модель 一/ö")  # for the process that owns it
        assert store.finished(map(str, range(100_000))) == set()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store(tmp_path_factory.mktemp("scratch") / "zoo.sqlite") as opened:
        yield opened


@given(payload=st.dictionaries(TEXT, JSON, max_size=4))
def test_what_is_kept_comes_back_bit_for_bit(scratch: Store, payload: dict[str, Any]) -> None:
    key = task_key({"payload": repr(payload)})
    finish(scratch, key, payload)
    assert repr(scratch.values([key])[key][0]) == repr(payload)  # which tells -0.0 from 0.0, and 1.0 from 1
    scratch.remember(key, payload)
    assert repr(scratch.recall(key)) == repr(payload)
    assert scratch.recall("nothing") is None


# Who owns a file, and what can be wrong with it.


@needs_fork
def test_a_store_has_one_owner_until_that_has_ended(path: Path) -> None:
    def own() -> None:
        with Store(path):
            path.with_name("note").touch()
            time.sleep(60)

    child = start(own)
    end = time.monotonic() + 60
    while not path.with_name("note").exists():
        assert time.monotonic() < end
        time.sleep(0.002)
    with pytest.raises(StoreError, match=r"Another process is measuring into .*zoo\.sqlite"):
        Store(path)
    with Store(path, alone=False) as reader:
        assert reader.finished(["a"]) == set()
    os.kill(child, signal.SIGKILL)
    assert end_of(child) == -signal.SIGKILL
    with Store(path) as store:
        assert finish(store, "a", {"value": 1.0})


def change(path: Path, statement: str) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute(statement)
    connection.close()


def damage(path: Path) -> None:
    with Store(path) as store:
        for number in range(50):
            finish(store, str(number), {"losses": [0.1] * 200})
    whole = path.read_bytes()
    middle = len(whole) // 2 // 4096 * 4096
    path.write_bytes(whole[:middle] + b"\xa5" * 8192 + whole[middle + 8192 :])


def older(path: Path) -> None:
    Store(path).close()
    change(path, f"PRAGMA user_version = {FORMAT - 1}")


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "text": (lambda path: path.write_text("checkpoint,value\n" * 50), "file is not a database"),
    "another program's": (
        lambda path: change(path, "CREATE TABLE results (key TEXT)"),
        "of this version. Found another",
    ),
    "damaged": (damage, "is malformed.* kept: see to it, or give another place"),
    "cut": (lambda path: (damage(path), os.truncate(path, 20_000)), "is malformed"),
    "another format": (older, "of this version. Found another"),
    "a folder": (lambda path: path.mkdir(), "unable to open database file"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_file_that_is_no_store_is_left_alone(path: Path, kind: str) -> None:
    make, words = REFUSED[kind]
    make(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(StoreError, match=words):
        Store(path)
    assert before is None or path.read_bytes() == before


def test_places_where_no_store_can_be(path: Path) -> None:
    with pytest.raises(StoreError, match="Found none at"):
        Store(path, alone=False)
    path.touch()
    with pytest.raises(StoreError, match="Found another file"):
        Store(path, alone=False)
    with pytest.raises(StoreError, match="cannot be used"):
        Store(path / "zoo.sqlite")
    Store(path).close()  # an empty file becomes one
    with Store(path.parent / "new" / "deeper" / "zoo.sqlite") as store:  # folders are made
        assert store.finished(["a"]) == set()
