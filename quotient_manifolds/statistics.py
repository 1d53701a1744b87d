"""Correlate measures with scores over models: coefficients, bootstrap intervals, permutation p-values."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from scipy import stats

__all__ = [
    "COEFFICIENTS",
    "COEFFICIENT_NAMES",
    "FEW_MODELS",
    "Correlation",
    "Kind",
    "Numbers",
    "correlation",
    "holm",
    "tau_deviation",
]

Floats = NDArray[np.float64]
Numbers = Sequence[float | None] | NDArray[Any]
Kind = Literal["kendall-b", "spearman", "pearson"]
COEFFICIENTS: tuple[Kind, ...] = get_args(Kind)
COEFFICIENT_NAMES: dict[Kind, str] = {
    "kendall-b": "Kendall’s tau-b",
    "spearman": "Spearman’s rho",
    "pearson": "Pearson’s r",
}

ROUNDING = 1e-10  # A residual of a column below this fraction, after a fit on covariates, counts as rounding.
# With fewer models there are too few distinct resamples for an interval.
FEWEST_MODELS = 5
# With fewer models the standard deviation of tau under the null exceeds 0.16, which reports mention.
FEW_MODELS = 20
BATCH = 500  # resamples computed at once


@dataclass(frozen=True)
class Correlation:
    """Hold a coefficient over `models` models, with a bootstrap interval and a permutation p-value; None if undefined.

    left_out: number of models that lacked a value. low, high: percentile bootstrap over models at level `confidence`.
    undefined: number of the `resamples` resamples without a coefficient (a constant column), which are ignored.
    permutations: number of permutations behind the two-sided p-value; all of them if there are few.
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
    given: Mapping[str, Sequence[float | str | None]] | None = None,
    confidence: float = 0.95,
    resamples: int = 2000,
    permutations: int = 9999,
    seed: int = 0,
) -> Correlation:
    """Compute sum_ij a_ij b_ij / sqrt(sum_ij a_ij^2 sum_ij b_ij^2) over models, an interval and a p-value.

    kind: Kendall's tau-b, Spearman's or Pearson's coefficient: a_ij = sign(x_i - x_j), the difference of ranks, or the
    difference of values, and b_ij likewise from y.

    given: columns by name, of numbers or of categories (text), for Kendall's partial tau. It is the correlation of the
    residuals of sign(x_i - x_j) and sign(y_i - y_j) after a linear fit on the signs of the covariates, over all pairs
    of models: (t_xy - t_xz t_yz) / sqrt((1 - t_xz^2)(1 - t_yz^2)) for one covariate. It need not vanish if x and y
    depend on the covariates only. A category is one 0/1 column for each of its values but one.

    A model with None or NaN in a column (a failed measurement) is left out and counted. The coefficient is None if
    x or y is constant, if the covariates determine one of them, or if no degree of freedom remains. The interval is
    None below five models. The p-value permutes x; with covariates, it permutes the residuals of the ranks of y and
    adds them to the fit again (Freedman and Lane, 1983).

    Raises ValueError for different lengths, infinite values, and covariates with a kind other than "kendall-b".
    """
    if kind not in COEFFICIENTS:
        raise ValueError(f"kind must be one of {', '.join(map(repr, COEFFICIENTS))}. Found {kind!r}")
    if given and kind != "kendall-b":
        raise ValueError(f"kind must be 'kendall-b' if covariates are given. Found {kind!r}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1. Found {confidence!r}")
    covariates = {f"the covariate {name}": values for name, values in (given or {}).items()}
    table: dict[str, Any] = {"x": x, "y": y, **covariates}
    lengths = {name: len(values) for name, values in table.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"Columns must be of one length, one value a model. Found {lengths}")
    rows = list(zip(*table.values(), strict=True))
    kept = [row for row in rows if not any(value is None or value != value for value in row)]
    complete = {name: [row[place] for row in kept] for place, name in enumerate(table)}
    others = [column for name in covariates for column in _coded(name, complete[name])]
    columns = np.stack([_numbers("x", complete["x"]), _numbers("y", complete["y"]), *others])
    models = len(kept)
    empty = Correlation(kind, None, None, None, None, models, len(rows) - models, confidence, 0, 0, 0)
    if models < 2 or (others and models < len(columns) + 1):
        return empty
    value = float(_coefficient(kind, columns))
    if math.isnan(value):
        return empty
    result = _with_p_value(replace(empty, value=value), columns, permutations, seed)
    return result if models < FEWEST_MODELS else _with_interval(result, columns, resamples, seed)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return Holm's corrected p-values: max over j <= i of min(1, (m - j) p_(j)), j = 0, 1, ..., in ascending order.

    m is the number of values that are not None. Rejecting corrected values below alpha keeps the probability of any
    false rejection below alpha, for any dependence between them (Holm, 1979).
    """
    ascending = sorted((value, place) for place, value in enumerate(p_values) if value is not None)
    corrected: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (value, place) in enumerate(ascending):
        largest = max(largest, min(1.0, (len(ascending) - rank) * value))
        corrected[place] = largest
    return corrected


def tau_deviation(models: int) -> float:
    """Return sqrt(2 (2 n + 5) / (9 n (n - 1))): the standard deviation of tau under the null (Kendall, 1938)."""
    return math.sqrt(2 * (2 * models + 5) / (9 * models * (models - 1)))


def _with_p_value(result: Correlation, columns: Floats, permutations: int, seed: int) -> Correlation:
    """Fill in the p-value, by permuting x, or with covariates the residuals of the ranks of y."""
    permuted, fit = columns[0], None
    if len(columns) > 2:
        columns = stats.rankdata(columns, axis=-1)
        design = np.stack([np.ones_like(permuted), *columns[2:]], axis=1)
        fit = design @ np.linalg.lstsq(design, columns[1], rcond=ROUNDING)[0]
        permuted = columns[1] - fit

    def statistic(permuted: Floats, axis: int) -> Floats:
        if fit is None:
            return _coefficient(result.kind, np.stack(np.broadcast_arrays(permuted, columns[1]), axis=-2))
        y = np.round(fit + permuted, 8)  # rounding errors of the fit would break ties of y
        fixed = [np.broadcast_to(column, y.shape) for column in columns]
        return _coefficient(result.kind, np.stack([fixed[0], y, *fixed[2:]], axis=-2))

    test = stats.permutation_test(
        (permuted,),
        statistic,
        permutation_type="pairings",
        vectorized=True,
        n_resamples=permutations,
        batch=BATCH,
        rng=np.random.default_rng(seed),
    )
    return replace(result, p_value=float(test.pvalue), permutations=len(test.null_distribution))


def _with_interval(result: Correlation, columns: Floats, resamples: int, seed: int) -> Correlation:
    """Fill in the interval, by drawing models with replacement, each with all its columns."""

    def statistic(drawn: NDArray[np.int64], axis: int) -> Floats:
        return _coefficient(result.kind, np.moveaxis(columns[:, drawn], 0, -2))

    with warnings.catch_warnings():
        # scipy warns when a resample has no coefficient; these are counted and ignored below.
        warnings.simplefilter("ignore", RuntimeWarning)
        values = stats.bootstrap(
            (np.arange(columns.shape[1]),),
            statistic,
            vectorized=True,
            n_resamples=resamples,
            batch=BATCH,
            method="percentile",
            rng=np.random.default_rng(seed),
        ).bootstrap_distribution
    undefined = int(np.isnan(values).sum())
    result = replace(result, resamples=resamples, undefined=undefined)
    if 2 * undefined > resamples:
        return result  # the defined ones are too few to represent these models
    tail = (1 - result.confidence) / 2
    low, high = np.nanquantile(values, [tail, 1 - tail])
    return replace(result, low=float(low), high=float(high))


def _coefficient(kind: Kind, columns: Floats) -> Floats:
    """Correlate columns 0 and 1, of "kendall-b" given columns 2 and on, (..., k, n) -> (...); NaN where undefined."""
    gram = _sign_gram(columns) if kind == "kendall-b" else _score_gram(kind, columns)
    norms = np.sqrt(np.diagonal(gram, axis1=-2, axis2=-1))
    norms = np.where(norms > 0, norms, math.inf)
    covariance = gram / (norms[..., :, None] * norms[..., None, :])
    if columns.shape[-2] > 2:
        # The covariance of the residuals is the Schur complement C_11 - C_12 C_22^+ C_21. Covariates may be dependent.
        mixed, rest = covariance[..., :2, 2:], covariance[..., 2:, 2:]
        fitted = mixed @ np.linalg.pinv(rest, ROUNDING, True) @ np.swapaxes(mixed, -1, -2)
        covariance = covariance[..., :2, :2] - fitted
    x, y = covariance[..., 0, 0], covariance[..., 1, 1]
    defined = (x > ROUNDING) & (y > ROUNDING)
    return np.clip(np.where(defined, covariance[..., 0, 1], math.nan) / np.sqrt(np.where(defined, x * y, 1)), -1, 1)


def _sign_gram(columns: Floats) -> Floats:
    """Return the Gram matrix of the signs of differences over all pairs of models, (..., k, n) -> (..., k, k)."""
    # Only the order matters, and single precision represents every rank and every sum of signs exactly.
    ranks = stats.rankdata(columns, method="dense", axis=-1).astype(np.float32)
    total = np.zeros((*columns.shape[:-1], columns.shape[-2]))
    for lag in range(1, columns.shape[-1]):
        signs = np.sign(ranks[..., lag:] - ranks[..., :-lag])
        total += np.einsum("...in,...jn->...ij", signs, signs)
    return total


def _score_gram(kind: Kind, columns: Floats) -> Floats:
    """Return the Gram matrix of centered values or ranks, (..., k, n) -> (..., k, k)."""
    scores = stats.rankdata(columns, axis=-1) if kind == "spearman" else columns
    if scores.shape[-1]:  # Constant columns become exactly 0, others have maximum 1, so that squares do not overflow.
        scores = scores - scores[..., :1]
        size = np.abs(scores).max(axis=-1, keepdims=True)
        scores = scores / np.where(size > 0, size, 1)
        scores = scores - scores.mean(axis=-1, keepdims=True)
    return scores @ np.swapaxes(scores, -1, -2)


def _numbers(name: str, values: Sequence[Any] | NDArray[Any]) -> Floats:
    """Return a column as an array, NaN for None."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or np.isinf(array).any():
        raise ValueError(f"Column {name!r} must hold one finite number a model, or None. Found {values!r}")
    return array


def _coded(name: str, values: Sequence[Any]) -> list[Floats]:
    """Return a column of numbers unchanged, and a category as 0/1 columns, one for each value but the first."""
    if not any(isinstance(value, str) for value in values):
        return [_numbers(name, values)]
    return [np.asarray([value == level for value in values], dtype=np.float64) for level in sorted(set(values))[1:]]
