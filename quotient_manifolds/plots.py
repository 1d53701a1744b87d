"""Figures as SVG text that stands inside a page: it scales, has a text alternative, and refers to nothing outside."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree as ET

SIZE = (4.8, 3.7)  # inches: narrow, so that letters stay readable at the width of a phone
SVG = "{http://www.w3.org/2000/svg}"
XLINK = "{http://www.w3.org/1999/xlink}"


@dataclass(frozen=True)
class Style:
    """Colour and marker of a series; the colours are Okabe and Ito's, told apart with any colour vision."""

    colour: str
    marker: str
    line: str = "-"


STYLES = (
    Style("#000000", "D", ":"),
    Style("#D55E00", "^", "-."),
    Style("#0072B2", "o", "-"),
    Style("#009E73", "s", "--"),
    Style("#CC79A7", "v", (0, (5, 1))),  # type: ignore[arg-type]
    Style("#E69F00", "P", (0, (1, 1))),  # type: ignore[arg-type]
)


@dataclass(frozen=True)
class Series:
    """Points to draw under one label; `errors` are half lengths of error bars in x."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    style: Style
    errors: Sequence[float] | None = None


@dataclass(frozen=True)
class Interval:
    """An estimate with its interval, which may be missing."""

    label: str
    value: float
    low: float | None
    high: float | None
    style: Style


def line_figure(
    series: Sequence[Series], *, x_label: str, y_label: str, log: tuple[bool, bool], name: str, alt: str
) -> str:
    """Lines with markers, and a legend above the axes. `log`: logarithmic x, y. The figure as SVG text."""
    with _axes(x_label, y_label) as (figure, axes):
        for one in series:
            style: dict[str, Any] = {"color": one.style.colour, "linestyle": one.style.line, "marker": one.style.marker}
            many = len(one.x) > 12
            axes.plot(one.x, one.y, **style, label=one.label, markersize=3.5 if many else 6, fillstyle="none")
        axes.set_xscale("log" if log[0] else "linear")
        axes.set_yscale("log" if log[1] else "linear")
        _plain_ticks(axes)
        figure.legend(loc="outside upper center", ncols=2, frameon=False)
        return _svg(figure, name, alt)


def scatter_figure(points: Series, *, x_label: str, y_label: str, title: str, name: str, alt: str) -> str:
    """One point a model; x is logarithmic where its values span more than a factor of ten. The figure as SVG text."""
    with _axes(x_label, y_label) as (figure, axes):
        axes.errorbar(
            points.x,
            points.y,
            xerr=points.errors,
            fmt=points.style.marker,
            color=points.style.colour,
            markerfacecolor=f"{points.style.colour}55",
            elinewidth=0.8,
        )
        if min(points.x) > 0 and max(points.x) > 10 * min(points.x):
            axes.set_xscale("log")
        _plain_ticks(axes)
        axes.set_title(title)
        return _svg(figure, name, alt)


def interval_figure(groups: Mapping[str, Sequence[Interval]], *, x_label: str, name: str, alt: str) -> str:
    """Estimates with their intervals on a scale from -1 to 1, in titled groups. The figure as SVG text."""
    rows = [(group, one) for group, intervals in groups.items() for one in intervals]
    with _axes(x_label, "") as (figure, axes):
        axes.axvline(0, color="#666666", linewidth=0.8)
        ticks, labels, place = [], [], 0.0
        for index, (group, one) in enumerate(rows):
            place -= 1.0 if index and rows[index - 1][0] == group else 1.8
            if not index or rows[index - 1][0] != group:
                axes.text(-1.0, place + 0.62, group, fontweight="bold")
            if one.low is not None and one.high is not None:
                axes.plot([one.low, one.high], [place, place], color=one.style.colour, linewidth=2)
            axes.plot([one.value], [place], color=one.style.colour, marker=one.style.marker, markersize=7)
            ticks.append(place)
            labels.append(one.label)
        axes.set(xlim=(-1.02, 1.02), ylim=(place - 0.6, -0.6), yticks=ticks)
        axes.set_yticklabels(labels)
        axes.grid(visible=False, axis="y")
        return _svg(figure, name, alt)


def _plain_ticks(axes: Any) -> None:
    """0.5, 1, 2 instead of powers of ten where an axis spans few decades; whole numbers where all x are whole."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator, MaxNLocator, NullFormatter

    for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        if axis.get_scale() == "linear":
            continue
        span = limits[1] / limits[0]
        if span < 1e5:
            axis.set_major_locator(LogLocator(subs=(1.0,) if span > 300 else (1.0, 2.0, 5.0)))
            axis.set_major_formatter(FormatStrFormatter("%g"))
            axis.set_minor_formatter(NullFormatter())
    whole = all(float(x).is_integer() for line in axes.get_lines() for x in line.get_xdata())
    if axes.get_xscale() == "linear" and whole:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


@contextmanager
def _axes(x_label: str, y_label: str) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes that no other figure of the process can see or change."""
    mpl, figure_class = _matplotlib()
    settings = {
        "font.size": 10.5,
        "axes.titlesize": 10.5,
        "svg.fonttype": "none",
        "svg.hashsalt": "quotient-manifolds",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#dddddd",
        "axes.axisbelow": True,
    }
    with mpl.rc_context():
        mpl.rcdefaults()  # a user's own matplotlibrc does not change a report
        mpl.rcParams.update(settings)
        figure = figure_class(figsize=SIZE, layout="constrained")
        axes = figure.add_subplot()
        axes.set(xlabel=x_label, ylabel=y_label)
        yield figure, axes


def _matplotlib() -> tuple[Any, Any]:
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'The figures are drawn by matplotlib, which is not installed: pip install "quotient-manifolds[plots]".'
        ) from error
    return mpl, Figure


def _svg(figure: Any, name: str, alt: str) -> str:
    """The figure as an <svg> element for a page, described by `alt`; `name` makes its ids unique in the page."""
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise ValueError(f"A figure's name must be lower-case letters, digits and hyphens, found {name!r}.")
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    root = ET.fromstring(buffer.getvalue())
    for metadata in root.findall(f"{SVG}metadata"):
        root.remove(metadata)
    for parent in [*root.iter(f"{SVG}defs")]:
        for style in parent.findall(f"{SVG}style"):
            parent.remove(style)  # it would hold for the whole page, not for this figure
    for element in root.iter():
        element.tag = element.tag.removeprefix(SVG)
        element.attrib = {key.removeprefix(XLINK): _local(value, key, name) for key, value in element.attrib.items()}
    for size in ("width", "height", "version"):
        root.attrib.pop(size, None)
    described = ET.Element("title", {"id": f"{name}-alt"})
    described.text = alt
    root.insert(0, described)
    root.attrib.update({"role": "img", "aria-labelledby": f"{name}-alt", "class": "plot"})
    root.attrib.update({"stroke-linejoin": "round", "stroke-linecap": "butt"})
    return ET.tostring(root, encoding="unicode")


def _local(value: str, key: str, name: str) -> str:
    """Ids, and references to ids, prefixed by the figure's name."""
    if key == "id":
        return f"{name}-{value}"
    if key in ("href", f"{XLINK}href"):
        return value.replace("#", f"#{name}-", 1)
    return re.sub(r"url\(#", f"url(#{name}-", value)
