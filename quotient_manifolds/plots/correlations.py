"""Draw correlations: between measures as a heat map, or with their intervals, one under the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from quotient_manifolds.plots.canvas import Plot, Style, canvas
from quotient_manifolds.statistics import COEFFICIENT_NAMES, Agreement

CELL = 0.62  # inches


def agreement_figure(agreement: Agreement) -> Plot:
    """Draw a coloured square, with its number, for every two measures; grey where the coefficient is not defined."""
    count = len(agreement.names)
    if count < 2:
        raise ValueError(f"Agreement needs at least two measures, found {count}.")
    values = np.array(agreement.values, dtype=float)
    side = max(3.2, 1.6 + CELL * count)
    with canvas("", "", size=(side, side)) as (figure, (axes,)):
        axes.set_facecolor("#c0c0c0")
        mesh = axes.pcolormesh(
            np.ma.masked_invalid(values), cmap="PuOr", vmin=-1, vmax=1, edgecolors="#808080", linewidth=0.5
        )
        for row, column in np.ndindex(count, count):
            value = values[row, column]
            text = "?" if np.isnan(value) else f"{value:+.2f}".replace("-", "\N{MINUS SIGN}")
            colour = "#000000" if np.isnan(value) else _readable(mesh.to_rgba(value)[:3])
            axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", color=colour, fontsize=8.5)
        axes.set(xlim=(0, count), ylim=(count, 0), aspect="equal")
        axes.set_xticks(np.arange(count) + 0.5, agreement.names, rotation=90)
        axes.set_yticks(np.arange(count) + 0.5, agreement.names)
        axes.tick_params(length=0)
        axes.grid(visible=False)
    return Plot(figure, f"{COEFFICIENT_NAMES[agreement.kind]} between {count} measures. {_extremes(agreement)}")


def _readable(background: Sequence[float]) -> str:
    """Return black or white, whichever has the larger contrast (4.5 at least) by the luminance that WCAG defines."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in background]
    luminance = float(np.dot(linear, (0.2126, 0.7152, 0.0722)))
    return "#000000" if (luminance + 0.05) ** 2 > 1.05 * 0.05 else "#ffffff"


def _extremes(agreement: Agreement) -> str:
    pairs = [
        (agreement.values[i][j], f"{agreement.names[i]} and {agreement.names[j]}")
        for i, j in combinations(range(len(agreement.names)), 2)
    ]
    known = sorted((value, names) for value, names in pairs if value is not None)
    if not known:
        return "No coefficient is defined."
    (low, least), (high, most) = known[0], known[-1]
    undefined = f" {len(pairs) - len(known)} pairs are not defined." if len(known) < len(pairs) else ""
    words = f"Highest: {most} ({high:+.2f}); lowest: {least} ({low:+.2f}).{undefined}"
    return words.replace("-", "\N{MINUS SIGN}")


@dataclass(frozen=True)
class Interval:
    """Hold an estimate with its interval, which may be missing."""

    label: str
    value: float
    low: float | None
    high: float | None
    style: Style


def interval_figure(groups: Mapping[str, Sequence[Interval]], *, x_label: str, alt: str) -> Plot:
    """Draw estimates with their intervals on a scale from -1 to 1, in titled groups."""
    rows = [(group, one) for group, intervals in groups.items() for one in intervals]
    size = (4.8, max(3.7, 0.6 + 0.26 * (len(rows) + len(groups))))
    with canvas(x_label, "", size=size) as (figure, (axes,)):
        axes.axvline(0, color="#808080", linewidth=0.8)
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
        return Plot(figure, alt)
