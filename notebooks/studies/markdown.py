"""Tables as Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells may hold links; what would end a cell is escaped. Raises ValueError for a row of another length."""
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"The table has {len(columns)} columns. Found a row of {len(row)}: {row}")
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(_cell(text) for text in line)} |" for line in lines)


def lines(texts: Sequence[str]) -> str:
    """In one cell, one under the other."""
    return "<br>".join(texts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
