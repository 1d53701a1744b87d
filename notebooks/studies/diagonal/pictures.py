"""The figures of the study: tau against the radius, and why truncated geodesics of mix measure something else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quotient_manifolds.plots import STYLES, Style
from quotient_manifolds.plots.canvas import Plot, canvas, plain_ticks
from studies.common import signed
from studies.diagonal.networks import Setting
from studies.diagonal.records import DiagonalStudy, family_name
from studies.diagonal.summary import Grid, said
from studies.diagonal.tables import LABELS, middle

SIZE = (3.6, 3.7)  # inches a panel
BAND = (0.1, 0.9)  # quantiles over seeds

LINES: dict[str, Style] = {
    "mix first": STYLES[5],
    "mix second": STYLES[1],
    "mix exact": STYLES[2],
    "mix endless": STYLES[0],
    "inv exact": STYLES[3],
}
FAMILY_STYLES = {"second": STYLES[1], "exact": STYLES[2]}
METRIC_STYLES = {"mix": STYLES[1], "inv": STYLES[3]}


def tau_figure(study: DiagonalStudy) -> Plot:
    """Return Kendall's tau against the radius, a panel for each number of points: means over seeds, and bands."""
    settings, radii = study.profiled, study.plan.profile
    with canvas("radius", "Kendall’s tau with the test loss", panels=len(settings), size=SIZE) as (figure, panels):
        for axes, setting in zip(panels, settings, strict=True):
            axes.axhline(0, color="#808080", linewidth=0.8)
            for measure, style in LINES.items():
                rows = [study.column("taus", measure, radius, [setting]) for radius in radii]
                _line(axes, radii, rows, style, LABELS[measure], middle=np.mean)
            axes.set(xscale="log", ylim=(-1, 1), title=f"n = {setting.points}")
            plain_ticks(axes)
        _legend(figure, len(panels), panels[0])
    words = "; ".join(
        f"n = {setting.points}, {LABELS[measure]}: "
        + ", ".join(
            f"{_mean(study, setting, measure, radius)} at {radius:g}" for radius in (radii[0], *study.plan.radii)
        )
        for setting in settings
        for measure in LINES
    )
    return Plot(figure, f"Kendall’s tau of sharpness with the test loss against the radius, mean over seeds. {words}.")


def family_figure(study: DiagonalStudy, radius: float) -> Plot:
    """Compute tau against the t of the metric, a panel for each number of points: means over seeds, and bands."""
    settings, family = study.profiled, study.plan.family
    place = study.plan.family_radii.index(radius)
    with canvas("t (0 is inv, 1 is mix)", "Kendall’s tau with the test loss", panels=len(settings), size=SIZE) as (
        figure,
        panels,
    ):
        for axes, setting in zip(panels, settings, strict=True):
            axes.axhline(0, color="#808080", linewidth=0.8)
            for geodesic, style in FAMILY_STYLES.items():
                rows = [
                    [value for cell in study.of(setting) if (value := cell.family[name][place]) is not None]
                    for name in (family_name(t, geodesic) for t in family)
                ]
                _line(axes, family, rows, style, f"{geodesic} geodesics", middle=np.mean)
            axes.set(ylim=(-1, 1), title=f"n = {setting.points}")
        _legend(figure, len(panels), panels[0])
    words = "; ".join(
        f"n = {setting.points}, {geodesic}: "
        + ", ".join(f"{_in_family(study, setting, t, geodesic, radius)}" for t in family)
        for setting in settings
        for geodesic in FAMILY_STYLES
    )
    return Plot(figure, f"Kendall’s tau at radius {radius:g} for t = {', '.join(f'{t:g}' for t in family)}. {words}.")


def _in_family(study: DiagonalStudy, setting: Setting, t: float, geodesic: str, radius: float) -> str:
    found = study.of_family(setting, t, geodesic, radius)
    return signed(None if found is None else found.value)


