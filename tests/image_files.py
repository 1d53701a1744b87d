"""Small images in arrays and files, and what a data source made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn


def images_and_labels(batches: list[Any]) -> tuple[Tensor, list[int]]:
    """All images and all labels of batches (inputs, labels)."""
    return torch.cat([images for images, _ in batches]), torch.cat([labels for _, labels in batches]).tolist()


PLAIN = nn.Flatten()


def pictures(dtype: str = "uint8", *, count: int = 5, channels: int = 3) -> NDArray[Any]:
    """(N, channels, 6, 4)"""
    return np.random.default_rng(0).integers(0, 256, (count, channels, 6, 4)).astype(dtype)


def write_npz(folder: Path, **arrays: NDArray[Any]) -> Path:
    np.savez(folder / "data.npz", **arrays)
    return folder / "data.npz"


def paint(path: Path, width: int = 12, height: int = 9, *, mode: str = "RGB", seed: int = 0) -> NDArray[Any]:
    """A smooth picture, stored without loss; its pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 4)).astype(np.uint8)
    picture = Image.fromarray(coarse, "RGBA").resize((width, height), Image.Resampling.BILINEAR).convert(mode)
    picture.save(path)
    return np.asarray(picture)


def picture(path: Path, width: int, height: int) -> Path:
    """Save a black picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height)).save(path)
    return path
