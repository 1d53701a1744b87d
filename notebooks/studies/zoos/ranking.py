"""Kendall's tau over some pairs of models only: of one cell of a design, or apart in one factor alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from studies.common import Estimate, Floats

RESAMPLES = 1000
GAP: Final = "error_gap"
Pairs = NDArray[np.bool_]  # (models, models), symmetric: which of them are compared


@final
@dataclass(frozen=True)
class Design:
    """Rank the models of a factorial design by measures.

    frame: a row for each model, with factors, measures and gaps in columns, NaN where a value is missing. factors: the
    columns that make up the design; along: those that the granulated coefficient is the mean over; cells: those that
    define the task. Within a cell, models differ only in how they were trained.

    Intervals are bootstraps: models are drawn with replacement, the same for all taus of a design. A model that is
    drawn twice is no pair with itself.
    """

    frame: pd.DataFrame
    factors: tuple[str, ...]
    along: tuple[str, ...]
    cells: tuple[str, ...]
    _known: dict[tuple[str, str, bytes], tuple[Floats, Floats]] = field(default_factory=dict, init=False, repr=False)

    def same(self, *factors: str) -> Pairs:
        """Return the pairs that have these factors in common: those of one stratum, all if there are no factors."""
        columns = [self.frame[factor].to_numpy() for factor in factors]
        everywhere = np.ones((len(self.frame), len(self.frame)), dtype=bool)
        return np.logical_and.reduce([everywhere, *(column[:, None] == column for column in columns)])

    @property
    def within(self) -> Pairs:
        """Return the pairs of models of one task."""
        return self.same(*self.cells)

    def apart(self, factor: str) -> Pairs:
        """Return the pairs that differ in this factor and agree in all others (Jiang et al., 2020)."""
        return ~self.same(factor) & self.same(*(other for other in self.factors if other != factor))

    def where(self, factor: str, value: Any) -> Pairs:
        """Return the pairs of models that both have this value."""
        here = self.frame[factor].to_numpy() == value
        return np.logical_and.outer(here, here)

    def tau(self, measure: str, pairs: Pairs, gap: str = GAP) -> Estimate | None:
        """Return tau over these pairs; None where it is not defined."""
        return _estimate(*self._drawn(measure, pairs, gap))

    def psi(self, measure: str) -> Estimate | None:
        """Return the mean over factors of tau along each: the granulated coefficient of Jiang et al. (2020)."""
        return _estimate(*self._granulated(measure))

    def psi_difference(self, first: str, second: str) -> Estimate | None:
        """Return |Psi| of the first minus |Psi| of the second."""
        pairs = zip(self._granulated(first), self._granulated(second), strict=True)
        return _estimate(*(np.abs(one) - np.abs(other) for one, other in pairs))

    def tau_difference(self, first: str, second: str, pairs: Pairs, absolute: bool = True) -> Estimate | None:
        """Return |tau| of the first minus |tau| of the second over some pairs, or the difference with their signs."""
        taus = zip(self._drawn(first, pairs, GAP), self._drawn(second, pairs, GAP), strict=True)
        return _estimate(*(np.abs(one) - np.abs(other) if absolute else one - other for one, other in taus))

    def _granulated(self, measure: str) -> tuple[Floats, Floats]:
        taus = zip(*(self._drawn(measure, self.apart(factor), GAP) for factor in self.along), strict=True)
        value, draws = (np.mean(each, axis=0) for each in taus)
        return value, draws

    def _drawn(self, measure: str, pairs: Pairs, gap: str) -> tuple[Floats, Floats]:
        """Return a tau, (1,), and its value for every resample, (RESAMPLES,); computed once, asked for often."""
        key = (measure, gap, pairs.tobytes())
        if key not in self._known:
            x, y = (self.frame[name].to_numpy(dtype=np.float64) for name in (measure, gap))
            once, draws = (masked_tau(x, y, pairs, counts) for counts in (np.ones((1, len(x))), self._counts))
            self._known[key] = once, draws
        return self._known[key]

    @cached_property
    def _counts(self) -> Floats:
        models = len(self.frame)
        draws = np.random.default_rng(0).multinomial(models, np.full(models, 1 / models), size=RESAMPLES)
        return draws.astype(np.float64)


def _estimate(value: Floats, draws: Floats) -> Estimate | None:
    return None if np.isnan(value[0]) else Estimate.of(float(value[0]), draws)


def masked_tau(x: Floats, y: Floats, pairs: Pairs, counts: Floats) -> Floats:
    """Compute tau-b over some pairs of models, where model i counts c_i times; counts (..., n) -> (...).

    sum c_i c_j m_ij a_ij b_ij / sqrt(sum c_i c_j m_ij a_ij^2 sum c_i c_j m_ij b_ij^2), a_ij = sign(x_i - x_j), b of y,
    m_ij whether the pair counts. NaN where nothing is left; models without a value (NaN) do not count.
    """
    known = ~(np.isnan(x) | np.isnan(y))
    a, b = (np.sign(values[known][:, None] - values[known]) for values in (x, y))
    kept, mask = counts[..., known], pairs[np.ix_(known, known)]
    both, left, right = (((kept @ (mask * signs)) * kept).sum(axis=-1) for signs in (a * b, a * a, b * b))
    norm = np.sqrt(left * right)
    return np.where(norm > 0, both / np.where(norm > 0, norm, 1), np.nan)
