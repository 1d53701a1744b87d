"""Set up what every figure is drawn on: settings of its own, styles, and the way into a page."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quotient_manifolds.check import needs
from quotient_manifolds.files import whole
from quotient_manifolds.statistics import Numbers

SIZE = (4.8, 3.7)  # inches: narrow, so that letters stay readable at the width of a phone

INK, GRID = "#000000", "#dddddd"


@dataclass(frozen=True)
class Style:
    """Hold colour, marker and line of a series; colours are Okabe and Ito's, told apart with any colour vision."""

    colour: str
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
    """Return the style of series number `place`, another one for each of the first 36."""
    colour, shape = STYLES[place % len(STYLES)], STYLES[(place + place // len(STYLES)) % len(STYLES)]
    return Style(colour.colour, shape.marker, shape.line)


@dataclass(frozen=True)
class Plot:
    """Hold a matplotlib figure, and `alt`: what it shows, in words, for those who do not see it."""

    figure: Any
    alt: str

    def html(self) -> str:
        """Return an <img> element that holds the figure as SVG and is described by `alt`."""
        buffer = io.BytesIO()
        with _settings():  # ticks are made only now
            self.figure.savefig(buffer, format="svg", metadata={"Date": None})
        data = base64.b64encode(buffer.getvalue()).decode()
        alt = html.escape(self.alt)
        return f'<img class="plot" alt="{alt}" src="data:image/svg+xml;base64,{data}">'

    def save(self, path: str | Path, *, dots_per_inch: int = 200) -> None:
        """Write the figure alone, in the format of the path's ending: .svg, .pdf or .png; whole or not at all."""
        form = Path(path).suffix.removeprefix(".")
        told = {"metadata": {"Date": None, "Title": self.alt}} if form == "svg" else {}
        with _settings(), whole(Path(path)) as unfinished:
            self.figure.savefig(unfinished, dpi=dots_per_inch, format=form, **told)

    def _repr_html_(self) -> str:
        return self.html()


@contextmanager
def canvas(
    x_label: str, y_label: str, *, panels: int = 1, size: tuple[float, float] = SIZE
) -> Iterator[tuple[Any, list[Any]]]:
    """Yield a figure and its axes, `size` inches each and two in a row.

    No other figure of the process can see or change them.
    """
    columns = min(2, panels)
    rows = math.ceil(panels / columns)
    with _settings():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(columns * size[0], rows * size[1]), layout="constrained")
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for place, one in enumerate(axes):
            one.set(xlabel=plain(x_label), ylabel=plain(y_label) if place % columns == 0 else "")
        for one in axes[panels:]:
            one.remove()
        yield figure, axes[:panels]


@contextmanager
def _settings() -> Iterator[None]:
    """Draw with these settings, whatever those of the user are. Raises ImportError without matplotlib."""
    with needs("A figure", "matplotlib", "plots"):
        import matplotlib as mpl
    with mpl.rc_context():
        mpl.rcdefaults()  # a user's own matplotlibrc does not change a report
        mpl.rcParams.update(
            {
                "font.size": 10.5,
                "axes.titlesize": 10.5,
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
    """Return text that is drawn as it is: $ begins no formula."""
    return text.replace("$", r"\$")


def numbers(values: Numbers) -> NDArray[np.float64]:
    """Return the values with NaN, which is not drawn, for those that are missing."""
    return np.asarray([math.nan if value is None else value for value in values], dtype=np.float64)


def extent(values: NDArray[np.float64]) -> str:
    """Return in words from where to where the finite ones of the values go."""
    found = values[np.isfinite(values)]
    return f"from {found.min():.3g} to {found.max():.3g}" if len(found) else "without values"


def plain_ticks(axes: Any) -> None:
    """Mark 0.5, 1, 2, not powers of ten, where an axis spans few decades."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator, MaxNLocator, NullFormatter

    for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        if axis.get_scale() == "linear":
            axis.set_major_locator(MaxNLocator(nbins=6))
            axis.get_major_formatter().set_powerlimits((-3, 5))  # 2.5 and a power of ten below, not 0.00025 six times
            continue
        span = limits[1] / limits[0]
        if span < 1e5:
            axis.set_major_locator(LogLocator(subs=(1.0,) if span > 300 else (1.0, 2.0, 5.0)))
            axis.set_major_formatter(FormatStrFormatter("%g"))
            axis.set_minor_formatter(NullFormatter())
