"""Report errors in one sentence, format tables of text, and report progress."""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Progress = Callable[[str, int, int], None]
"""A function (task, parts finished, parts in all)."""

_INSTALLED = [sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")]
_INSTALLED_ANYWHERE = {"site-packages", "dist-packages"}  # covers other environments and the system, too
_NOT_THE_USERS = tuple({Path(each).resolve() for each in (str(Path(__file__).parent), *_INSTALLED)})
_PYTHON = re.compile(r"\w\(\)|\b[a-z_]{2,}=|\beps > 0")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, without the pages that some libraries append."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    return " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1])


def sentence(error: BaseException) -> str:
    """Return an error's message on one line, its type if the message alone is unclear, and the user's line of code.

    That line is the innermost line of the traceback in the user's files, such as a line of a model or a loss.
    """
    text = shown(" ".join(str(error).split()))
    message = text if isinstance(error, (ValueError, OSError)) and text else f"{type(error).__name__}: {text}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    if not frames:
        return message
    return f"{message} (at {shown(Path(frames[-1].filename).name)}, line {frames[-1].lineno}, in {frames[-1].name})"


def without_advice(message: str) -> str:
    """Return a message without its last clauses that advise Python arguments or calls, which no command takes.

    >>> without_advice("The loss must be the same. Found 2 for 1: use Adaptive(), or verify='full'")
    'The loss must be the same. Found 2 for 1'
    """
    finding, _, advice = max(message.rpartition("; "), message.rpartition(": "), key=lambda parts: len(parts[0]))
    return without_advice(finding) if finding and _PYTHON.search(advice) else message


def is_users(file: str) -> bool:
    """Return whether a source file belongs to the user: not to a package, to Python or to this package."""
    if file.startswith("<") or not _INSTALLED_ANYWHERE.isdisjoint(Path(file).parts):
        return False
    return not any(map(Path(file).resolve().is_relative_to, _NOT_THE_USERS))


def brief(value: Any, width: int = 60) -> str:
    """Return the repr of a value, cut to `width` characters."""
    text = repr(value if not isinstance(value, str) else value[: width + 1])
    return text if len(text) <= width else f"{text[: width - 3]}..."


def shown(text: object) -> str:
    """Return a text or a path with control characters and undecodable bytes as escapes."""
    return "".join(
        each if each.isprintable() or each == "\xa0" else each.encode("unicode_escape").decode() for each in str(text)
    )


def text_table(header: Sequence[str], lines: Sequence[Sequence[str]], words: int | None = None) -> str:
    """Return columns of plain text under a ruled header, aligned right after the first `words` columns.

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
