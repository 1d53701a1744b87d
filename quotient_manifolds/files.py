"""Files that are whole or not there at all."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a name to write to; what was written is at `path` when all of it is on disk: nobody meets half of it.

    A file that is there keeps its mode, a link stays and what it points to is replaced. What cannot be replaced by
    another file, as a device or a pipe, is written to.
    """
    if is_special(path):
        with tempfile.TemporaryDirectory() as folder:
            unfinished = Path(folder) / path.name
            yield unfinished
            with unfinished.open("rb") as made, path.open("wb") as special:
                shutil.copyfileobj(made, special)
        return
    target = Path(os.path.realpath(path))
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


def is_special(path: Path) -> bool:
    """Return whether `path` is there and no plain file or directory: a device, a pipe, an open descriptor's name."""
    if path.absolute().parts[1:2] in (("dev",), ("proc",)) and path.exists():
        return True  # /dev/stdout may lead to a plain file, which the shell goes on writing to
    return path.exists() and not path.is_file() and not path.is_dir()


def write_text(path: Path, text: str) -> None:
    """Write the text as UTF-8, whole, its line ends as they are."""
    with whole(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8", newline="")
