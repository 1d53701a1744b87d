"""Figures for pages, papers and notebooks: plain data in, a matplotlib figure and its text alternative out."""

from __future__ import annotations

from quotient_manifolds.plots.agreement import agreement_figure
from quotient_manifolds.plots.canvas import STYLES, Plot, Style, style_of
from quotient_manifolds.plots.contours import Curve, Field, contour_figure
from quotient_manifolds.plots.intervals import Interval, interval_figure
from quotient_manifolds.plots.lines import Series, line_figure, orbit_figure, radius_figure
from quotient_manifolds.plots.scatter import Colour, Panel, scatter_figure

__all__ = [
    "STYLES",
    "Colour",
    "Curve",
    "Field",
    "Interval",
    "Panel",
    "Plot",
    "Series",
    "Style",
    "agreement_figure",
    "contour_figure",
    "interval_figure",
    "line_figure",
    "orbit_figure",
    "radius_figure",
    "scatter_figure",
    "style_of",
]
