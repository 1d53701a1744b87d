"""Write files atomically."""

from __future__ import annotations

import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
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
