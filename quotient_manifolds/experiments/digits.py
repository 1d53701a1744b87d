"""Scikit-learn's handwritten digits: 1797 grey images of 8 x 8 pixels, split once into training and test images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Batch = dict[str, Tensor]  # what a Hugging Face image classifier takes: pixel_values and labels

IMAGES = 1797
TRAIN_POINTS = 300  # few, so that generalisation gaps spread


@dataclass(frozen=True)
class Digits:
    """Images standardised by the training images' mean and deviation, (points, 1, 8, 8) float32, and their classes."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @property
    def blank(self) -> float:
        """The value of background after standardisation: what a shifted image is padded with."""
        return float(self.train_images.min())

    def training_batches(self, count: int, size: int) -> tuple[Batch, ...]:
        """`count` disjoint batches of `size` training points, in the (shuffled, stratified) order of the split."""
        if count < 1 or size < 1 or count * size > len(self.train_labels):
            raise ValueError(
                f"Expected at least one batch of at least one point and at most {len(self.train_labels)} points "
                f"(the training set), found {count} batches of {size}."
            )
        rows = [slice(i * size, (i + 1) * size) for i in range(count)]
        return tuple({"pixel_values": self.train_images[r], "labels": self.train_labels[r]} for r in rows)


def load_digits(*, train_points: int = TRAIN_POINTS, seed: int = 0) -> Digits:
    """The digits, split into `train_points` training images and the rest for testing, classes in proportion."""
    datasets, model_selection = _scikit_learn()
    if not 20 <= train_points <= IMAGES - 100:
        raise ValueError(f"train_points must lie between 20 and {IMAGES - 100}, found {train_points}.")
    pixels, classes = datasets.load_digits(return_X_y=True)
    train, test = model_selection.train_test_split(
        np.arange(len(classes)), train_size=train_points, stratify=classes, random_state=seed
    )
    images = torch.from_numpy(pixels).float().reshape(-1, 1, 8, 8)
    images = (images - images[train].mean()) / images[train].std()
    labels = torch.from_numpy(classes).long()
    return Digits(images[train], labels[train], images[test], labels[test])


def _scikit_learn() -> tuple[Any, Any]:
    try:
        from sklearn import datasets, model_selection
    except ImportError as error:
        raise ImportError(
            'The digits come with scikit-learn, which is not installed: pip install "quotient-manifolds[studies]".'
        ) from error
    return datasets, model_selection


def shifted(images: Tensor, pixels: int, blank: float, generator: torch.Generator) -> Tensor:
    """Each image moved by its own random (rows, columns) in -pixels..pixels, the edge filled with `blank`."""
    count, _, height, width = images.shape
    padded = torch.nn.functional.pad(images, (pixels,) * 4, value=blank)
    offset = torch.randint(0, 2 * pixels + 1, (count, 2), generator=generator)
    rows = offset[:, :1, None] + torch.arange(height)[None, :, None]  # (count, height, 1)
    columns = offset[:, 1:, None] + torch.arange(width)[None, None, :]  # (count, 1, width)
    return padded[torch.arange(count)[:, None, None], 0, rows, columns][:, None]
