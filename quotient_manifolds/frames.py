"""Make pandas frames, where pandas is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pandas import DataFrame as DataFrame


def data_frame(rows: Sequence[Mapping[str, Any]]) -> DataFrame:
    """Return the rows as a frame, a column for every name that a row has. Raises ImportError without pandas."""
    try:
        import pandas as pd
    except ImportError as error:
        raise ImportError(
            'A data frame needs pandas, which is not installed: pip install "quotient-manifolds[compare]".'
        ) from error
    return pd.DataFrame(list(rows))
