"""Diagonal networks: does sharpness rank them, and does the answer depend on how geodesics are followed?"""

from __future__ import annotations

from studies.diagonal.study import run
from studies.diagonal.tables import Study, figure, tables

__all__ = ["Study", "figure", "run", "tables"]
