"""Figures: every point drawn, the same every time, fit to stand in a page, and told in words."""

from __future__ import annotations

import base64
import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree as ET

import matplotlib as mpl
import numpy as np
import pytest

from quotient_manifolds.plots import (
    STYLES,
    Colour,
    Interval,
    Panel,
    Plot,
    Series,
    agreement_figure,
    interval_figure,
    line_figure,
    orbit_figure,
    radius_figure,
    scatter_figure,
    style_of,
)
from quotient_manifolds.statistics import Agreement, agreement, correlation
from tests.pages import contrast

X, Y = [1.0, 10.0, None, 100.0, 30.0, 7.0], [5.0, 3.0, 2.0, None, 4.0, 9.0]
PANEL = Panel("Adaptive <&>", X, Y, correlation(X, Y, permutations=9), x_errors=[0.1] * 6, y_errors=[None] * 6)
COLUMNS = {"one": [1.0, 2.0, 3.0, 4.0], "two": [2.0, 1.0, 3.0, 4.0], "three": [4.0, 3.0, 2.0, 1.0], "none": [None] * 4}

FIGURES: dict[str, Callable[[], Plot]] = {
    "line": lambda: line_figure(
        [Series("one <&>", [1, 10, 100], [0.5, 2.0, 7.0], STYLES[0])],
        x_label="x",
        y_label="y",
        log=(True, True),
        alt="A & B",
    ),
    "scatter": lambda: scatter_figure([PANEL, PANEL], y_label="gap"),
    "categories": lambda: scatter_figure(
        [PANEL], y_label="gap", colour=Colour("optimizer", ["a", "b", "a", None, "b", "c"])
    ),
    "scale": lambda: scatter_figure(
        [PANEL], y_label="gap", colour=Colour("rate", [1e-5, 1e-4, 1e-3, 1e-2, None, 1e-3])
    ),
    "interval": lambda: interval_figure(
        {"g": [Interval("m", 0.2, None, None, STYLES[1]), Interval("n", 0.1, -0.2, 0.3, STYLES[2])]},
        x_label="tau",
        alt="alt",
    ),
    "orbit": lambda: orbit_figure([0.1, 1.0, 10.0], {"Adaptive": [7.0, None, 0.2], "inv": [1.0, 1.0, 1.0 + 1e-12]}),
    "models": lambda: radius_figure([0.1, 0.2], {"Adaptive": [[0.1, 0.4], [0.2, 0.8], [None, 0.5]], "inv": []}),
    "band": lambda: radius_figure([0.1, 0.2], {"Adaptive": [[0.1, 0.4], [0.2, 0.8], [0.0, 0.6]]}, show="band"),
    "agreement": lambda: agreement_figure(agreement(COLUMNS)),
}


def axes_of(plot: Plot) -> list[object]:
    return list(plot.figure.axes)


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_the_same_every_time_whatever_the_users_settings(name: str) -> None:
    first = FIGURES[name]().html()
    with mpl.rc_context({"font.size": 30, "axes.facecolor": "red", "svg.fonttype": "path", "axes.grid": False}):
        assert FIGURES[name]().html() == first
        assert mpl.rcParams["font.size"] == 30


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_stands_in_a_page_with_its_words(name: str) -> None:
    plot = FIGURES[name]()
    image = ET.fromstring(f"{plot.html().removesuffix('>')}/>")
    assert image.attrib["alt"] == plot.alt
    kind, _, data = image.attrib["src"].partition(",")
    assert kind == "data:image/svg+xml;base64"
    assert ET.fromstring(base64.b64decode(data)).tag.endswith("svg")


@pytest.mark.parametrize("name", [name for name in FIGURES if name not in ("line", "interval")])
def test_words_say_what_is_drawn(name: str) -> None:
    alt = FIGURES[name]().alt
    assert len(alt) > 60
    assert not re.search(r"\bnan\b|None|inf\b", alt)
    expected = {
        "scatter": "Adaptive <&> against gap, 4 models, 2 without a value not drawn; from 1 to 30 and from 3 to 9; "
        "Kendall’s tau-b −0.33 no interval.",
        "categories": "Colour shows optimizer.",
        "scale": "Colour shows rate.",
        "orbit": "from 0.1 to 10. Adaptive from 0.2 to 7; inv from 1 to 1.",
        "models": "a line for every model. Adaptive (3 models) median 0.15 at radius 0.1, 0.5 at radius 0.2.",
        "band": "quartiles shaded. Adaptive (3 models) median 0.15 at radius 0.1, 0.6 at radius 0.2.",
        "agreement": "Kendall’s tau-b between 4 measures. Highest: one and two (+0.67); lowest: one and three (−1.00). "
        "3 pairs are not defined.",
    }[name]
    assert expected in alt


