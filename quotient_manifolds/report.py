"""A page that needs nothing but itself: text, tables and figures as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal


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
class Table:
    """Cells by row; the first cell of a row is its heading. `numeric` says column by column what is aligned right."""

    name: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: Sequence[bool]
    kind: Literal["table"] = "table"


@dataclass(frozen=True)
class Figure:
    """A figure as an <svg> element, and the words under it."""

    svg: str
    caption: str


@dataclass(frozen=True)
class Gallery:
    """Figures side by side where the page is wide enough."""

    figures: Sequence[Figure]
    kind: Literal["gallery"] = "gallery"


Block = Text | Listing | Code | Table | Gallery


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
    return _template().render(page=page)


def _check(table: Table) -> None:
    width = len(table.columns)
    if len(table.numeric) != width or any(len(row) != width for row in table.rows):
        found = sorted({len(table.numeric), *(len(row) for row in table.rows)})
        raise ValueError(f"Table {table.name!r} has {width} columns, but rows or alignments of lengths {found}.")


def _template() -> Any:
    try:
        import jinja2
    except ImportError as error:
        raise ImportError(
            'The report is written by jinja2, which is not installed: pip install "quotient-manifolds[plots]".'
        ) from error
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("quotient_manifolds", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2")
