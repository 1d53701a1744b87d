"""The figures of the page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from quotient_manifolds.plots import STYLES, Interval, Plot, interval_figure
from quotient_manifolds.plots.canvas import canvas, numbers
from studies.results.claims import said
from studies.results.estimates import Estimate
from studies.results.records import Records
from studies.results.settings import DiagonalZoo
from studies.results.transformers import GAPS
from studies.results.zoo_tables import GAP, WORST, Zoo
from studies.zoos.catalogue import COMPETITORS

FREE = (*WORST, *COMPETITORS.values())  # shown of the zoos

SHOWN = ("adaptive", "inv exact", "mix exact", "inv closed", "mix closed")  # a panel each
SIZE = (2.6, 3.6)  # inches a panel


def pictures(records: Records) -> dict[str, Plot]:
    """Draw figures, by name of file, of records that are there."""
    plots = {} if records.diagonal is None else {"settings": _settings(records.diagonal)}
    if records.mnist is not None:
        plots["mnist"] = _mnist(records.mnist)
    if records.sentiment is not None:
        plots["sentiment"] = _sentiment(records.sentiment[0])
    return plots


def write_pictures(folder: Path, plots: Mapping[str, Plot]) -> None:
    """Write each as NAME.svg, a file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, plot in plots.items():
        plot.save(folder / f"{name}.svg")


def _mnist(zoo: Zoo) -> Plot:
    """Show tau of every measure at its middle radius, on the same task and granulated."""
    names = [name for name in FREE if name in zoo.measures]
    found = {
        "Within cells": {name: zoo.design.tau(zoo.measures[name], GAP, zoo.within) for name in names},
        "Granulated": {name: zoo.design.granulated(zoo.measures[name], GAP, zoo.along) for name in names},
    }
    return _intervals(found, f"{zoo.design.models} vision transformers on MNIST")


def _sentiment(zoo: Zoo) -> Plot:
    """Show tau of every measure at its middle radius, with the gap on each source of sentences."""
    names = [name for name in FREE if name in zoo.measures]
    found = {
        words: {name: zoo.design.tau(zoo.measures[name], gap, zoo.design.everywhere) for name in names}
        for words, gap in GAPS.items()
    }
    return _intervals(found, f"{zoo.design.models} BERTs on film reviews that differ by seed alone")


def _intervals(found: Mapping[str, Mapping[str, Estimate | None]], models: str) -> Plot:
    groups = {
        group: [
            Interval(name, tau.value, tau.low, tau.high, STYLES[place % len(STYLES)])
            for place, (name, tau) in enumerate(taus.items())
            if tau is not None
        ]
        for group, taus in found.items()
    }
    said = "; ".join(
        f"{group}: " + ", ".join(f"{name} {tau}" for name, tau in taus.items()) for group, taus in found.items()
    )
    alt = f"Kendall’s tau-b with the gap in error, {models}. {said}."
    return interval_figure(groups, x_label="Kendall’s tau-b with the gap in error", alt=alt)


def _settings(zoo: DiagonalZoo) -> Plot:
    """Show the distribution of tau over seeds, a panel a measure, a column a setting in the order of the table."""
    with canvas("setting", "Kendall’s tau-b with the test loss", panels=len(SHOWN), size=SIZE) as (figure, panels):
        for axes, name in zip(panels, SHOWN, strict=True):
            axes.axhline(0, color="#808080", linewidth=0.8)
            seeds = [numbers(zoo.by_seed(setting, name)) for setting in zoo.settings]
            places, colour = range(1, len(seeds) + 1), STYLES[1].colour
            for width, ends in ((1, (0, 1)), (4, (0.1, 0.9))):
                low, high = (np.array([np.nanquantile(taus, end) for taus in seeds]) for end in ends)
                axes.vlines(places, low, high, color=colour, linewidth=width, alpha=0.5)
            axes.plot(places, [np.nanmedian(taus) for taus in seeds], color=colour, linestyle="", marker="o")
            axes.set(ylim=(-1.02, 1.02), title=said(name), xticks=places)
            axes.tick_params(axis="x", labelsize=6)
    words = "; ".join(
        f"{said(name)}: " + ", ".join(str(zoo.tau(setting, name)) for setting in zoo.settings) for name in SHOWN
    )
    return Plot(figure, f"Kendall’s tau-b with the test loss over seeds, by setting. Means: {words}.")
