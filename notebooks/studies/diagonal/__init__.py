"""Diagonal networks: does sharpness rank them, and does the answer depend on how geodesics are followed?"""

from __future__ import annotations

from studies.diagonal.pictures import figure
from studies.diagonal.records import Cell, DiagonalStudy, Mean, Plan
from studies.diagonal.study import load, run, run_diagonal
from studies.diagonal.tables import tables

__all__ = ["Cell", "DiagonalStudy", "Mean", "Plan", "figure", "load", "run", "run_diagonal", "tables"]
