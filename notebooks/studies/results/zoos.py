"""The three zoos alike: tau of a measure by name, with its interval, and resampled with all others of its zoo."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from quotient_manifolds.compare import Comparison
from studies.diagonal.records import DiagonalStudy, Mean, family_name
from studies.results.estimates import Estimate, Floats
from studies.zoos.measures import PLAIN, ZooMeasures

RESAMPLES = 2000
GAP = "error_gap"


class Zoo(ABC):
    """Hold networks ranked by measures.

    key: of the paper's figures. units: what is resampled, and how many of them there are.
    """

    key: str
    units: str
    count: int

    @abstractmethod
    def tau(self, name: str) -> Estimate | None:
        """Return Kendall's tau-b with the gap, of a measure at its middle radius; None if it was not measured."""

    @property
    def relaxed(self) -> list[str]:
        """Return the names of the measures with a relaxed metric."""
        return []

    @abstractmethod
    def draws(self, names: Sequence[str]) -> tuple[Floats, Floats]:
        """Compute tau of k known measures, (k,), and of each resample of the same units, (k, RESAMPLES)."""

    @abstractmethod
    def family(self) -> dict[float, Estimate]:
        """Compute tau by t of the metric, second order, at one radius."""

    @abstractmethod
    def radii(self, name: str) -> dict[float, tuple[Estimate | None, float]]:
        """Return by radius tau, and the median of the sharpness."""

    def generator(self) -> np.random.Generator:
        """Return the generator of resamples: another one for each zoo, so that they are independent."""
        return np.random.default_rng(list(self.key.encode()))

    def estimate(self, names: Sequence[str], statistic: Callable[..., Floats]) -> Estimate | None:
        """Return a function of some taus with its interval; None if one of them is not known."""
        if any(self.tau(name) is None for name in names):
            return None
        values, draws = self.draws(names)
        return Estimate.of(float(statistic(*values)), statistic(*draws))


@final
class ModelZoo(Zoo):
    """Represent models that a comparison ranks by its measures; models are resampled."""

    units = "models"

    def __init__(self, key: str, comparison: Comparison) -> None:
        self.key, self.comparison, self.count = key, comparison, len(comparison.rows)
        self.measures = ZooMeasures(comparison)

    @property
    def relaxed(self) -> list[str]:
        """Return the names of the measures with eps."""
        return [name for name in self.measures.places if "eps" in name and self.tau(name) is not None]

    def tau(self, name: str, gap: str = GAP) -> Estimate | None:
        return self._tau(self.measures.places.get(name), gap)

    def _tau(self, label: str | None, gap: str = GAP) -> Estimate | None:
        found = self.measures.tau(label, gap)
        return None if found is None or found.value is None else Estimate(found.value, found.low, found.high)

    def draws(self, names: Sequence[str]) -> tuple[Floats, Floats]:
        gap = np.array(self.comparison.column(GAP), dtype=np.float64)
        columns = [self.comparison.column(self.measures.places[name]) for name in names]
        once = np.ones((1, self.count))
        counts = self.generator().multinomial(self.count, np.full(self.count, 1 / self.count), size=RESAMPLES)
        taus = [
            [weighted_tau(np.array(column, dtype=np.float64), gap, weights) for weights in (once, counts)]
            for column in columns
        ]
        return np.array([value[0] for value, _ in taus]), np.array([draws for _, draws in taus])

    def family(self) -> dict[float, Estimate]:
        found = {t: self._tau(label) for t, label in self.measures.family.items()}
        return {t: tau for t, tau in found.items() if tau is not None}

    def radii(self, name: str) -> dict[float, tuple[Estimate | None, float]]:
        found = {}
        for radius in self.measures.radii(PLAIN[name]):
            label = self.measures.label(PLAIN[name], radius)
            column = [] if label is None else self.comparison.column(label)
            if values := [value for value in column if value is not None]:
                found[radius] = self._tau(label), float(np.median(values))
        return found


@final
class DiagonalZoo(Zoo):
    """Represent diagonal networks: tau is its mean over all settings; seeds, each with its own data, are resampled."""

    key, units = "diagonal", "seeds"

    def __init__(self, study: DiagonalStudy) -> None:
        self.study, self.count = study, study.plan.seeds
        self.middle = study.plan.radii[len(study.plan.radii) // 2]

    def measure(self, name: str) -> str:
        """Return how the study calls it."""
        return f"{name} second" if name in ("inv", "mix") else name

    def by_seed(self, name: str, radius: float) -> list[float]:
        """Return for each seed, the mean of tau over the settings."""
        measure = self.measure(name)
        return self._by_seed(lambda cell: cell.taus[measure][cell.radii.index(radius)])

    def _by_seed(self, tau: Callable[..., float | None]) -> list[float]:
        seeds: dict[int, list[float]] = {}
        for cell in self.study.cells:
            if (value := tau(cell)) is not None:
                seeds.setdefault(cell.seed, []).append(value)
        return [float(np.mean(values)) for _, values in sorted(seeds.items())]

    def at(self, name: str, radius: float) -> Estimate | None:
        """Return the mean over settings and seeds."""
        return _estimate(self.by_seed(name, radius))

    def tau(self, name: str) -> Estimate | None:
        return self.at(name, self.middle) if self.measure(name) in self.study.measures else None

    def signs(self, name: str, radius: float) -> tuple[int, int, int]:
        return self.study.signs(self.measure(name), radius)

    def reference(self, name: str) -> Estimate | None:
        """Compute tau of what has no radius."""
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


def weighted_tau(x: Floats, y: Floats, counts: NDArray[Any]) -> Floats:
    """Compute tau-b where model i counts c_i times, counts (..., n) -> (...); models without value (NaN) do not.

    sum c_i c_j a_ij b_ij / sqrt(sum c_i c_j a_ij^2 sum c_i c_j b_ij^2), a_ij = sign(x_i - x_j), b of y.
    """
    known = ~(np.isnan(x) | np.isnan(y))
    a, b = (np.sign(values[known][:, None] - values[known]) for values in (x, y))
    kept = counts[..., known]
    both, left, right = (((kept @ signs) * kept).sum(axis=-1) for signs in (a * b, a * a, b * b))
    norm = np.sqrt(left * right)
    return np.where(norm > 0, both / np.where(norm > 0, norm, 1), np.nan)
