"""Measure checkpoints, in one process or many, into one store that survives a crash, and rank the measures."""

from __future__ import annotations

try:
    from quotient_manifolds.compare.comparison import Comparison
    from quotient_manifolds.compare.report import comparison_page, summary_tables
    from quotient_manifolds.compare.run import Forecast, forecast, run_comparison
    from quotient_manifolds.compare.spec import MeasureEntry, Spec, measures_of
    from quotient_manifolds.compare.spec_file import read_spec
    from quotient_manifolds.compare.store import Store, StoreError
except ModuleNotFoundError as error:
    if error.name not in {"ruamel", "ruamel.yaml", "pandas"}:
        raise
    raise ImportError(
        f'Comparing checkpoints needs {error.name}, which is not installed: pip install "quotient-manifolds[compare]".'
    ) from error

__all__ = [
    "Comparison",
    "Forecast",
    "MeasureEntry",
    "Spec",
    "Store",
    "StoreError",
    "comparison_page",
    "forecast",
    "measures_of",
    "read_spec",
    "run_comparison",
    "summary_tables",
]
