"""Figures: every point drawn, the same every time, fit to stand in a page, and told in words."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree as ET

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from quotient_manifolds.plots import (
    STYLES,
    Panel,
    Plot,
    Series,
    line_figure,
    orbit_figure,
    path_figure,
    scatter_figure,
    style_of,
)
from quotient_manifolds.statistics import correlation

X, Y = [1.0, 10.0, None, 100.0, 30.0, 7.0], [5.0, 3.0, 2.0, None, 4.0, 9.0]
PANEL = Panel("Adaptive <&>", X, Y, correlation(X, Y, permutations=9), x_errors=[0.1] * 6)

LINE = [Series("one <&>", [1, 10, 100], [0.5, 2.0, 7.0], STYLES[0])]
FIGURES: dict[str, Callable[[], Plot]] = {
    "line": lambda: line_figure(LINE, x_label="x", y_label="y", log=(True, True), alt="A & B"),
    "scatter": lambda: scatter_figure([PANEL, PANEL], y_label="gap"),
    "orbit": lambda: orbit_figure([0.1, 1.0, 10.0], {"Adaptive": [7.0, None, 0.2], "inv": [1.0, 1.0, 1.0 + 1e-12]}),
}
WORDS = {
    "line": "A & B",
    "scatter": "Adaptive <&> against gap, 4 models, 2 without a value not drawn; from 1 to 30 and from 3 to 9; "
    "Kendall’s tau-b −0.33 no interval.",
    "orbit": "from 0.1 to 10. Adaptive from 0.2 to 7; inv from 1 to 1.",
}
EVERY = pytest.mark.parametrize("name", FIGURES)


@EVERY
def test_a_figure_is_the_same_every_time_whatever_the_users_settings(name: str) -> None:
    first = FIGURES[name]().html()
    with mpl.rc_context({"font.size": 30, "axes.facecolor": "red", "svg.fonttype": "path", "axes.grid": False}):
        assert FIGURES[name]().html() == first
        assert mpl.rcParams["font.size"] == 30


@EVERY
def test_a_figure_stands_in_a_page_and_says_what_is_drawn(name: str) -> None:
    plot = FIGURES[name]()
    image = ET.fromstring(f"{plot.html().removesuffix('>')}/>")
    assert image.attrib["alt"] == plot.alt
    kind, _, data = image.attrib["src"].partition(",")
    assert kind == "data:image/svg+xml;base64"
    assert ET.fromstring(base64.b64decode(data)).tag.endswith("svg")
    assert WORDS[name] in plot.alt
    assert not re.search(r"\bnan\b|None|inf\b", plot.alt)


def test_scatter_draws_every_model_that_has_both_values() -> None:
    plot = scatter_figure([PANEL] * 5, y_label="gap")
    for axes in plot.figure.axes:
        (points,) = (line for line in axes.get_lines() if line.get_marker() == "o")
        assert points.get_xydata().tolist() == [[1.0, 5.0], [10.0, 3.0], [30.0, 4.0], [7.0, 9.0]]
        assert axes.get_title() == "Kendall’s tau-b −0.33 no interval"
        assert axes.get_xscale() == "log"
    assert plot.figure.get_size_inches().tolist() == pytest.approx([2 * 4.8, 3 * 3.7])
    assert [axes.get_ylabel() for axes in plot.figure.axes] == ["gap", "", "gap", "", "gap"]
    few = scatter_figure([Panel("a", [1.0, 2.0], [1.0, 2.0])], y_label="gap").figure.axes[0]
    assert (few.get_xscale(), few.get_title()) == ("linear", "")


def test_orbit_is_drawn_against_one_and_rounding_stays_small() -> None:
    (axes,) = FIGURES["orbit"]().figure.axes
    one, adaptive, inv = axes.get_lines()
    assert list(one.get_ydata()) == [1, 1]
    np.testing.assert_array_equal(adaptive.get_ydata(), [7.0, math.nan, 0.2])
    assert inv.get_ydata()[2] == 1 + 1e-12
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert axes.get_ylim()[0] < 0.2 < 7 < axes.get_ylim()[1]
    still = orbit_figure([0.1, 10.0], {"inv": [1.0, 1.0 + 1e-12]}).figure.axes[0]
    assert still.get_ylim() == (0.5, 2.0)


SURE = correlation(range(6), range(6), permutations=9)
LONG = [f"{letter * 59}{letter}" for letter in "Wm_xgi"]
CROWDED: dict[str, Callable[[list[str]], Plot]] = {
    "line": lambda names: line_figure(
        [Series(name, [1, 10], [0.5, 2.0], style_of(place)) for place, name in enumerate(names)],
        x_label=names[0], y_label=names[1], log=(True, True), alt="",
    ),
    "orbit": lambda names: orbit_figure([0.1, 10.0], {name: [7.0, 0.2] for name in names}),
    "path": lambda names: path_figure([0.0, 0.5, 1.0], {name: [0.3, 0.5, 0.3] for name in names}),
    "scatter": lambda names: scatter_figure(
        [Panel(each, range(6), range(6), SURE, names=names) for each in names],
        y_label=names[0],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CROWDED)
@pytest.mark.parametrize(
    "names", [LONG, ["adaptive", "inv"] * 3, ["a $x$ of b, " * 5] * 6], ids=["long", "short", "words"]
)
def test_everything_lies_inside_the_canvas_for_the_longest_names(name: str, names: list[str]) -> None:
    figure = CROWDED[name](names).figure
    FigureCanvasAgg(figure).draw()
    width, height = figure.bbox.size
    for legend in figure.legends:  # matplotlib leaves out what begins with an underscore
        assert len(legend.get_texts()) == (len(names) if name == "line" else len(set(names)))
    drawn = [text for axes in figure.axes for text in (*axes.texts, axes.title, axes.xaxis.label, axes.yaxis.label)]
    for each in (*figure.legends, *drawn):
        box = each.get_window_extent()
        assert -1 < box.x0 <= box.x1 < width + 1, each
        assert -1 < box.y0 <= box.y1 < height + 1, each
    for axes in figure.axes:  # and leaves room for what is drawn
        assert axes.get_window_extent().width > 0.5 * 4.8 * figure.dpi
        assert axes.get_window_extent().height > 0.5 * 3.7 * figure.dpi


def test_points_carry_the_names_of_models_and_hide_none() -> None:
    names = ["m_0", "m_1", "m_2", "m_3", "$x$", "a-long-name-of-a-checkpoint-that-was-trained-with-seed-17"]
    (axes,) = scatter_figure([Panel("a", X, Y, names=names)], y_label="gap").figure.axes
    said = {tuple(text.xy): text.get_text() for text in axes.texts}
    assert said == {(1.0, 5.0): "m_0", (10.0, 3.0): "m_1", (30.0, 4.0): r"\$x\$", (7.0, 9.0): "a-long-na…-seed-17"}
    with pytest.raises(ValueError, match=r"lengths \[5, 6\]"):
        scatter_figure([Panel("a", X, Y, names=names[:5])], y_label="gap")


def test_36_series_can_be_told_apart() -> None:
    assert len({(style_of(place).color, style_of(place).marker) for place in range(36)}) == 36
    assert tuple(style_of(place) for place in range(6)) == STYLES


def test_a_plot_is_saved_alone_and_shown_in_a_notebook(tmp_path: Path) -> None:
    plot = FIGURES["scatter"]()
    for name, start in (("plot.svg", b"<?xml"), ("plot.pdf", b"%PDF"), ("plot.png", b"\x89PNG")):
        plot.save(tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)
    assert plot._repr_html_() == plot.html()
    assert ET.fromstring((tmp_path / "plot.svg").read_text()).findtext(".//{*}title") == plot.alt


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: scatter_figure([], y_label="gap"), "at least one panel"),
        (lambda: scatter_figure([Panel("a", [1.0, 2.0], [1.0])], y_label="gap"), r"lengths \[1, 2\]"),
    ],
    ids=["no panel", "lengths"],
)
def test_bad_input_gets_a_sentence(call: Callable[[], object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        call()
