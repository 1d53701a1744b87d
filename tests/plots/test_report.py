"""The page: complete, self-contained, readable without eyes, and its text escaped."""

from __future__ import annotations

import re
import sys
from dataclasses import asdict
from html.parser import HTMLParser

import pandas as pd
import pytest

from quotient_manifolds.compare import Comparison
from quotient_manifolds.compare.comparison import COLUMNS
from quotient_manifolds.compare.report import comparison_page
from quotient_manifolds.plots import orbit_figure
from quotient_manifolds.report import render
from quotient_manifolds.statistics import correlation

VOID = {"meta", "link", "br", "hr", "img", "input"}
EVIL = '<script>alert("&")</script>'
FOUND = correlation([1, 2, 3, 4, 5], [3, 1, 2, 5, 4], resamples=99)


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


@pytest.fixture(scope="module")
def html() -> str:
    """The page of a comparison that has everything, every text hostile."""
    names = [f"{EVIL}{number}" for number in range(5)]
    labels = [f"{EVIL}, radius {radius}" for radius in (0.1, 0.2)]
    measures = pd.DataFrame({"family": EVIL, "radius": [0.1, 0.2]}, index=pd.Index(labels, name="label"))
    scores = pd.DataFrame({EVIL: [3.0, 1.0, 2.0, 5.0, 4.0]}, index=pd.Index(names, name="checkpoint"))
    values = [
        dict.fromkeys(COLUMNS["values"], 0.2)
        | {"checkpoint": name, "label": label, "mean": 0.25 + k, "standard_error": 0.01}
        for label in labels
        for k, name in enumerate(names)
    ]
    rows = [{"measure": label, "against": EVIL, "given": ""} | asdict(FOUND) | {"p_holm": 0.5} for label in labels]
    failures = pd.DataFrame([[EVIL, EVIL, "no loss"]], columns=list(COLUMNS["failures"]))
    flags = {"beyond_reach": False, "rounded": True}
    tables = (pd.DataFrame(values).assign(**flags), pd.DataFrame(rows), failures)
    return comparison_page(Comparison(EVIL, "1", EVIL, measures, scores, *tables, notes=(EVIL,)))


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


def test_everything_is_shown_and_its_text_escaped(reader: Reader) -> None:
    for tag in ("title", "h1", "li", "code", "th", "td", "figcaption"):
        assert any(EVIL in text for _, text in reader.all(tag)), tag
    notes = [text for attributes, text in reader.all("div") if attributes.get("role") == "note"]
    assert [EVIL in text for text in notes] == [True, True]
    assert any("0.25 ± 0.01" in text for _, text in reader.all("td"))
    assert [EVIL in attributes["alt"] for attributes, _ in reader.all("img")] == [True, True]
    assert {attributes.get("scope") for attributes, _ in reader.all("th")} == {"col", "row"}


def test_ids_are_unique_and_references_arrive(reader: Reader) -> None:
    ids = [attributes["id"] for _, attributes, _ in reader.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    attributes = [attributes for _, attributes, _ in reader.elements]
    wanted = {each[name].lstrip("#") for each in attributes for name in ("href", "aria-labelledby") if name in each}
    assert {"content", "failures", "rankings"} <= wanted <= set(ids)
    assert {"care", "notes", "correlations", "values", "redo"} <= set(ids)  # folded at the end


def test_headings_go_down_in_order_and_the_page_suits_a_phone(reader: Reader) -> None:
    levels = [int(tag[1]) for tag, _, _ in reader.elements if re.fullmatch(r"h[1-6]", tag)]
    assert (levels[0], set(levels[1:])) == (1, {2})
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in [a for a, _ in reader.all("meta")]
    assert [attributes["lang"] for attributes, _ in reader.all("html")] == ["en"]


def test_missing_libraries_are_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for library, call in (
        ("jinja2", lambda: render("comparison.html.j2")),
        ("matplotlib", lambda: orbit_figure([0.1, 1.0], {"inv": [1.0, 1.0]})),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, library, None)
            with pytest.raises(ImportError, match=rf'{library}.*pip install "quotient-manifolds\[plots\]"'):
                call()
