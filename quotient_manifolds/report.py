"""Write a page that needs nothing but itself: text, tables and figures as one HTML file."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

LONG = 24  # letters from which on a text in a table may break into lines


@dataclass(frozen=True)
class Fact:
    """Hold a figure that comes first on the page, and the sentence that says what it is."""

    value: str
    meaning: str


@dataclass(frozen=True)
class Text:
    """Hold a paragraph."""

    text: str


@dataclass(frozen=True)
class Listing:
    """Hold a list of sentences."""

    items: Sequence[str]


@dataclass(frozen=True)
class Code:
    """Hold something to type, as it is."""

    text: str


@dataclass(frozen=True)
class Note:
    """Hold something the reader must not miss, such as models that failed: a title, and a sentence each."""

    title: str
    items: Sequence[str]


@dataclass(frozen=True)
class Table:
    """Hold cells by row, the first the heading of its row; `numeric` says which columns are aligned right.

    In a browser a reader sorts by any column. A numeric column sorts by the first number in each of its texts, or, if
    `values` has the column's place, by those; a text without number, or None, is missing and comes last.
    """

    name: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: Sequence[bool]
    values: Mapping[int, Sequence[float | None]] = field(default_factory=dict)
    sortable: bool = True

    def __post_init__(self) -> None:
        """Raise ValueError if a row, or the values to sort by, are more or fewer than they must be."""
        width = len(self.columns)
        if len(self.numeric) != width or any(len(row) != width for row in self.rows):
            found = sorted({len(self.numeric), *(len(row) for row in self.rows)})
            raise ValueError(f"Table {self.name!r} has {width} columns, but rows or alignments of lengths {found}.")
        for column, values in self.values.items():
            if not 0 <= column < width or not self.numeric[column] or len(values) != len(self.rows):
                raise ValueError(
                    f"Table {self.name!r} has {len(self.rows)} rows; the values of column {column} must be as many, "
                    f"and the column one of its {width} and numeric; found {len(values)} values."
                )

    @classmethod
    def of(cls, name: str, caption: str, rows: Sequence[Mapping[str, str]], *, words: Collection[str]) -> Table:
        """Return the table of cells by column: numbers, except in the columns that `words` names."""
        columns = list(dict.fromkeys(column for row in rows for column in row))
        cells = [[row[column] for column in columns] for row in rows]
        return cls(name, caption, columns, cells, [column not in words for column in columns])


@dataclass(frozen=True)
class Figure:
    """Hold a figure as an <svg> element, and the words under it; a `wide` one has a row of its own."""

    svg: str
    caption: str
    wide: bool = False


@dataclass(frozen=True)
class Gallery:
    """Hold figures side by side where the page is wide enough."""

    figures: Sequence[Figure]


Block = Text | Listing | Code | Note | Table | Gallery


@dataclass(frozen=True)
class Section:
    """Hold a heading and what stands under it; `name` is the target of links."""

    name: str
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Page:
    """Hold the whole page: headline figures first, then sections."""

    title: str
    lead: str
    facts: Sequence[Fact]
    sections: Sequence[Section]


def render(page: Page) -> str:
    """Return the page as HTML, its text escaped; only the figures' SVG is trusted.

    Sections without blocks are left out.
    """
    page = replace(page, sections=[section for section in page.sections if section.blocks])
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
    script = templates.get_template("sort.js.j2").render()
    # The page itself tells the browser to load nothing, and to run this script and no other.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return templates.get_template("page.html.j2").render(
        page=page, kind=lambda block: type(block).__name__.lower(), body=_body, script=script, digest=digest
    )


def _body(table: Table) -> list[list[tuple[str, str | None, str]]]:
    """Return every cell's text, what it sorts by in a numeric column, and its style."""
    return [[_cell(table, row, column, text) for column, text in enumerate(one)] for row, one in enumerate(table.rows)]


def _cell(table: Table, row: int, column: int, text: str) -> tuple[str, str | None, str]:
    if not table.numeric[column]:
        return text, None, "long" if len(text) > LONG else ""
    value = table.values[column][row] if column in table.values else first_number(text)
    if value is None or math.isnan(value):
        return text, None, "number missing"
    return text, repr(float(value)), "number"


def first_number(text: str) -> float | None:
    """Return the first number in a text for people, −0.1 of `[−0.1, 0.5]`, 58570 of `58,570`; None without one."""
    found = re.search(r"-?(\d[\d,]*(\.\d+)?(e[-+]?\d+)?|\binf\b)", text.replace("\N{MINUS SIGN}", "-"), re.IGNORECASE)
    return None if found is None else float(found[0].replace(",", ""))
