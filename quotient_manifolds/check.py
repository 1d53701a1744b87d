"""Check arguments; errors state in one sentence what is expected."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


@contextmanager
def needs(what: str, package: str, extra: str) -> Iterator[None]:
    """Turn an ImportError inside the block into one that says which extra to install."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f'{what} needs {package}: pip install "quotient-manifolds[{extra}]".') from error


def meant(word: object, known: Iterable[object], cutoff: float = 0.6) -> str:
    """Return "; did you mean 'NAME'?" for the known name closest to a word, "" if none is similar.

    >>> meant("inw", ["inv", "mix"])
    "; did you mean 'inv'?"
    >>> meant(float("inf"), ["inv", "mix"])  # numbers are not misspelt
    ''
    """
    word = word.lower() if isinstance(word, str) else ""
    near = difflib.get_close_matches(word, [str(each) for each in known], n=1, cutoff=cutoff)
    return f"; did you mean {near[0]!r}?" if near else ""


def check_one_of(name: str, value: object, known: Iterable[object], besides: str = "") -> None:
    """Raise ValueError unless a value is among the known ones; besides: other possible values, in words."""
    known = list(known)
    if value not in known:
        listed = ", ".join(map(str, known)) + besides
        raise ValueError(f"{name} must be one of {listed}. Found {value!r}{meant(value, known)}")


def check_integer(name: str, value: object, least: int) -> None:
    """Raise ValueError unless a value is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}. Found {value!r}")


def check_number(name: str, value: object, *, positive: bool = False) -> None:
    """Raise ValueError unless a value is a finite number, at least 0, or above 0 if `positive`."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value < math.inf or (positive and value == 0):  # type: ignore[operator]
        wanted = "a positive finite number" if positive else "a finite number of at least 0"
        raise ValueError(f"{name} must be {wanted}. Found {value!r}")
