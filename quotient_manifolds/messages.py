"""Say in one sentence what went wrong, with what, and where in the user's own code."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parent
_INSTALLED = tuple({Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib")})
_PYTHON = tuple({Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "platstdlib")})


def one_line(error: BaseException) -> str:
    """Return what an error says on one line; its kind where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


def first_line(error: BaseException) -> str:
    """Return what an error says, without the pages that some libraries append."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    return " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1])


def brief(value: Any, width: int = 60) -> str:
    """Return what a value looks like, cut where it is long."""
    text = repr(value if not isinstance(value, str) else value[: width + 1])
    return text if len(text) <= width else f"{text[: width - 3]}..."


def shown(text: object) -> str:
    """Return a text or a path with control characters, and bytes of names of files that are no text, as escapes."""
    return "".join(letter if _shows(letter) else _escape(letter) for letter in str(text))


def sentence(error: BaseException) -> str:
    """Return what an error says on one line, its kind where the message alone says little, and where it arose.

    That is the innermost line of a file of the user's, else of a library that is neither torch nor Python's own, as
    Hugging Face's models are. An error that this package raises says itself what is wrong; its place is told if a file
    of the user's caused it.
    """
    text = shown(" ".join(str(error).split()))
    said = text if isinstance(error, (ValueError, OSError)) and text else f"{type(error).__name__}: {text}"
    frames = traceback.extract_tb(error.__traceback__)
    if frames and _is_ours(frames[-1].filename):
        frame = None if error.__cause__ is None else innermost(error.__cause__, is_users)
    else:
        frame = innermost(error, is_users) or innermost(error, _is_of_a_model)
    if frame is None:
        return said
    return f"{said} (at {shown(Path(frame.filename).name)}, line {frame.lineno}, in {frame.name})"


def innermost(error: BaseException, wanted: Callable[[str], bool]) -> traceback.FrameSummary | None:
    """Return the innermost frame, of those an error went through, whose file is wanted; None if there is none."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return next((frame for frame in frames if wanted(frame.filename)), None)


def is_users(file: str) -> bool:
    """Return whether a source file is neither of an installed package, nor Python's, nor this package's."""
    return not file.startswith("<") and not _is_in(file, _PACKAGE, *_INSTALLED, *_PYTHON)


def _is_ours(file: str) -> bool:
    return _is_in(file, _PACKAGE)


def _is_of_a_model(file: str) -> bool:
    torch = (place / "torch" for place in _INSTALLED)
    return _is_in(file, *_INSTALLED) and not _is_in(file, _PACKAGE, *torch)


def _is_in(file: str, *places: Path) -> bool:
    return any(map(Path(file).resolve().is_relative_to, places))


def _shows(letter: str) -> bool:
    return not (ord(letter) < 0x20 or 0x7F <= ord(letter) < 0xA0 or "\ud800" <= letter <= "\udfff")


def _escape(letter: str) -> str:
    code = ord(letter)
    return f"\\x{code - 0xDC00 if 0xDC80 <= code <= 0xDCFF else code:02x}"
