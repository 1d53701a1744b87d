"""Tell how far measures agree with each other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from quotient_manifolds.statistics.coefficients import Kind, check_kind, coefficient
from quotient_manifolds.statistics.columns import Floats, Numbers, numbers


@dataclass(frozen=True)
class Agreement:
    """Hold coefficients between all columns, row by row (None: not defined), and from how many models each comes."""

    kind: Kind
    names: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    models: tuple[tuple[int, ...], ...]
    total: int


def agreement(columns: Mapping[str, Numbers], kind: Kind = "kendall-b") -> Agreement:
    """Return the correlation of every two columns, over the models that have both (others have None or NaN there)."""
    check_kind(kind)
    table = {name: numbers(name, values) for name, values in columns.items()}
    lengths = {name: len(values) for name, values in table.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"Columns of one length are needed, one value a model, found {lengths}.")
    pairs = [[_pair(a, b, kind) for b in table.values()] for a in table.values()]
    return Agreement(
        kind,
        tuple(table),
        tuple(tuple(value for value, _ in row) for row in pairs),
        tuple(tuple(models for _, models in row) for row in pairs),
        max(lengths.values(), default=0),
    )


def _pair(a: Floats, b: Floats, kind: Kind) -> tuple[float | None, int]:
    both = np.isfinite(a) & np.isfinite(b)
    value = float(coefficient(kind, np.stack([a[both], b[both]])))
    return None if math.isnan(value) else value, int(both.sum())
