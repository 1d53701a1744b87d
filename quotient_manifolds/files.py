"""Write files and directories atomically."""

from __future__ import annotations

import os
import stat
import tempfile
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


def check_new(directory: Path) -> None:
    """Raise ValueError unless a directory can be made: it does not exist, and the one above it does."""
    parent = directory.absolute().parent
    if os.path.lexists(directory) or not parent.is_dir():
        problem = f"there is no directory {parent}" if not parent.is_dir() else "it exists already"
        raise ValueError(f"{directory} must be a new directory. Found that {problem}.")


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory, which is at `path` when all is written, or not at all. Raises what `check_new` does."""
    check_new(path)
    with tempfile.TemporaryDirectory(dir=path.absolute().parent, prefix=f".{path.name[:200]}.") as folder:
        unfinished = Path(folder) / path.name
        unfinished.mkdir()
        yield unfinished
        unfinished.rename(path)


def expanded(path: Path | str) -> Path:
    """Return the path with ~ replaced by a home directory; that of an unknown user stays as it is written."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"A path must be text. Found {path!r}")
    return Path(os.path.expanduser(path))  # Path.expanduser raises for an unknown user
