"""The scalar network f(x) = G H x: the smallest model with a continuous symmetry [paper, Fig. 1 and App. D].

Every ball around (G, H) reaches an interval of products p = G H, and the loss is an upward parabola in p: the maximum
lies at an end of the interval. With R = radius / sqrt(2), the largest relative change b of both weights in `inv`:

    inv           p e^(2b), |b| <= R (exact); p (1 + b)^2 (first order); p (1 + b + b^2 / 2)^2 (second)
    mix           p (1 + 2b), |b| <= R / |p|, b > -1/2; p (1 + b)^2; p (1 + b - b^2 / 2)^2
    adaptive      p (1 + a) (1 + c), a^2 + c^2 <= radius^2
    euclidean     (G + a) (H + c), a^2 + c^2 <= radius^2

The study compares these closed forms with the package's ascent and with their expansions [paper, Eq. 19 to 22].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from quotient_manifolds.demo.zoo import one_thread
from quotient_manifolds.geometry import Adaptive, Euclidean
from quotient_manifolds.manifolds import DiagonalQuotient
from quotient_manifolds.messages import Progress
from quotient_manifolds.sharpness import AutoPGD, worst_case_sharpness
from studies.common import Record, Tables, read_record, table, write_record

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

    def loss(self, point: Tensor) -> Tensor:
        """Compute L at a point (2, 1), G on top of H: the shape that DiagonalQuotient has."""
        x, y = torch.tensor([self.x, self.y], dtype=point.dtype)
        return ((x * point.prod() - y) ** 2).sum()

    def rise(self, product: float, reached: float) -> float:
        """Compute L where G H is `reached`, minus L where it is `product`."""
        A, B, _ = self.coefficients
        step = reached - product
        return A * step**2 + 2 * (A * product - B) * step

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return the data as the network takes them, (points, 1) each."""
        x, y = torch.tensor([self.x, self.y], dtype=torch.float64)[..., None]
        return x, y


