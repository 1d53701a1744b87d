"""A page that needs nothing but itself: text, tables and figures as one HTML file."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

LONG = 24  # letters from which on a text in a table may break into lines


@dataclass(frozen=True)
class Fact:
    """A figure that comes first on the page, and the sentence that says what it is."""

    value: str
    meaning: str


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str
    kind: Literal["text"] = "text"


@dataclass(frozen=True)
class Listing:
    """A list of sentences."""

    items: Sequence[str]
    kind: Literal["listing"] = "listing"


@dataclass(frozen=True)
class Code:
    """Something to type, as it is."""

    text: str
    kind: Literal["code"] = "code"


@dataclass(frozen=True)
class Note:
    """Something the reader must not miss, such as models that failed: a title, and a sentence each."""

    title: str
    items: Sequence[str]
    kind: Literal["note"] = "note"


@dataclass(frozen=True)
class Table:
    """Cells by row; the first cell of a row is its heading. `numeric` says column by column what is aligned right.

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
    kind: Literal["table"] = "table"


@dataclass(frozen=True)
class Figure:
    """A figure as an <svg> element, and the words under it; a `wide` one has a row of its own."""

    svg: str
    caption: str
    wide: bool = False


@dataclass(frozen=True)
class Gallery:
    """Figures side by side where the page is wide enough."""

    figures: Sequence[Figure]
    kind: Literal["gallery"] = "gallery"


Block = Text | Listing | Code | Note | Table | Gallery


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it; `name` is the target of links."""

    name: str
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Page:
    """The whole page: headline figures first, then sections."""

    title: str
    lead: str
    facts: Sequence[Fact]
    sections: Sequence[Section]


def render(page: Page) -> str:
    """The page as HTML. Text is escaped; only the figures' SVG is trusted. Raises ValueError for a crooked table."""
    for section in page.sections:
        for block in section.blocks:
            if isinstance(block, Table):
                _check(block)
    templates = _templates()
    script = templates.get_template("sort.js.j2").render()
    # The page itself tells the browser to load nothing, and to run this script and no other.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return templates.get_template("page.html.j2").render(page=page, body=_body, script=script, digest=digest)


@dataclass(frozen=True)
class _Cell:
    text: str
    value: str | None  # what a numeric column sorts by
    style: str


def _body(table: Table) -> list[list[_Cell]]:
    return [[_cell(table, row, column, text) for column, text in enumerate(one)] for row, one in enumerate(table.rows)]


def _cell(table: Table, row: int, column: int, text: str) -> _Cell:
    if not table.numeric[column]:
        return _Cell(text, None, "long" if len(text) > LONG else "")
    value = table.values[column][row] if column in table.values else first_number(text)
    if value is None or math.isnan(value):
        return _Cell(text, None, "number missing")
    return _Cell(text, repr(float(value)), "number")


def first_number(text: str) -> float | None:
    """The first number in a text written for people: −0.1 of `[−0.1, 0.5]`, 58570 of `58,570`; None: there is none."""
    found = re.search(r"-?(\d[\d,]*(\.\d+)?(e[-+]?\d+)?|\binf\b)", text.replace("\N{MINUS SIGN}", "-"), re.IGNORECASE)
    return None if found is None else float(found[0].replace(",", ""))


def _check(table: Table) -> None:
    width = len(table.columns)
    if len(table.numeric) != width or any(len(row) != width for row in table.rows):
        found = sorted({len(table.numeric), *(len(row) for row in table.rows)})
        raise ValueError(f"Table {table.name!r} has {width} columns, but rows or alignments of lengths {found}.")
    for column, values in table.values.items():
        if not 0 <= column < width or not table.numeric[column] or len(values) != len(table.rows):
            raise ValueError(
                f"Table {table.name!r} has {len(table.rows)} rows; the values of column {column} must be as many, "
                f"and the column one of its {width} and numeric; found {len(values)} values."
            )


def _templates() -> Any:
    try:
        import jinja2
    except ImportError as error:
        raise ImportError(
            'The report is written by jinja2, which is not installed: pip install "quotient-manifolds[plots]".'
        ) from error
    return jinja2.Environment(
        loader=jinja2.PackageLoader("quotient_manifolds", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
