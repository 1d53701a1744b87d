"""Whether optimizers on the quotient and geodesic SAM train better than others."""

from __future__ import annotations

from studies.training.study import load, run
from studies.training.tables import figure, tables

__all__ = ["figure", "load", "run", "tables"]
