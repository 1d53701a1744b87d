"""Hold tables for terminals and pages, and render a page as one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quotient_manifolds.check import needs
from quotient_manifolds.messages import text_table


@dataclass(frozen=True)
class Table:
    """Hold a table of strings. The first cell is the heading of its row; the first `words` columns are not numbers."""

    name: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1

    def __str__(self) -> str:
        return f"{self.caption}\n{text_table(self.columns, self.rows, self.words)}".strip()


def render(template: str, **content: Any) -> str:
    """Render a template in the folder `templates` with the given content, all text escaped.

    Raises ImportError without jinja2, and jinja2's error if the template uses a name that the content lacks.
    """
    with needs("A report", "jinja2", "plots"):
        import jinja2
    places = jinja2.PackageLoader("quotient_manifolds", "templates")
    templates = jinja2.Environment(
        loader=places, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return templates.get_template(template).render(content)
