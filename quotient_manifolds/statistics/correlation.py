"""Compute correlations over models, with a bootstrap interval and a permutation p-value."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from quotient_manifolds.statistics.coefficients import NOTHING_LEFT, Kind, check_kind, coefficient
from quotient_manifolds.statistics.columns import Floats, Numbers, complete, encoded, numbers

# Fewer models than this have so few distinct resamples that an interval would be an ornament.
FEWEST_MODELS = 5
# Of fewer models than this tau strays from 0 by 0.16 and more by chance alone: a reader is told.
FEW_MODELS = 20
# Partial tau is tau-b's, which is tau-a without ties: with ties tau-a comes from no fit.
PARTIAL = ("kendall-b", "spearman", "pearson")
BATCH = 500  # resamples computed at once


@dataclass(frozen=True)
class Correlation:
    """Hold a coefficient over `models` models, with a bootstrap interval and a permutation p-value; None: not defined.

    `left_out` models lacked a value. The interval is the percentile bootstrap over models at level `confidence`: of
    `resamples` resamples, `undefined` had a constant column, thus no coefficient, and do not count. The two-sided
    p-value comes from `permutations` permutations: all there are, if they are no more than were asked for.
    """

    kind: Kind
    value: float | None
    low: float | None
    high: float | None
    p_value: float | None
    models: int
    left_out: int
    confidence: float
    resamples: int
    undefined: int
    permutations: int

    def __str__(self) -> str:
        """Return the value and its interval as text: `+0.42 [+0.11, +0.68]`."""
        bounds = "no interval" if self.low is None or self.high is None else f"[{self.low:+.2f}, {self.high:+.2f}]"
        value = "undefined" if self.value is None else f"{self.value:+.2f}"
        return f"{value} {bounds}".replace("-", "\N{MINUS SIGN}")


def correlation(
    x: Numbers,
    y: Numbers,
    kind: Kind = "kendall-b",
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    permutations: int = 9999,
    seed: int = 0,
) -> Correlation:
    """Compute how well x and y go together over models, with a bootstrap interval and a permutation p-value.

    kind: Kendall's tau-b or tau-a, Spearman's or Pearson's coefficient, each sum_ij a_ij b_ij / sqrt(sum_ij a_ij^2
    sum_ij b_ij^2) with a_ij = sign(x_i - x_j) (tau), or differences of ranks or of values, and b likewise from y.

    tau-a divides by the number of pairs instead; without ties it is tau-b. A model in which x or y is None or NaN (a
    measurement that failed) is left out and counted. No value where x or y is constant, no interval below five
    models. The p-value permutes x. Raises ValueError for different lengths or infinite values.
    """
    check_kind(kind)
    _check(confidence, resamples, permutations)
    (a, b), left_out = complete({"x": x, "y": y})
    columns = np.stack([numbers("x", a), numbers("y", b)])
    empty = Correlation(kind, None, None, None, None, columns.shape[1], left_out, confidence, 0, 0, 0)

    def permuted(x: Floats) -> Floats:
        return np.stack(np.broadcast_arrays(x, columns[1]), axis=-2)

    return _estimate(empty, columns, columns[0], permuted, resamples, permutations, seed)


def partial_correlation(
    x: Numbers,
    y: Numbers,
    given: Mapping[str, Sequence[float | str | None]],
    kind: Kind = "kendall-b",
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    permutations: int = 9999,
    seed: int = 0,
) -> Correlation:
    """Compute the correlation of what is left of x and y after a linear fit on the columns `given` (name: values).

    "pearson" fits values, "spearman" ranks. Kendall fits the signs of differences over all pairs of models, x_i - x_j
    on those of the covariates: for one covariate that is Kendall's partial tau,
    (t_xy - t_xz t_yz) / sqrt((1 - t_xz^2)(1 - t_yz^2)), and it is defined for several; it shrinks, but need not
    vanish, where x and y depend on the covariates only. A column of text is a category: one 0/1 column for each of its
    values but one. The p-value is Freedman and Lane's: residuals of y (of its ranks) on the covariates are permuted
    and added to the fit again. No value where fewer than one degree of freedom is left, or where the covariates decide
    x or y.
    """
    check_kind(kind, PARTIAL)
    _check(confidence, resamples, permutations)
    if {"x", "y"} & set(given):
        raise ValueError("The covariates may not be called 'x' or 'y', which are the correlated columns: rename them.")
    (a, b, *others), left_out = complete({"x": x, "y": y, **given})
    covariates = [column for name, values in zip(given, others, strict=True) for column in encoded(name, values)]
    columns = np.stack([numbers("x", a), numbers("y", b), *covariates])
    empty = Correlation(kind, None, None, None, None, columns.shape[1], left_out, confidence, 0, 0, 0)
    if columns.shape[1] < len(columns) + 1:
        return empty
    if kind != "pearson":
        columns = stats.rankdata(columns, axis=-1)
    fit, residuals = _fitted(columns[1], columns[2:])

    def permuted(residuals: Floats) -> Floats:
        # Ties of y would be broken by the rounding of the fit.
        again = fit + residuals if kind == "pearson" else np.round(fit + residuals, 8)
        fixed = [np.broadcast_to(column, again.shape) for column in columns]
        return np.stack([fixed[0], again, *fixed[2:]], axis=-2)

    return _estimate(empty, columns, residuals, permuted, resamples, permutations, seed)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return Holm's corrected p-values: max over j <= i of min(1, (m - j) p_(j)), j = 0, 1, ..., in ascending order.

    m is the number of values that are not None. Below a level alpha they keep the chance of any false finding among
    the m below alpha, whatever the dependence between them (Holm, 1979).
    """
    known = sorted((value, place) for place, value in enumerate(p_values) if value is not None)
    corrected: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (value, place) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * value))
        corrected[place] = largest
    return corrected


