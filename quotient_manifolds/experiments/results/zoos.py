"""The three zoos alike: tau of a measure by name, with its interval, and resampled with all others of its zoo."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, final

import numpy as np

from quotient_manifolds.experiments.diagonal.records import DiagonalStudy, Mean, family_name
from quotient_manifolds.experiments.results.estimates import Estimate, Floats
from quotient_manifolds.experiments.vit_figures import tau_of
from quotient_manifolds.experiments.vit_spec import EPS, FAMILY, label, of_family
from quotient_manifolds.geometry import Adaptive, Euclidean, Geometry, Quotient
from quotient_manifolds.sharpness import WorstCase

if TYPE_CHECKING:
    from quotient_manifolds.compare import Comparison

RESAMPLES = 2000
GAP = "error_gap"

GEOMETRIES: Mapping[str, Geometry] = {
    "euclidean": Euclidean(),
    "adaptive": Adaptive(),
    "inv": Quotient("inv"),
    "mix": Quotient("mix"),
    "inv first": Quotient("inv", "first"),
    "mix first": Quotient("mix", "first"),
    "inv exact": Quotient("inv", "exact"),
    "inv adaptive norm": Quotient("inv", norm="adaptive"),
    "mix adaptive norm": Quotient("mix", norm="adaptive"),
    **{f"inv eps {eps:g}": Quotient("inv", eps=eps) for eps in EPS},
}
"""What the names of measures stand for; a metric without more is followed along second-order geodesics."""


class Zoo(ABC):
    """Networks ranked by measures.

    key: of the paper's figures. units: what is resampled, and how many of them there are.
    """

    key: str
    units: str
    count: int

    @abstractmethod
    def tau(self, name: str) -> Estimate | None:
        """Kendall's tau-b with the gap, of a measure at its middle radius; None if it was not measured."""

    @abstractmethod
    def draws(self, names: Sequence[str]) -> tuple[Floats, Floats]:
        """tau of measures that are known, (k,), and of each resample, (k, RESAMPLES), of the same units for all."""

    @abstractmethod
    def family(self) -> dict[float, Estimate]:
        """tau by t of the metric, second order, at one radius."""

    @abstractmethod
    def radii(self, name: str) -> dict[float, tuple[Estimate | None, float]]:
        """By radius: tau, and the median of the sharpness."""

    def generator(self) -> np.random.Generator:
        """Of the resamples: another one for each zoo, so that they are independent."""
        return np.random.default_rng(list(self.key.encode()))

    def estimate(self, names: Sequence[str], statistic: Callable[..., Floats]) -> Estimate | None:
        """A function of some taus with its interval; None if one of them is not known."""
        if any(self.tau(name) is None for name in names):
            return None
        values, draws = self.draws(names)
        return Estimate.of(float(statistic(*values)), statistic(*draws))


