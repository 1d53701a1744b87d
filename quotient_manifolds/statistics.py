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

NOTHING_LEFT = 1e-10  # of a column after a fit on covariates: below it there is nothing but rounding
# Fewer models than this have so few distinct resamples that an interval would be an ornament.
FEWEST_MODELS = 5
# Of fewer models than this tau deviates from 0 by 0.16 and more by chance alone: a reader is told.
FEW_MODELS = 20
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
    given: Mapping[str, Sequence[float | str | None]] | None = None,
    confidence: float = 0.95,
    resamples: int = 2000,
    permutations: int = 9999,
    seed: int = 0,
) -> Correlation:
    """Compute how strongly x and y correlate over models, with a bootstrap interval and a permutation p-value.

    kind: Kendall's tau-b, Spearman's or Pearson's coefficient, each sum_ij a_ij b_ij / sqrt(sum_ij a_ij^2
    sum_ij b_ij^2) with a_ij = sign(x_i - x_j) (tau), or differences of ranks or of values, and b likewise from y.

    given: columns by name, of numbers or of categories (text), for Kendall's partial tau: the correlation of what is
    left of sign(x_i - x_j) and sign(y_i - y_j) after a linear fit on those of the covariates, over all pairs of models.
    For one covariate it is (t_xy - t_xz t_yz) / sqrt((1 - t_xz^2)(1 - t_yz^2)). It shrinks, but need not vanish, where
    x and y depend on the covariates only. A category is one 0/1 column for each of its values but one.

    A model in which a column is None or NaN (a measurement that failed) is left out and counted. No value where x or y
    is constant, where the covariates decide it, or where fewer than one degree of freedom is left; no interval below
    five models. The p-value permutes x; with covariates residuals of the ranks of y, which are added to the fit again
    (Freedman and Lane, 1983). Raises ValueError for different lengths, infinite values, and covariates of another kind
    than "kendall-b".
    """
    if kind not in COEFFICIENTS:
        raise ValueError(f"kind must be one of {', '.join(map(repr, COEFFICIENTS))}. Found {kind!r}")
    if given and kind != "kendall-b":
        raise ValueError(f"kind must be 'kendall-b' where covariates are given. Found {kind!r}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1. Found {confidence!r}")
    covariates = {f"the covariate {name}": values for name, values in (given or {}).items()}
    table: dict[str, Any] = {"x": x, "y": y, **covariates}
    lengths = {name: len(values) for name, values in table.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"Columns must be of one length, one value a model. Found {lengths}")
    rows = list(zip(*table.values(), strict=True))
    kept = [row for row in rows if not any(value is None or value != value for value in row)]
    whole = {name: [row[place] for row in kept] for place, name in enumerate(table)}
    others = [column for name in covariates for column in _coded(name, whole[name])]
    columns = np.stack([_numbers("x", whole["x"]), _numbers("y", whole["y"]), *others])
    models = len(kept)
    empty = Correlation(kind, None, None, None, None, models, len(rows) - models, confidence, 0, 0, 0)
    if models < 2 or (others and models < len(columns) + 1):
        return empty
    value = float(_coefficient(kind, columns))
    if math.isnan(value):
        return empty
    found = _with_p_value(replace(empty, value=value), columns, permutations, seed)
    return found if models < FEWEST_MODELS else _with_interval(found, columns, resamples, seed)


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
    """Return sqrt(2 (2 n + 5) / (9 n (n - 1))): tau's standard deviation for n unrelated models (Kendall, 1938)."""
    return math.sqrt(2 * (2 * models + 5) / (9 * models * (models - 1)))


