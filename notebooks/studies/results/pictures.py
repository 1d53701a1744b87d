"""The figures of the page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from quotient_manifolds.files import write_text
from quotient_manifolds.plots import STYLES, Plot
from quotient_manifolds.plots.canvas import canvas, numbers
from studies.results.claims import said
from studies.results.records import Records
from studies.results.settings import DiagonalZoo

SHOWN = ("adaptive", "inv exact", "mix exact", "inv closed", "mix closed")  # a panel each
SIZE = (2.6, 3.6)  # inches a panel


def pictures(records: Records) -> dict[str, Plot]:
    """Draw figures, by name of file, of records that are there."""
    return {} if records.diagonal is None else {"settings": _settings(records.diagonal)}


def write_pictures(folder: Path, plots: Mapping[str, Plot]) -> None:
    """Return each as NAME.svg, a file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, plot in plots.items():
        svg = plot.svg(name).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
        write_text(folder / f"{name}.svg", f"{svg}\n")


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
