"""Who measures what: a unit is claimed by one living process at a time."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import final

from quotient_manifolds.compare.database import AMONG, Database, StoreError
from quotient_manifolds.compare.life import Life
from quotient_manifolds.compare.unit import Unit


@final
class Claims:
    """The claims in one database, as one process sees them; `Store` says what they mean."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._life = Life(database.path.with_name(f"{database.path.name}.living"))
        # A unit that fails while this process runs is not tried again by it; one that failed before is.
        numbers = database.rows("SELECT seq FROM sqlite_sequence WHERE name = 'failures'")
        self._earlier_failures: int = numbers[0][0] if numbers else 0

    @property
    def owner(self) -> str:
        return self._life.name

    def take(self, units: Sequence[Unit], at_most: int | None) -> list[Unit]:
        """The first units that are free, now claimed."""
        self._begin()
        while True:
            free = self._free(units) or (self._free(units) if self._bury() else [])
            if not free:
                return []
            if taken := self._insert(free[:at_most]):
                return taken  # else another process was quicker with every one of them

    def of_others(self, units: Iterable[Unit]) -> dict[str, str]:
        """In words, who has claimed which of the keys."""
        rows = self._database.rows(
            f"SELECT key, host, pid FROM claims WHERE owner <> ? AND key {AMONG}", [self.owner, keys_of(units)]
        )
        return {key: f"process {pid} on {host}" for key, host, pid in rows}

    def release(self) -> None:
        """Give everything back; this process can claim again."""
        if self._life.begun:
            # Not on a full disk; but without the lock the claims are void anyhow.
            with suppress(StoreError), self._database.transaction() as connection:
                connection.execute("DELETE FROM claims WHERE owner = ?", [self.owner])
            self._life.end()

    def _begin(self) -> None:
        """At the first claim; what the dead have left is free from then on."""
        if not self._life.begun:
            self._database.rows("SELECT 1")  # a forked child is refused before it can lock what is its parent's
            self._life.begin()
            self._bury()

    def _free(self, units: Sequence[Unit]) -> list[Unit]:
        keys = keys_of(units)
        rows = self._database.rows(
            f"SELECT key FROM results WHERE key {AMONG} UNION SELECT key FROM claims WHERE key {AMONG} "
            f"UNION SELECT key FROM failures WHERE number > ? AND key {AMONG}",
            [keys, keys, self._earlier_failures, keys],
        )
        taken = {key for (key,) in rows}
        return [unit for unit in units if unit.key not in taken]

    def _insert(self, units: Sequence[Unit]) -> list[Unit]:
        """Claim those that are still free, in one transaction."""
        owner = (self.owner, socket.gethostname(), os.getpid())
        with self._database.transaction() as connection:
            return [
                unit
                for unit in units
                if connection.execute(
                    "INSERT OR IGNORE INTO claims SELECT ?1, ?2, ?3, ?4 "
                    "WHERE NOT EXISTS (SELECT 1 FROM results WHERE key = ?1)",
                    (unit.key, *owner),
                ).rowcount
            ]

    def _bury(self) -> bool:
        """Make the claims of the dead void. Whether there were any."""
        owners = {owner for (owner,) in self._database.rows("SELECT DISTINCT owner FROM claims")}
        void = 0
        for name in sorted((owners | self._life.others()) - {self.owner}):
            with self._life.buried(name) as dead:
                if dead:
                    with self._database.transaction() as connection:
                        void += connection.execute("DELETE FROM claims WHERE owner = ?", [name]).rowcount
        return void > 0


def keys_of(units: Iterable[Unit]) -> str:
    return json.dumps([unit.key for unit in units])
