"""Turn columns of one value a model, with gaps where a measurement failed, into arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Numbers = Sequence[float | None] | NDArray[Any]


def complete(columns: Mapping[str, Sequence[Any] | NDArray[Any]]) -> tuple[list[list[Any]], int]:
    """Return the columns without the models in which one of them is missing, and the number of those models."""
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"Columns of one length are needed, one value a model, found {lengths}.")
    rows = list(zip(*columns.values(), strict=True))
    kept = [row for row in rows if not any(value is None or value != value for value in row)]
    return [[row[place] for row in kept] for place in range(len(columns))], len(rows) - len(kept)


def numbers(name: str, values: Sequence[Any] | NDArray[Any]) -> Floats:
    try:
        array = np.asarray([math.nan if value is None else value for value in values], dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"Column {name!r} must hold one number a model, found {values!r}.") from error
    if array.ndim != 1 or np.isinf(array).any():
        raise ValueError(
            f"Column {name!r} must hold one finite number a model, found {values!r}; "
            "a value that could not be measured is None or NaN."
        )
    return array


def encoded(name: str, values: Sequence[Any]) -> list[Floats]:
    """Return a column of numbers as it is, a category as 0/1 columns, for all its values but the first."""
    if not any(isinstance(value, str) for value in values):
        return [numbers(name, values)]
    if not all(isinstance(value, str) for value in values):
        raise ValueError(f"Column {name!r} must hold numbers or text, not both, found {values!r}.")
    return [np.asarray([value == level for value in values], dtype=np.float64) for level in sorted(set(values))[1:]]
