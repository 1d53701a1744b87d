"""The page and its figures: complete, self-contained, readable without eyes, and honest about what is not defined."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser

import pytest

from quotient_manifolds.report import (
    Code,
    Fact,
    Figure,
    Gallery,
    Listing,
    Note,
    Page,
    Section,
    Table,
    Text,
    render,
)
from tests.pages import galleries, zoo_page

VOID = {"meta", "link", "br", "hr", "img", "input"}


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

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}, []))

    def handle_endtag(self, tag: str) -> None:
        assert self.elements[self.open.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        for place in self.open:
            self.elements[place][2].append(data)

    def all(self, *tags: str) -> list[tuple[dict[str, str], str]]:
        return [(attributes, "".join(text)) for tag, attributes, text in self.elements if tag in tags]


@pytest.fixture(scope="module")
def html() -> str:
    return render(zoo_page())


@pytest.fixture(scope="module")
def page(html: str) -> Reader:
    return Reader(html)


def test_the_page_refers_to_nothing_outside_and_runs_nothing(html: str, page: Reader) -> None:
    outside = re.sub(r"/\*.*?\*/|base64,[^\"]*", "", html, flags=re.DOTALL)
    assert not re.search(r"https?:|//|@import", outside)
    assert not {"script", "link", "iframe", "object", "base"} & {tag for tag, _, _ in page.elements}
    for _, attributes, _ in page.elements:
        for name in ("src", "href", "srcset", "action"):
            assert attributes.get(name, "#").startswith(("#", "data:image/svg+xml"))
    (policy,) = (meta["content"] for meta, _ in page.all("meta") if "http-equiv" in meta)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def test_ids_are_unique_and_references_arrive(page: Reader) -> None:
    ids = [attributes["id"] for _, attributes, _ in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    wanted = {
        *(attributes["href"][1:] for _, attributes, _ in page.elements if "href" in attributes),
        *(attributes["aria-labelledby"] for _, attributes, _ in page.elements if "aria-labelledby" in attributes),
    }
    assert len(wanted) >= 8
    assert wanted <= set(ids)


def test_every_table_is_there_with_caption_and_scopes(page: Reader) -> None:
    tables = [block for section in zoo_page().sections for block in section.blocks if isinstance(block, Table)]
    assert [text for _, text in page.all("caption")] == [table.caption for table in tables]
    assert len(tables) == 6
    assert {attributes.get("scope") for attributes, _ in page.all("th")} == {"col", "row"}
    cells = [text for _, text in page.all("th", "td")]
    for table in tables:
        shown = [*table.columns, *(cell for row in table.rows for cell in row)]
        assert set(shown) <= set(cells)
    assert len(cells) == sum(len(table.columns) * (1 + len(table.rows)) for table in tables)


def test_every_figure_says_in_words_what_it_shows(page: Reader) -> None:
    plots = page.all("img")
    assert len(plots) == 5
    assert all(len(attributes["alt"]) > 40 for attributes, _ in plots)
    assert len(page.all("figcaption")) == len(plots)


def test_headings_go_down_in_order_and_the_page_suits_a_phone(page: Reader) -> None:
    levels = [int(tag[1]) for tag, _, _ in page.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert set(levels[1:]) == {2}
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in [a for a, _ in page.all("meta")]
    assert [attributes["lang"] for attributes, _ in page.all("html")] == ["en"]
    assert len(page.all("main")) == 1


def test_a_section_without_blocks_is_left_out() -> None:
    empty = Section("empty", "Nothing", [])
    reader = Reader(render(Page("t", "l", [], [empty, Section("s", "Something", [Text("x")])])))
    assert [text for _, text in reader.all("h2")] == ["Something"]
    assert [text for _, text in reader.all("li")] == ["Something"]


def test_text_is_escaped_and_every_kind_of_block_is_shown() -> None:
    evil = '<script>alert("&")</script>'
    blocks = (
        Text(evil),
        Listing([evil]),
        Code(evil),
        Note(evil, [evil]),
        Table("t", evil, [evil, "b"], [[evil, evil]], [False, True]),
        Gallery([Figure('<img alt="">', evil)]),
    )
    reader = Reader(render(Page(evil, evil, [Fact(evil, evil)], [Section("s", evil, blocks)])))
    assert reader.all("script") == []
    assert len(reader.all("img")) == 1
    for tag in ("title", "h1", "strong", "h2", "p", "li", "code", "caption", "th", "td", "figcaption"):
        assert any(evil in text for _, text in reader.all(tag)), tag


def test_what_failed_is_a_note() -> None:
    reader = Reader(render(zoo_page()))
    ((_, text),) = ((attributes, text) for attributes, text in reader.all("div") if attributes.get("role") == "note")
    assert "2 of 8 checkpoints could not be measured" in text
    assert "run-10/pytorch_model.bin holds no weights" in text


def test_a_crooked_table_is_refused() -> None:
    with pytest.raises(ValueError, match="'t' has 2 columns, but rows or alignments of lengths"):
        Table("t", "c", ["a", "b"], [["1"]], [False, False])


def test_missing_libraries_are_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    page = Page("t", "l", [], [])
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "jinja2", None)
        with pytest.raises(ImportError, match=r'jinja2.*pip install "quotient-manifolds\[plots\]"'):
            render(page)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(ImportError, match=r'matplotlib.*pip install "quotient-manifolds\[plots\]"'):
            galleries()
