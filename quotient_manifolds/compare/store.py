"""What is measured stays measured: finished units on disk, claimed by one process at a time, whoever dies meanwhile."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, final

from quotient_manifolds.compare import table
from quotient_manifolds.compare.claims import Claims, keys_of
from quotient_manifolds.compare.database import AMONG, Database, StoreError
from quotient_manifolds.compare.table import Result
from quotient_manifolds.compare.unit import Unit, plain, to_json, unit_key

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Failure", "Result", "Store", "StoreError", "Unit", "unit_key"]

ORDER = "ORDER BY checkpoint, measure, geometry, radius, batch, settings, key"


@final
@dataclass(frozen=True)
class Failure:
    """What went wrong with a unit, or with a checkpoint as a whole (unit None), in one sentence."""

    checkpoint: str
    unit: Unit | None
    message: str


@final
class Store:
    """Finished units and failures in one file, for any number of processes at once.

    A unit is claimed, measured, and finished in one durable transaction; the first result of a key stays for good. A
    claim lives as long as the process that took it, and is void once that has ended, by whatever signal. Opened after a
    fork, by one thread: neither the file nor the claims pass to a forked child. Beside the file stand its journal and
    the folder NAME.living, which is empty when no process runs. Both locks and file need a file system whose locks all
    hosts see (NFS with its lock daemon, Lustre with `flock`; not `localflock`).

    make: make the file (and its folder) if there is none. patience: seconds to wait for another process's transaction.
    Raises StoreError for a file that is no store, of another format, damaged, locked for too long, in a place that
    cannot be written, or on a full disk; what was finished before is kept.
    """

    def __init__(self, path: str | Path, *, make: bool = True, patience: float = 120.0) -> None:
        self.path = Path(path).resolve()
        self._database = Database(self.path, make=make, patience=patience)
        self._claims = Claims(self._database)

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give back what was claimed and not finished. In a forked child, nothing: all of it is its parent's."""
        if not self._database.inherited:
            self._claims.release()
            self._database.close()

    # What is finished.

    def finished(self, keys: Iterable[str]) -> set[str]:
        """Those of the keys that have a result."""
        rows = self._database.rows(f"SELECT key FROM results WHERE key {AMONG}", [json.dumps(list(keys))])
        return {key for (key,) in rows}

    def get(self, key: str) -> dict[str, Any] | None:
        """The payload kept under this key, floats bit for bit; None if it is not finished."""
        rows = self._database.rows("SELECT payload FROM results WHERE key = ?", [key])
        return self._read(rows[0][0]) if rows else None

    def results(self, units: Iterable[Unit] | None = None) -> list[Result]:
        """All that is finished, in the order of identity; or of these units, in their order and under their names.

        (A key stands for what decides a value: a checkpoint that was renamed, or has a twin, finds its results.)
        """
        if units is None:
            columns = f"payload, seconds, settings, {', '.join(table.IDENTITY)}"
            return [
                Result(_unit(identity, self._read(settings)), self._read(payload), seconds)
                for payload, seconds, settings, *identity in self._database.rows(
                    f"SELECT {columns} FROM results {ORDER}"
                )
            ]
        units = list(units)
        rows = self._database.rows(f"SELECT key, payload, seconds FROM results WHERE key {AMONG}", [keys_of(units)])
        found = {key: (payload, seconds) for key, payload, seconds in rows}
        return [Result(unit, self._read(found[unit.key][0]), found[unit.key][1]) for unit in units if unit.key in found]

    def finish(self, unit: Unit, payload: Mapping[str, Any], seconds: float) -> bool:
        """Keep a result for good, drop the unit's claim and failure, and that of its checkpoint.

        On disk when this returns. False: the key had a result already, which stays. Raises ValueError for a payload
        that is not plain JSON: a value that is not finite is a failure.
        """
        row = [
            *(getattr(unit, name) for name in table.IDENTITY),
            to_json(unit.settings, "settings"),
            to_json(payload, "payload"),
            plain(seconds, "seconds"),
        ]
        with self._database.transaction() as connection:
            new = connection.execute("INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row).rowcount
            connection.execute("DELETE FROM claims WHERE key = ?", [unit.key])
            connection.execute("DELETE FROM failures WHERE key = ?", [unit.key])
            _mend(connection, unit.checkpoint)
        return new == 1

    # Who measures what.

    def claim(self, units: Iterable[Unit], at_most: int | None = 1) -> list[Unit]:
        """Take the first units, in the order given, that are neither finished nor claimed by a living process.

        at_most: how many; None for all. A unit that has failed since this store was opened here counts as finished; one
        that failed earlier is tried again. Empty: nothing is left, or others are at it (`claimed`). Without units this
        only makes the claims of the dead void.
        """
        return self._claims.take(list(units), at_most)

    def claimed(self, units: Iterable[Unit]) -> dict[str, str]:
        """Which of the units other processes have claimed, by key, and who they are, in words.

        One that has died is among them until a `claim` finds nothing else free.
        """
        return self._claims.of_others(units)

    # What went wrong.

    def fail(self, what: Unit | str, message: str) -> None:
        """Keep a failure of a unit, or of a checkpoint, instead of an earlier one. Nothing if the unit is finished."""
        unit = what if isinstance(what, Unit) else None
        checkpoint, key = (unit.checkpoint, unit.key) if unit else (plain(what, "checkpoint"), None)
        row = [checkpoint, key, to_json(asdict(unit), "unit") if unit else None, _printable(message)]
        with self._database.transaction() as connection:
            if connection.execute("SELECT 1 FROM results WHERE key = ?", [key]).fetchone():
                return
            connection.execute("DELETE FROM claims WHERE key = ? AND owner = ?", [key, self._claims.owner])
            connection.execute("DELETE FROM failures WHERE checkpoint = ? AND key IS ?", [checkpoint, key])
            connection.execute("INSERT INTO failures (checkpoint, key, unit, message) VALUES (?, ?, ?, ?)", row)

    def failures(self) -> list[Failure]:
        """In the order in which they happened. A later success removes a failure."""
        rows = self._database.rows("SELECT checkpoint, unit, message FROM failures ORDER BY number")
        return [
            Failure(checkpoint, Unit(**self._read(unit)) if unit else None, message)
            for checkpoint, unit, message in rows
        ]

    def mend(self, checkpoint: str) -> None:
        """Forget the failure of a checkpoint as a whole: it loads now."""
        with self._database.transaction() as connection:
            _mend(connection, checkpoint)

    # What is worth remembering.

    def remember(self, fingerprint: str, value: Any) -> None:
        """Keep plain JSON under a fingerprint, instead of what was there: what would take a model's loading to know."""
        with self._database.transaction() as connection:
            connection.execute("INSERT OR REPLACE INTO memory VALUES (?, ?)", [fingerprint, to_json(value, "value")])

    def recall(self, fingerprint: str) -> Any:
        """What `remember` kept under this fingerprint; None if nothing."""
        rows = self._database.rows("SELECT value FROM memory WHERE fingerprint = ?", [fingerprint])
        return self._read(rows[0][0]) if rows else None

    # What leaves.

    def frame(self, units: Iterable[Unit] | None = None) -> pd.DataFrame:
        """`results`, a row each, as `table.rows` lays them out."""
        return table.frame(self.results(units))

    def export(self, path: str | Path, units: Iterable[Unit] | None = None) -> None:
        """Write `results` as .csv, .parquet or .json, by the suffix; whole or not at all."""
        table.export(self.results(units), Path(path))

    def _read(self, text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError as error:
            raise StoreError(
                f"The store {self.path} is damaged ({error}): restore a copy, or move it away and run again."
            ) from error


def _unit(identity: Sequence[Any], settings: Mapping[str, Any]) -> Unit:
    return Unit(**dict(zip(table.IDENTITY, identity, strict=True)), settings=settings)


def _mend(connection: sqlite3.Connection, checkpoint: str) -> None:
    connection.execute("DELETE FROM failures WHERE checkpoint = ? AND key IS NULL", [checkpoint])


def _printable(message: str) -> str:
    """Half surrogate pairs, from names of files that are no text, as escapes."""
    return message.encode("utf-8", "backslashreplace").decode("utf-8")
