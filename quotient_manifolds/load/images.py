"""Read images from folders, one folder for each class."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
from torch import Tensor, nn

from quotient_manifolds.load.labelled_examples import Examples, Head, Labels, named_label, new_label
from quotient_manifolds.load.preparation import Normalisation, Picture, Preparation, channels_first
from quotient_manifolds.messages import first_line, shown

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # as Pillow calls them; others run programs
MODES = {1: "L", 3: "RGB"}
DEEP = ("I", "F")  # how the names of Pillow's modes with more than 8 bits begin; conversion would clip them
LARGEST = 89_478_485  # pixels; above it Pillow suspects a bomb


@final
class FolderExamples(Examples):
    """Find the pictures in the folders of `path`, in the order of their names; the folders stand for classes.

    Names sort as text (10 before 2). A folder's own folders belong to it; hidden files and files that are no pictures
    do not count. The class of a folder is the one that `labels` gives its name or its place; without them, that of its
    name in the model's configuration; where the model does not know the names, its place, if all classes have a folder.
    """

    keyword = "pixel_values"

    def __init__(
        self,
        path: Path,
        labels: Labels | None,
        normalisation: Normalisation | None,
        *,
        size: int | None = None,
        channels: int | None = None,
    ) -> None:
        if not path.is_dir():
            raise ValueError(f"There is no folder of images {shown(path)}.")
        self.path = path
        self._names = sorted(each.name for each in path.iterdir() if each.is_dir() and not each.name.startswith("."))
        if not self._names:
            raise ValueError(f"{shown(path)} has no folders: expected one for each class, with its images.")
        by_name = isinstance(labels, Mapping)
        self._files: list[Path] = []
        self.labels: list[int] = []
        for place, name in enumerate(self._names):
            files = _pictures(path / name)
            self._files += files
            self.labels += [new_label(name if by_name else place, labels, shown(path / name))] * len(files)
        self._by_place = labels is None
        self._normalisation, self._size, self._channels = normalisation, size, channels

    def classes(self, rows: Sequence[int], head: Head) -> list[int]:
        known = [name for name in self._names if head.find(name) is not None]
        if self._by_place and known:  # all of them, or the one that is not is named
            table = [named_label(name, head, shown(self.path / name)) for name in self._names]
            return [table[self.labels[row]] for row in rows]
        if self._by_place and head.count not in (None, len(self._names)):
            raise ValueError(
                f"{shown(self.path)} has {len(self._names)} folders and the model {head.count} classes "
                f"({head.listed()}), none of them called like a folder; give labels, the class of each folder."
            )
        return [self.labels[row] for row in rows]

    def file(self, row: int) -> Path:
        return self._files[row]

    def where(self, row: int) -> str:
        return shown(self._files[row])

    def inputs(
        self, batches: Sequence[Sequence[int]], model: nn.Module, homes: Sequence[Path]
    ) -> tuple[list[dict[str, Tensor]], dict[str, Any]]:
        wanted = getattr(getattr(model, "config", None), "num_channels", None)
        mode = MODES[self._channels or (wanted if isinstance(wanted, int) and wanted in MODES else 3)]
        prepare = Preparation.of(self._size, self._normalisation, model, homes)
        return [
            {self.keyword: prepare([_pixels(self.file(row), mode) for row in rows], list(map(self.where, rows)))}
            for rows in batches
        ], {}


def _pictures(folder: Path) -> list[Path]:
    files = [Path(where) / name for where, _, names in os.walk(folder) for name in names if not name.startswith(".")]
    found = sorted(file for file in files if file.suffix.lower() in SUFFIXES)
    if not found:
        raise ValueError(f"{shown(folder)} has no images: expected {', '.join(SUFFIXES)}.")
    return found


def _pixels(file: Path, mode: str) -> Picture:
    """Return the values of a picture, uint8 (channels, height, width)."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError('Images need the pillow library: pip install "quotient-manifolds[images]".') from error
    if not file.is_file():  # reading a pipe may never end
        raise ValueError(f"{shown(file)} is no readable image: it is no regular file.")
    try:
        with Image.open(file, formats=FORMATS) as picture:
            refused = _why_not(picture)
            pixels = None if refused else np.array(picture.convert(mode), dtype=np.uint8)
    except Exception as error:  # Pillow raises OSError, SyntaxError, ValueError and kinds of its own
        raise ValueError(f"{shown(file)} is no readable image: {shown(first_line(error))}") from error
    if pixels is None:
        raise ValueError(f"{shown(file)} has {refused}.")
    return channels_first(pixels)


def _why_not(picture: Any) -> str | None:
    if picture.mode.startswith(DEEP):
        return "pixels of more than 8 bits; save it with 8"
    if picture.width * picture.height > LARGEST:
        return f"{picture.width} x {picture.height} pixels, more than the {LARGEST} that are read"
    return None
