"""Tell how well a measure ranks models: correlations over models, and how far they can be trusted."""

from __future__ import annotations

from quotient_manifolds.statistics.correlation import (
    COEFFICIENT_NAMES,
    COEFFICIENTS,
    FEW_MODELS,
    Correlation,
    Kind,
    Numbers,
    correlation,
    holm,
    tau_deviation,
)

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