def _with_p_value(found: Correlation, columns: Floats, permutations: int, seed: int) -> Correlation:
    """Fill in the p-value: x is permuted, or what the covariates leave of the ranks of y."""
    moved, fit = columns[0], None
    if len(columns) > 2:
        columns = stats.rankdata(columns, axis=-1)
        design = np.stack([np.ones_like(moved), *columns[2:]], axis=1)
        fit = design @ np.linalg.lstsq(design, columns[1], rcond=NOTHING_LEFT)[0]
        moved = columns[1] - fit

    def statistic(moved: Floats, axis: int) -> Floats:
        if fit is None:
            return _coefficient(found.kind, np.stack(np.broadcast_arrays(moved, columns[1]), axis=-2))
        again = np.round(fit + moved, 8)  # else rounding of the fit would break ties of y
        fixed = [np.broadcast_to(column, again.shape) for column in columns]
        return _coefficient(found.kind, np.stack([fixed[0], again, *fixed[2:]], axis=-2))

    test = stats.permutation_test(
        (moved,),
        statistic,
        permutation_type="pairings",
        vectorized=True,
        n_resamples=permutations,
        batch=BATCH,
        rng=np.random.default_rng(seed),
    )
    return replace(found, p_value=float(test.pvalue), permutations=len(test.null_distribution))


def _with_interval(found: Correlation, columns: Floats, resamples: int, seed: int) -> Correlation:
    """Fill in the interval: models are drawn with replacement, each with all its columns."""

    def statistic(drawn: NDArray[np.int64], axis: int) -> Floats:
        return _coefficient(found.kind, np.moveaxis(columns[:, drawn], 0, -2))

    with warnings.catch_warnings():
        # scipy warns when a resample has no coefficient; those are counted and left out below.
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
    found = replace(found, resamples=resamples, undefined=undefined)
    if 2 * undefined > resamples:
        return found  # the few that are left would speak for other models than these
    tail = (1 - found.confidence) / 2
    low, high = np.nanquantile(values, [tail, 1 - tail])
    return replace(found, low=float(low), high=float(high))


def _coefficient(kind: Kind, columns: Floats) -> Floats:
    """Correlate columns 0 and 1, of "kendall-b" given columns 2 and on, (..., k, n) -> (...); NaN where undefined."""
    gram = _signs(columns) if kind == "kendall-b" else _scores(kind, columns)
    norms = np.sqrt(np.diagonal(gram, axis1=-2, axis2=-1))
    norms = np.where(norms > 0, norms, math.inf)
    left = gram / (norms[..., :, None] * norms[..., None, :])
    if columns.shape[-2] > 2:  # the Schur complement of the covariates, which may depend on each other
        mixed, rest = left[..., :2, 2:], left[..., 2:, 2:]
        left = left[..., :2, :2] - mixed @ np.linalg.pinv(rest, NOTHING_LEFT, True) @ np.swapaxes(mixed, -1, -2)
    defined = (left[..., 0, 0] > NOTHING_LEFT) & (left[..., 1, 1] > NOTHING_LEFT)
    variances = np.where(defined, left[..., 0, 0] * left[..., 1, 1], 1)
    return np.clip(np.where(defined, left[..., 0, 1], math.nan) / np.sqrt(variances), -1, 1)


def _signs(columns: Floats) -> Floats:
    """Multiply signs of differences over all pairs of models, (..., k, n) -> (..., k, k)."""
    # Only the order counts, so single precision is exact: it holds every rank and every sum of signs.
    ranks = stats.rankdata(columns, method="dense", axis=-1).astype(np.float32)
    total = np.zeros((*columns.shape[:-1], columns.shape[-2]))
    for lag in range(1, columns.shape[-1]):
        signs = np.sign(ranks[..., lag:] - ranks[..., :-lag])
        total += np.einsum("...in,...jn->...ij", signs, signs)
    return total


def _scores(kind: Kind, columns: Floats) -> Floats:
    """Multiply centred values or ranks, (..., k, n) -> (..., k, k)."""
    scores = stats.rankdata(columns, axis=-1) if kind == "spearman" else columns
    if scores.shape[-1]:  # constant columns become exactly 0, others of size 1: squares do not overflow
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
    """Return a column of numbers as it is, a category as 0/1 columns, for all its values but the first."""
    if not any(isinstance(value, str) for value in values):
        return [_numbers(name, values)]
    return [np.asarray([value == level for value in values], dtype=np.float64) for level in sorted(set(values))[1:]]