@final
class ModelZoo(Zoo):
    """Models that a comparison ranks; models are resampled."""

    units = "models"

    def __init__(self, key: str, comparison: Comparison) -> None:
        self.key, self.comparison, self.count = key, comparison, len(comparison.rows)

    def radii_of(self, geometry: Geometry) -> list[float]:
        """At which worst-case sharpness was measured, ascending."""
        from quotient_manifolds.compare.measures import Measured

        family = Measured(WorstCase(geometry, 1.0)).family
        return sorted(each.radius for each in self.comparison.measures if each.family == family and each.radius)

    def middle(self, geometry: Geometry) -> float | None:
        radii = self.radii_of(geometry)
        return radii[len(radii) // 2] if radii else None

    def tau(self, name: str, gap: str = GAP) -> Estimate | None:
        return self._tau(GEOMETRIES[name], self.middle(GEOMETRIES[name]), gap) if name in GEOMETRIES else None

    def _tau(self, geometry: Geometry, radius: float | None, gap: str = GAP) -> Estimate | None:
        found = None if radius is None else tau_of(self.comparison, label(geometry, radius), gap)
        return None if found is None or found.value is None else Estimate(found.value, found.low, found.high)

    def _values(self, name: str) -> list[float | None]:
        """Of each model."""
        geometry = GEOMETRIES[name]
        return self.comparison.column(label(geometry, self.middle(geometry) or 0.0))

    def draws(self, names: Sequence[str]) -> tuple[Floats, Floats]:
        from quotient_manifolds.statistics.coefficients import coefficient

        columns = [self.comparison.column(GAP), *map(self._values, names)]
        rows = [row for row in zip(*columns, strict=True) if None not in row]
        gap, *measures = np.array(rows, dtype=np.float64).T
        drawn = self.generator().integers(len(rows), size=(RESAMPLES, len(rows)))
        values = [coefficient("kendall-b", np.stack([measure, gap])) for measure in measures]
        draws = [coefficient("kendall-b", np.stack([m[drawn], gap[drawn]], axis=1)) for m in measures]
        return np.array(values), np.array(draws)

    def family(self) -> dict[float, Estimate]:
        radius = next((self.middle(of_family(t)) for t in FAMILY if t not in (0, 1)), None)
        found = {t: self._tau(of_family(t), radius) for t in FAMILY}
        return {t: tau for t, tau in found.items() if tau is not None}

    def radii(self, name: str) -> dict[float, tuple[Estimate | None, float]]:
        geometry, found = GEOMETRIES[name], {}
        for radius in self.radii_of(geometry):
            values = [value for value in self.comparison.column(label(geometry, radius)) if value is not None]
            if values:
                found[radius] = self._tau(geometry, radius), float(np.median(values))
        return found


@final
class DiagonalZoo(Zoo):
    """Diagonal networks: tau is its mean over all settings; seeds, each with its own data, are resampled."""

    key, units = "diagonal", "seeds"

    def __init__(self, study: DiagonalStudy) -> None:
        self.study, self.count = study, study.plan.seeds
        self.middle = study.plan.radii[len(study.plan.radii) // 2]

    def measure(self, name: str) -> str:
        """How the study calls it."""
        return f"{name} second" if name in ("inv", "mix") else name

    def by_seed(self, name: str, radius: float) -> list[float]:
        """For each seed, the mean of tau over the settings."""
        measure = self.measure(name)
        return self._by_seed(lambda cell: cell.taus[measure][cell.radii.index(radius)])

    def _by_seed(self, tau: Callable[..., float | None]) -> list[float]:
        seeds: dict[int, list[float]] = {}
        for cell in self.study.cells:
            if (value := tau(cell)) is not None:
                seeds.setdefault(cell.seed, []).append(value)
        return [float(np.mean(values)) for _, values in sorted(seeds.items())]

    def at(self, name: str, radius: float) -> Estimate | None:
        """The mean over settings and seeds."""
        return _estimate(self.by_seed(name, radius))

    def tau(self, name: str) -> Estimate | None:
        return self.at(name, self.middle) if self.measure(name) in self.study.measures else None

    def signs(self, name: str, radius: float) -> tuple[int, int, int]:
        return self.study.signs(self.measure(name), radius)

    def reference(self, name: str) -> Estimate | None:
        """tau of what has no radius."""
        return _estimate(self._by_seed(lambda cell: cell.references[name]))

    def draws(self, names: Sequence[str]) -> tuple[Floats, Floats]:
        rows = np.array([self.by_seed(name, self.middle) for name in names])
        drawn = self.generator().integers(rows.shape[1], size=(RESAMPLES, rows.shape[1]))
        return rows.mean(axis=1), rows[:, drawn].mean(axis=-1)

    def family(self, geodesic: str = "second") -> dict[float, Estimate]:
        if self.middle not in self.study.plan.family_radii:
            return {}
        place = self.study.plan.family_radii.index(self.middle)
        found = {}
        for t in self.study.plan.family:
            name = family_name(t, geodesic)
            if (tau := _estimate(self._by_seed(lambda cell, name=name: cell.family[name][place]))) is not None:
                found[t] = tau
        return found

    def radii(self, name: str) -> dict[float, tuple[Estimate | None, float]]:
        measure = self.measure(name)
        return {
            radius: (self.at(name, radius), float(np.median(self.study.column("rises", measure, radius))))
            for radius in self.study.plan.radii
        }


def _estimate(values: Sequence[float]) -> Estimate | None:
    mean = Mean.of(values)
    return None if mean is None else Estimate(mean.value, mean.low, mean.high)
