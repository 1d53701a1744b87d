"""Keep what is measured: one SQLite file that survives crashes, kills and full disks."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, final

FORMAT = 3  # of the tables
APPLICATION = 0x716D7A31  # "qmz1" in the file's header: tells a store from any other SQLite file
PATIENCE = 60.0  # seconds to wait for another process's transaction

TABLES = (
    """CREATE TABLE results (
        key TEXT PRIMARY KEY NOT NULL, checkpoint TEXT NOT NULL, measure TEXT NOT NULL, batch INTEGER NOT NULL,
        payload TEXT NOT NULL, seconds REAL NOT NULL)""",
    "CREATE TABLE memory (fingerprint TEXT PRIMARY KEY NOT NULL, value TEXT NOT NULL)",
    f"PRAGMA application_id = {APPLICATION}",
    f"PRAGMA user_version = {FORMAT}",
)
AMONG = "IN (SELECT value FROM json_each(?))"  # keys travel as one JSON list: a query has room for few parameters

# What SQLite says, and what that means here. Its error codes reach Python from 3.11 on only, its words always.
_DAMAGED = "is damaged: restore a copy, or move it away and run again; nothing was changed in it."
SENTENCES = {
    "full": "has no room left on its disk: free some and run again. What was finished before is kept.",
    "readonly": "cannot be written: allow writing to the file and to its folder, or give another place.",
    "locked": "has been locked by another program for long: see what holds it, and run again.",
    "not a database": "is not a store: give the path of one, or of a file that does not exist yet.",
    "malformed": _DAMAGED,
    "no such": _DAMAGED,
    "unable to open": "cannot be opened: check that it is a file and that its folder exists and can be written.",
    "disk I/O": "could not be read or written: check the disk, and run again. What was finished before is kept.",
}


class StoreError(OSError):
    """Say that a store cannot be opened, read or written, in one sentence on what to do; what was finished is kept."""


def task_key(deciding: Mapping[str, Any]) -> str:
    """Return the SHA-256, in hexadecimal, of the canonical JSON of everything that decides a value.

    The order of keys does not matter. Raises ValueError or TypeError for what is not plain JSON, infinite and undefined
    numbers included.
    """
    text = json.dumps(deciding, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


@final
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
        self.path = Path(path).resolve()
        if not alone and not self.path.exists():
            raise StoreError(f"A store must exist to be read. Found none at {self.path}")
        self._lock = _only_owner(self.path) if alone else None
        try:
            with self._sentences():
                self._connection = self._opened(alone)
        except BaseException:
            if self._lock is not None:
                self._lock.release()
            raise

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, and let another process own it."""
        self._connection.close()
        if self._lock is not None:
            self._lock.release()

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
        row = [key, checkpoint, measure, batch, text, seconds]
        with self._sentences():  # a transaction of its own, as every statement is
            return (
                self._connection.execute("INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?, ?, ?)", row).rowcount == 1
            )

    def remember(self, fingerprint: str, value: Any) -> None:
        """Keep plain JSON under a fingerprint, in place of what was there: what only a loaded model tells."""
        self._rows("INSERT OR REPLACE INTO memory VALUES (?, ?)", [fingerprint, json.dumps(value)])

    def recall(self, fingerprint: str) -> Any:
        """Return what `remember` kept under this fingerprint; None if nothing."""
        found = self._rows("SELECT value FROM memory WHERE fingerprint = ?", [fingerprint])
        return json.loads(found[0][0]) if found else None

    def _rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        with self._sentences():
            return self._connection.execute(sql, parameters).fetchall()

    def _opened(self, make: bool) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=PATIENCE, isolation_level=None)
        try:
            # A rollback journal and full synchronisation. (A write-ahead log needs shared memory, which a reader on
            # another host does not have.) The journal is emptied, not deleted: no folder need be synchronised.
            connection.execute("PRAGMA synchronous = FULL")
            application, version = (
                int(connection.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("application_id", "user_version")
            )
            if make and not application and not any(connection.execute("SELECT 1 FROM sqlite_master")):
                connection.execute("BEGIN IMMEDIATE")
                for statement in TABLES:
                    connection.execute(statement)
                connection.execute("COMMIT")
            elif application != APPLICATION:
                raise sqlite3.DatabaseError("file is not a database of this package")
            elif version != FORMAT:
                raise StoreError(
                    f"{self.path} must be a store of format {FORMAT}. Found format {version}, of another version of "
                    "this package: use that one, or another file"
                )
            # Damage is found before hours are spent on measuring, in milliseconds.
            if make and (found := connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
                raise sqlite3.DatabaseError(f"malformed: {found}")
            connection.execute("PRAGMA journal_mode = TRUNCATE")
        except BaseException:
            connection.close()
            raise
        return connection

    @contextmanager
    def _sentences(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.ProgrammingError:
            raise  # a mistake in the program, such as a closed store: not about the file
        except sqlite3.Error as error:
            words = str(error)
            meaning = next(
                (means for says, means in SENTENCES.items() if says in words), "failed: see the words of SQLite."
            )
            raise StoreError(f"The store {self.path} {meaning} ({words})") from error


def _only_owner(path: Path) -> Any:
    """Take the lock beside a store; a second process is told at once that there is a first."""
    from filelock import FileLock, Timeout

    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    if not path.parent.is_dir():
        return None  # SQLite says it better when it cannot open the file
    # A lock that is a mere marker would outlive its process.
    lock = FileLock(path.with_name(f"{path.name}.lock"), thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        why = "wait until it has ended, stop it, or give another directory"
        raise StoreError(f"Another process is measuring into {path}: {why}.") from error
    except OSError as error:
        raise StoreError(f"{path} cannot be written: no file could be locked beside it ({error}).") from error
    return lock
