"""Measure sharpness: how much the loss can increase within a ball around a model's parameters."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from quotient_manifolds.sharpness.ascent import Ascent, AscentMethod, AutoPGD
from quotient_manifolds.sharpness.caution import (
    ConvergenceWarning,
    RoundingWarning,
    SharpnessWarning,
    TruncationWarning,
)
from quotient_manifolds.sharpness.curvature import HessianTrace, TopEigenvalue, hessian_trace, top_eigenvalue
from quotient_manifolds.sharpness.full_steps import FullStepAPGD
from quotient_manifolds.sharpness.legacy import LegacyWorstCase, legacy_sharpness
from quotient_manifolds.sharpness.losses import Loss, cross_entropy, next_token_cross_entropy
from quotient_manifolds.sharpness.measure import Measure
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
    "AscentMethod",
    "AutoPGD",
    "AverageCase",
    "BatchResult",
    "ConvergenceWarning",
    "FullStepAPGD",
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


class _Room(ModuleType):
    """Raise TypeError if the module is called, naming the functions to call instead."""

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        functions = ", ".join(
            name for name in __all__ if name.endswith(("_sharpness", "_norm", "_trace", "_eigenvalue"))
        )
        raise TypeError(f"{self.__name__} is a module; call one of its functions, {functions}")


sys.modules[__name__].__class__ = _Room
