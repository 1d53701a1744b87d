"""Which processes still live: each holds a lock that the kernel drops when the process ends, however it ends."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, final

from quotient_manifolds.compare.database import StoreError

if TYPE_CHECKING:
    from filelock import BaseFileLock


@final
class Life:
    """The lock file of this process: locked from `begin` to `end`, or to the death of the process.

    No heartbeat and no timeout: a process that is stopped or slow keeps what it claimed. A forked child does not share
    the lock. Across hosts this needs a file system whose locks are seen by all of them, as SQLite does.
    """

    def __init__(self, folder: Path) -> None:
        self.name = uuid.uuid4().hex
        self._folder = folder
        self._lock: BaseFileLock | None = None

    def begin(self) -> None:
        """Raises StoreError where files cannot be locked."""
        if self._lock is not None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = _file_lock(self._path(self.name))
            lock.acquire()
        except OSError as error:
            raise StoreError(
                f"No file could be locked in {self._folder} ({error}): put the store where files can be written and "
                "locked."
            ) from error
        self._lock = lock

    @property
    def begun(self) -> bool:
        return self._lock is not None

    def end(self) -> None:
        if self._lock is not None:
            # Unlinked while locked: whoever waits for this file finds it gone, and takes the name for a dead one's.
            self._path(self.name).unlink(missing_ok=True)
            self._lock.release()
            self._lock = None

    def others(self) -> set[str]:
        """The names that have a lock file, alive or dead."""
        return {path.stem for path in self._folder.glob("*.lock")} - {self.name}

    @contextmanager
    def buried(self, name: str) -> Iterator[bool]:
        """Whether the process of that name is dead; if so nobody else buries it meanwhile, and its file goes after.

        A file that is missing is a dead one's too: a living process has made and locked its own before it has claims.
        """
        lock = _seized(self._path(name))
        if lock is None:
            yield False
            return
        try:
            yield True
            self._path(name).unlink(missing_ok=True)
        finally:
            lock.release()

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.lock"


def _seized(path: Path) -> BaseFileLock | None:
    """The lock if it was free; None if somebody lives, buries just now, or belongs to a user who locked us out."""
    from filelock import Timeout

    lock = _file_lock(path)
    try:
        lock.acquire(blocking=False)
    except (Timeout, OSError):
        return None
    return lock


def _file_lock(path: Path) -> BaseFileLock:
    try:
        from filelock import FileLock
    except ImportError as error:
        raise ImportError(
            'A store needs filelock, which is not installed: pip install "quotient-manifolds[compare]".'
        ) from error
    # A lock that is a mere marker would outlive its process; and any thread may close the store.
    return FileLock(path, thread_local=False, fallback_to_soft=False)
