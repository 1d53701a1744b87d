"""How far measures agree, as a heat map."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from quotient_manifolds.plots.canvas import Plot, canvas
from quotient_manifolds.statistics import NAMES, Agreement

CELL = 0.62  # inches


def agreement_figure(agreement: Agreement) -> Plot:
    """A coloured square, with its number, for every two measures; grey where the coefficient is not defined."""
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
    return Plot(figure, f"{NAMES[agreement.kind]} between {count} measures. {_extremes(agreement)}")


def _readable(background: Sequence[float]) -> str:
    """Black or white, whichever has the larger contrast (4.5 at least) by the luminance of sRGB, as WCAG defines it."""
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
