"""Diagonal networks: does sharpness rank them, and does the answer depend on how geodesics are followed?"""

from __future__ import annotations

from studies.diagonal.study import run
from studies.diagonal.tables import Study, tables

__all__ = ["Study", "run", "tables"]
