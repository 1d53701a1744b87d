"""Report errors in one sentence, and the progress of long work."""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Progress = Callable[[str, int, int], None]
"""Take what is being done, how many of its parts are finished, and how many there are in all."""

_INSTALLED = [sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")]
_INSTALLED_ANYWHERE = {"site-packages", "dist-packages"}  # also of the system, of a user, of another environment
_NOT_THE_USERS = tuple({Path(each).resolve() for each in (str(Path(__file__).parent), *_INSTALLED)})
_OF_PYTHON = re.compile(r"\w\(\)|\b[a-z_]{2,}=|\beps > 0")


def first_line(error: BaseException) -> str:
    """Return what an error says, without the pages that some libraries append."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    return " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1])


def sentence(error: BaseException) -> str:
    """Return what an error says on one line, its kind where the message alone says little, and a user's line of code.

    That is the innermost line of those that the error went through in the user's files, as of a model or a loss.
    """
    text = shown(" ".join(str(error).split()))
    said = text if isinstance(error, (ValueError, OSError)) and text else f"{type(error).__name__}: {text}"
    places = [each for each in traceback.extract_tb(error.__traceback__) if is_users(each.filename)]
    if not places:
        return said
    return f"{said} (at {shown(Path(places[-1].filename).name)}, line {places[-1].lineno}, in {places[-1].name})"


def without_advice(said: str) -> str:
    """Return a sentence without the last clauses that advise arguments or calls of Python, which no command takes.

    >>> without_advice("The loss must be the same. Found 2 for 1: use Adaptive(), or verify='full'")
    'The loss must be the same. Found 2 for 1'
    """
    finding, _, advice = max(said.rpartition("; "), said.rpartition(": "), key=lambda parts: len(parts[0]))
    return without_advice(finding) if finding and _OF_PYTHON.search(advice) else said


def is_users(file: str) -> bool:
    """Return whether a source file is neither of an installed package, nor Python's, nor this package's."""
    if file.startswith("<") or not _INSTALLED_ANYWHERE.isdisjoint(Path(file).parts):
        return False
    return not any(map(Path(file).resolve().is_relative_to, _NOT_THE_USERS))


def brief(value: Any, width: int = 60) -> str:
    """Return what a value looks like, cut where it is long."""
    text = repr(value if not isinstance(value, str) else value[: width + 1])
    return text if len(text) <= width else f"{text[: width - 3]}..."


def shown(text: object) -> str:
    """Return a text or a path with control characters, and bytes of names of files that are no text, as escapes."""
    return "".join(
        each if each.isprintable() or each == "\xa0" else each.encode("unicode_escape").decode() for each in str(text)
    )


def text_table(header: Sequence[str], lines: Sequence[Sequence[str]], words: int | None = None) -> str:
    """Return columns of plain text under a ruled header, those after the first `words` aligned right.

    >>> print(text_table(("name", "size"), [("a", "10"), ("longer", "9")], words=1))
    name    size
    ------  ----
    a         10
    longer     9
    """
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    left = len(widths) if words is None else words
    put = [str.ljust if place < left else str.rjust for place in range(len(widths))]
    ruled = [header, ["-" * width for width in widths], *lines]
    padded = (map(lambda align, *cell: align(*cell), put, line, widths) for line in ruled)
    return "\n".join("  ".join(line).rstrip() for line in padded)
