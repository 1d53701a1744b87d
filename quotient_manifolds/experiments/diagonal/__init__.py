"""Diagonal networks: does sharpness rank them, and does the answer depend on how geodesics are followed?"""

from __future__ import annotations

from quotient_manifolds.experiments.diagonal.records import Cell, DiagonalStudy, Mean, Plan
from quotient_manifolds.experiments.diagonal.study import run_diagonal

__all__ = ["Cell", "DiagonalStudy", "Mean", "Plan", "run_diagonal"]
