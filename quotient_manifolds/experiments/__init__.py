"""Studies: data, training, measuring, and the records they leave."""

from __future__ import annotations

from quotient_manifolds.experiments.demo import run_demo
from quotient_manifolds.experiments.records import DemoResult
from quotient_manifolds.experiments.statistics import Correlation, kendall

__all__ = ["Correlation", "DemoResult", "kendall", "run_demo"]
