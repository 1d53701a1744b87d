"""Links in the README, the documentation and the notebooks lead somewhere, and the index lists every page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "notebooks").glob("*.md")),
    *sorted((ROOT / "notebooks").glob("*.ipynb")),
]
LINK = re.compile(r"\[[^\]\[]*\]\(([^()\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)

every_page = pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])


def text(page: Path) -> str:
    """What a page says in Markdown, without its code."""
    said = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = json.loads(said)["cells"]
        said = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return FENCE.sub("", said)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings: lower case, spaces to hyphens, other signs dropped."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADING.findall(text(page))}


def broken(page: Path) -> Iterator[str]:
    for link in LINK.findall(text(page)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            yield link


@every_page
def test_its_links_lead_somewhere(page: Path) -> None:
    assert list(broken(page)) == []


def test_the_index_lists_every_page() -> None:
    index = ROOT / "docs" / "index.md"
    listed = {link.partition("#")[0] for link in LINK.findall(text(index))}
    assert {page.name for page in index.parent.glob("*.md")} - {index.name} <= listed
