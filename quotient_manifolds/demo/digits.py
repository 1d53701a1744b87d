"""Split scikit-learn's handwritten digits, 1797 grey images of 8 x 8 pixels, into training and test images."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from quotient_manifolds.files import whole

IMAGES = 1797


@dataclass(frozen=True)
class Digits:
    """Hold images (N, 1, 8, 8) float32, standardised by the training images' mean and deviation, and their classes."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    def write(self, folder: Path) -> None:
        """Write train.npz and test.npz, each with `images` and `labels`; what is there and the same stays untouched."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("train", "test"):
            file, written = folder / f"{name}.npz", io.BytesIO()
            images, labels = getattr(self, f"{name}_images"), getattr(self, f"{name}_labels")
            np.savez(written, images=images.numpy(), labels=labels.numpy())
            if not file.is_file() or file.read_bytes() != written.getvalue():
                with whole(file) as unfinished:
                    unfinished.write_bytes(written.getvalue())


def load_digits(*, train_points: int, seed: int = 0) -> Digits:
    """Return the digits, split into `train_points` training images and the rest for testing, classes in proportion."""
    try:
        from sklearn import datasets, model_selection
    except ImportError as error:
        raise ImportError(
            'The digits come with scikit-learn, which is not installed: pip install "quotient-manifolds[demo]".'
        ) from error
    if not 20 <= train_points <= IMAGES - 100:
        raise ValueError(f"train_points must lie between 20 and {IMAGES - 100}, found {train_points}.")
    grey, classes = datasets.load_digits(return_X_y=True)
    train, test = model_selection.train_test_split(
        np.arange(len(classes)), train_size=train_points, stratify=classes, random_state=seed
    )
    images = torch.from_numpy(grey).float().reshape(-1, 1, 8, 8)
    images = (images - images[train].mean()) / images[train].std()
    labels = torch.from_numpy(classes).long()
    return Digits(images[train], labels[train], images[test], labels[test])


def shifted(images: Tensor, most: int, blank: float, generator: torch.Generator) -> Tensor:
    """Return each image moved by its own random (rows, columns) in -most..most, the edge filled with `blank`."""
    count, _, height, width = images.shape
    padded = torch.nn.functional.pad(images, (most,) * 4, value=blank)
    offset = torch.randint(0, 2 * most + 1, (count, 2), generator=generator)
    rows = offset[:, :1, None] + torch.arange(height)[None, :, None]  # (count, height, 1)
    columns = offset[:, 1:, None] + torch.arange(width)[None, None, :]  # (count, 1, width)
    return padded[torch.arange(count)[:, None, None], 0, rows, columns][:, None]
