"""Estimates with their intervals, one under the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quotient_manifolds.plots.canvas import Plot, Style, canvas


@dataclass(frozen=True)
class Interval:
    """An estimate with its interval, which may be missing."""

    label: str
    value: float
    low: float | None
    high: float | None
    style: Style


def interval_figure(groups: Mapping[str, Sequence[Interval]], *, x_label: str, alt: str) -> Plot:
    """Estimates with their intervals on a scale from -1 to 1, in titled groups."""
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
