"""Paths, values and errors as they are written into a sentence."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def first_line(error: BaseException) -> str:
    """Return what an error says, without the pages that some libraries append."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    return " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1])


def shown(path: Path | str) -> str:
    """Return a path as text that can be written anywhere: bytes of a name that are not UTF-8 as \\xff."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def brief(value: Any, width: int = 60) -> str:
    """Return what a value looks like, cut where it is long."""
    text = repr(value if not isinstance(value, str) else value[: width + 1])
    return text if len(text) <= width else f"{text[: width - 3]}..."


def expanded(path: Path | str) -> Path:
    """Return the path with ~ replaced by a home directory; that of an unknown user stays as it is written."""
    return Path(os.path.expanduser(path))  # Path.expanduser raises for an unknown user
