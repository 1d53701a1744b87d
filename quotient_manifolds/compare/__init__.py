"""Measure a zoo of models unit by unit, in one process or many, into one store that survives a crash."""

from __future__ import annotations

try:
    from quotient_manifolds.compare.comparison import (
        ComparedMeasure,
        ComparedModel,
        Comparison,
        Failure,
        MeanValue,
        Ranking,
    )
    from quotient_manifolds.compare.forecast import Forecast, forecast
    from quotient_manifolds.compare.inventory import Inventory
    from quotient_manifolds.compare.measure_entries import MeasureEntry
    from quotient_manifolds.compare.report import summary_tables
    from quotient_manifolds.compare.run import run_comparison
    from quotient_manifolds.compare.spec import Spec, read_spec
    from quotient_manifolds.compare.store import Store, StoreError
    from quotient_manifolds.compare.unit import Unit, unit_key
except ModuleNotFoundError as error:
    if error.name not in {"ruamel", "ruamel.yaml", "pydantic", "pandas"}:
        raise
    raise ImportError(
        f'Comparing a zoo needs {error.name}, which is not installed: pip install "quotient-manifolds[compare]".'
    ) from error

__all__ = [
    "ComparedMeasure",
    "ComparedModel",
    "Comparison",
    "Failure",
    "Forecast",
    "Inventory",
    "MeanValue",
    "MeasureEntry",
    "Ranking",
    "Spec",
    "Store",
    "StoreError",
    "Unit",
    "forecast",
    "read_spec",
    "run_comparison",
    "summary_tables",
    "unit_key",
]
