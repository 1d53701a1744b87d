"""Kendall's tau over some pairs of models only: of one cell of a design, or apart in one factor alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from quotient_manifolds.compare import Comparison
from studies.results.estimates import Estimate, Floats

RESAMPLES = 2000
Pairs = NDArray[np.bool_]  # (models, models), symmetric: which of them are compared


@final
@dataclass(frozen=True)
class Design:
    """Answer how measures rank the models of a factorial design.

    factors: the columns that make up the design. blocks: the column by which models are resampled together, "" if each
    is drawn for itself.
    """

    comparison: Comparison
    factors: tuple[str, ...]

    @property
    def models(self) -> int:
        return len(self.comparison.rows)

    def column(self, name: str) -> Floats:
        """Return a measure or a score, NaN where it is missing."""
        return np.array([np.nan if each is None else each for each in self.comparison.column(name)], dtype=np.float64)

    @cached_property
    def _equal(self) -> dict[str, Pairs]:
        """Return by factor which two models have it in common."""
        columns = {factor: np.array(self.comparison.column(factor)) for factor in self.factors}
        return {factor: values[:, None] == values for factor, values in columns.items()}

    @property
    def everywhere(self) -> Pairs:
        return np.ones((self.models, self.models), dtype=bool)

    def within(self, *factors: str) -> Pairs:
        """Return the pairs that have these factors in common: those of one stratum."""
        return np.logical_and.reduce([self.everywhere, *(self._equal[factor] for factor in factors)])

    def along(self, factor: str) -> Pairs:
        """Return the pairs that differ in this factor and agree in all others (Jiang et al., 2020)."""
        others = [self._equal[other] for other in self.factors if other != factor]
        return np.logical_and.reduce([~self._equal[factor], *others])

    def where(self, **values: Any) -> Pairs:
        """Return the pairs of models that both have these values."""
        here = np.logical_and.reduce(
            [np.array(self.comparison.column(name)) == value for name, value in values.items()]
        )
        return np.logical_and.outer(here, here)

    def tau(self, measure: str, gap: str, pairs: Pairs) -> Estimate | None:
        """Return tau over these pairs; None where it is not defined."""
        return self.estimate([(measure, gap, pairs)], lambda tau: tau)

    def granulated(self, measure: str, gap: str, along: Sequence[str]) -> Estimate | None:
        """Return the mean over factors of tau along each: the granulated coefficient of Jiang et al. (2020)."""
        return self.estimate([(measure, gap, self.along(factor)) for factor in along], lambda *taus: np.mean(taus, 0))

    def estimate(self, terms: Sequence[tuple[str, str, Pairs]], statistic: Callable[..., Floats]) -> Estimate | None:
        """Return a function of some taus, each (measure, gap, pairs), with its bootstrap interval.

        The same models are drawn with replacement for all of them; a model drawn twice is no pair with itself.
        """
        once = np.ones((1, self.models))
        draws = [self._drawn(*term, self._counts) for term in terms]
        values = [self._drawn(*term, once) for term in terms]
        value = float(statistic(*values)[0])
        return None if np.isnan(value) else Estimate.of(value, statistic(*draws))

    def _drawn(self, measure: str, gap: str, pairs: Pairs, counts: Floats) -> Floats:
        return masked_tau(self.column(measure), self.column(gap), pairs, counts)

    @cached_property
    def _counts(self) -> Floats:
        draw = np.random.default_rng(0)
        return draw.multinomial(self.models, np.full(self.models, 1 / self.models), size=RESAMPLES).astype(np.float64)


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
