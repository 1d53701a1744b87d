"""Studies: data, training, measuring, and the records they leave."""

from __future__ import annotations

from quotient_manifolds.experiments.demo import run_demo
from quotient_manifolds.experiments.records import DemoResult

__all__ = ["DemoResult", "run_demo"]
