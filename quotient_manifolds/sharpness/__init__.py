"""Measures of sharpness: how much the loss can rise within a ball around a model's parameters."""

from __future__ import annotations

from quotient_manifolds.sharpness.ascent import Ascent, AutoPGD
from quotient_manifolds.sharpness.losses import Loss, cross_entropy
from quotient_manifolds.sharpness.result import SharpnessResult
from quotient_manifolds.sharpness.worst_case import worst_case_sharpness

__all__ = ["Ascent", "AutoPGD", "Loss", "SharpnessResult", "cross_entropy", "worst_case_sharpness"]
