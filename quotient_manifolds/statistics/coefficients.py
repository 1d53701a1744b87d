"""Compute Kendall's, Spearman's and Pearson's coefficients of many samples at once, plain and partial."""

from __future__ import annotations

import math
from typing import Literal, get_args

import numpy as np
from scipy import stats

from quotient_manifolds.statistics.columns import Floats

Kind = Literal["kendall-a", "kendall-b", "spearman", "pearson"]
COEFFICIENTS: tuple[Kind, ...] = get_args(Kind)
COEFFICIENT_NAMES: dict[Kind, str] = {
    "kendall-a": "Kendall’s tau-a",
    "kendall-b": "Kendall’s tau-b",
    "spearman": "Spearman’s rho",
    "pearson": "Pearson’s r",
}

# What a fit on covariates leaves of a column, below which nothing but rounding is left.
NOTHING_LEFT = 1e-10


def check_kind(kind: str, kinds: tuple[str, ...] = COEFFICIENTS) -> None:
    if kind not in kinds:
        raise ValueError(f"The kind of correlation must be one of {', '.join(map(repr, kinds))}, found {kind!r}.")


def coefficient(kind: Kind, columns: Floats) -> Floats:
    """Correlate columns 0 and 1, given columns 2 and on, (..., k, n) -> (...); NaN where that is not defined."""
    gram = _inner_products(kind, columns)
    if kind == "kendall-a":
        # A resample holds some models twice; such a pair is no pair. Column 2, when there, numbers the models.
        pairs = gram[..., 2, 2] if columns.shape[-2] > 2 else math.comb(columns.shape[-1], 2)
        defined = (gram[..., 0, 0] > 0) & (gram[..., 1, 1] > 0)
        return np.where(defined, gram[..., 0, 1] / np.maximum(pairs, 1), math.nan)
    norms = np.sqrt(np.diagonal(gram, axis1=-2, axis2=-1))
    norms = np.where(norms > 0, norms, math.inf)
    left = _given_the_rest(gram / (norms[..., :, None] * norms[..., None, :]))
    variances = left[..., 0, 0] * left[..., 1, 1]
    defined = (left[..., 0, 0] > NOTHING_LEFT) & (left[..., 1, 1] > NOTHING_LEFT)
    return np.clip(np.where(defined, left[..., 0, 1], math.nan) / np.sqrt(np.where(defined, variances, 1)), -1, 1)


def _inner_products(kind: Kind, columns: Floats) -> Floats:
    """Multiply columns, (..., k, n) -> (..., k, k): centred values or ranks, or signs of differences over pairs."""
    if kind in ("kendall-a", "kendall-b"):
        # Only the order counts, so single precision is exact: it holds every rank and every sum of signs.
        ranks = stats.rankdata(columns, method="dense", axis=-1).astype(np.float32)
        total = np.zeros((*columns.shape[:-1], columns.shape[-2]))
        for lag in range(1, columns.shape[-1]):
            signs = np.sign(ranks[..., lag:] - ranks[..., :-lag])
            total += np.einsum("...in,...jn->...ij", signs, signs)
        return total
    scores = stats.rankdata(columns, axis=-1) if kind == "spearman" else columns
    if scores.shape[-1]:  # to size 1 by a power of two, which is exact: differences do not overflow
        scores = np.ldexp(scores, -np.frexp(np.abs(scores).max(axis=-1, keepdims=True))[1])
    varying = np.ptp(scores, axis=-1, keepdims=True) if scores.shape[-1] else np.zeros((*scores.shape[:-1], 1))
    scores = (scores - scores[..., :1]) / np.where(varying > 0, varying, 1)  # of size 1: squares do not overflow
    scores = scores - scores.mean(axis=-1, keepdims=True)
    return scores @ np.swapaxes(scores, -1, -2)


def _given_the_rest(matrix: Floats) -> Floats:
    """Return the Schur complement (..., 2, 2) of rows 2 and on of (..., k, k), which may depend on each other."""
    if matrix.shape[-1] == 2:
        return matrix
    first, mixed, rest = matrix[..., :2, :2], matrix[..., :2, 2:], matrix[..., 2:, 2:]
    return first - mixed @ np.linalg.pinv(rest, NOTHING_LEFT, True) @ np.swapaxes(mixed, -1, -2)
