"""Draw lines, sharpness along an orbit or against the radius, and estimates with their intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quotient_manifolds.plots.canvas import INK, Plot, Style, canvas, extent, numbers, plain, plain_ticks, style_of
from quotient_manifolds.statistics import Numbers


@dataclass(frozen=True)
class Series:
    """Hold points to draw under one label, joined by a line; None or NaN interrupts it."""

    label: str
    x: Numbers
    y: Numbers
    style: Style


@dataclass(frozen=True)
class Interval:
    """Hold an estimate with its interval, which may be missing."""

    label: str
    value: float
    low: float | None
    high: float | None
    style: Style


def line_figure(series: Sequence[Series], *, x_label: str, y_label: str, log: tuple[bool, bool], alt: str) -> Plot:
    """Draw lines with markers, and a legend above the axes; log: whether x and y are logarithmic."""
    with canvas(x_label, y_label) as (figure, (axes,)):
        for one in series:
            _line(axes, one)
        _finish(figure, axes, log)
        return Plot(figure, alt)


def orbit_figure(scales: Sequence[float], ratios: Mapping[str, Numbers]) -> Plot:
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
            _line(axes, Series(label, scales, values, style_of(place)))
        # Never so near that the rounding of an invariant measure looks like a change.
        axes.set(ylim=(min(0.5, drawn.min() / 1.3), max(2.0, drawn.max() * 1.3)))
        _finish(figure, axes, (True, True))
    ranges = "; ".join(f"{label} {extent(values)}" for label, values in rows.items())
    return Plot(
        figure,
        "Sharpness after a move along the orbit divided by sharpness before it, against the size a of the move, "
        f"{extent(numbers(scales))}. {ranges}.",
    )


def radius_figure(radii: Sequence[float], measures: Mapping[str, Sequence[Numbers]]) -> Plot:
    """Draw sharpness against radius, both logarithmic, a line for every model.

    measures: by label, for each model its values by radius. Values that are missing, or not positive, are not drawn.
    """
    tables = {label: np.stack([numbers(row) for row in rows]) for label, rows in measures.items() if len(rows)}
    tables = {label: np.where(table > 0, table, np.nan) for label, table in tables.items()}
    with canvas("radius", "sharpness") as (figure, (axes,)):
        for place, (label, table) in enumerate(tables.items()):
            look = {"color": style_of(place).colour, "linestyle": style_of(place).line, "alpha": 0.6}
            for index, row in enumerate(table):
                axes.plot(radii, row, **look, label=None if index else plain(label))
        _finish(figure, axes, (True, True))
    ends = "; ".join(f"{label} ({len(table)} models) {extent(table)}" for label, table in tables.items())
    return Plot(figure, f"Sharpness against radius, {extent(numbers(radii))}, a line for every model. {ends}.")


def interval_figure(groups: Mapping[str, Sequence[Interval]], *, x_label: str, alt: str) -> Plot:
    """Draw estimates with their intervals on a scale from -1 to 1, one under the other in titled groups."""
    count = len(groups) + sum(map(len, groups.values()))
    with canvas(x_label, "", size=(4.8, max(3.7, 0.6 + 0.26 * count))) as (figure, (axes,)):
        axes.axvline(0, color="#808080", linewidth=0.8)
        labels: dict[float, str] = {}
        place = 0.0
        for title, intervals in groups.items():
            place -= 0.8
            axes.text(-1.0, place - 0.38, title, fontweight="bold")
            for one in intervals:
                place -= 1.0
                labels[place] = one.label
                if one.low is not None and one.high is not None:
                    axes.plot([one.low, one.high], [place, place], color=one.style.colour, linewidth=2)
                axes.plot([one.value], [place], color=one.style.colour, marker=one.style.marker, markersize=7)
        axes.set(xlim=(-1.02, 1.02), ylim=(place - 0.6, -0.6))
        axes.set_yticks(list(labels), labels.values())
        axes.grid(visible=False, axis="y")
        return Plot(figure, alt)


def _line(axes: Any, one: Series) -> None:
    style: dict[str, Any] = {"color": one.style.colour, "linestyle": one.style.line, "marker": one.style.marker}
    size = 3.5 if len(one.x) > 12 else 6
    axes.plot(numbers(one.x), numbers(one.y), **style, label=plain(one.label), markersize=size, fillstyle="none")


def _finish(figure: Any, axes: Any, log: tuple[bool, bool]) -> None:
    axes.set(xscale="log" if log[0] else "linear", yscale="log" if log[1] else "linear")
    plain_ticks(axes)
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
