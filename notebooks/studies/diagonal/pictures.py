"""The figures of the study: tau against the radius, and why truncated geodesics of mix measure something else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from studies.common import Record
from studies.diagonal.tables import LABELS, Study, said

BAND = (0.1, 0.9)  # quantiles over seeds
TAU = "Kendall’s tau with the test loss"
LOOKS: dict[str, dict[str, str]] = {
    "mix first": {"color": "#E69F00", "marker": "P", "linestyle": "-."},
    "mix second": {"color": "#D55E00", "marker": "^", "linestyle": "-."},
    "mix exact": {"color": "#0072B2", "marker": "o"},
    "mix endless": {"color": "#000000", "marker": "D", "linestyle": ":"},
    "inv exact": {"color": "#009E73", "marker": "s", "linestyle": "--"},
}
SECOND, EXACT = LOOKS["mix second"], LOOKS["mix exact"]


def panels(count: int, width: float, titles: Iterable[str], label: str, **settings: Any) -> tuple[Figure, list[Any]]:
    """Return a figure with panels in a row, and its axes."""
    figure = Figure(figsize=(count * width, 3.7), layout="constrained")
    axes = list(figure.subplots(1, count, squeeze=False).flat)
    for one, title in zip(axes, titles, strict=True):
        one.set(title=title, **settings)
        one.grid(color="#dddddd")
        one.axhline(0, color="#808080", linewidth=0.8)
    axes[0].set_ylabel(label)
    return figure, axes


def _line(
    axes: Any, x: Sequence[float], rows: Sequence[Any], label: str, look: dict[str, str], middle: Callable[[Any], float]
) -> None:
    """Draw the middle of each row, and a band from its 10th to its 90th percentile."""
    low, high = np.array([np.quantile(row, BAND) for row in rows]).T
    axes.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0)
    axes.plot(x, [middle(row) for row in rows], **look, markersize=3.5, fillstyle="none", label=label)


def _legend(figure: Figure, axes: Sequence[Any]) -> Figure:
    entries = {label: line for one in axes for line, label in zip(*one.get_legend_handles_labels(), strict=True)}
    figure.legend(list(entries.values()), list(entries), loc="outside upper center", ncols=3, frameon=False)
    return figure


def tau_figure(study: Study) -> Figure:
    """Draw tau against the radius, a panel for each number of points: means over seeds, and bands."""
    radii, titles = study.plan["profile"], [f"n = {setting.points}" for setting in study.profiled]
    figure, axes = panels(len(titles), 3.6, titles, TAU, xlabel="radius", xscale="log", ylim=(-1, 1))
    for one, setting in zip(axes, study.profiled, strict=True):
        for name, look in LOOKS.items():
            rows = [study.column("taus", name, radius, [setting]) for radius in radii]
            _line(one, radii, rows, LABELS[name], look, np.mean)
    return _legend(figure, axes[:1])


def family_figure(study: Study) -> Figure:
    """Draw tau against the t of the metric at the middle radius, a panel for each number of points."""
    family, titles = study.plan["family"], [f"n = {setting.points}" for setting in study.profiled]
    figure, axes = panels(len(titles), 3.6, titles, TAU, xlabel="t (0 is inv, 1 is mix)", ylim=(-1, 1))
    for one, setting in zip(axes, study.profiled, strict=True):
        for order, look in {"second": SECOND, "exact": EXACT}.items():
            rows = [study.column("family", f"{t:g} {order}", study.middle, [setting]) for t in family]
            _line(one, family, rows, f"{order} geodesics", look, np.mean)
    return _legend(figure, axes[:1])


def mechanism_figure(study: Study) -> Figure:
    """Draw far coordinates, truncation error and agreement of the orders against the radius, over profiled cells."""
    radii = study.plan["profile"]
    titles = ("share of |z|² where |b| > 1/2", "truncation error / rise", "tau of second order with exact")
    figure, axes = panels(3, 3.6, titles, "", xlabel="radius", xscale="log")
    for name in ("mix first", "mix second", "mix exact", "inv exact"):
        rows = [study.column("far", name, radius, study.profiled) for radius in radii]
        _line(axes[0], radii, rows, LABELS[name], LOOKS[name], np.median)
    for metric, look in {"mix": SECOND, "inv": LOOKS["inv exact"]}.items():
        for one, quantity in ((axes[1], "truncation"), (axes[2], "agreement")):
            rows = [study.column(quantity, metric, radius, study.profiled) for radius in radii]
            _line(one, radii, rows, f"{metric}, second order against exact", look, np.median)
    axes[1].set_yscale("log")
    return _legend(figure, axes[:2])


def figure(record: Record) -> Figure:
    """Draw the distribution of tau over seeds, a panel a measure, a column a setting in the order of the table."""
    study, names = Study(record), ("adaptive", "inv exact", "mix exact", "inv closed", "mix closed")
    drawn, axes = panels(len(names), 2.6, map(said, names), TAU, xlabel="setting", ylim=(-1.02, 1.02))
    places = range(1, len(study.settings) + 1)
    for one, name in zip(axes, names, strict=True):
        for width, ends in ((1, (0, 1)), (4, BAND)):
            low, high = np.nanquantile(study.by_seed(name), ends, axis=1)
            one.vlines(places, low, high, color="#D55E00", linewidth=width, alpha=0.5)
        one.plot(places, np.nanmedian(study.by_seed(name), axis=1), color="#D55E00", linestyle="", marker="o")
        one.set_xticks(places)
        one.tick_params(axis="x", labelsize=6)
    return drawn
