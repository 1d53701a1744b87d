"""The page and its figures: complete, self-contained, readable without eyes, and honest about what is not defined."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import matplotlib as mpl
import pytest

from quotient_manifolds.experiments.page import demo_page
from quotient_manifolds.experiments.records import (
    CorrelationRow,
    DemoResult,
    Measure,
    ModelRow,
    OrbitRow,
    PairRow,
    Provenance,
    Settings,
    Sharpness,
)
from quotient_manifolds.experiments.zoo import Scores, draw_recipe
from quotient_manifolds.plots import STYLES, Interval, Series, interval_figure, line_figure, scatter_figure
from quotient_manifolds.report import Code, Fact, Figure, Gallery, Listing, Page, Section, Table, Text, render
from quotient_manifolds.statistics import Correlation, correlation

KEYS = ("euclidean", "adaptive", "inv", "mix")
VOID = {"meta", "link", "br", "hr", "img", "input"}


def made_up(models: int = 6) -> DemoResult:
    """Records as a run would leave them, with numbers that can be recognised in the page."""
    measures = tuple(Measure(key, f"Measure {key}", 0.05 * (1 + place)) for place, key in enumerate(KEYS))
    rows = tuple(
        ModelRow(
            f"model {place}",
            draw_recipe(place),
            Scores(0.01, 0.0, 0.3 + 0.01 * place, 0.05 + 0.01 * place),
            dict.fromkeys(KEYS, Sharpness(0.4321 + ((3 * place) % 7) / 10, 0.01)),
        )
        for place in range(models)
    )
    correlations = tuple(
        CorrelationRow(
            key,
            gap,
            correlation(
                [row.sharpness[key].mean for row in rows], [getattr(row.scores, gap) for row in rows], resamples=20
            ),
        )
        for gap in ("error_gap", "loss_gap")
        for key in KEYS
    )
    after = {"adaptive": 7.25, "inv": 1 + 3e-14, "mix": 1.0}
    orbit = tuple(
        OrbitRow(dtype, key, scale, 0.5, 0.5 * after[key], 0.25, 0.25)
        for dtype in ("float32", "float64")
        for key in after
        for scale in (0.1, 1.0, 10.0)
    )
    return DemoResult(
        Settings(models, 0, "cpu", "float32", 20, 0.2, 0.05, 2, 128, 300, None, (0.1, 1.0, 10.0), 20),
        Provenance("quotient-manifolds demo --seed 0", "9.8.7", "2.0", "3.12", "Linux", 1, 4, {"training": 61.0}),
        58570,
        measures,
        (PairRow("layer.0 query/key", "query/key", "GL(12)^4", 49, 48, 12, 1e-15, 0.8, "proved"),),
        ("embeddings.weight",),
        1e-16,
        orbit,
        rows,
        correlations,
        dict.fromkeys(KEYS, (0.1, 0.5, 0.4)),
    )


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
def result() -> DemoResult:
    return made_up()


@pytest.fixture(scope="module")
def html(result: DemoResult) -> str:
    return render(demo_page(result))


@pytest.fixture(scope="module")
def page(html: str) -> Reader:
    return Reader(html)


def test_the_page_refers_to_nothing_outside(html: str, page: Reader) -> None:
    assert not re.search(r"https?:|//|@import|data:", re.sub(r"/\*.*?\*/", "", html))
    assert not {"script", "link", "iframe", "img", "object", "base"} & {tag for tag, _, _ in page.elements}
    for _, attributes, _ in page.elements:
        for name in ("src", "href", "srcset", "action"):
            assert attributes.get(name, "#").startswith("#")


def test_ids_are_unique_and_references_arrive(html: str, page: Reader) -> None:
    ids = [attributes["id"] for _, attributes, _ in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    wanted = {
        *(attributes["href"][1:] for _, attributes, _ in page.elements if "href" in attributes),
        *(attributes["aria-labelledby"] for _, attributes, _ in page.elements if "aria-labelledby" in attributes),
        *re.findall(r"url\(#([^)]+)\)", html),
    }
    assert len(wanted) > 20
    assert wanted <= set(ids)


def test_every_table_is_there_with_caption_and_scopes(result: DemoResult, page: Reader) -> None:
    tables = [block for section in demo_page(result).sections for block in section.blocks if isinstance(block, Table)]
    assert [text for _, text in page.all("caption")] == [table.caption for table in tables]
    assert len(tables) == 6
    assert {attributes.get("scope") for attributes, _ in page.all("th")} == {"col", "row"}
    cells = [text for _, text in page.all("th", "td")]
    for table in tables:
        shown = [*table.columns, *(cell for row in table.rows for cell in row)]
        assert set(shown) <= set(cells)
    assert len(cells) == sum(len(table.columns) * (1 + len(table.rows)) for table in tables)


def test_every_figure_says_in_words_what_it_shows(page: Reader) -> None:
    plots = page.all("svg")
    assert len(plots) == 8
    titles = {attributes["id"]: text for attributes, text in page.all("title") if "id" in attributes}
    for attributes, _ in plots:
        assert attributes["role"] == "img"
        assert len(titles[attributes["aria-labelledby"]]) > 40
        assert "viewbox" in attributes
        assert "width" not in attributes
    assert len(page.all("figcaption")) == len(plots)


def test_headings_go_down_in_order_and_the_page_suits_a_phone(page: Reader) -> None:
    levels = [int(tag[1]) for tag, _, _ in page.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert set(levels[1:]) == {2}
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in [a for a, _ in page.all("meta")]
    assert [attributes["lang"] for attributes, _ in page.all("html")] == ["en"]
    assert len(page.all("main")) == 1


def test_the_main_figures_come_first_and_are_the_recorded_ones(html: str, page: Reader) -> None:
    facts = [text for attributes, text in page.all("strong")]
    assert facts == ["× 7.25", "3.0e-14", "1 of 1", "6 models"]
    assert html.index("× 7.25") < html.index("<h2")
    body = " ".join(text for _, text in page.all("body"))
    for wanted in ("quotient-manifolds demo --seed 0", "9.8.7", "61 s: training 61 s", "6 models are few", "58,570"):
        assert wanted in body
    assert "4 trained in this run, 2 kept from an earlier one" in body


@pytest.mark.parametrize("undefined", ["constant gap", "three models", "one batch"])
def test_what_is_not_defined_is_said_in_words(result: DemoResult, undefined: str) -> None:
    if undefined == "constant gap":
        nothing = Correlation("kendall-b", None, None, None, None, 6, 0, 0.95, 0, 0, 0)
        changed = replace(result, correlations=tuple(replace(r, correlation=nothing) for r in result.correlations))
        expected = "undefined"
    elif undefined == "three models":
        changed, expected = made_up(3), "no interval"
    else:
        alone = dict.fromkeys(KEYS, Sharpness(0.5, None))
        changed = replace(result, models=tuple(replace(row, sharpness=alone) for row in result.models))
        expected = "0.5"
    shown = " ".join(text for _, text in Reader(render(demo_page(changed))).all("body"))
    assert expected in shown


def test_the_verdict_follows_the_intervals(result: DemoResult) -> None:
    def verdict(low: float | None, high: float | None) -> str:
        found = Correlation("kendall-b", 0.4, low, high, 0.1, 6, 0, 0.95, 20, 0, 720)
        first, *others = (replace(row, correlation=replace(found, low=-0.1, high=0.1)) for row in result.correlations)
        rows = (replace(first, correlation=found), *others)
        if low is None:
            rows = tuple(replace(row, correlation=found) for row in rows)
        texts = [text for _, text in Reader(render(demo_page(replace(result, correlations=rows)))).all("p")]
        (ranking,) = (text for text in texts if text.startswith("Kendall"))
        return ranking.partition("%). ")[2]

    assert verdict(-0.1, 0.5) == "Here every interval contains 0: in this zoo no measure is shown to rank the models."
    expected = (
        "Here the interval excludes 0 for: Measure euclidean with the gap in error (+0.40). All others contain 0."
    )
    assert verdict(0.1, 0.5) == verdict(-0.5, -0.1) == expected
    assert verdict(None, None).startswith("Here no interval could be formed")


@pytest.mark.parametrize("models", [3, 6])
def test_no_number_is_missing(models: int) -> None:
    shown = " ".join(text for _, text in Reader(render(demo_page(made_up(models)))).all("body"))
    assert not re.search(r"\b(nan|NaN|inf|Infinity|None)\b", shown)
    assert not re.search(r"[{}]", shown)


def test_text_is_escaped_and_every_kind_of_block_is_shown() -> None:
    evil = '<script>alert("&")</script>'
    blocks = (
        Text(evil),
        Listing([evil]),
        Code(evil),
        Table("t", evil, [evil, "b"], [[evil, evil]], [False, True]),
        Gallery([Figure("<svg></svg>", evil)]),
    )
    reader = Reader(render(Page(evil, evil, [Fact(evil, evil)], [Section("s", evil, blocks)])))
    assert reader.all("script") == []
    assert len(reader.all("svg")) == 1
    for tag in ("title", "h1", "strong", "h2", "p", "li", "code", "caption", "th", "td", "figcaption"):
        assert any(evil in text for _, text in reader.all(tag)), tag


def test_a_crooked_table_is_refused() -> None:
    table = Table("t", "c", ["a", "b"], [["1"]], [False, False])
    with pytest.raises(ValueError, match="'t' has 2 columns, but rows or alignments of lengths"):
        render(Page("t", "l", [], [Section("s", "s", [table])]))


# ---- figures


SERIES = (Series("one <&>", [1, 10, 100], [0.5, 2.0, 7.0], STYLES[0], [0.1, 0.2, 0.3]),)


def figures() -> dict[str, Callable[[], str]]:
    return {
        "line": lambda: line_figure(SERIES, x_label="x", y_label="y", log=(True, True), name="line", alt="A & B"),
        "scatter": lambda: scatter_figure(SERIES[0], x_label="x", y_label="y", title="<t>", name="scatter", alt="alt"),
        "interval": lambda: interval_figure(
            {"g": [Interval("m", 0.2, None, None, STYLES[1]), Interval("n", 0.1, -0.2, 0.3, STYLES[2])]},
            x_label="tau",
            name="interval",
            alt="alt",
        ),
    }


@pytest.mark.parametrize("name", ["line", "scatter", "interval"])
def test_a_figure_is_the_same_every_time_whatever_the_users_settings(name: str) -> None:
    first = figures()[name]()
    with mpl.rc_context({"font.size": 30, "axes.facecolor": "red", "svg.fonttype": "path"}):
        assert figures()[name]() == first
        assert mpl.rcParams["font.size"] == 30


@pytest.mark.parametrize("name", ["line", "scatter", "interval"])
def test_ids_of_a_figure_begin_with_its_name(name: str) -> None:
    root = ET.fromstring(figures()[name]())
    ids = [element.attrib["id"] for element in root.iter() if "id" in element.attrib]
    assert ids
    assert all(one.startswith(f"{name}-") for one in ids)
    assert not [element for element in root.iter() if element.tag.endswith(("style", "metadata"))]


def test_a_figure_draws_every_point_and_label() -> None:
    text = figures()["line"]()
    root = ET.fromstring(text)
    assert "one <&>" in "".join(root.itertext())
    assert root.find("title").text == "A & B"  # type: ignore[union-attr]
    assert text.count("<use ") >= 3


def test_a_figures_name_must_serve_as_an_id() -> None:
    with pytest.raises(ValueError, match="lower-case letters, digits and hyphens, found 'a b'"):
        line_figure(SERIES, x_label="", y_label="", log=(False, False), name="a b", alt="")


def test_missing_libraries_are_named_with_the_extra(monkeypatch: pytest.MonkeyPatch, result: DemoResult) -> None:
    page = Page("t", "l", [], [])
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "jinja2", None)
        with pytest.raises(ImportError, match=r'jinja2.*pip install "quotient-manifolds\[plots\]"'):
            render(page)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(ImportError, match=r'matplotlib.*pip install "quotient-manifolds\[plots\]"'):
            demo_page(result)
