"""The page: complete, self-contained, readable without eyes, and its text escaped."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser

import pytest

from quotient_manifolds.plots import orbit_figure
from quotient_manifolds.report import Code, Fact, Figure, Gallery, Note, Page, Section, Table, Text, render

VOID = {"meta", "link", "br", "hr", "img", "input"}
EVIL = '<script>alert("&")</script>'


class Reader(HTMLParser):
    """A page as a list of elements with their attributes and the text inside; complains of tags that do not match."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[int] = []
        self.elements: list[tuple[str, dict[str, str], list[str]]] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs)
        self.elements.append((tag, {name: value or "" for name, value in attrs}, []))
        if tag not in VOID:
            self.open.append(len(self.elements) - 1)

    def handle_endtag(self, tag: str) -> None:
        assert self.elements[self.open.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        for place in self.open:
            self.elements[place][2].append(data)

    def all(self, *tags: str) -> list[tuple[dict[str, str], str]]:
        return [(attributes, "".join(text)) for tag, attributes, text in self.elements if tag in tags]


def page() -> Page:
    """Every kind of block, every text hostile."""
    plot = orbit_figure([0.1, 1.0, 10.0], {EVIL: [1.5, 1.0, 3.0]})
    rows = [[EVIL, "0.25 ± 0.01"], ["run 10", "failed"]]
    blocks = (
        Text(EVIL),
        Code(EVIL),
        Note(EVIL, [EVIL, "run 6: no loss."]),
        Table("first", EVIL, [EVIL, "b"], rows, [False, True]),
        Table("second", "A second table", ["c", "d"], rows[:1], [False, True]),
        Gallery([Figure(plot.html(), EVIL)]),
    )
    return Page(EVIL, EVIL, [Fact(EVIL, EVIL)], [Section("s", EVIL, blocks), Section("empty", "Nothing", [])])


@pytest.fixture(scope="module")
def html() -> str:
    return render(page())


@pytest.fixture(scope="module")
def reader(html: str) -> Reader:
    return Reader(html)


def test_the_page_refers_to_nothing_outside_and_runs_nothing(html: str, reader: Reader) -> None:
    assert not re.search(r"https?:|//|@import", re.sub(r"/\*.*?\*/|base64,[^\"]*", "", html, flags=re.DOTALL))
    assert not {"script", "link", "iframe", "object", "base"} & {tag for tag, _, _ in reader.elements}
    for _, attributes, _ in reader.elements:
        for name in ("src", "href", "srcset", "action"):
            assert attributes.get(name, "#").startswith(("#", "data:image/svg+xml"))
    (policy,) = (meta["content"] for meta, _ in reader.all("meta") if "http-equiv" in meta)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def test_every_block_is_shown_and_its_text_escaped(reader: Reader) -> None:
    for tag in ("title", "h1", "strong", "h2", "p", "li", "code", "caption", "th", "td", "figcaption"):
        assert any(EVIL in text or "0.25 ± 0.01" in text for _, text in reader.all(tag)), tag
    assert any(attributes.get("role") == "note" and "no loss" in text for attributes, text in reader.all("div"))
    assert [EVIL in attributes["alt"] for attributes, _ in reader.all("img")] == [True]
    assert len(reader.all("th", "td")) == 2 * 3 + 2 * 2
    assert {attributes.get("scope") for attributes, _ in reader.all("th")} == {"col", "row"}


def test_ids_are_unique_references_arrive_and_empty_sections_are_left_out(reader: Reader) -> None:
    ids = [attributes["id"] for _, attributes, _ in reader.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    attributes = [attributes for _, attributes, _ in reader.elements]
    wanted = {each[name].lstrip("#") for each in attributes for name in ("href", "aria-labelledby") if name in each}
    assert {"content", "s", "first", "second"} == wanted <= set(ids)


def test_headings_go_down_in_order_and_the_page_suits_a_phone(reader: Reader) -> None:
    levels = [int(tag[1]) for tag, _, _ in reader.elements if re.fullmatch(r"h[1-6]", tag)]
    assert (levels[0], set(levels[1:])) == (1, {2})
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in [a for a, _ in reader.all("meta")]
    assert [attributes["lang"] for attributes, _ in reader.all("html")] == ["en"]


def test_a_crooked_table_is_refused() -> None:
    with pytest.raises(ValueError, match="'t' has 2 columns, but rows or alignments of lengths"):
        Table("t", "c", ["a", "b"], [["1"]], [False, False])


def test_missing_libraries_are_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for library, call in (("jinja2", lambda: render(Page("t", "l", [], []))), ("matplotlib", page)):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, library, None)
            with pytest.raises(ImportError, match=rf'{library}.*pip install "quotient-manifolds\[plots\]"'):
                call()