def tau_deviation(models: int) -> float:
    """Return sqrt(2 (2 n + 5) / (9 n (n - 1))): how far tau of n unrelated models strays from 0 (Kendall, 1938)."""
    if models < 2:
        raise ValueError(f"tau is of at least 2 models, found {models}.")
    return math.sqrt(2 * (2 * models + 5) / (9 * models * (models - 1)))


def _check(confidence: float, resamples: int, permutations: int) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"The confidence lies between 0 and 1, found {confidence!r}.")
    if resamples < 1 or permutations < 1:
        raise ValueError(
            f"At least one resample and one permutation are needed, found {resamples=} and {permutations=}."
        )


def _fitted(y: Floats, covariates: Floats) -> tuple[Floats, Floats]:
    """Split y into fit + residuals, by least squares on the covariates and a constant."""
    design = np.stack([np.ones_like(y), *covariates], axis=1)
    fit = design @ np.linalg.lstsq(design, y, rcond=NOTHING_LEFT)[0]
    return fit, y - fit


def _estimate(
    empty: Correlation,
    columns: Floats,
    moved: Floats,
    permuted: Callable[[Floats], Floats],
    resamples: int,
    permutations: int,
    seed: int,
) -> Correlation:
    """Fill in all but the counts; `permuted` makes columns (..., k, n) of permutations (..., n) of `moved`."""
    models = columns.shape[1]
    value = float(coefficient(empty.kind, columns)) if models > 1 else math.nan
    if math.isnan(value):
        return empty
    test = stats.permutation_test(
        (moved,),
        lambda moved, axis: coefficient(empty.kind, permuted(moved)),
        permutation_type="pairings",
        vectorized=True,
        n_resamples=permutations,
        batch=BATCH,
        rng=np.random.default_rng(seed),
    )
    found = replace(empty, value=value, p_value=float(test.pvalue), permutations=len(test.null_distribution))
    return found if models < FEWEST_MODELS else _with_interval(found, columns, resamples, seed)


def _with_interval(found: Correlation, columns: Floats, resamples: int, seed: int) -> Correlation:
    """Fill in the interval: models are drawn with replacement, each with all its columns."""
    numbered = np.arange(columns.shape[1])
    source = np.stack([*columns, numbered]) if found.kind == "kendall-a" else columns

    def statistic(drawn: NDArray[np.int64], axis: int) -> Floats:
        return coefficient(found.kind, np.moveaxis(source[:, drawn], 0, -2))

    with warnings.catch_warnings():
        # scipy warns when a resample has no coefficient; those are counted and left out below.
        warnings.simplefilter("ignore", RuntimeWarning)
        values = stats.bootstrap(
            (numbered,),
            statistic,
            vectorized=True,
            n_resamples=resamples,
            batch=BATCH,
            method="percentile",
            rng=np.random.default_rng(seed),
        ).bootstrap_distribution
    undefined = int(np.isnan(values).sum())
    found = replace(found, resamples=resamples, undefined=undefined)
    if 2 * undefined > resamples:
        return found  # the few that are left would speak for other models than these
    tail = (1 - found.confidence) / 2
    low, high = np.nanquantile(values, [tail, 1 - tail])
    return replace(found, low=float(low), high=float(high))
