"""Files that are whole or not there at all."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to, moved there when all of it is on disk: no reader and no crash meets half."""
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        yield unfinished
        with unfinished.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """The text as UTF-8, whole, its line ends as they are."""
    with whole(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8", newline="")
