"""Tables as Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; cells may hold links, and what would end one is escaped. Raises ValueError for crooked rows."""
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"The table has {len(columns)} columns. Found a row of {len(row)}: {row}")
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(_cell(text) for text in line)} |" for line in lines)


def lines(texts: Sequence[str]) -> str:
    """Join texts in one cell, one under the other."""
    return "<br>".join(texts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