def test_scatter_draws_every_model_that_has_both_values() -> None:
    one, two = axes_of(scatter_figure([PANEL, PANEL], y_label="gap"))
    for axes in (one, two):
        (points,) = (line for line in axes.get_lines() if line.get_marker() == "o")  # type: ignore[attr-defined]
        assert points.get_xydata().tolist() == [[1.0, 5.0], [10.0, 3.0], [30.0, 4.0], [7.0, 9.0]]
        assert axes.get_title() == "Kendall’s tau-b −0.33 no interval"  # type: ignore[attr-defined]
        assert axes.get_xscale() == "log"  # type: ignore[attr-defined]
    assert one.get_ylabel() == "gap"  # type: ignore[attr-defined]
    few = scatter_figure([Panel("a", [1.0, 2.0], [1.0, 2.0])], y_label="gap").figure.axes[0]
    assert (few.get_xscale(), few.get_title()) == ("linear", "")


def test_panels_stand_in_rows() -> None:
    plot = scatter_figure([PANEL] * 5, y_label="gap", columns=2)
    assert len(plot.figure.axes) == 5
    assert plot.figure.get_size_inches().tolist() == pytest.approx([2 * 4.8, 3 * 3.7])
    assert [axes.get_ylabel() for axes in plot.figure.axes] == ["gap", "", "gap", "", "gap"]


def test_colour_by_category_and_along_a_scale() -> None:
    plot = FIGURES["categories"]()
    legend = plot.figure.legends[0]
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b", "c", "missing"]
    assert legend.get_title().get_text() == "optimizer"
    markers = {line.get_marker(): line.get_xdata().tolist() for line in plot.figure.axes[0].get_lines()}
    assert [markers[style_of(place).marker] for place in range(4)] == [[1.0], [10.0, 30.0], [7.0], []]
    scale = FIGURES["scale"]().figure.axes
    assert scale[1].get_ylabel() == "rate"
    points = scale[0].collections[-1]
    assert points.get_offsets()[:, 0].tolist() == [1.0, 10.0, 30.0, 7.0]
    np.testing.assert_array_equal(np.ma.filled(points.get_array(), math.nan), [1e-5, 1e-4, math.nan, 1e-3])
    assert isinstance(points.norm, mpl.colors.LogNorm)
    assert (points.norm.vmin, points.norm.vmax) == (1e-5, 1e-2)
    nothing = scatter_figure([PANEL], y_label="gap", colour=Colour("rate", [None] * 6))
    assert len(nothing.figure.axes) == 2


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


def test_radius_draws_a_line_a_model_or_median_and_quartiles() -> None:
    (axes,) = FIGURES["models"]().figure.axes
    lines = [line.get_ydata().tolist() for line in axes.get_lines()]
    np.testing.assert_array_equal(lines, [[0.1, 0.4], [0.2, 0.8], [math.nan, 0.5]])
    (axes,) = FIGURES["band"]().figure.axes
    (middle,) = axes.get_lines()
    assert middle.get_ydata() == pytest.approx([0.15, 0.6])  # 0 cannot be drawn and does not count
    (band,) = axes.collections
    heights = {tuple(point) for point in np.round(band.get_paths()[0].vertices, 12).tolist()}
    assert {(0.1, 0.125), (0.1, 0.175), (0.2, 0.5), (0.2, 0.7)} <= heights
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "without values" in radius_figure([0.1, 0.2], {"a": [[None, None]]}, show="band").alt


def test_agreement_shows_every_number_readably() -> None:
    (axes,) = FIGURES["agreement"]().figure.axes
    texts = [text.get_text() for text in axes.texts]
    assert texts[:8] == ["+1.00", "+0.67", "−1.00", "?", "+0.67", "+1.00", "−0.67", "?"]
    assert len(texts) == 16
    assert [label.get_text() for label in axes.get_yticklabels()] == list(COLUMNS)
    values = tuple(tuple(value for value in np.linspace(-1, 1, 40)) for _ in range(40))
    plot = agreement_figure(Agreement("pearson", tuple(map(str, range(40))), values, ((9,) * 40,) * 40, 9))
    mesh = plot.figure.axes[0].collections[0]
    for value, text in zip(values[0], plot.figure.axes[0].texts[:40], strict=True):
        assert contrast(mesh.to_rgba(value), mpl.colors.to_rgba(text.get_color())) >= 4.5


def test_36_series_can_be_told_apart() -> None:
    assert len({(style_of(place).colour, style_of(place).marker) for place in range(36)}) == 36
    assert tuple(style_of(place) for place in range(6)) == STYLES


def test_a_plot_is_saved_alone_and_shown_in_a_notebook(tmp_path: Path) -> None:
    plot = FIGURES["scatter"]()
    for name, start in (("plot.svg", b"<?xml"), ("plot.pdf", b"%PDF"), ("plot.png", b"\x89PNG")):
        plot.save(tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)
    assert plot._repr_html_() == plot.html()
    assert ET.fromstring((tmp_path / "plot.svg").read_text()).findtext(".//{*}title") == plot.alt


def test_bad_input_gets_a_sentence() -> None:
    with pytest.raises(ValueError, match="at least one panel, found none"):
        scatter_figure([], y_label="gap")
    with pytest.raises(ValueError, match=r"one value a model, found lengths \[5, 6\]"):
        scatter_figure([PANEL], y_label="gap", colour=Colour("optimizer", ["a"] * 5))
    with pytest.raises(ValueError, match="'models' or 'band', found 'mean'"):
        radius_figure([0.1], {}, show="mean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least two measures, found 1"):
        agreement_figure(agreement({"one": [1.0, 2.0]}))
