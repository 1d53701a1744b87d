"""The scalar network f(x) = G H x: the smallest model with a continuous symmetry [paper, Fig. 1 and App. D].

Every ball around (G, H) reaches an interval of products p = G H, and the loss is an upward parabola in p: the maximum
lies at an end of the interval. With R = radius / sqrt(2), the largest relative change b of both weights in `inv`:

    inv           p e^(2b), |b| <= R (exact); p (1 + b)^2 (first order); p (1 + b + b^2 / 2)^2 (second)
    mix           p (1 + 2b), |b| <= R / |p|, b > -1/2; p (1 + b)^2; p (1 + b - b^2 / 2)^2
    adaptive      p (1 + a) (1 + c), a^2 + c^2 <= radius^2
    euclidean     (G + a) (H + c), a^2 + c^2 <= radius^2

The study compares these closed forms with their expansions [paper, Eq. 19 to 22]; tests compare the package with them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from quotient_manifolds.messages import Progress
from studies.common import Record, Tables

# ---- the network


class Point(NamedTuple):
    """Hold the two weights, each different from 0. The network depends only on the product G H."""

    G: float
    H: float

    @property
    def product(self) -> float:
        return self.G * self.H

    def moved(self, a: float) -> Point:
        """Compute (G / a, H a): the same network elsewhere on its orbit."""
        return Point(self.G / a, self.H * a)

    @classmethod
    def balanced(cls, product: float) -> Point:
        """Return the point of the orbit G H = product with |G| = |H|."""
        root = abs(product) ** 0.5
        return cls(root, root if product > 0 else -root)


@final
@dataclass(frozen=True)
class Scalar:
    """Represent L(G, H) = sum_i (x_i G H - y_i)^2 = A p^2 - 2 B p + C with p = G H; one x at least is not 0.

    A = sum x_i^2, B = sum x_i y_i, C = sum y_i^2. The minima are the orbit p = B / A.
    """

    x: tuple[float, ...] = (1.0,)
    y: tuple[float, ...] = (1.0,)

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """Return A, B, C."""
        pairs = list(zip(self.x, self.y, strict=True))
        return sum(x * x for x, _ in pairs), sum(x * y for x, y in pairs), sum(y * y for _, y in pairs)

    def rise(self, product: float, reached: float) -> float:
        """Compute L where G H is `reached`, minus L where it is `product`."""
        A, B, _ = self.coefficients
        step = reached - product
        return A * step**2 + 2 * (A * product - B) * step


# ---- closed forms

# By metric and order: b -> the factor of p along the geodesic, and the b where the factor turns.
_FACTORS: dict[str, tuple[Callable[[float], float], tuple[float, ...]]] = {
    "inv (first order)": (lambda b: (1 + b) ** 2, (-1.0,)),
    "inv (second order)": (lambda b: (1 + b + b * b / 2) ** 2, (-1.0,)),
    "inv (exact)": (lambda b: math.exp(2 * b), ()),
    "mix (first order)": (lambda b: (1 + b) ** 2, (-1.0,)),
    "mix (second order)": (lambda b: (1 + b - b * b / 2) ** 2, (1 - math.sqrt(3), 1.0, 1 + math.sqrt(3))),
    "mix (exact)": (lambda b: 1 + 2 * max(b, -0.5), ()),  # at b = -1/2 the geodesic has left the manifold
}
MEASURES = ("euclidean", "adaptive", *_FACTORS)
"""Every measure by the name of its geometry."""


def sharpness(problem: Scalar, point: Point, measure: str, radius: float) -> float:
    """Compute max { L - L(G, H) } over the ball of this radius in the norm of `measure`, one of `MEASURES`."""
    return max(problem.rise(point.product, end) for end in reached(point, measure, radius))


def reached(point: Point, measure: str, radius: float) -> tuple[float, float]:
    """Return the smallest and the largest product G H in the ball, in either order where that is negative."""
    R = radius / math.sqrt(2)
    if measure == "euclidean":  # extremes lie on the circle, where the derivative of the product by the angle is 0:
        G, H = point  # G cos - H sin + r (cos^2 - sin^2) = 0, a quartic in tan(angle / 2)
        roots = np.roots([radius - G, -2 * H, -6 * radius, -2 * H, G + radius])
        angles = [math.pi, *2 * np.arctan(roots.real)]  # of complex roots the real part is just another candidate
        ends = [(G + radius * math.cos(a)) * (H + radius * math.sin(a)) for a in angles]
        return min(ends), max(ends)
    if measure == "adaptive":  # on the circle (1 + a) (1 + c) = 1 + s + (s^2 - radius^2) / 2 with s = a + c
        low = (1 - R) ** 2 if 2 * R <= 1 else (1 - radius**2) / 2  # at a = c = -R, until s = -1 is within reach
        return point.product * low, point.product * (1 + R) ** 2
    factor, turns = _FACTORS[measure]
    b = largest_step(point, measure, radius)
    factors = [factor(c) for c in (-b, b, *(turn for turn in turns if abs(turn) < b))]
    return point.product * min(factors), point.product * max(factors)


def largest_step(point: Point, measure: str, radius: float) -> float:
    """Return the largest |b| with |xi| <= radius: |xi|^2 is 2 b^2 in inv and 2 (G H b)^2 in mix."""
    return radius / math.sqrt(2) / (abs(point.product) if measure.startswith("mix") else 1.0)


def first_term(problem: Scalar, point: Point, measure: str, radius: float) -> float:
    """Return the term of first order in the radius: 4 R |p (A p - B)| in inv [paper, Eq. 22], 4 R |A p - B| in mix."""
    A, B, _ = problem.coefficients
    return 4 * largest_step(point, measure, radius) * abs(point.product * (A * point.product - B))


# ---- the study

PROBLEM = Scalar()
SERIES_PRODUCTS = (1.0, 1.01, 1.5)
SERIES_RADII = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
ORDERS = {"first": "first order", "second": "second order", "exact": "exact"}


def run(out: Path, *, fast: bool, progress: Progress) -> Record:
    """Compute sharpness with the geodesic to first and second order, exact, and the first-order term in the radius."""
    series = []
    for metric, product, radius in itertools.product(("inv", "mix"), SERIES_PRODUCTS, SERIES_RADII):
        point = Point.balanced(product)
        row = {"metric": metric, "product": product, "radius": radius}
        row["term"] = first_term(PROBLEM, point, metric, radius)
        row |= {key: sharpness(PROBLEM, point, f"{metric} ({order})", radius) for key, order in ORDERS.items()}
        series.append(row)
    return {"series": series}


def tables(record: Record) -> Tables:
    """Return sharpness by metric, product and radius, over that of exact geodesics."""
    series = pd.DataFrame(record["series"])
    parts = series[["term", "first", "second"]].div(series["exact"], axis=0).map("{:.3f}".format)
    return {"series": series[["metric", "product", "radius"]].join(parts)}


def series_picture(record: Record, metric: str, product: float) -> Figure:
    """Draw sharpness against the radius, exact, with truncated geodesics, and the first-order term."""
    rows = pd.DataFrame(record["series"]).query("metric == @metric and product == @product")
    figure = Figure(figsize=(4.8, 3.7), layout="constrained")
    axes = figure.subplots()
    lines = {"exact": ("exact", "k:"), "first-order geodesics": ("first", "^-.")}
    lines |= {"second-order geodesics": ("second", "o-"), "first-order term": ("term", "s--")}
    for name, (column, style) in lines.items():
        axes.loglog(rows.radius, rows[column], style, label=name, fillstyle="none")
    axes.set(xlabel="radius", ylabel="sharpness")
    axes.legend()
    return figure
