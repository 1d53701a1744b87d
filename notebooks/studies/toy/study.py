"""What changes along an orbit of the scalar network, and how far ascent and expansions are from the closed forms."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import final

from quotient_manifolds.demo.zoo import one_thread
from quotient_manifolds.plots import STYLES, Plot, line_figure
from quotient_manifolds.plots import Series as Line
from quotient_manifolds.progress import Progress
from quotient_manifolds.report import Table
from quotient_manifolds.version import VERSION
from studies.common import Saves, change, numbers
from studies.toy.climb import climb
from studies.toy.closed import MEASURES, first_term, sharpness
from studies.toy.landscape import GEOMETRIES, landscape
from studies.toy.network import Point, Scalar

PROBLEM = Scalar()
PRODUCTS = (-0.5, 0.25, 1.0, 1.5)  # of the orbits that are followed; 1 is the minima's
SIZES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # (G / a, H a)
RADIUS = 0.1
VANISHES = 1e-10
CLIMBED = {"euclidean": "euclidean", "adaptive": "adaptive", "inv": "inv (exact)", "mix": "mix (exact)"}

POINTS = (Point(0.4, 0.9), Point(2.0, -1.5), Point(0.6, 2.5))
SEVERAL = Scalar((1.0, -2.0, 0.5), (0.7, 1.0, 2.0))
RADII = (0.01, 0.1, 1.0)

SERIES_PRODUCTS = (1.0, 1.01, 1.5)
SERIES_RADII = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


@final
@dataclass(frozen=True)
class Along:
    """Hold one quantity in one geometry at the points (G / a, H a) of an orbit, a in `sizes`."""

    quantity: str
    geometry: str
    product: float
    values: tuple[float, ...]

    @property
    def spread(self) -> float | None:
        """Return the largest value over the smallest, in magnitude: 1 is constant. None where it vanishes all along."""
        magnitudes = [abs(value) for value in self.values]
        return None if max(magnitudes) < VANISHES else max(magnitudes) / min(magnitudes)


@final
@dataclass(frozen=True)
class Agreement:
    """Hold the largest relative difference between ascent and closed form, and the product and radius where it is."""

    measure: str
    cases: int
    difference: float
    product: float
    radius: float


@final
@dataclass(frozen=True)
class Series:
    """Hold sharpness with the geodesic to first and second order, exact, and the first-order term in the radius."""

    metric: str
    product: float
    radius: float
    term: float
    first: float
    second: float
    exact: float


@final
@dataclass(frozen=True)
class Toy(Saves):
    """Hold all of the study."""

    sizes: tuple[float, ...]
    radius: float
    along: tuple[Along, ...]
    agreements: tuple[Agreement, ...]
    series: tuple[Series, ...]
    command: str
    version: str

    def spread(self, quantity: str, geometry: str) -> float | None:
        """Return the largest over all orbits; None where there is none."""
        found = [one.spread for one in self.along if (one.quantity, one.geometry) == (quantity, geometry)]
        return max((spread for spread in found if spread is not None), default=None)


@one_thread()
def run(out: Path, *, fast: bool, command: str, progress: Progress) -> Toy:
    """Measure everything and write OUT/toy.json; `fast`: two orbits at three points, one ascent for each measure."""
    sizes = (0.1, 1.0, 10.0) if fast else SIZES
    products = PRODUCTS[1:3] if fast else PRODUCTS
    rows: list[Along] = []
    for place, product in enumerate(products):
        progress("orbits", place, len(products))
        rows += _along(product, sizes)
    progress("orbits", len(products), len(products))
    agreements = []
    for place, measure in enumerate(MEASURES):
        progress("ascents", place, len(MEASURES))
        agreements.append(_agreement(measure, POINTS[:1] if fast else POINTS, RADII[1:2] if fast else RADII))
    progress("ascents", len(MEASURES), len(MEASURES))
    found = Toy(sizes, RADIUS, (*rows,), (*agreements,), _series(), command, VERSION)
    found.save(out / "toy.json")
    return found


def load(folder: Path) -> Toy:
    """Read the record in a folder."""
    return Toy.load(folder / "toy.json")


def tables(found: Toy) -> list[Table]:
    """Return the largest over the smallest value along orbits, and how far ascents are from the closed forms."""
    quantities = dict.fromkeys(one.quantity for one in found.along)
    spreads = [[name, *(_spread(found.spread(name, geometry)) for geometry in GEOMETRIES)] for name in quantities]
    agreements = [[one.measure, str(one.cases), change(one.difference)] for one in found.agreements]
    return [
        numbers("spreads", "Largest over smallest value along orbits.", ["Quantity", *GEOMETRIES], spreads),
        numbers("ascents", "Ascents against closed forms.", ["Measure", "Balls", "Largest difference"], agreements),
    ]


def _spread(value: float | None) -> str:
    """Return a ratio, or how far it is from 1."""
    if value is None:
        return "0"
    return f"1 + {change(value - 1)}" if value - 1 < 1e-6 else f"{value:.3g}"


def _along(product: float, sizes: tuple[float, ...]) -> list[Along]:
    """Return loss, gradient norm, Hessian trace and worst-case sharpness on one orbit, in every geometry."""
    points = [Point.balanced(product).moved(a) for a in sizes]
    here = landscape(PROBLEM, points)
    rows = [Along("loss", geometry, product, (*here.loss.tolist(),)) for geometry in GEOMETRIES]
    for name, values in (("gradient norm", here.gradient_norm), ("Hessian trace", here.hessian_trace)):
        rows += [Along(name, geometry, product, (*values[geometry].tolist(),)) for geometry in GEOMETRIES]
    for geometry, measure in CLIMBED.items():
        found = tuple(climb(PROBLEM, point, measure, RADIUS) for point in points)
        rows.append(Along("worst-case sharpness", geometry, product, found))
    return rows


def _agreement(measure: str, points: tuple[Point, ...], radii: tuple[float, ...]) -> Agreement:
    """Compare over one point of data, a minimum, and several points of data."""
    worst = (-1.0, 0.0, 0.0)
    cases = 0
    for point in points:
        for problem in (PROBLEM, Scalar((1.0,), (point.product,)), SEVERAL):
            for radius in radii:
                exact = sharpness(problem, point, measure, radius)
                difference = abs(climb(problem, point, measure, radius) / exact - 1)
                worst = max(worst, (difference, point.product, radius))
                cases += 1
    return Agreement(measure, cases, *worst)


def _series() -> tuple[Series, ...]:
    rows = []
    for metric in ("inv", "mix"):
        for product in SERIES_PRODUCTS:
            point = Point.balanced(product)
            for radius in SERIES_RADII:
                term = first_term(PROBLEM, point, metric, radius)
                orders = (f"{metric} ({order})" for order in ("first order", "second order", "exact"))
                found = (sharpness(PROBLEM, point, measure, radius) for measure in orders)
                rows.append(Series(metric, product, radius, term, *found))
    return (*rows,)


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
