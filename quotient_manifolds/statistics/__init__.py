"""Tell how well a measure ranks models: correlations over models, and how far they can be trusted."""

from __future__ import annotations

from quotient_manifolds.statistics.agreement import Agreement, agreement
from quotient_manifolds.statistics.coefficients import COEFFICIENT_NAMES, COEFFICIENTS, Kind
from quotient_manifolds.statistics.correlation import (
    FEW_MODELS,
    Correlation,
    correlation,
    holm,
    partial_correlation,
    tau_deviation,
)

__all__ = [
    "COEFFICIENTS",
    "COEFFICIENT_NAMES",
    "FEW_MODELS",
    "Agreement",
    "Correlation",
    "Kind",
    "agreement",
    "correlation",
    "holm",
    "partial_correlation",
    "tau_deviation",
]
