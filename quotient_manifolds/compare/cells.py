"""Text in the cells of CSV files that a spreadsheet would take for a formula."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# What spreadsheets run as a formula: = + - @ at the front, after a tab or a carriage return too.
_FORMULA = re.compile("'*[=+\\-@\t\r]")


def quoted(text: str) -> str:
    """Return the text, behind an apostrophe if a spreadsheet would run it; `unquoted` is the inverse."""
    return f"'{text}" if _FORMULA.match(text) else text


def unquoted(text: str) -> str:
    """Return what `quoted` was given; other text as it is."""
    return text[1:] if text.startswith("'") and _FORMULA.match(text) else text


def guarded(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with its text quoted, names of columns too, its numbers as they are."""
    return {quoted(name): quoted(value) if isinstance(value, str) else value for name, value in row.items()}
