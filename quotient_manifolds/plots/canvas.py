"""Set up figures: settings independent of the user's, styles, legends, and HTML."""

from __future__ import annotations

import base64
import html
import io
import math
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quotient_manifolds.check import needs
from quotient_manifolds.files import atomic_file
from quotient_manifolds.statistics import Numbers

SIZE = (4.8, 3.7)  # inches; narrow, so that text is readable at the width of a phone

FONT = 10.5  # points; ticks and names of points have other sizes
LEGEND_WIDTH, MARGIN = 275.0, 30.0  # largest width of a label, and the width of its handle, in points
LEGEND_HEIGHT = 0.55  # inches for the legend that SIZE includes
LABEL_WIDTH, LABEL_HEIGHT = 235.0, 200.0  # lengths of the axes of a panel, in points

INK, GRID = "#000000", "#dddddd"


@dataclass(frozen=True)
class Style:
    """Hold color, marker and line of a series; the colors of Okabe and Ito are distinct with any color vision."""

    color: str
    marker: str
    line: Any = "-"


STYLES = (
    Style(INK, "D", ":"),
    Style("#D55E00", "^", "-."),
    Style("#0072B2", "o", "-"),
    Style("#009E73", "s", "--"),
    Style("#CC79A7", "v", (0, (5, 1))),
    Style("#E69F00", "P", (0, (1, 1))),
)


def style_of(place: int) -> Style:
    """Return the style of series number `place`; the first 36 differ."""
    color, shape = STYLES[place % len(STYLES)], STYLES[(place + place // len(STYLES)) % len(STYLES)]
    return Style(color.color, shape.marker, shape.line)


@dataclass(frozen=True)
class Plot:
    """Hold a matplotlib figure and its text alternative `alt`."""

    figure: Any
    alt: str

    def html(self) -> str:
        """Return an <img> element that holds the figure as SVG and is described by `alt`."""
        buffer = io.BytesIO()
        with _settings():  # matplotlib creates ticks only when it draws
            self.figure.savefig(buffer, format="svg", metadata={"Date": None})
        data = base64.b64encode(buffer.getvalue()).decode()
        alt = html.escape(self.alt)
        return f'<img class="plot" alt="{alt}" src="data:image/svg+xml;base64,{data}">'

    def save(self, path: str | Path, *, dots_per_inch: int = 200) -> None:
        """Write the figure atomically, as .svg, .pdf or .png by the suffix of the path."""
        suffix = Path(path).suffix.removeprefix(".")
        metadata = {"metadata": {"Date": None, "Title": self.alt}} if suffix == "svg" else {}
        with _settings(), atomic_file(Path(path)) as unfinished:
            self.figure.savefig(unfinished, dpi=dots_per_inch, format=suffix, **metadata)

    def _repr_html_(self) -> str:
        return self.html()


@contextmanager
def canvas(
    x_label: str, y_label: str, *, panels: int = 1, size: tuple[float, float] = SIZE
) -> Iterator[tuple[Any, list[Any]]]:
    """Yield a figure, not registered with pyplot, and its axes, each of `size` inches, two in a row."""
    columns = min(2, panels)
    rows = math.ceil(panels / columns)
    with _settings():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(columns * size[0], rows * size[1]), layout="constrained")
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for place, panel in enumerate(axes):
            is_first = place % columns == 0
            panel.set(xlabel=wrapped(x_label, LABEL_WIDTH), ylabel=wrapped(y_label, LABEL_HEIGHT) if is_first else "")
        for panel in axes[panels:]:
            panel.remove()
        yield figure, axes[:panels]


@contextmanager
def _settings() -> Iterator[None]:
    """Draw with these settings instead of the user's. Raises ImportError without matplotlib."""
    with needs("A figure", "matplotlib", "plots"):
        import matplotlib as mpl
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(
            {
                "font.size": FONT,
                "axes.titlesize": FONT,
                "svg.fonttype": "none",
                "svg.hashsalt": "quotient-manifolds",
                "axes.spines.top": False,
                "axes.spines.right": False,
                "axes.grid": True,
                "axes.axisbelow": True,
                "grid.color": GRID,
            }
        )
        yield


def plain(text: str) -> str:
    """Return text with $ escaped, so that it does not begin a formula."""
    return text.replace("$", r"\$")


def text_width(text: str) -> float:
    """Return the width of text at the size of labels, in points."""
    from matplotlib.textpath import TextPath

    return float(TextPath((0, 0), plain(text), size=FONT).get_extents().width) if text.strip() else 0.0


def wrapped(text: str, width: float) -> str:
    """Return text in lines of at most `width` points, with $ escaped."""
    most = max(1, min(len(text), int(len(text) * width / (text_width(text) or width))))
    while most > 1 and any(text_width(line) > width for line in textwrap.wrap(text, most)):
        most -= 1
    return "\n".join(map(plain, textwrap.wrap(text, most)))


def shortened(name: str, most: int = 18) -> str:
    """Return a long name without its middle, because names of a zoo begin alike.

    >>> shortened("vit-small-learning-rate-0.01-seed-3")
    'vit-small…1-seed-3'
    """
    return name if len(name) <= most else f"{name[: most // 2]}…{name[most // 2 + 1 - most :]}"


def put_legend(figure: Any, labels: Sequence[str]) -> None:
    """Put the legend above the axes, where it hides no point, and make the figure taller by its height."""
    legend = figure.legend(loc="outside upper center", ncols=2 if fits_beside(labels) else 1, frameon=False)
    height = legend.get_window_extent().height / figure.dpi
    figure.set_figheight(figure.get_figheight() + max(0.0, height - LEGEND_HEIGHT))


def legend_label(label: str, labels: Sequence[str]) -> str:
    """Return a label for a legend of all labels: in two columns, or wrapped in one."""
    prefix = "\N{HAIR SPACE}" * label.startswith("_")  # matplotlib leaves out labels that begin with an underscore
    return prefix + (plain(label) if fits_beside(labels) else wrapped(label, LEGEND_WIDTH))


def fits_beside(labels: Sequence[str]) -> bool:
    """Return whether a legend of these labels has room for two columns."""
    return all(text_width(label) <= LEGEND_WIDTH / 2 - MARGIN for label in labels)


def numbers(values: Numbers) -> NDArray[np.float64]:
    """Return the values as an array; None becomes NaN, which is not drawn."""
    return np.asarray([math.nan if value is None else value for value in values], dtype=np.float64)


def extent(values: NDArray[np.float64]) -> str:
    """Return the range of the finite values in words."""
    finite = values[np.isfinite(values)]
    return f"from {finite.min():.3g} to {finite.max():.3g}" if len(finite) else "without values"


def plain_ticks(axes: Any) -> None:
    """Mark 0.5, 1, 2 instead of powers of ten if an axis spans few decades."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator, MaxNLocator, NullFormatter

    for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        if axis.get_scale() == "linear":
            axis.set_major_locator(MaxNLocator(nbins=6))
            axis.get_major_formatter().set_powerlimits((-3, 5))  # 2.5 at each tick and one power of ten, not 0.00025
            continue
        span = limits[1] / limits[0]
        if span < 1e5:
            axis.set_major_locator(LogLocator(subs=(1.0,) if span > 300 else (1.0, 2.0, 5.0)))
            axis.set_major_formatter(FormatStrFormatter("%g"))
            axis.set_minor_formatter(NullFormatter())
