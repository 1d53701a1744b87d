"""How well a measure ranks models: Kendall's tau, and how far it can be trusted."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

# Fewer models than this have so few distinct resamples that an interval would be an ornament.
FEWEST_MODELS = 5


@dataclass(frozen=True)
class Correlation:
    """Kendall's tau over `models` pairs of values, with a bootstrap interval; None where it is not defined.

    `p_value` is that of scipy's two-sided test of independence (exact for few models without ties).
    """

    tau: float | None
    low: float | None
    high: float | None
    p_value: float | None
    models: int
    confidence: float
    resamples: int


def kendall(
    x: Sequence[float],
    y: Sequence[float],
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Correlation:
    """(concordant - discordant pairs) / sqrt((pairs without ties in x)(pairs without ties in y)): tau-b, by scipy.

    Without ties it is tau-a. The interval is the percentile bootstrap over models, resampled as pairs; resamples in
    which one of the two is constant have no tau and are left out. tau is None when x or y is constant; the interval is
    None below five models. Raises ValueError for different lengths, fewer than two models or values not finite.
    """
    a, b = _checked(x), _checked(y)
    if len(a) != len(b) or len(a) < 2:
        raise ValueError(f"A rank correlation needs two lists of one length >= 2, found {len(a)} and {len(b)} values.")
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return Correlation(None, None, None, None, len(a), confidence, 0)
    test = stats.kendalltau(a, b)
    if len(a) < FEWEST_MODELS:
        return Correlation(float(test.statistic), None, None, float(test.pvalue), len(a), confidence, 0)
    low, high = _interval(a, b, confidence, resamples, seed)
    return Correlation(float(test.statistic), low, high, float(test.pvalue), len(a), confidence, resamples)


def _checked(values: Sequence[float]) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not np.isfinite(array).all():
        raise ValueError(f"A rank correlation needs a list of finite numbers, found {values!r}.")
    return array


def _interval(
    a: NDArray[np.float64], b: NDArray[np.float64], confidence: float, resamples: int, seed: int
) -> tuple[float, float]:
    with warnings.catch_warnings():
        # scipy warns when a resample is constant; those are left out below.
        warnings.simplefilter("ignore", RuntimeWarning)
        result = stats.bootstrap(
            (a, b),
            _tau,
            paired=True,
            vectorized=False,
            n_resamples=resamples,
            confidence_level=confidence,
            method="percentile",
            rng=np.random.default_rng(seed),
        )
    tail = (1 - confidence) / 2
    low, high = np.nanquantile(result.bootstrap_distribution, [tail, 1 - tail])
    return float(low), float(high)


def _tau(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return math.nan
    return float(stats.kendalltau(a, b, method="asymptotic").statistic)  # the p-value, which is not used, the cheap way
