"""Small images in arrays, and what a data source made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

PLAIN = nn.Flatten()


def images_and_labels(batches: list[Any]) -> tuple[Tensor, list[int]]:
    """All images and all labels of batches (inputs, labels)."""
    return torch.cat([images for images, _ in batches]), torch.cat([labels for _, labels in batches]).tolist()


def pictures(dtype: str = "uint8", *, count: int = 5, channels: int = 3) -> NDArray[Any]:
    """(N, channels, 6, 4)"""
    return np.random.default_rng(0).integers(0, 256, (count, channels, 6, 4)).astype(dtype)


def write_npz(folder: Path, **arrays: NDArray[Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "data.npz", **arrays)
    return folder / "data.npz"
