"""Whose code an error comes from: ours, a library's, or that of a module which the user names."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

_OURS = Path(__file__).resolve().parents[1]
_LIBRARIES = tuple(
    {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


def place_in_users_code(error: BaseException) -> str | None:
    """Return file, line and function of the user's code in which the error, or the one behind it, arose; or None.

    Code in the standard library or among installed packages is not the user's, nor is this package.
    """
    for each in _chain(error):
        for frame in reversed(traceback.extract_tb(each.__traceback__)):
            if _is_users(frame.filename):
                where = "at import" if frame.name == "<module>" else f"in {frame.name}"
                return f"{frame.filename}, line {frame.lineno}, {where}"
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in seen:
        seen.append(current)
        current = current.__cause__
    yield from reversed(seen)  # what was raised first says most


def _is_users(filename: str) -> bool:
    if filename.startswith("<"):
        return False
    path = Path(filename).resolve()
    return not any(path.is_relative_to(place) for place in (_OURS, *_LIBRARIES))
