"""Draw figures for pages, papers and notebooks in matplotlib, from plain data, with a text alternative."""

from __future__ import annotations

from quotient_manifolds.plots.canvas import STYLES, Plot, Style, style_of
from quotient_manifolds.plots.figures import Panel, Series, line_figure, orbit_figure, path_figure, scatter_figure
from quotient_manifolds.plots.level_sets import level_sets

__all__ = [
    "STYLES",
    "Panel",
    "Plot",
    "Series",
    "Style",
    "level_sets",
    "line_figure",
    "orbit_figure",
    "path_figure",
    "scatter_figure",
    "style_of",
]
