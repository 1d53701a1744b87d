"""Keep what is measured: one SQLite file that survives crashes, kills and full disks."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

FORMAT = 0x716D7A04  # "qmz" and the number of the format, in the file's header: tells a store from other SQLite files
PATIENCE = 60.0  # seconds to wait for another process's transaction

TABLES = (
    """CREATE TABLE results (
        key TEXT PRIMARY KEY NOT NULL, checkpoint TEXT NOT NULL, measure TEXT NOT NULL, batch INTEGER NOT NULL,
        payload TEXT NOT NULL, seconds REAL NOT NULL)""",
    "CREATE TABLE memory (fingerprint TEXT PRIMARY KEY NOT NULL, value TEXT NOT NULL)",
    f"PRAGMA user_version = {FORMAT}",
)
AMONG = "IN (SELECT value FROM json_each(?))"  # keys travel as one JSON list: a query has room for few parameters


class StoreError(OSError):
    """Say that a store cannot be opened, read or written, in one sentence on what to do; what was finished is kept."""


def task_key(deciding: Mapping[str, Any]) -> str:
    """Return the SHA-256, in hexadecimal, of the canonical JSON of everything that decides a value.

    The order of keys does not matter. Raises ValueError or TypeError for what is not plain JSON, infinite and undefined
    numbers included.
    """
    text = json.dumps(deciding, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


class Store:
    """Keep values in one file.

    A value is on disk when `finish` returns: a transaction that returned survives a loss of power, and one that did not
    never happened. The first value of a key stays for good. alone: make the file (and its folder) if there is none, and
    be its only owner until `close`, by a lock that the operating system drops when the process ends, however it ends.
    Otherwise the file is there, to be read, or to be written for the process that owns it.

    Raises StoreError for a file that is no store, of another format, damaged, in a place that cannot be written, on a
    full disk, or that another process owns; what was finished before is kept.
    """

    def __init__(self, path: str | Path, *, alone: bool = True) -> None:
        self.path = Path(os.path.realpath(path))  # Path.resolve raises RuntimeError for links in a circle
        if not alone and not self.path.exists():
            raise StoreError(f"A store must exist to be read. Found none at {self.path}")
        with ExitStack() as stack:
            if alone:
                stack.callback(_only_owner(self.path).release)
            with self._sentences():
                connected = sqlite3.connect(self.path, timeout=PATIENCE, isolation_level=None)
                self._connection = stack.enter_context(closing(connected))
                self._prepare(alone)
            self._open = stack.pop_all()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, and let another process own it."""
        self._open.close()

    def finished(self, keys: Iterable[str]) -> set[str]:
        """Return those of the keys that have a value."""
        return {key for (key,) in self._rows(f"SELECT key FROM results WHERE key {AMONG}", [json.dumps(list(keys))])}

    def values(self, keys: Iterable[str]) -> dict[str, tuple[dict[str, Any], float]]:
        """Return payload and seconds by key, of those of the keys that have a value; floats bit for bit."""
        rows = self._rows(f"SELECT key, payload, seconds FROM results WHERE key {AMONG}", [json.dumps(list(keys))])
        return {key: (json.loads(payload), seconds) for key, payload, seconds in rows}

    def finish(
        self, key: str, checkpoint: str, measure: str, batch: int, payload: Mapping[str, Any], seconds: float
    ) -> bool:
        """Keep a value for good: it is on disk when this returns.

        checkpoint, measure, batch: names for readers. False: the key had a value already, which stays. Raises
        ValueError for a payload with a number that is not finite: that is a failure.
        """
        try:
            text = json.dumps(payload, ensure_ascii=False, allow_nan=False)
        except ValueError as error:
            raise ValueError(f"Numbers must be finite to be kept. Found one that is not ({error})") from error
        insert = "INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?, ?, ?)"
        with self._sentences():  # a transaction of its own, as every statement is
            return self._connection.execute(insert, [key, checkpoint, measure, batch, text, seconds]).rowcount == 1

    def remember(self, fingerprint: str, value: Any) -> None:
        """Keep plain JSON under a fingerprint, in place of what was there: what only a loaded model tells."""
        self._rows("INSERT OR REPLACE INTO memory VALUES (?, ?)", [fingerprint, json.dumps(value)])

    def recall(self, fingerprint: str) -> Any:
        """Return what `remember` kept under this fingerprint; None if nothing."""
        found = self._rows("SELECT value FROM memory WHERE fingerprint = ?", [fingerprint])
        return json.loads(found[0][0]) if found else None

    def _rows(self, sql: str, parameters: Sequence[Any]) -> list[Any]:
        with self._sentences():
            return self._connection.execute(sql, parameters).fetchall()

    def _prepare(self, make: bool) -> None:
        """Make the tables, if wanted and there are none, or check that the file has them."""
        execute = self._connection.execute
        # A rollback journal and full synchronisation. (A write-ahead log needs shared memory, which a reader on another
        # host does not have.) The journal is emptied, not deleted: no folder need be synchronised.
        execute("PRAGMA synchronous = FULL")
        (version,) = execute("PRAGMA user_version").fetchone()
        if make and not version and not any(execute("SELECT 1 FROM sqlite_master")):
            for statement in ("BEGIN IMMEDIATE", *TABLES, "COMMIT"):
                execute(statement)
        elif version != FORMAT:
            raise StoreError(f"{self.path} must be a store of this version. Found another file: give another place")
        # Damage is found before hours are spent on measuring, in milliseconds.
        if make and execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
            raise sqlite3.DatabaseError("database disk image is malformed")
        execute("PRAGMA journal_mode = TRUNCATE")

    @contextmanager
    def _sentences(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.ProgrammingError:
            raise  # a mistake in the program, such as a closed store: not about the file
        except sqlite3.Error as error:
            kept = "What was finished before is kept: see to it, or give another place, and run again."
            raise StoreError(f"The store {self.path} cannot be used: {error}. {kept}") from error


def _only_owner(path: Path) -> Any:
    """Take the lock beside a store; a second process is told at once that there is a first."""
    from filelock import FileLock, Timeout

    # A lock that is a mere marker would outlive its process.
    lock = FileLock(path.with_name(f"{path.name}.lock"), thread_local=False, fallback_to_soft=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        why = "wait until it has ended, stop it, or give another directory"
        raise StoreError(f"Another process is measuring into {path}: {why}.") from error
    except OSError as error:
        raise StoreError(f"The store {path} cannot be used: {error}. Give a place that can be written") from error
    return lock
