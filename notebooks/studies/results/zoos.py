"""The zoos of transformers: tau of a measure by name, with its interval, and resampled with all others of its zoo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from quotient_manifolds.compare import Comparison
from studies.results.estimates import Estimate, Floats
from studies.zoos.measures import PLAIN, ZooMeasures

RESAMPLES = 2000
GAP = "error_gap"


@final
class ModelZoo:
    """Represent models that a comparison ranks by its measures; models are resampled. key: of the paper's figures."""

    units = "models"

    def __init__(self, key: str, comparison: Comparison) -> None:
        self.key, self.comparison, self.count = key, comparison, len(comparison.rows)
        self.measures = ZooMeasures(comparison)

    @property
    def relaxed(self) -> list[str]:
        """Return the names of the measures with eps."""
        return [name for name in self.measures.places if "eps" in name and self.tau(name) is not None]

    def tau(self, name: str, gap: str = GAP) -> Estimate | None:
        """Return Kendall's tau-b with the gap, of a measure at its middle radius; None if it was not measured."""
        return self._tau(self.measures.places.get(name), gap)

    def _tau(self, label: str | None, gap: str = GAP) -> Estimate | None:
        found = self.measures.tau(label, gap)
        return None if found is None or found.value is None else Estimate(found.value, found.low, found.high)

    def generator(self) -> np.random.Generator:
        """Return the generator of resamples: another one for each zoo, so that they are independent."""
        return np.random.default_rng(list(self.key.encode()))

    def estimate(self, names: Sequence[str], statistic: Callable[..., Floats]) -> Estimate | None:
        """Return a function of some taus with its interval; None if one of them is not known."""
        if any(self.tau(name) is None for name in names):
            return None
        values, draws = self.draws(names)
        return Estimate.of(float(statistic(*values)), statistic(*draws))

    def draws(self, names: Sequence[str]) -> tuple[Floats, Floats]:
        """Compute tau of k known measures, (k,), and of each resample of the same models, (k, RESAMPLES)."""
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
        """Compute tau by t of the metric, second order, at one radius."""
        found = {t: self._tau(label) for t, label in self.measures.family.items()}
        return {t: tau for t, tau in found.items() if tau is not None}

    def radii(self, name: str) -> dict[float, tuple[Estimate | None, float]]:
        """Return by radius tau, and the median of the sharpness."""
        found = {}
        for radius in self.measures.radii(PLAIN[name]):
            label = self.measures.label(PLAIN[name], radius)
            column = [] if label is None else self.comparison.column(label)
            if values := [value for value in column if value is not None]:
                found[radius] = self._tau(label), float(np.median(values))
        return found


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
