"""Kendall's tau over some pairs of models only: of one cell of a design, or apart in one factor alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from quotient_manifolds.compare import Comparison
from studies.common import Estimate, Floats

RESAMPLES = 1000
Pairs = NDArray[np.bool_]  # (models, models), symmetric: which of them are compared


@final
@dataclass(frozen=True)
class Term:
    """Name a tau: of a measure and a gap, over some pairs of models."""

    measure: str
    gap: str
    pairs: Pairs


@final
@dataclass(frozen=True)
class Design:
    """Answer how measures rank the models of a factorial design; factors: the columns that make it up.

    Intervals are bootstraps: models are drawn with replacement, the same for all taus of a design. A model that is
    drawn twice is no pair with itself.
    """

    comparison: Comparison
    factors: tuple[str, ...]

    @property
    def models(self) -> int:
        return len(self.comparison.scores)

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
        return ~self._equal[factor] & self.within(*(other for other in self.factors if other != factor))

    def where(self, **values: Any) -> Pairs:
        """Return the pairs of models that both have these values."""
        columns = [np.array(self.comparison.column(name)) == value for name, value in values.items()]
        here = np.logical_and.reduce(columns)
        return np.logical_and.outer(here, here)

    def tau(self, measure: str, gap: str, pairs: Pairs) -> Estimate | None:
        """Return tau over these pairs; None where it is not defined."""
        return self.estimate([Term(measure, gap, pairs)], lambda tau: tau)

    def granulated(self, measure: str, gap: str, along: Sequence[str]) -> Estimate | None:
        """Return the mean over factors of tau along each: the granulated coefficient of Jiang et al. (2020)."""
        return self.estimate(self.terms(measure, gap, along), lambda *taus: np.mean(taus, axis=0))

    def terms(self, measure: str, gap: str, along: Sequence[str]) -> list[Term]:
        """Return the taus along each of some factors."""
        return [Term(measure, gap, self.along(factor)) for factor in along]

    def estimate(self, terms: Sequence[Term], statistic: Callable[..., Floats]) -> Estimate | None:
        """Return a function of some taus with its interval; None where it is not defined."""
        values, draws = zip(*(self._drawn(term) for term in terms), strict=True)
        value = float(statistic(*values)[0])
        return None if np.isnan(value) else Estimate.of(value, statistic(*draws))

    def partial(self, measure: str, gap: str, given: Sequence[str]) -> Estimate | None:
        """Return Kendall's partial tau, given some numbers: of what a linear fit leaves of the signs of differences."""
        columns = [self.column(name) for name in (measure, gap, *given)]
        known = ~np.isnan(columns).any(axis=0)
        signs = [np.sign(values[known][:, None] - values[known]) for values in columns]
        value, draws = (_partial(signs, counts[:, known]) for counts in (self._once, self._counts))
        return None if np.isnan(value[0]) else Estimate.of(float(value[0]), draws)

    def _drawn(self, term: Term) -> tuple[Floats, Floats]:
        """Return a tau, (1,), and its value for every resample, (RESAMPLES,); computed once, asked for often."""
        key = (term.measure, term.gap, term.pairs.tobytes())
        if key not in self._known:
            x, y = self.column(term.measure), self.column(term.gap)
            once, draws = (masked_tau(x, y, term.pairs, counts) for counts in (self._once, self._counts))
            self._known[key] = once, draws
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[str, str, bytes], tuple[Floats, Floats]]:
        return {}

    @property
    def _once(self) -> Floats:
        return np.ones((1, self.models))

    @cached_property
    def _counts(self) -> Floats:
        share = np.full(self.models, 1 / self.models)
        return np.random.default_rng(0).multinomial(self.models, share, size=RESAMPLES).astype(np.float64)


def masked_tau(x: Floats, y: Floats, pairs: Pairs, counts: Floats) -> Floats:
    """Compute tau-b over some pairs of models, where model i counts c_i times; counts (..., n) -> (...).

    sum c_i c_j m_ij a_ij b_ij / sqrt(sum c_i c_j m_ij a_ij^2 sum c_i c_j m_ij b_ij^2), a_ij = sign(x_i - x_j), b of y,
    m_ij whether the pair counts. NaN where nothing is left; models without a value (NaN) do not count.
    """
    known = ~(np.isnan(x) | np.isnan(y))
    a, b = (np.sign(values[known][:, None] - values[known]) for values in (x, y))
    kept, mask = counts[..., known], pairs[np.ix_(known, known)]
    both, left, right = (_summed(mask * signs, kept) for signs in (a * b, a * a, b * b))
    norm = np.sqrt(left * right)
    return np.where(norm > 0, both / np.where(norm > 0, norm, 1), np.nan)


def _summed(signs: Floats, counts: Floats) -> Floats:
    """Compute sum_ij c_i c_j s_ij for every row of counts."""
    found: Floats = ((counts @ signs) * counts).sum(axis=-1)
    return found


def _partial(signs: Sequence[Floats], counts: Floats) -> Floats:
    """Compute the partial coefficient of the first two of k matrices of signs, given the others."""
    size = len(signs)
    gram = np.empty((len(counts), size, size))
    for i in range(size):
        for j in range(i + 1):
            gram[:, i, j] = gram[:, j, i] = _summed(signs[i] * signs[j], counts)
    fit = gram[:, :2, 2:] @ np.linalg.pinv(gram[:, 2:, 2:])
    left = gram[:, :2, :2] - fit @ gram[:, 2:, :2]
    norm = np.sqrt(np.maximum(left[:, 0, 0] * left[:, 1, 1], 0))
    return np.where(norm > 0, left[:, 0, 1] / np.where(norm > 0, norm, 1), np.nan)
