"""Store measured values in one SQLite file that survives crashes, kills and full disks."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

FORMAT = 0x716D7A04  # "qmz" and the format number, in the file's header: it identifies a store
PATIENCE = 60.0  # seconds to wait for another process's transaction

TABLES = (
    """CREATE TABLE results (
        key TEXT PRIMARY KEY NOT NULL, checkpoint TEXT NOT NULL, measure TEXT NOT NULL, batch INTEGER NOT NULL,
        payload TEXT NOT NULL, seconds REAL NOT NULL)""",
    "CREATE TABLE memory (fingerprint TEXT PRIMARY KEY NOT NULL, value TEXT NOT NULL)",
    f"PRAGMA user_version = {FORMAT}",
)
AMONG = "IN (SELECT value FROM json_each(?))"  # one JSON list of keys, because SQLite limits the number of parameters


class StoreError(OSError):
    """Report, in one sentence with advice, that a store cannot be opened, read or written; stored values are kept."""


def task_key(deciding: Mapping[str, Any]) -> str:
    """Return the SHA-256, in hexadecimal, of the canonical JSON of everything that determines a value.

    The order of keys does not matter. Raises ValueError or TypeError for anything but plain JSON, also for infinity and
    NaN.
    """
    text = json.dumps(deciding, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


class Store:
    """Store values by key in one file.

    A value is on disk when `finish` returns: a completed transaction survives a loss of power, an incomplete one leaves
    no trace. The first value of a key is never replaced. alone: create the file (and its folder) if necessary, and own
    it exclusively until `close`. The operating system releases the lock when the process ends, however it ends.
    Otherwise the file must exist; it is read, or written on behalf of the process that owns it.

    Raises StoreError for a file that is not a store, has another format, is damaged, cannot be written, is on a full
    disk, or is owned by another process; stored values are kept.
    """

    def __init__(self, path: str | Path, *, alone: bool = True) -> None:
        self.path = Path(os.path.realpath(path))  # Path.resolve raises RuntimeError for circular links
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
        """Close the file and release the lock."""
        self._open.close()

    def finished(self, keys: Iterable[str]) -> set[str]:
        """Return the keys that have a value."""
        return {key for (key,) in self._rows(f"SELECT key FROM results WHERE key {AMONG}", [json.dumps(list(keys))])}

    def values(self, keys: Iterable[str]) -> dict[str, tuple[dict[str, Any], float]]:
        """Return payload and seconds for each key that has a value; floats are exact bit for bit."""
        rows = self._rows(f"SELECT key, payload, seconds FROM results WHERE key {AMONG}", [json.dumps(list(keys))])
        return {key: (json.loads(payload), seconds) for key, payload, seconds in rows}

    def finish(
        self, key: str, checkpoint: str, measure: str, batch: int, payload: Mapping[str, Any], seconds: float
    ) -> bool:
        """Store a value permanently; it is on disk on return. Return False if the key already had one, which stays.

        checkpoint, measure, batch: descriptions for readers of the file. Raises ValueError for a payload with a
        non-finite number, which counts as a failure.
        """
        try:
            text = json.dumps(payload, ensure_ascii=False, allow_nan=False)
        except ValueError as error:
            raise ValueError(f"Numbers must be finite to be kept. Found one that is not ({error})") from error
        insert = "INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?, ?, ?)"
        with self._sentences():  # in autocommit mode, each statement is one transaction
            return self._connection.execute(insert, [key, checkpoint, measure, batch, text, seconds]).rowcount == 1

    def remember(self, fingerprint: str, value: Any) -> None:
        """Store plain JSON under a fingerprint, replacing any earlier value; for facts that need a loaded model."""
        self._rows("INSERT OR REPLACE INTO memory VALUES (?, ?)", [fingerprint, json.dumps(value)])

    def recall(self, fingerprint: str) -> Any:
        """Return the value that `remember` stored under this fingerprint; None if there is none."""
        found = self._rows("SELECT value FROM memory WHERE fingerprint = ?", [fingerprint])
        return json.loads(found[0][0]) if found else None

    def _rows(self, sql: str, parameters: Sequence[Any]) -> list[Any]:
        with self._sentences():
            return self._connection.execute(sql, parameters).fetchall()

    def _prepare(self, make: bool) -> None:
        """Create the tables if `make` and the file is empty, else check that the file has them."""
        execute = self._connection.execute
        # A rollback journal with full synchronization is used, because a write-ahead log needs shared memory, which a
        # reader on another host lacks. The journal is emptied, not deleted, so that no folder needs synchronization.
        execute("PRAGMA synchronous = FULL")
        (version,) = execute("PRAGMA user_version").fetchone()
        if make and not version and not any(execute("SELECT 1 FROM sqlite_master")):
            for statement in ("BEGIN IMMEDIATE", *TABLES, "COMMIT"):
                execute(statement)
        elif version != FORMAT:
            raise StoreError(f"{self.path} must be a store of this version. Found another file: give another place")
        # This check takes milliseconds and finds damage before hours of measuring.
        if make and execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
            raise sqlite3.DatabaseError("database disk image is malformed")
        execute("PRAGMA journal_mode = TRUNCATE")

    @contextmanager
    def _sentences(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.ProgrammingError:
            raise  # a defect of the program, such as use of a closed store, not of the file
        except sqlite3.Error as error:
            kept = "What was finished before is kept: see to it, or give another place, and run again."
            raise StoreError(f"The store {self.path} cannot be used: {error}. {kept}") from error


def _only_owner(path: Path) -> Any:
    """Take the lock beside a store; raise StoreError at once if another process holds it."""
    from filelock import FileLock, Timeout

    # A soft lock, which is only a marker file, would outlive its process.
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
