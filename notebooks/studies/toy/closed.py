"""Worst-case sharpness of the scalar network in closed form: Eq. 19 to 22 of the paper, and what it compares with.

Every ball around (G, H) reaches an interval of products p = G H, and the loss is an upward parabola in p: the maximum
lies at an end of the interval. With R = radius / sqrt(2), the largest relative change b of both weights in `inv`:

    inv           p e^(2b), |b| <= R (exact); p (1 + b)^2 (first order); p (1 + b + b^2 / 2)^2 (second)
    mix           p (1 + 2b), |b| <= R / |p|, b > -1/2; p (1 + b)^2; p (1 + b - b^2 / 2)^2
    adaptive      p (1 + a) (1 + c), a^2 + c^2 <= radius^2
    euclidean     (G + a) (H + c), a^2 + c^2 <= radius^2
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from studies.toy.network import Point, Scalar

MEASURES = (
    "euclidean",
    "adaptive",
    *(f"{metric} ({order})" for metric in ("inv", "mix") for order in ("first order", "second order", "exact")),
)
"""Every measure by the name of its geometry."""

Interval = tuple[float, float]

# By metric and order: b -> the factor of p along the geodesic, and the b where the factor turns.
_FACTORS: dict[str, tuple[Callable[[float], float], tuple[float, ...]]] = {
    "inv (first order)": (lambda b: (1 + b) ** 2, (-1.0,)),
    "inv (second order)": (lambda b: (1 + b + b * b / 2) ** 2, (-1.0,)),
    "inv (exact)": (lambda b: math.exp(2 * b), ()),
    "mix (first order)": (lambda b: (1 + b) ** 2, (-1.0,)),
    "mix (second order)": (lambda b: (1 + b - b * b / 2) ** 2, (1 - math.sqrt(3), 1.0, 1 + math.sqrt(3))),
    "mix (exact)": (lambda b: 1 + 2 * max(b, -0.5), ()),  # at b = -1/2 the geodesic has left the manifold
}


def sharpness(problem: Scalar, point: Point, measure: str, radius: float) -> float:
    """Compute max { L - L(G, H) } over the ball of this radius in the norm of `measure`, one of `MEASURES`."""
    return max(problem.rise(point.product, end) for end in reached(point, measure, radius))


def reached(point: Point, measure: str, radius: float) -> Interval:
    """Return the smallest and the largest product G H in the ball."""
    if measure == "euclidean":
        return _euclidean(point, radius)
    if measure == "adaptive":
        ends = _adaptive(radius)
    elif measure in _FACTORS:
        factor, turns = _FACTORS[measure]
        b = largest_step(point, measure, radius)
        values = [factor(c) for c in (-b, b, *(turn for turn in turns if abs(turn) < b))]
        ends = min(values), max(values)
    else:
        raise ValueError(f"measure must be one of {', '.join(MEASURES)}. Found {measure!r}")
    low, high = sorted(point.product * end for end in ends)
    return low, high


def largest_step(point: Point, measure: str, radius: float) -> float:
    """Return the largest |b| with |xi| <= radius: |xi|^2 is 2 b^2 in inv and 2 (G H b)^2 in mix."""
    return radius / math.sqrt(2) / (abs(point.product) if measure.startswith("mix") else 1.0)


def first_term(problem: Scalar, point: Point, measure: str, radius: float) -> float:
    """Return the term of first order in the radius: 4 R |p (A p - B)| in inv [paper, Eq. 22], 4 R |A p - B| in mix."""
    A, B, _ = problem.coefficients
    return 4 * largest_step(point, measure, radius) * abs(point.product * (A * point.product - B))


def term_at_minimum(problem: Scalar, point: Point, measure: str, radius: float) -> float:
    """Return the term of second order where the first vanishes: 4 A R^2 p^2 in inv [paper, App. D], 4 A R^2 in mix."""
    A, _, _ = problem.coefficients
    return 4 * A * (largest_step(point, measure, radius) * point.product) ** 2


def exact_direction(problem: Scalar, point: Point, radius: float) -> int:
    """Return the sign of the b that maximises over an exact geodesic ball of inv.

    That of p (A p cosh(2 R) - B); the paper's rule for Eq. 22, p (A p - B), is its limit for small R.
    """
    A, B, _ = problem.coefficients
    bent = A * point.product * math.cosh(2 * largest_step(point, "inv (exact)", radius))
    return 1 if point.product * (bent - B) >= 0 else -1


def paper_direction(problem: Scalar, point: Point) -> int:
    """Return the sign of the b that maximises Eq. 22."""
    A, B, _ = problem.coefficients
    return 1 if point.product * (A * point.product - B) >= 0 else -1


def _adaptive(radius: float) -> Interval:
    """Return the range of (1 + a) (1 + c): on the circle it is 1 + s + (s^2 - radius^2) / 2 with s = a + c.

    |s| <= 2 R. The ends are at a = c = +-R, horizontal like geodesics, until s = -1 is within reach.
    """
    R = radius / math.sqrt(2)
    return ((1 - R) ** 2 if 2 * R <= 1 else (1 - radius**2) / 2), (1 + R) ** 2


def _euclidean(point: Point, radius: float) -> Interval:
    """Return the range of (G + r cos) (H + r sin): its extremes lie on the circle, at roots of a quartic in tan / 2.

    Where the derivative G cos - H sin + r (cos^2 - sin^2) is 0, with t = tan(angle / 2).
    """
    G, H = point
    roots = np.roots([radius - G, -2 * H, -6 * radius, -2 * H, G + radius])
    angles = [math.pi, *2 * np.arctan(roots.real)]  # of complex roots the real part is just another candidate
    values = [(G + radius * math.cos(a)) * (H + radius * math.sin(a)) for a in angles]
    return min(values), max(values)
