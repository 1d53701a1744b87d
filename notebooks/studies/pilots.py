"""Choose the radii of a zoo by the rises of the loss that pilots show: models outside the zoo, of other seeds.

A radius is that at which the median rise over the pilots, interpolated between measured radii (log-log), is a rise
asked for, rounded to two digits. The radius at which parts of a measure are compared is that at which geodesics of
second order have a median reach of `REACH`: there truncation shows and does not yet decide.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from torch import nn

from quotient_manifolds.geometry import Adaptive, Euclidean, Geometry, KnownSymmetries, Quotient
from quotient_manifolds.progress import Progress
from quotient_manifolds.report import Table
from quotient_manifolds.sharpness import WorstCase, cross_entropy
from studies.common import RECORDS, Saves, figure, numbers
from studies.mnist.zoo import pilot_models as vision
from studies.sentiment.sentences import fetched
from studies.sentiment.zoo import pilot_models as language

RISES: Final = (0.02, 0.2, 2.0)  # nats
REACH: Final = 0.4
GEOMETRIES: Final[dict[str, tuple[Geometry, float]]] = {
    "euclidean": (Euclidean(), 0.00625),
    "adaptive": (Adaptive(), 0.0625),
    "adaptive linf": (Adaptive(norm="linf"), 0.00025),
    "inv": (Quotient("inv"), 0.0125),
    "mix": (Quotient("mix"), 0.00625),
}
"""What is asked for radii, and the least of those that are measured; each is twice the one before."""
DOUBLINGS = 9


@final
@dataclass(frozen=True)
class Rise:
    """Hold the rise of the loss (nats) in one ball, and the reach of its geodesics, model by model."""

    geometry: str
    radius: float
    rises: tuple[float, ...]
    reaches: tuple[float, ...]


@final
@dataclass(frozen=True)
class Pilots(Saves):
    """Hold what the pilots of a zoo showed: their recipes in words, and the rises in every ball."""

    zoo: str
    command: str
    models: tuple[str, ...]
    rises: tuple[Rise, ...]

    def radii(self, geometry: str) -> tuple[float, ...]:
        """Return the radii at which the median rises are `RISES`."""
        return tuple(self._radius(geometry, lambda each: each.rises, rise) for rise in RISES)

    def reaching(self, geometry: str) -> float:
        """Return the radius at which the median reach is `REACH`."""
        return self._radius(geometry, lambda each: each.reaches, REACH)

    def _radius(self, geometry: str, column: Callable[[Rise], Sequence[float]], wanted: float) -> float:
        medians = {
            each.radius: statistics.median(values)
            for each in self.rises
            if each.geometry == geometry and (values := column(each))
        }
        radii, found = np.log(list(medians)), np.log(np.maximum.accumulate(list(medians.values())))
        if not found[0] <= math.log(wanted) <= found[-1]:
            raise ValueError(f"{geometry}: no measured radius is below or above a median of {wanted:g}: {medians}")
        return float(f"{math.exp(np.interp(math.log(wanted), found, radii)):.2g}")


def measure_pilots(
    models: Mapping[str, Callable[[], tuple[nn.Module, Any]]],
    *,
    zoo: str,
    command: str,
    steps: int,
    progress: Progress,
) -> Pilots:
    """Measure the rise of the loss in balls of every geometry.

    models: by recipe, in words, what returns a model and the batch it is measured on.
    """
    rises: dict[tuple[str, float], list[tuple[float, float | None]]] = {}
    total = len(models) * len(GEOMETRIES)
    for place, load in enumerate(models.values()):
        model, batch = load()
        known = KnownSymmetries()
        for number, (name, (geometry, least)) in enumerate(GEOMETRIES.items()):
            progress("pilots", place * len(GEOMETRIES) + number, total)
            for power in range(DOUBLINGS):
                radius = least * 2**power
                # Without its warnings: the largest radii are there to be too large.
                found = WorstCase(geometry, radius, steps).of(model, cross_entropy, [batch], known=known)
                rises.setdefault((name, radius), []).append((found.mean, found.reach))
    progress("pilots", total, total)
    return Pilots(
        zoo,
        command,
        tuple(models),
        tuple(
            Rise(
                name, radius, tuple(rise for rise, _ in found), tuple(reach for _, reach in found if reach is not None)
            )
            for (name, radius), found in rises.items()
        ),
    )


def run(out: Path, *, fast: bool, command: str, progress: Progress) -> tuple[Pilots, ...]:
    """Measure the pilots of both zoos and write OUT/ZOO/pilots.json."""
    models = {"mnist": (vision(out / "mnist", 100), 20), "sentiment": (language(out / "sentiment", fetched()), 10)}
    found = []
    for zoo, (made, steps) in models.items():
        chosen = dict(list(made.items())[: 1 if fast else None])
        steps = 2 if fast else steps
        found.append(measure_pilots(chosen, zoo=zoo, command=command, steps=steps, progress=progress))
        found[-1].save(out / zoo / "pilots.json")
    return (*found,)


def load(folder: Path = RECORDS) -> tuple[Pilots, ...]:
    """Read the records in a folder."""
    return tuple(Pilots.load(folder / zoo / "pilots.json") for zoo in ("mnist", "sentiment"))


def tables(found: tuple[Pilots, ...]) -> list[Table]:
    """Return the median increase in loss of each zoo's pilots by geometry and radius."""
    return [
        numbers(
            each.zoo,
            f"{each.zoo}: median increase in loss of the pilots.",
            ["Geometry", "Radius", "Median increase (nats)"],
            [[rise.geometry, f"{rise.radius:g}", figure(statistics.median(rise.rises))] for rise in each.rises],
        )
        for each in found
    ]
