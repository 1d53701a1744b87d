"""The files beside a file, for folders that hold thousands."""

from __future__ import annotations

import bisect
import os
import time
from functools import lru_cache
from pathlib import Path

SETTLED = 2 * 10**9  # nanoseconds; the time of change of a folder is no finer than some of them


def beside(path: Path, start: str) -> list[Path]:
    """Return the paths in the folder of `path` whose names begin with `start`, sorted.

    A folder is listed once for all files in it, unless it changes: to ask for each of n files takes n log n steps.
    """
    folder = path.parent
    changed = folder.stat().st_mtime_ns
    names = _listed(folder, changed) if time.time_ns() - changed > SETTLED else sorted(os.listdir(folder))
    place = bisect.bisect_left(names, start)
    found = []
    while place < len(names) and names[place].startswith(start):
        found.append(folder / names[place])
        place += 1
    return found


@lru_cache(maxsize=16)
def _listed(folder: Path, changed: int) -> list[str]:
    """The names in a folder that was changed last at that time."""
    return sorted(os.listdir(folder))
