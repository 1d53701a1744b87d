"""Draw lines, models by two numbers, and level sets of functions."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quotient_manifolds.plots.canvas import (
    INK,
    STYLES,
    Plot,
    Style,
    canvas,
    extent,
    numbers,
    plain,
    plain_ticks,
    style_of,
)
from quotient_manifolds.statistics import COEFFICIENT_NAMES, Correlation, Numbers

LABEL_WIDTH = 42  # letters under a panel; a longer label goes on in another line
SQUARE = (3.9, 3.1)  # inches; panels of level sets are square, and have a bar of colours beside them
LEVELS = 9
NOISE = 1e-12  # of the largest value: a level below this is 0, but for rounding


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


def orbit_figure(scales: Sequence[float], ratios: Mapping[str, Numbers]) -> Plot:
    """Draw sharpness after over before an action of the symmetry group, against the size a of the group element.

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
        "Sharpness at other points of the orbit over sharpness of the model, against the size a of the group element, "
        f"{extent(numbers(scales))}. {ranges}.",
    )


def path_figure(t: Sequence[float], losses: Mapping[str, Numbers]) -> Plot:
    """Draw losses along the straight path between two models, from t = 0 to t = 1, a line for each label."""
    series = [Series(label, t, values, style_of(place)) for place, (label, values) in enumerate(losses.items())]
    ranges = "; ".join(f"{label} {extent(numbers(values))}" for label, values in losses.items())
    return line_figure(
        series,
        x_label="t (0: the first model, 1: the second)",
        y_label="loss",
        log=(False, False),
        alt=f"Loss along the straight path between two models. {ranges}.",
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


def _line(axes: Any, one: Series) -> None:
    """Draw a series, with smaller markers where its points are many."""
    style: dict[str, Any] = {"color": one.style.colour, "linestyle": one.style.line, "marker": one.style.marker}
    size = 3.5 if len(one.x) > 12 else 6
    axes.plot(numbers(one.x), numbers(one.y), **style, label=plain(one.label), markersize=size, fillstyle="none")


def _finish(figure: Any, axes: Any, log: tuple[bool, bool]) -> None:
    """Set the scales and their ticks, and put the legend above the axes, where it hides no point."""
    axes.set(xscale="log" if log[0] else "linear", yscale="log" if log[1] else "linear")
    plain_ticks(axes)
    figure.legend(loc="outside upper center", ncols=2, frameon=False)


@dataclass(frozen=True)
class Panel:
    """Hold a measure x and the gap y of every model, None where not measured, and half lengths of error bars."""

    label: str
    x: Numbers
    y: Numbers
    correlation: Correlation | None = None
    x_errors: Numbers | None = None
    y_errors: Numbers | None = None
    style: Style = STYLES[2]

    @property
    def drawn(self) -> NDArray[np.bool_]:
        """Which models have both values."""
        return np.isfinite(numbers(self.x)) & np.isfinite(numbers(self.y))

    @property
    def title(self) -> str:
        """Return the coefficient with its interval, or nothing."""
        return f"{COEFFICIENT_NAMES[self.correlation.kind]} {self.correlation}" if self.correlation else ""


def scatter_figure(panels: Sequence[Panel], *, y_label: str, columns: int = 2) -> Plot:
    """Draw the gap against each measure, in a panel titled with correlation and interval. [paper, Fig. 3 to 5]

    x is logarithmic where its values span more than a factor of ten. A model with x or y missing is not drawn, and
    the text alternative counts it. Raises ValueError without a panel, or where lengths of x and y differ.
    """
    lengths = {len(values) for panel in panels for values in (panel.x, panel.y)}
    if len(lengths) != 1:
        raise ValueError(
            "A scatter plot must have at least one panel, and one x and y a model in each. "
            f"Found {len(panels)} panels with values of lengths {sorted(lengths)}."
        )
    with canvas("", y_label, panels=len(panels), columns=columns) as (figure, all_axes):
        for axes, panel in zip(all_axes, panels, strict=True):
            x, y = (numbers(values)[panel.drawn] for values in (panel.x, panel.y))
            bars = [e if e is None else numbers(e)[panel.drawn] for e in (panel.y_errors, panel.x_errors)]
            style = {"fmt": panel.style.marker, "color": panel.style.colour, "elinewidth": 0.8}
            axes.errorbar(x, y, *bars, **style, markerfacecolor=f"{panel.style.colour}99")
            if len(x) and x.min() > 0 and x.max() > 10 * x.min():
                axes.set_xscale("log")
            plain_ticks(axes)
            axes.set_xlabel(textwrap.fill(plain(panel.label), LABEL_WIDTH))
            axes.set_title(panel.title)
    return Plot(figure, " ".join(_words(panel, y_label) for panel in panels))


def _words(panel: Panel, y_label: str) -> str:
    """Return what a panel shows, as text."""
    there, missing = panel.drawn, int((~panel.drawn).sum())
    text = f"{panel.label} against {y_label}, {there.sum()} models"
    text += f", {missing} without a value not drawn" if missing else ""
    if there.any():
        text += f"; {extent(numbers(panel.x)[there])} and {extent(numbers(panel.y)[there])}"
    return f"{text}; {panel.title}." if panel.title else f"{text}."


@dataclass(frozen=True)
class Field:
    """Hold a function on the plane: values by place, rows along y, columns along x."""

    title: str
    values: NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Hold a line to draw over every panel, and what it is in words; NaN interrupts it."""

    label: str
    x: NDArray[np.float64]
    y: NDArray[np.float64]


def contour_figure(
    x: NDArray[np.float64],
    y: NDArray[np.float64],
    fields: Sequence[Field],
    *,
    x_label: str,
    y_label: str,
    curves: Sequence[Curve] = (),
    columns: int = 2,
) -> Plot:
    """Draw the level sets of each field in a panel, with about as many points of the plane between any two levels.

    Raises ValueError if there is no field, or one has another shape than (len(y), len(x)) or a value not finite.
    """
    shape = (len(y), len(x))
    if not fields or any(field.values.shape != shape or not np.isfinite(field.values).all() for field in fields):
        found = [(field.title, field.values.shape) for field in fields]
        raise ValueError(f"Fields must be finite and of shape {shape}, and at least one. Found {found}.")
    with canvas(x_label, y_label, panels=len(fields), columns=columns, size=SQUARE) as (figure, all_axes):
        for axes, field in zip(all_axes, fields, strict=True):
            _level_sets(figure, axes, x, y, field.values)
            for curve in curves:
                axes.plot(curve.x, curve.y, color="#ffffff", linewidth=2.6)  # seen on any colour of the map
                axes.plot(curve.x, curve.y, color="#000000", linewidth=1.1, linestyle=(0, (4, 2)))
            axes.set(xlim=(x[0], x[-1]), ylim=(y[0], y[-1]), aspect="equal", title=field.title)
            axes.grid(visible=False)
    drawn = "".join(f" Dashed: {curve.label}." for curve in curves)
    ranges = "; ".join(f"{field.title} {extent(field.values)}" for field in fields)
    return Plot(figure, f"Level sets over {x_label} {extent(x)} and {y_label} {extent(y)}. {ranges}.{drawn}")


def _level_sets(
    figure: Any, axes: Any, x: NDArray[np.float64], y: NDArray[np.float64], values: NDArray[np.float64]
) -> None:
    from matplotlib.colors import BoundaryNorm

    quantiles = np.quantile(values, np.linspace(0, 1, LEVELS + 2)[1:-1])
    quantiles[abs(quantiles) < NOISE * abs(values).max()] = 0.0
    levels = sorted({float(f"{level:.3g}") for level in quantiles})
    if len(levels) < 2:
        text = f"{_number(float(np.median(values)))} everywhere"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center")
        return
    norm = BoundaryNorm(levels, 256, extend="both")  # a colour a band, however unevenly the levels lie
    filled = axes.contourf(x, y, values, levels, cmap="cividis", norm=norm, extend="both")
    filled.set(edgecolor="#000000", linewidth=0.3)
    figure.colorbar(filled, ax=axes, ticks=levels, format=lambda level, _: _number(level))


def _number(value: float) -> str:
    """Return a number of three digits, with the sign that axes have."""
    return f"{value:.3g}".replace("-", "\N{MINUS SIGN}")
