"""Whether optimizers on the quotient and geodesic SAM train better than others."""

from __future__ import annotations

from studies.training.pictures import figure
from studies.training.study import Plan, Training, load, run
from studies.training.tables import tables

__all__ = ["Plan", "Training", "figure", "load", "run", "tables"]
