"""Draw figures for pages, papers and notebooks: from plain data, in matplotlib, with a text alternative."""

from __future__ import annotations

from quotient_manifolds.plots.canvas import STYLES, Plot, Style, style_of
from quotient_manifolds.plots.contours import Curve, Field, contour_figure
from quotient_manifolds.plots.correlations import Interval, agreement_figure, interval_figure
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
