"""A zoo of models measured unit by unit, by any number of processes, into one store that survives a crash."""

from __future__ import annotations

try:
    from quotient_manifolds.compare.analysis import analyse
    from quotient_manifolds.compare.comparing import run_comparison
    from quotient_manifolds.compare.comparison import Comparison, Named, Ranking, Row, Trouble, Value
    from quotient_manifolds.compare.database import StoreError
    from quotient_manifolds.compare.page import summary_tables, write_comparison
    from quotient_manifolds.compare.plan import Plan, Planned, plan
    from quotient_manifolds.compare.run import Run
    from quotient_manifolds.compare.spec import Spec, read_spec
    from quotient_manifolds.compare.store import Failure, Store
    from quotient_manifolds.compare.unit import Unit, unit_key
    from quotient_manifolds.compare.workers import Worker, joined, leads
except ModuleNotFoundError as error:
    if error.name not in {"yaml", "pydantic", "pandas", "filelock"}:
        raise
    raise ImportError(
        f'Comparing a zoo needs {error.name}, which is not installed: pip install "quotient-manifolds[compare]".'
    ) from error

__all__ = [
    "Comparison",
    "Failure",
    "Named",
    "Plan",
    "Planned",
    "Ranking",
    "Row",
    "Run",
    "Spec",
    "Store",
    "StoreError",
    "Trouble",
    "Unit",
    "Value",
    "Worker",
    "analyse",
    "joined",
    "leads",
    "plan",
    "read_spec",
    "run_comparison",
    "summary_tables",
    "unit_key",
    "write_comparison",
]
