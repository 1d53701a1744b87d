"""Measures of sharpness: how much the loss can rise within a ball around a model's parameters."""

from __future__ import annotations

from quotient_manifolds.sharpness.ascent import Ascent, AutoPGD
from quotient_manifolds.sharpness.average import AverageCase, average_sharpness
from quotient_manifolds.sharpness.eigenvalue import TopEigenvalue, top_eigenvalue
from quotient_manifolds.sharpness.gradient import GradientNorm, gradient_norm
from quotient_manifolds.sharpness.legacy import LegacyWorstCase, legacy_sharpness
from quotient_manifolds.sharpness.logits import normalised_logits
from quotient_manifolds.sharpness.losses import Loss, cross_entropy, next_token_cross_entropy
from quotient_manifolds.sharpness.measure import (
    ConvergenceWarning,
    Measure,
    MeasurementWarning,
    RoundingWarning,
    Subject,
    TruncationWarning,
)
from quotient_manifolds.sharpness.measurement import Measurement, OnBatch
from quotient_manifolds.sharpness.measurements import Measurements
from quotient_manifolds.sharpness.relative_flatness import RelativeFlatness, relative_flatness
from quotient_manifolds.sharpness.trace import HessianTrace, hessian_trace
from quotient_manifolds.sharpness.truncation import TruncationError, truncation_error
from quotient_manifolds.sharpness.worst_case import WorstCase, worst_case_profile, worst_case_sharpness

__all__ = [
    "Ascent",
    "AutoPGD",
    "AverageCase",
    "ConvergenceWarning",
    "GradientNorm",
    "HessianTrace",
    "LegacyWorstCase",
    "Loss",
    "Measure",
    "Measurement",
    "MeasurementWarning",
    "Measurements",
    "OnBatch",
    "RelativeFlatness",
    "RoundingWarning",
    "Subject",
    "TopEigenvalue",
    "TruncationError",
    "TruncationWarning",
    "WorstCase",
    "average_sharpness",
    "cross_entropy",
    "gradient_norm",
    "hessian_trace",
    "legacy_sharpness",
    "next_token_cross_entropy",
    "normalised_logits",
    "relative_flatness",
    "top_eigenvalue",
    "truncation_error",
    "worst_case_profile",
    "worst_case_sharpness",
]
