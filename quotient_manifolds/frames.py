"""Make pandas frames of rows, where pandas is installed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pandas import DataFrame as DataFrame


def data_frame(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> DataFrame:
    """Return the rows as a frame, a column for every name that a row has; `columns` are those of an empty one.

    A column of numbers is numeric (whole ones stay whole beside missing values), one that mixes kinds is JSON text.
    Raises ImportError where pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise ImportError(
            'A data frame needs pandas, which is not installed: pip install "quotient-manifolds[compare]".'
        ) from error
    names = list(dict.fromkeys(name for row in rows for name in row)) or list(columns)
    return pd.DataFrame({name: _column(pd, [row.get(name) for row in rows]) for name in names})


def _column(pd: Any, values: list[Any]) -> Any:
    """Return a series of the dtype that holds all values exactly, or of JSON texts."""
    kinds = {type(value) for value in values if value is not None}
    # As float64 whole numbers are exact to 2^53, as Int64 to 2^63.
    whole = max((abs(value) for value in values if type(value) is int), default=0)
    if kinds == {int} and whole < 2**63:
        return pd.Series(values, dtype="Int64")
    if kinds <= {float, int} and whole <= 2**53:
        return pd.Series(values, dtype="float64")
    if kinds == {bool}:
        return pd.Series(values, dtype="boolean")
    if kinds != {str}:
        values = [None if value is None else json.dumps(value, ensure_ascii=False) for value in values]
    return pd.Series(values, dtype="str")
