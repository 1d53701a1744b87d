"""Say what failed and where, in one sentence that a terminal and a page can show."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path

import torch


def sentence(error: BaseException) -> str:
    """Return what an error says on one line, its kind where the message alone says little, and where it arose.

    That is the innermost line of a file of the user's, else of a library that is neither torch nor Python's own, as
    Hugging Face's models are. An error that this package raises says itself what is wrong; its place is told if a file
    of the user's caused it.
    """
    text = printable(" ".join(str(error).split()))
    said = text if isinstance(error, (ValueError, OSError)) and text else f"{type(error).__name__}: {text}"
    place = arose(error)
    return said if place is None else f"{said} (at {place})"


def arose(error: BaseException) -> str | None:
    """Return `file.py, line 12, in forward`, as `sentence` says it; None where no such line is known."""
    frames = traceback.extract_tb(error.__traceback__)
    if frames and _ours(frames[-1].filename):
        return None if error.__cause__ is None else _innermost(error.__cause__, is_users)
    return _innermost(error, is_users) or _innermost(error, _of_a_model)


def _innermost(error: BaseException, wanted: Callable[[str], bool]) -> str | None:
    found = [each for each in traceback.extract_tb(error.__traceback__) if wanted(each.filename)]
    if not found:
        return None
    return f"{printable(Path(found[-1].filename).name)}, line {found[-1].lineno}, in {found[-1].name}"


def _ours(file: str) -> bool:
    return Path(file).is_relative_to(_PACKAGE)


def is_users(file: str) -> bool:
    """Return whether a source file is neither of an installed package, nor Python's, nor ours."""
    places = (*_INSTALLED, *_PYTHON, _PACKAGE, _TORCH)
    return not file.startswith("<") and not any(Path(file).is_relative_to(place) for place in places)


def _of_a_model(file: str) -> bool:
    installed = any(Path(file).is_relative_to(place) for place in _INSTALLED)
    return installed and not _ours(file) and not Path(file).is_relative_to(_TORCH)


def printable(text: str) -> str:
    """Return the text with control characters, and bytes of the names of files that are no text, as escapes."""
    return "".join(letter if _shows(letter) else _escape(letter) for letter in text)


def _shows(letter: str) -> bool:
    return not (ord(letter) < 0x20 or 0x7F <= ord(letter) < 0xA0 or "\ud800" <= letter <= "\udfff")


def _escape(letter: str) -> str:
    code = ord(letter)
    return f"\\x{code - 0xDC00 if 0xDC80 <= code <= 0xDCFF else code:02x}"


_PACKAGE = Path(__file__).parents[1]
_TORCH = Path(torch.__file__).parent
_INSTALLED = tuple(Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib"))
_PYTHON = tuple(Path(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib"))