def network(point: Point) -> nn.Sequential:
    """Compute x -> H (G x): two Linears without bias, in float64."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double().eval()
    for weight, value in zip(model.parameters(), point, strict=True):
        nn.init.constant_(weight, value)
    return model


def squared_error(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    """Compute sum_i (f(x_i) - y_i)^2."""
    return ((model(data[0]) - data[1]) ** 2).sum()


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


# ---- the package's ascent and manifolds

STEPS = 30
RESTARTS = 3  # a ball that is a line segment has two maxima, one at each end


def climb(problem: Scalar, point: Point, measure: str, radius: float) -> float:
    """Return worst-case sharpness as Auto-PGD finds it.

    Quotient measures ascend on DiagonalQuotient, whose geodesics are closed forms in both metrics. `Quotient` measures
    the same on FixedRankQuotient(1, 1), where an exact geodesic of mix is an ODE.
    """
    if measure in ("euclidean", "adaptive"):
        geometry = Euclidean() if measure == "euclidean" else Adaptive()
        settings: dict[str, Any] = {"radius": radius, "steps": STEPS, "restarts": RESTARTS}
        return worst_case_sharpness(
            network(point), squared_error, [problem.batch()], geometry=geometry, **settings
        ).mean
    metric, order = measure.rstrip(")").split(" (")
    objective: Any = _OnGeodesics(problem, point, metric, order.removesuffix(" order"))
    found = AutoPGD(steps=STEPS, restarts=RESTARTS).maximise(objective, radius, torch.Generator().manual_seed(0))
    return found.loss - found.base


@final
class _OnGeodesics:
    """Represent z -> L(gamma_z(1)) in orthonormal coordinates z of the horizontal line at a point."""

    def __init__(self, problem: Scalar, point: Point, metric: Any, order: Any) -> None:
        self.problem, self.order = problem, order
        self.space = DiagonalQuotient(metric).at(torch.tensor(point, dtype=torch.float64)[:, None])

    def zero(self) -> dict[str, Tensor]:
        return {"z": torch.zeros_like(self.space.point)}

    def sample(self, generator: torch.Generator) -> dict[str, Tensor]:
        noise = torch.randn(self.space.point.shape, generator=generator, dtype=torch.float64)
        return {"z": self.space.project(noise).clone()}

    def value(self, z: dict[str, Tensor]) -> float:
        return float(self.problem.loss(self.space.follow(z["z"], self.order)[0]))

    def value_and_gradient(self, z: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        leaf = z["z"].detach().requires_grad_()
        value = self.problem.loss(self.space.follow(leaf, self.order)[0])
        (gradient,) = torch.autograd.grad(value, leaf)
        return float(value.detach()), {"z": self.space.project(gradient).clone()}


# ---- the study

PROBLEM = Scalar()
POINTS = (Point(0.4, 0.9), Point(2.0, -1.5), Point(0.6, 2.5))
SEVERAL = Scalar((1.0, -2.0, 0.5), (0.7, 1.0, 2.0))
RADII = (0.01, 0.1, 1.0)
SERIES_PRODUCTS = (1.0, 1.01, 1.5)
SERIES_RADII = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


@one_thread()
def run(out: Path, *, fast: bool, command: str, progress: Progress) -> Record:
    """Compare everything and write OUT/toy.json; `fast`: one ascent for each measure and kind of data.

    agreements: the largest relative difference of ascents and closed form, and where. series: sharpness with the
    geodesic to first and second order, exact, and the first-order term in the radius.
    """
    agreements = []
    for place, measure in enumerate(MEASURES):
        progress("ascents", place, len(MEASURES))
        agreements.append(_agreement(measure, POINTS[:1] if fast else POINTS, RADII[1:2] if fast else RADII))
    return write_record(out / "toy.json", {"agreements": agreements, "series": _series()}, command)


def load(folder: Path) -> Record:
    """Read the record in a folder."""
    return read_record(folder / "toy.json")


def _agreement(measure: str, points: Sequence[Point], radii: Sequence[float]) -> Record:
    """Compare over one point of data, a minimum, and several points of data."""
    found = []
    for point in points:
        for problem in (PROBLEM, Scalar((1.0,), (point.product,)), SEVERAL):
            for radius in radii:
                exact = sharpness(problem, point, measure, radius)
                found.append((abs(climb(problem, point, measure, radius) / exact - 1), point.product, radius))
    difference, product, radius = max(found)
    where = {"difference": difference, "product": product, "radius": radius}
    return {"measure": measure, "cases": len(found), **where}


def _series() -> list[Record]:
    rows = []
    for metric in ("inv", "mix"):
        for product in SERIES_PRODUCTS:
            point = Point.balanced(product)
            for radius in SERIES_RADII:
                row = {"metric": metric, "product": product, "radius": radius}
                row["term"] = first_term(PROBLEM, point, metric, radius)
                for key, order in (("first", "first order"), ("second", "second order"), ("exact", "exact")):
                    row[key] = sharpness(PROBLEM, point, f"{metric} ({order})", radius)
                rows.append(row)
    return rows


def tables(record: Record) -> Tables:
    """Return how far ascents are from the closed forms."""
    rows = [[one["measure"], str(one["cases"]), f"{one['difference']:.1e}"] for one in record["agreements"]]
    return {"ascents": table(["Measure", "Balls", "Largest difference"], rows)}


def series_picture(record: Record, metric: str, product: float) -> Figure:
    """Draw sharpness against the radius, exact, with truncated geodesics, and the first-order term."""
    rows = pd.DataFrame(record["series"]).query("metric == @metric and product == @product")
    figure = Figure(figsize=(4.8, 3.7), layout="constrained")
    axes = figure.subplots()
    names = ("exact", "first-order geodesics", "second-order geodesics", "first-order term")
    for name, column, style in zip(
        names, ("exact", "first", "second", "term"), ("k:", "^-.", "o-", "s--"), strict=True
    ):
        axes.loglog(rows.radius, rows[column], style, label=name, fillstyle="none")
    axes.set(xlabel="radius", ylabel="sharpness")
    axes.legend()
    return figure
