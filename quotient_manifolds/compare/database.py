"""The file under a store: SQLite opened so that it is right on shared file systems, its errors as sentences."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, final

FORMAT = 1  # of the tables; raise when a reader of the old form would misread the new one
APPLICATION = 0x716D7A31  # "qmz1" in the file's header: tells a store from any other SQLite file

TABLES = (
    """CREATE TABLE results (
        key TEXT PRIMARY KEY NOT NULL, checkpoint TEXT NOT NULL, measure TEXT NOT NULL, geometry TEXT NOT NULL,
        radius REAL, batch INTEGER NOT NULL, settings TEXT NOT NULL, payload TEXT NOT NULL, seconds REAL NOT NULL)""",
    """CREATE TABLE claims (
        key TEXT PRIMARY KEY NOT NULL, owner TEXT NOT NULL, host TEXT NOT NULL, pid INTEGER NOT NULL)""",
    # key: of the unit; null for a checkpoint as a whole. AUTOINCREMENT: a number is never given twice.
    """CREATE TABLE failures (
        number INTEGER PRIMARY KEY AUTOINCREMENT, checkpoint TEXT NOT NULL, key TEXT, unit TEXT,
        message TEXT NOT NULL)""",
    "CREATE TABLE memory (fingerprint TEXT PRIMARY KEY NOT NULL, value TEXT NOT NULL)",
    f"PRAGMA application_id = {APPLICATION}",
    f"PRAGMA user_version = {FORMAT}",
)

# Keys travel as one JSON list: a query has room for few parameters.
AMONG = "IN (SELECT value FROM json_each(?))"

# What SQLite says, and what that means here. Its error codes reach Python from 3.11 on only, its words always.
SENTENCES = (
    ("full", "has no room left on its disk: free some and run again. What was finished before is kept."),
    ("readonly", "cannot be written: allow writing to the file and to its folder, or give another place."),
    ("locked", "has been locked by another process for longer than {patience:g} s: see what holds it, and run again."),
    ("not a database", "is not a store: give the path of one, or of a file that does not exist yet."),
    ("malformed", "is damaged: restore a copy, or move it away and run again; nothing was changed in it."),
    ("no such", "is damaged: restore a copy, or move it away and run again; nothing was changed in it."),
    ("unable to open", "cannot be opened: check that it is a file and that its folder exists and can be written."),
    ("disk I/O", "could not be read or written: check the disk, and run again. What was finished before is kept."),
)


class StoreError(OSError):
    """A store that cannot be opened, read or written: one sentence on what to do. What was finished before is kept."""


@final
class Database:
    """One connection to the file, of one process and thread.

    A rollback journal and full synchronisation: a transaction that returned survives a loss of power, and one that did
    not never happened. (A write-ahead log needs shared memory, which processes on two hosts do not have.) The journal
    is emptied, not deleted, so that no entry of the folder need be synchronised or can be seen late by another host.
    """

    def __init__(self, path: Path, *, make: bool, patience: float) -> None:
        self.path = path
        self._patience = patience
        self._process = os.getpid()
        self._connection: sqlite3.Connection | None = None
        with self._sentences():
            self._connection = self._opened(make)

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """Every row of one query."""
        with self._sentences():
            return self._alive().execute(sql, parameters).fetchall()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All of it or nothing, on disk when it returns; no other process writes meanwhile."""
        connection = self._alive()
        with self._sentences():
            try:
                connection.execute("BEGIN IMMEDIATE")
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:  # SQLite may have taken it back itself
                    with suppress(sqlite3.Error):
                        connection.execute("ROLLBACK")
                raise

    @property
    def inherited(self) -> bool:
        """This process is a fork of the one that opened the file."""
        return os.getpid() != self._process

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _alive(self) -> sqlite3.Connection:
        if self.inherited:
            raise StoreError(
                f"The store {self.path} was opened by process {self._process}, and SQLite does not survive a fork: "
                f"open it anew in process {os.getpid()}."
            )
        if self._connection is None:
            raise StoreError(f"The store {self.path} is closed: open it again.")
        return self._connection

    def _opened(self, make: bool) -> sqlite3.Connection:
        if not make and not self.path.exists():
            raise StoreError(f"There is no store at {self.path}.")
        if make:
            with suppress(OSError):  # SQLite says it better when it cannot open the file
                self.path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(self.path, timeout=self._patience, isolation_level=None)
        try:
            connection.execute("PRAGMA synchronous = FULL")
            if make and _is_empty(connection):
                _make(connection)
            self._check(connection)
            _check_pages(connection)
            connection.execute("PRAGMA journal_mode = TRUNCATE")
        except BaseException:
            connection.close()
            raise
        return connection

    def _check(self, connection: sqlite3.Connection) -> None:
        if _number(connection, "application_id") != APPLICATION:
            raise StoreError(f"{self.path} is not a store: give the path of one, or of a file that does not exist yet.")
        if (found := _number(connection, "user_version")) != FORMAT:
            raise StoreError(
                f"Expected a store of format {FORMAT}, found format {found} in {self.path}: it was written by "
                f"{'a newer' if found > FORMAT else 'an older'} version; use that one, or another file."
            )

    @contextmanager
    def _sentences(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.ProgrammingError:
            raise  # a mistake in the program, such as a second thread: not about the file
        except sqlite3.Error as error:
            words = str(error)
            meaning = next((means for says, means in SENTENCES if says in words), "failed: see the words of SQLite.")
            raise StoreError(f"The store {self.path} {meaning.format(patience=self._patience)} ({words})") from error


def _check_pages(connection: sqlite3.Connection) -> None:
    """Damage is found before hours are spent on measuring, in milliseconds."""
    if (found := connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
        raise sqlite3.DatabaseError(f"malformed: {found}")


def _number(connection: sqlite3.Connection, pragma: str) -> int:
    return int(connection.execute(f"PRAGMA {pragma}").fetchone()[0])


def _is_empty(connection: sqlite3.Connection) -> bool:
    """A new file, or one whose making was cut short."""
    return connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0 and (
        _number(connection, "application_id") == 0
    )


def _make(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")
    if _is_empty(connection):  # still: another process may have been quicker
        for statement in TABLES:
            connection.execute(statement)
    connection.execute("COMMIT")
