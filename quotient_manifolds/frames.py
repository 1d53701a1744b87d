"""Make pandas frames, where pandas is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quotient_manifolds.check import needs

if TYPE_CHECKING:
    from pandas import DataFrame as DataFrame


def data_frame(rows: Sequence[Mapping[str, Any]]) -> DataFrame:
    """Return the rows as a frame, a column for every name that a row has. Raises ImportError without pandas."""
    with needs("A data frame", "pandas", "compare"):
        import pandas as pd
    return pd.DataFrame(list(rows))
