"""Draw lines: any series, sharpness along an orbit, sharpness against the radius."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from quotient_manifolds.plots.canvas import INK, Plot, Style, canvas, extent, numbers, plain, plain_ticks, style_of
from quotient_manifolds.statistics import Numbers


@dataclass(frozen=True)
class Series:
    """Hold points to draw under one label, joined by a line; None or NaN interrupts it."""

    label: str
    x: Numbers
    y: Numbers
    style: Style


def line_figure(series: Sequence[Series], *, x_label: str, y_label: str, log: tuple[bool, bool], alt: str) -> Plot:
    """Draw lines with markers, and a legend above the axes; log: whether x and y are logarithmic."""
    with canvas(x_label, y_label) as (figure, (axes,)):
        for one in series:
            _line(axes, one)
        _finish(figure, axes, log)
        return Plot(figure, alt)


def orbit_figure(
    scales: Sequence[float], ratios: Mapping[str, Numbers], *, styles: Mapping[str, Style] | None = None
) -> Plot:
    """Draw sharpness after a move along the orbit over sharpness before, against the size a of the move.

    ratios: by measure, one for every scale; 1 is invariant, None or NaN a measurement that failed.
    [da Silva et al., ICML, Fig. 7]
    """
    rows = {label: numbers(values) for label, values in ratios.items()}
    drawn = np.concatenate([[1.0], *rows.values()])
    drawn = drawn[np.isfinite(drawn) & (drawn > 0)]
    with canvas("a (size of the group element)", "sharpness after / before") as (figure, (axes,)):
        axes.axhline(1, color=INK, linewidth=0.8, zorder=1)
        for place, (label, values) in enumerate(rows.items()):
            _line(axes, Series(label, scales, values, (styles or {}).get(label, style_of(place))))
        # Never so near that the rounding of an invariant measure looks like a change.
        axes.set(ylim=(min(0.5, drawn.min() / 1.3), max(2.0, drawn.max() * 1.3)))
        _finish(figure, axes, (True, True))
    ranges = "; ".join(f"{label} {extent(values)}" for label, values in rows.items())
    return Plot(
        figure,
        "Sharpness after a move along the orbit divided by sharpness before it, against the size a of the move, "
        f"{extent(numbers(scales))}. {ranges}.",
    )


def radius_figure(
    radii: Sequence[float],
    measures: Mapping[str, Sequence[Numbers]],
    *,
    show: Literal["models", "band"] = "models",
    styles: Mapping[str, Style] | None = None,
) -> Plot:
    """Draw sharpness against radius, both logarithmic. measures: by label, for each model its values by radius.

    "models" draws a line for every model; "band" the median over models and, shaded, the quartiles. Values that are
    missing, or not positive, are not drawn.
    """
    if show not in ("models", "band"):
        raise ValueError(f"show must be 'models' or 'band', found {show!r}.")
    tables = {label: np.stack([numbers(row) for row in rows]) for label, rows in measures.items() if len(rows)}
    tables = {label: np.where(table > 0, table, np.nan) for label, table in tables.items()}
    with canvas("radius", "sharpness") as (figure, (axes,)):
        for place, (label, table) in enumerate(tables.items()):
            style = (styles or {}).get(label, style_of(place))
            if show == "band":
                low, middle, high = _quartiles(table)
                axes.fill_between(radii, low, high, color=style.colour, alpha=0.2, linewidth=0)
                _line(axes, Series(label, radii, middle, style))
                continue
            for index, row in enumerate(table):
                look = {"color": style.colour, "linestyle": style.line, "alpha": 0.6}
                axes.plot(radii, row, **look, label=None if index else plain(label))
        _finish(figure, axes, (True, True))
    what = "a line for every model" if show == "models" else "median over models, quartiles shaded"
    ends = "; ".join(f"{label} ({len(table)} models) {_growth(radii, table)}" for label, table in tables.items())
    return Plot(figure, f"Sharpness against radius, {what}. {ends}.")


def _line(axes: Any, one: Series) -> None:
    style: dict[str, Any] = {"color": one.style.colour, "linestyle": one.style.line, "marker": one.style.marker}
    size = 3.5 if len(one.x) > 12 else 6
    axes.plot(numbers(one.x), numbers(one.y), **style, label=plain(one.label), markersize=size, fillstyle="none")


def _finish(figure: Any, axes: Any, log: tuple[bool, bool]) -> None:
    axes.set(xscale="log" if log[0] else "linear", yscale="log" if log[1] else "linear")
    plain_ticks(axes)
    figure.legend(loc="outside upper center", ncols=2, frameon=False)


def _quartiles(table: NDArray[np.float64]) -> NDArray[np.float64]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a radius at which every model failed
        return np.nanquantile(table, [0.25, 0.5, 0.75], axis=0)


def _growth(radii: Sequence[float], table: NDArray[np.float64]) -> str:
    middle = _quartiles(table)[1]
    there = np.flatnonzero(np.isfinite(middle))
    if not len(there):
        return "without values"
    first, last = there[0], there[-1]
    return f"median {middle[first]:.3g} at radius {radii[first]:g}, {middle[last]:.3g} at radius {radii[last]:g}"
