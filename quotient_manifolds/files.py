"""Write files that are whole or not there at all, and list the files beside a file."""

from __future__ import annotations

import bisect
import os
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a name to write to; what was written is at `path` when all of it is on disk: nobody meets half of it.

    A file that is there keeps its mode, a link stays and what it points to is replaced. A device or a pipe is written
    to as it is.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        yield target
        return
    unfinished = target.with_name(f".{target.name[:200]}.{uuid.uuid4().hex}")
    try:
        yield unfinished
        with unfinished.open("rb+") as file:
            os.fsync(file.fileno())
        if target.exists():
            unfinished.chmod(stat.S_IMODE(target.stat().st_mode))
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write the text as UTF-8, whole, its line ends as they are."""
    with whole(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8", newline="")


def expanded(path: Path | str) -> Path:
    """Return the path with ~ replaced by a home directory; that of an unknown user stays as it is written."""
    return Path(os.path.expanduser(path))  # Path.expanduser raises for an unknown user


SETTLED = 2 * 10**9  # nanoseconds; some file systems stamp the change of a folder no finer


def siblings(path: Path, start: str) -> list[Path]:
    """Return the paths in the folder of `path` whose names begin with `start`, sorted.

    A folder is listed once for all files in it, unless it changes: to ask for each of n files takes n log n steps.
    """
    folder = path.parent
    changed = folder.stat().st_mtime_ns
    settled = time.time_ns() - changed > SETTLED  # else it may change again with the same stamp
    names = _listed(folder, changed) if settled else sorted(os.listdir(folder))
    first, end = (bisect.bisect_left(names, bound) for bound in (start, f"{start}\U0010ffff"))  # the last character
    return [folder / name for name in names[first:end]]


@lru_cache(maxsize=16)
def _listed(folder: Path, changed: int) -> list[str]:
    """Return the names in a folder that was last changed at that time."""
    return sorted(os.listdir(folder))