def mechanism_figure(study: DiagonalStudy) -> Plot:
    """Draw far coordinates, truncation error and agreement of the orders against the radius, over profiled cells."""
    settings, radii = study.profiled, study.plan.profile
    with canvas("radius", "", panels=3, size=SIZE) as (figure, panels):
        for measure in ("mix first", "mix second", "mix exact", "inv exact"):
            rows = [study.column("far", measure, radius, settings) for radius in radii]
            _line(panels[0], radii, rows, LINES[measure], LABELS[measure])
        for metric, style in METRIC_STYLES.items():
            for axes, column in ((panels[1], "truncation"), (panels[2], "agreement")):
                rows = [study.column(column, metric, radius, settings) for radius in radii]
                _line(axes, radii, rows, style, f"{metric}, second order against exact")
        panels[0].set(title="share of |z|² where |b| > 1/2", ylim=(-0.03, 1.03))
        panels[1].set(title="truncation error / rise", yscale="log")
        panels[2].set(title="tau of second order with exact", ylim=(-1, 1.03))
        panels[2].axhline(0, color="#808080", linewidth=0.8)
        for axes in panels:
            axes.set(xscale="log")
            plain_ticks(axes)
        _legend(figure, 3, panels[0], panels[1])
    return Plot(figure, _mechanism_words(study))


def _mechanism_words(study: DiagonalStudy) -> str:
    ends = (study.plan.profile[0], *study.plan.radii)
    rows = [
        f"{what} " + ", ".join(f"{middle(study, column, key, radius)} at radius {radius:g}" for radius in ends)
        for what, column, key in (
            ("Share of |z|² where |b| > 1/2, mix to second order:", "far", "mix second"),
            ("Truncation error over the rise, mix:", "truncation", "mix"),
            ("inv:", "truncation", "inv"),
            ("Tau of second-order with exact sharpness, mix:", "agreement", "mix"),
            ("inv:", "agreement", "inv"),
        )
    ]
    return f"Medians over networks and seeds against the radius. {'; '.join(rows)}."


def _mean(study: DiagonalStudy, setting: Setting, measure: str, radius: float) -> str:
    found = study.tau(setting, measure, radius)
    return signed(None if found is None else found.value)


def _line(
    axes: Any, radii: Sequence[float], rows: Sequence[list[float]], style: Style, label: str, middle: Any = np.median
) -> None:
    """Return the middle of each row, and shaded from its 10th to its 90th percentile."""
    low, high = np.array([np.quantile(row, BAND) for row in rows]).T
    axes.fill_between(radii, low, high, color=style.colour, alpha=0.15, linewidth=0)
    look: dict[str, Any] = {"color": style.colour, "linestyle": style.line, "marker": style.marker}
    axes.plot(radii, [middle(row) for row in rows], **look, markersize=3.5, fillstyle="none", label=label)


def _legend(figure: Any, columns: int, *panels: Any) -> None:
    """Return one legend for all panels."""
    entries = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(list(entries.values()), list(entries), loc="outside upper center", ncols=columns, frameon=False)


SETTINGS_SHOWN = ("adaptive", "inv exact", "mix exact", "inv closed", "mix closed")  # a panel each


def figure(study: DiagonalStudy) -> Plot:
    """Draw the distribution of tau over seeds, a panel a measure, a column a setting in the order of the table."""
    zoo = Grid(study)
    label = "Kendall’s tau-b with the test loss"
    with canvas("setting", label, panels=len(SETTINGS_SHOWN), size=(2.6, 3.6)) as (drawn, panels):
        for axes, name in zip(panels, SETTINGS_SHOWN, strict=True):
            axes.axhline(0, color="#808080", linewidth=0.8)
            seeds = [np.array(zoo.by_seed(setting, name), dtype=float) for setting in zoo.settings]
            places, colour = range(1, len(seeds) + 1), STYLES[1].colour
            for width, ends in ((1, (0, 1)), (4, (0.1, 0.9))):
                low, high = (np.array([np.nanquantile(taus, end) for taus in seeds]) for end in ends)
                axes.vlines(places, low, high, color=colour, linewidth=width, alpha=0.5)
            axes.plot(places, [np.nanmedian(taus) for taus in seeds], color=colour, linestyle="", marker="o")
            axes.set(ylim=(-1.02, 1.02), title=said(name), xticks=places)
            axes.tick_params(axis="x", labelsize=6)
    words = "; ".join(
        f"{said(name)}: " + ", ".join(str(zoo.tau(setting, name)) for setting in zoo.settings)
        for name in SETTINGS_SHOWN
    )
    return Plot(drawn, f"{label} over seeds, by setting. Means: {words}.")
