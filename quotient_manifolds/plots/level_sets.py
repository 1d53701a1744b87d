"""Draw the level sets of functions on a plane."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quotient_manifolds.plots.canvas import canvas

SQUARE = (3.9, 3.1)  # inches; a square panel with a color bar beside it
LEVELS = 9
NOISE = 1e-12  # A level below this fraction of the largest value is 0 up to rounding.


def level_sets(
    axis: NDArray[np.float64],
    fields: Mapping[str, NDArray[np.float64]],
    labels: tuple[str, str],
    curves: Sequence[tuple[Any, Any]] = (),
) -> Any:
    """Return a figure with a panel for each field, by title; its levels are quantiles of the field.

    axis: the coordinates of both directions; the first index of a field is y. curves: (x, y) to draw dashed over every
    panel; NaN interrupts them.
    """
    with canvas(*labels, panels=len(fields), size=SQUARE) as (figure, all_axes):
        for axes, (title, values) in zip(all_axes, fields.items(), strict=True):
            _fill(figure, axes, axis, values)
            for x, y in curves:
                axes.plot(x, y, color="#ffffff", linewidth=2.6)  # outlines the next line, on any color
                axes.plot(x, y, color="#000000", linewidth=1.1, linestyle=(0, (4, 2)))
            axes.set(xlim=(axis[0], axis[-1]), ylim=(axis[0], axis[-1]), aspect="equal", title=title)
            axes.grid(visible=False)
        return figure


def _fill(figure: Any, axes: Any, axis: NDArray[np.float64], values: NDArray[np.float64]) -> None:
    from matplotlib.colors import BoundaryNorm

    quantiles = np.quantile(values, np.linspace(0, 1, LEVELS + 2)[1:-1])
    quantiles[abs(quantiles) < NOISE * abs(values).max()] = 0.0
    levels = sorted({float(f"{level:.3g}") for level in quantiles})
    if len(levels) < 2:
        text = f"{_number(float(np.median(values)))} everywhere"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center")
        return
    norm = BoundaryNorm(levels, 256, extend="both")  # one color for each band between levels
    filled = axes.contourf(axis, axis, values, levels, cmap="cividis", norm=norm, extend="both")
    filled.set(edgecolor="#000000", linewidth=0.3)
    figure.colorbar(filled, ax=axes, ticks=levels, format=lambda level, _: _number(level))


def _number(value: float) -> str:
    """Return a number with three digits, and the minus sign of tick labels."""
    return f"{value:.3g}".replace("-", "\N{MINUS SIGN}")
