"""Hold tables that a terminal and a page show alike, and write a page as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Table:
    """Hold cells by row, the first the heading of its row; `numeric` says which columns are aligned right."""

    name: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: Sequence[bool]

    @classmethod
    def of(cls, name: str, caption: str, rows: Sequence[Mapping[str, str]], *, words: Collection[str]) -> Table:
        """Return the table of cells by column: numbers, except in the columns that `words` names."""
        columns = list(dict.fromkeys(column for row in rows for column in row))
        cells = [[row[column] for column in columns] for row in rows]
        return cls(name, caption, columns, cells, [column not in words for column in columns])


def render(template: str, **content: Any) -> str:
    """Return the page that a file of `templates` makes of its content, all text escaped.

    Raises ImportError without jinja2, and jinja2's error for content that the template lacks.
    """
    try:
        import jinja2
    except ImportError as error:
        raise ImportError(
            'The report is written by jinja2, which is not installed: pip install "quotient-manifolds[plots]".'
        ) from error
    places = jinja2.PackageLoader("quotient_manifolds", "templates")
    templates = jinja2.Environment(
        loader=places, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return templates.get_template(template).render(content)
