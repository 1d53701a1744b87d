"""Write a page that needs nothing but itself: text, tables and figures as one HTML file."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

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
    """Hold cells by row, the first the heading of its row; `numeric` says which columns are aligned right."""

    name: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: Sequence[bool]

    def __post_init__(self) -> None:
        """Raise ValueError if a row, or the alignments, are more or fewer than the columns."""
        width = len(self.columns)
        if len(self.numeric) != width or any(len(row) != width for row in self.rows):
            found = sorted({len(self.numeric), *(len(row) for row in self.rows)})
            raise ValueError(f"Table {self.name!r} has {width} columns, but rows or alignments of lengths {found}.")

    @classmethod
    def of(cls, name: str, caption: str, rows: Sequence[Mapping[str, str]], *, words: Collection[str]) -> Table:
        """Return the table of cells by column: numbers, except in the columns that `words` names."""
        columns = list(dict.fromkeys(column for row in rows for column in row))
        cells = [[row[column] for column in columns] for row in rows]
        return cls(name, caption, columns, cells, [column not in words for column in columns])


@dataclass(frozen=True)
class Figure:
    """Hold a figure as an HTML element, and the words under it."""

    html: str
    caption: str


@dataclass(frozen=True)
class Gallery:
    """Hold figures side by side where the page is wide enough."""

    figures: Sequence[Figure]


Block = Text | Code | Note | Table | Gallery


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
    """Return the page as HTML, its text escaped; only the figures' elements are trusted.

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
    return templates.get_template("page.html.j2").render(
        page=page, kind=lambda block: type(block).__name__.lower(), style=_style
    )


def _style(table: Table, column: int, text: str) -> str:
    return "number" if table.numeric[column] else "long" if len(text) > LONG else ""
