"""Diagonal networks: does sharpness rank them, and does the answer depend on how geodesics are followed?"""

from __future__ import annotations

from studies.diagonal.records import Cell, DiagonalStudy, Mean, Plan
from studies.diagonal.study import run_diagonal

__all__ = ["Cell", "DiagonalStudy", "Mean", "Plan", "run_diagonal"]
