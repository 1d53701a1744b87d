"""Measure sharpness: how much the loss can increase within a ball around a model's parameters."""

from __future__ import annotations

from quotient_manifolds.sharpness.ascent import Ascent, AutoPGD
from quotient_manifolds.sharpness.curvature import HessianTrace, TopEigenvalue, hessian_trace, top_eigenvalue
from quotient_manifolds.sharpness.legacy import LegacyWorstCase, legacy_sharpness
from quotient_manifolds.sharpness.losses import Loss, cross_entropy, next_token_cross_entropy
from quotient_manifolds.sharpness.measure import (
    ConvergenceWarning,
    Measure,
    RoundingWarning,
    SharpnessWarning,
    TruncationWarning,
)
from quotient_manifolds.sharpness.prepared_model import PreparedModel
from quotient_manifolds.sharpness.result import BatchResult, Result
from quotient_manifolds.sharpness.suggest import suggest_radius
from quotient_manifolds.sharpness.worst_case import (
    AverageCase,
    GradientNorm,
    WorstCase,
    average_case_sharpness,
    gradient_norm,
    worst_case_profile,
    worst_case_sharpness,
)

__all__ = [
    "Ascent",
    "AutoPGD",
    "AverageCase",
    "BatchResult",
    "ConvergenceWarning",
    "GradientNorm",
    "HessianTrace",
    "LegacyWorstCase",
    "Loss",
    "Measure",
    "PreparedModel",
    "Result",
    "RoundingWarning",
    "SharpnessWarning",
    "TopEigenvalue",
    "TruncationWarning",
    "WorstCase",
    "average_case_sharpness",
    "cross_entropy",
    "gradient_norm",
    "hessian_trace",
    "legacy_sharpness",
    "next_token_cross_entropy",
    "suggest_radius",
    "top_eigenvalue",
    "worst_case_profile",
    "worst_case_sharpness",
]
