"""Images and labels from a .npz file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from quotient_manifolds.load.huggingface import first_line
from quotient_manifolds.load.labels import Labels, new_label
from quotient_manifolds.load.pixels import Normalisation
from quotient_manifolds.load.points import Points, Read

CHANNELS = (1, 3)  # grey, RGB


@final
class ArrayPoints(Points):
    """The arrays `images` and `labels` (N,) of a .npz file; nothing in it is unpickled.

    images: (N, channels, height, width), (N, height, width, channels) or (N, height, width), uint8 (then divided by
    255) or floating point (taken as it is).
    """

    keyword = "pixel_values"

    def __init__(self, path: Path, labels: Labels | None, normalisation: Normalisation | None) -> None:
        found = _read(path, "labels")
        if found.ndim != 1 or found.dtype.kind not in "iu" or not len(found):
            raise ValueError(f"{path}: labels must be integers (N,), found {found.dtype} {found.shape}.")
        self._path = path
        self._normalisation = normalisation
        self._labels = [new_label(label, labels, self.where(row)) for row, label in enumerate(found.tolist())]

    @property
    def labels(self) -> Sequence[int]:
        return self._labels

    def file(self, row: int) -> Path:
        return self._path

    def where(self, row: int) -> str:
        return f"{self._path}, row {row}"

    def reader(self, model: nn.Module, home: Path | None) -> Read:
        images = _channels_first(_read(self._path, "images"), self._path)
        if len(images) != len(self._labels):
            raise ValueError(f"{self._path} has {len(images)} images and {len(self._labels)} labels.")

        def read(rows: Sequence[int]) -> dict[str, Tensor]:
            pixels = torch.from_numpy(np.ascontiguousarray(images[list(rows)]))
            scaled = pixels.float() / 255 if pixels.dtype == torch.uint8 else pixels.float()
            return {self.keyword: scaled if self._normalisation is None else self._normalisation(scaled)}

        return read


def _read(path: Path, name: str) -> Any:
    if not path.is_file():
        raise ValueError(f"There is no data file {path}.")
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            return np.asarray(archive[name])
    except KeyError as error:
        raise ValueError(f"{path} has no array {name!r}: expected images and labels.") from error
    except Exception as error:  # zipfile, zlib and numpy raise half a dozen kinds for damaged files
        raise ValueError(f"{path} is no readable .npz file of plain arrays: {first_line(error)}") from error


def _channels_first(images: Any, path: Path) -> Any:
    """(N, channels, height, width)"""
    if images.dtype != np.uint8 and images.dtype.kind != "f":
        raise ValueError(f"{path}: images must be uint8 or floating point, found {images.dtype}.")
    if images.ndim == 3:
        return images[:, None]
    first = images.ndim == 4 and images.shape[1] in CHANNELS
    last = images.ndim == 4 and images.shape[3] in CHANNELS
    if first == last:
        why = ", where either axis may be the channels" if first else ""
        raise ValueError(
            f"{path}: images must be (N, channels, height, width), (N, height, width, channels) or (N, height, width), "
            f"found {images.shape}{why}."
        )
    return images if first else images.transpose(0, 3, 1, 2)
