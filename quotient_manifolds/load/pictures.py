"""Images from folders, one folder for each class."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from quotient_manifolds.load.huggingface import first_line
from quotient_manifolds.load.labels import Labels, new_label
from quotient_manifolds.load.pixels import Normalisation
from quotient_manifolds.load.points import Points, Read

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
MODES = {1: "L", 3: "RGB"}
DEEP = ("I", "F")  # how the names of Pillow's modes with more than 8 bits begin; conversion would clip them


@final
class PicturePoints(Points):
    """The pictures in the folders of `path`, in the order of their names; the folders' names, sorted, are the classes.

    Names sort as text (10 before 2). A folder's own folders belong to it; hidden files and files that are no pictures
    do not count. Each picture is resized to `size` along its shorter side (bicubic), cropped to size x size in the
    middle, as CLIP does it, and scaled to 0 ... 1 before it is normalised; without a size it stays as large as it is.
    """

    keyword = "pixel_values"

    def __init__(
        self,
        path: Path,
        labels: Labels | None,
        normalisation: Normalisation | None,
        *,
        size: int | None = None,
        channels: int = 3,
    ) -> None:
        if not path.is_dir():
            raise ValueError(f"There is no folder of images {path}.")
        names = sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
        if not names:
            raise ValueError(f"{path} has no folders: expected one for each class, with its images.")
        by_name = isinstance(labels, Mapping)
        self._files: list[Path] = []
        self._labels: list[int] = []
        for place, name in enumerate(names):
            files = _pictures(path / name)
            self._files += files
            self._labels += [new_label(name if by_name else place, labels, str(path / name))] * len(files)
        self._normalisation, self._size, self._channels = normalisation, size, channels

    @property
    def labels(self) -> Sequence[int]:
        return self._labels

    def file(self, row: int) -> Path:
        return self._files[row]

    def where(self, row: int) -> str:
        return str(self._files[row])

    def reader(self, model: nn.Module, home: Path | None) -> Read:
        def read(rows: Sequence[int]) -> dict[str, Tensor]:
            pixels = [_pixels(self._files[row], self._size, MODES[self._channels]) for row in rows]
            for row, picture in zip(rows, pixels, strict=True):
                if picture.shape != pixels[0].shape:
                    raise ValueError(f"{self.where(row)} is of another size than others; give a size for all.")
            scaled = torch.from_numpy(np.stack(pixels)).float() / 255
            return {self.keyword: scaled if self._normalisation is None else self._normalisation(scaled)}

        return read


def _pictures(folder: Path) -> list[Path]:
    files = [Path(where) / name for where, _, names in os.walk(folder) for name in names if not name.startswith(".")]
    found = sorted(file for file in files if file.suffix.lower() in SUFFIXES)
    if not found:
        raise ValueError(f"{folder} has no images: expected {', '.join(SUFFIXES)}.")
    return found


def _pixels(file: Path, size: int | None, mode: str) -> Any:
    """uint8 (channels, height, width)"""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError('Images need the pillow library: pip install "quotient-manifolds[images]".') from error
    try:
        with Image.open(file) as picture:
            deep = picture.mode.startswith(DEEP)
            pixels = None if deep else np.array(_cropped(picture.convert(mode), size), dtype=np.uint8)
    except Exception as error:  # Pillow raises OSError, SyntaxError, ValueError and kinds of its own
        raise ValueError(f"{file} is no readable image: {first_line(error)}") from error
    if pixels is None:
        raise ValueError(f"{file} has pixels of more than 8 bits; save it with 8.")
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _cropped(picture: Any, size: int | None) -> Any:
    if size is None:
        return picture
    shorter = min(picture.size)
    width, height = (int(size * side / shorter) for side in picture.size)
    if (width, height) != picture.size:
        picture = picture.resize((width, height), 3)  # 3: bicubic
    left, top = round((width - size) / 2), round((height - size) / 2)
    return picture.crop((left, top, left + size, top + size))
