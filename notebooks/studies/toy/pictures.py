"""The figures of the scalar network."""

from __future__ import annotations

import numpy as np

from quotient_manifolds.plots import STYLES, Curve, Field, Plot, contour_figure, line_figure, orbit_figure
from quotient_manifolds.plots import Series as Line
from studies.toy.landscape import GEOMETRIES, WINDOW, grid
from studies.toy.network import Scalar
from studies.toy.study import Toy

SHOWN = ("euclidean", "inv", "mix")


def landscapes(problem: Scalar, *, window: float = WINDOW) -> tuple[Plot, Plot]:
    """Return level sets of loss and gradient norm [paper, Fig. 1], and of the Hessian trace [App. D.1]."""
    found = grid(problem, window=window)
    minima = [hyperbola(problem.best, window=window, label="the minima")]
    loss = Field("loss", found.landscape.loss)
    figures = []
    for name, fields, columns in (
        ("gradient norm", found.landscape.gradient_norm, 2),
        ("Hessian trace", found.landscape.hessian_trace, 3),
    ):
        shown = [Field(f"{name}, {geometry}", fields[geometry]) for geometry in SHOWN]
        first = [loss] if name == "gradient norm" else []
        figures.append(
            contour_figure(found.G, found.H, [*first, *shown], x_label="G", y_label="H", curves=minima, columns=columns)
        )
    return figures[0], figures[1]


def hyperbola(product: float, *, window: float = WINDOW, label: str = "") -> Curve:
    """Return the orbit G H = product inside the window, both branches."""
    branch = np.geomspace(abs(product) / window, window, 100)
    G = np.concatenate([-branch[::-1], [np.nan], branch])
    return Curve(label or f"G H = {product:g}", G, product / G)


def orbit_picture(found: Toy, quantity: str = "worst-case sharpness", product: float = 1.0) -> Plot:
    """Return a quantity after a move along an orbit, over the quantity at a = 1."""
    rows = {one.geometry: one.values for one in found.along if (one.quantity, one.product) == (quantity, product)}
    start = found.sizes.index(1.0)
    ratios = {geometry: np.array(rows[geometry]) / rows[geometry][start] for geometry in GEOMETRIES}
    return orbit_figure(found.sizes, ratios)


def series_picture(found: Toy, metric: str, product: float) -> Plot:
    """Return sharpness against the radius, exact, with truncated geodesics, and the first-order term."""
    rows = [one for one in found.series if (one.metric, one.product) == (metric, product)]
    radii = [one.radius for one in rows]
    lines = [
        Line("exact", radii, [one.exact for one in rows], STYLES[0]),
        Line("first-order geodesics", radii, [one.first for one in rows], STYLES[1]),
        Line("second-order geodesics", radii, [one.second for one in rows], STYLES[2]),
        Line("first-order term", radii, [one.term for one in rows], STYLES[3]),
    ]
    ends = "; ".join(f"{line.label} {line.y[0]:.3g} to {line.y[-1]:.3g}" for line in lines)
    return line_figure(
        lines,
        x_label="radius",
        y_label="sharpness",
        log=(True, True),
        alt=f"Sharpness in {metric} at G H = {product:g} against the radius, {radii[0]:g} to {radii[-1]:g}: {ends}.",
    )
