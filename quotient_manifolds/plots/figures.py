"""Draw lines, and scatter plots of models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quotient_manifolds.plots.canvas import (
    INK,
    LABEL_WIDTH,
    STYLES,
    Plot,
    Style,
    canvas,
    extent,
    legend_label,
    numbers,
    plain,
    plain_ticks,
    put_legend,
    shortened,
    style_of,
    wrapped,
)
from quotient_manifolds.statistics import COEFFICIENT_NAMES, Correlation, Numbers

FEW, LARGE, SMALL = 24, 6.5, 4.5  # Names beside at most 24 points have 6.5 pt, others 4.5 pt.


@dataclass(frozen=True)
class Series:
    """Hold points under one label, joined by a line that None or NaN interrupts."""

    label: str
    x: Numbers
    y: Numbers
    style: Style


def line_figure(series: Sequence[Series], *, x_label: str, y_label: str, log: tuple[bool, bool], alt: str) -> Plot:
    """Draw lines with markers, and a legend above the axes; log: whether x and y are logarithmic."""
    with canvas(x_label, y_label) as (figure, (axes,)):
        labels = [each.label for each in series]
        for line in series:
            _line(axes, line, labels)
        _finish(figure, axes, log, labels)
        return Plot(figure, alt)


def orbit_figure(scales: Sequence[float], ratios: Mapping[str, Numbers]) -> Plot:
    """Draw S(g w) / S(w), the ratio of sharpness after and before the action of a group element g of size a.

    ratios: by measure, one for every scale; None or NaN for a failed measurement. [paper, Fig. 7]
    """
    rows = {label: numbers(values) for label, values in ratios.items()}
    finite = np.concatenate([[1.0], *rows.values()])
    finite = finite[np.isfinite(finite) & (finite > 0)]
    with canvas("a (size of the group element)", "sharpness after / before") as (figure, (axes,)):
        axes.axhline(1, color=INK, linewidth=0.8, zorder=1)
        for place, (label, values) in enumerate(rows.items()):
            _line(axes, Series(label, scales, values, style_of(place)), [*rows])
        # A smaller range would make the rounding errors of an invariant measure look like a change.
        axes.set(ylim=(min(0.5, finite.min() / 1.3), max(2.0, finite.max() * 1.3)))
        _finish(figure, axes, (True, True), [*rows])
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


def _line(axes: Any, line: Series, labels: Sequence[str]) -> None:
    """Draw a series, with smaller markers if it has many points."""
    style: dict[str, Any] = {"color": line.style.color, "linestyle": line.style.line, "marker": line.style.marker}
    size = 3.5 if len(line.x) > 12 else 6
    label = legend_label(line.label, labels)
    axes.plot(numbers(line.x), numbers(line.y), **style, label=label, markersize=size, fillstyle="none")


def _finish(figure: Any, axes: Any, log: tuple[bool, bool], labels: Sequence[str]) -> None:
    """Set the scales and their ticks, and add the legend of these labels."""
    axes.set(xscale="log" if log[0] else "linear", yscale="log" if log[1] else "linear")
    plain_ticks(axes)
    put_legend(figure, labels)


@dataclass(frozen=True)
class Panel:
    """Hold the measure x and the gap y of every model, None if not measured.

    x_errors: half lengths of error bars. names: of the models, written beside their points.
    """

    label: str
    x: Numbers
    y: Numbers
    correlation: Correlation | None = None
    x_errors: Numbers | None = None
    style: Style = STYLES[2]
    names: Sequence[str] = ()

    @property
    def drawn(self) -> NDArray[np.bool_]:
        """Return a mask of the models that have both values."""
        return np.isfinite(numbers(self.x)) & np.isfinite(numbers(self.y))

    @property
    def title(self) -> str:
        """Return the coefficient with its interval, or "" without a correlation."""
        return f"{COEFFICIENT_NAMES[self.correlation.kind]} {self.correlation}" if self.correlation else ""


def scatter_figure(panels: Sequence[Panel], *, y_label: str) -> Plot:
    """Draw the gap against each measure, in a panel titled with correlation and interval. [paper, Fig. 3 to 5]

    x is logarithmic if its values span more than a factor of ten. A model without x or y is not drawn; the text
    alternative counts it. Raises ValueError without a panel, or if the lengths of x, y and names differ.
    """
    lengths = {len(values) for panel in panels for values in (panel.x, panel.y, panel.names or panel.x)}
    if len(lengths) != 1:
        raise ValueError(
            "A scatter plot must have at least one panel, and one x, y and name (if any) a model in each. "
            f"Found {len(panels)} panels with values of lengths {sorted(lengths)}"
        )
    with canvas("", y_label, panels=len(panels)) as (figure, all_axes):
        for axes, panel in zip(all_axes, panels, strict=True):
            x, y = (numbers(values)[panel.drawn] for values in (panel.x, panel.y))
            bars = None if panel.x_errors is None else numbers(panel.x_errors)[panel.drawn]
            style = {"fmt": panel.style.marker, "color": panel.style.color, "elinewidth": 0.8}
            axes.errorbar(x, y, xerr=bars, **style, markerfacecolor=f"{panel.style.color}99")
            if len(x) and x.min() > 0 and x.max() > 10 * x.min():
                axes.set_xscale("log")
            plain_ticks(axes)
            axes.set_xlabel(wrapped(panel.label, LABEL_WIDTH))
            axes.set_title(panel.title)
            names = [name for name, drawn in zip(panel.names, panel.drawn, strict=False) if drawn]
            _name_points(axes, x, y, names)
    return Plot(figure, " ".join(_description(panel, y_label) for panel in panels))


def _name_points(axes: Any, x: NDArray[np.float64], y: NDArray[np.float64], names: Sequence[str]) -> None:
    """Write names beside points, toward the middle of the axes, so that no name extends beyond them."""
    for name, point in zip(names, zip(x.tolist(), y.tolist(), strict=True), strict=False):
        across, up = axes.transAxes.inverted().transform(axes.transData.transform(point))
        axes.annotate(
            plain(shortened(name)),
            point,
            xytext=(4 if across < 0.5 else -4, 3 if up < 0.9 else -3),
            textcoords="offset points",
            ha="left" if across < 0.5 else "right",
            va="bottom" if up < 0.9 else "top",
            fontsize=LARGE if len(names) <= FEW else SMALL,
        ).set_in_layout(False)


def _description(panel: Panel, y_label: str) -> str:
    """Return the text alternative of a panel."""
    drawn, missing = panel.drawn, int((~panel.drawn).sum())
    text = f"{panel.label} against {y_label}, {drawn.sum()} models"
    text += f", {missing} without a value not drawn" if missing else ""
    if drawn.any():
        text += f"; {extent(numbers(panel.x)[drawn])} and {extent(numbers(panel.y)[drawn])}"
    return f"{text}; {panel.title}." if panel.title else f"{text}."
