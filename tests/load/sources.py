"""Pictures, and a model that takes one tensor, for tests of data."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

PLAIN = nn.Flatten()  # a model that takes one tensor


def pictures(dtype: str = "uint8", *, channels: int = 3) -> NDArray[Any]:
    """(5, channels, 6, 4)"""
    return np.random.default_rng(0).integers(0, 256, (5, channels, 6, 4)).astype(dtype)
