"""Kendall's tau over some pairs of models only: of one cell of a design, or apart in one factor alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from studies.common import Estimate, Floats

RESAMPLES = 1000
Pairs = NDArray[np.bool_]  # (models, models), symmetric: which of them are compared
Term = tuple[str, str, Pairs]  # a tau: of a measure with a gap, over some pairs


@final
@dataclass(frozen=True)
class Design:
    """Rank the models of a factorial design by measures.

    frame: a row for each model, with factors, measures and gaps in columns, NaN where a value is missing. factors: the
    columns that make up the design. Intervals are bootstraps: models are drawn with replacement, the same for all taus
    of a design. A model that is drawn twice is no pair with itself.
    """

    frame: pd.DataFrame
    factors: tuple[str, ...]
    _known: dict[tuple[str, str, bytes], tuple[Floats, Floats]] = field(default_factory=dict, init=False, repr=False)

    @property
    def models(self) -> int:
        return len(self.frame)

    def column(self, name: str) -> Floats:
        """Return a measure or a score."""
        return self.frame[name].to_numpy(dtype=np.float64)

    def within(self, *factors: str) -> Pairs:
        """Return the pairs that have these factors in common: those of one stratum, all if there are no factors."""
        equal = [self.frame[factor].to_numpy()[:, None] == self.frame[factor].to_numpy() for factor in factors]
        return np.logical_and.reduce([np.ones((self.models, self.models), dtype=bool), *equal])

    @property
    def everywhere(self) -> Pairs:
        return self.within()

    def along(self, factor: str) -> Pairs:
        """Return the pairs that differ in this factor and agree in all others (Jiang et al., 2020)."""
        return ~self.within(factor) & self.within(*(other for other in self.factors if other != factor))

    def where(self, **values: Any) -> Pairs:
        """Return the pairs of models that both have these values."""
        here = np.logical_and.reduce([self.frame[name].to_numpy() == value for name, value in values.items()])
        return np.logical_and.outer(here, here)

    def tau(self, measure: str, gap: str, pairs: Pairs) -> Estimate | None:
        """Return tau over these pairs; None where it is not defined."""
        return self.estimate([(measure, gap, pairs)], lambda tau: tau)

    def granulated(self, measure: str, gap: str, along: Sequence[str]) -> Estimate | None:
        """Return the mean over factors of tau along each: the granulated coefficient of Jiang et al. (2020)."""
        return self.estimate([(measure, gap, self.along(each)) for each in along], lambda *taus: np.mean(taus, axis=0))

    def difference(self, first: Sequence[Term], second: Sequence[Term]) -> Estimate | None:
        """Return |mean of some taus| minus |mean of others|."""

        def statistic(*taus: Floats) -> Floats:
            parts = taus[: len(first)], taus[len(first) :]
            one, other = (np.abs(np.mean(part, axis=0)) for part in parts)
            return one - other

        return self.estimate([*first, *second], statistic)

    def estimate(self, terms: Sequence[Term], statistic: Callable[..., Floats]) -> Estimate | None:
        """Return a function of some taus with its interval; None where it is not defined."""
        values, draws = zip(*(self._drawn(*term) for term in terms), strict=True)
        value = float(statistic(*values)[0])
        return None if np.isnan(value) else Estimate.of(value, statistic(*draws))

    def partial(self, measure: str, gap: str, given: Sequence[str]) -> Estimate | None:
        """Return Kendall's partial tau, given some numbers: of what a linear fit leaves of the signs of differences."""
        columns = [self.column(name) for name in (measure, gap, *given)]
        known = ~np.isnan(columns).any(axis=0)
        signs = [np.sign(values[known][:, None] - values[known]) for values in columns]
        value, draws = (_partial(signs, counts[:, known]) for counts in (self._once, self._counts))
        return None if np.isnan(value[0]) else Estimate.of(float(value[0]), draws)

    def _drawn(self, measure: str, gap: str, pairs: Pairs) -> tuple[Floats, Floats]:
        """Return a tau, (1,), and its value for every resample, (RESAMPLES,); computed once, asked for often."""
        key = (measure, gap, pairs.tobytes())
        if key not in self._known:
            x, y = self.column(measure), self.column(gap)
            self._known[key] = masked_tau(x, y, pairs, self._once), masked_tau(x, y, pairs, self._counts)
        return self._known[key]

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
    return _ratio(both, np.sqrt(left * right))


def _partial(signs: Sequence[Floats], counts: Floats) -> Floats:
    """Compute the partial coefficient of the first two of k matrices of signs, given the others."""
    size = len(signs)
    gram = np.empty((len(counts), size, size))
    for i in range(size):
        for j in range(i + 1):
            gram[:, i, j] = gram[:, j, i] = _summed(signs[i] * signs[j], counts)
    fit = gram[:, :2, 2:] @ np.linalg.pinv(gram[:, 2:, 2:])
    left = gram[:, :2, :2] - fit @ gram[:, 2:, :2]
    return _ratio(left[:, 0, 1], np.sqrt(np.maximum(left[:, 0, 0] * left[:, 1, 1], 0)))


def _summed(signs: Floats, counts: Floats) -> Floats:
    """Compute sum_ij c_i c_j s_ij for every row of counts."""
    found: Floats = ((counts @ signs) * counts).sum(axis=-1)
    return found


def _ratio(part: Floats, whole: Floats) -> Floats:
    """Return part / whole, NaN where whole is 0."""
    return np.where(whole > 0, part / np.where(whole > 0, whole, 1), np.nan)
