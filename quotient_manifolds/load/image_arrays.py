"""Read images and labels from a .npz file: its headers, and only those rows that are wanted."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, final

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor, nn

from quotient_manifolds.load.labelled_examples import Examples, Labels, new_label
from quotient_manifolds.load.preparation import Normalisation, Preparation, normalising_home
from quotient_manifolds.messages import first_line, shown

CHANNELS = (1, 3)  # grey, RGB
BOMB, RATIO = 2**26, 100  # bytes, and how many times its place in the file: no images or labels are packed so well
PIECE = 2**20  # bytes read at a time


@final
class ArrayExamples(Examples):
    """Read the arrays `images` and `labels` (N,) of a .npz file; nothing in it is unpickled.

    images: (N, channels, height, width), (N, height, width, channels) or (N, height, width), uint8 (then prepared like
    pictures: divided by 255 and normalised) or floating point (taken as it is, unless mean and std are given).
    """

    keyword = "pixel_values"

    def __init__(self, path: Path, labels: Labels | None, normalisation: Normalisation | None) -> None:
        self.path, self._normalisation = path, normalisation
        header = StoredArray(path, "labels")
        if len(header.shape) != 1 or header.dtype.kind not in "iu" or not header.shape[0]:
            raise ValueError(f"{shown(path)}: labels must be integers (N,), found {header.dtype} {header.shape}.")
        found = header.rows(range(header.shape[0])).tolist()
        self.labels = [new_label(label, labels, self.where(row)) for row, label in enumerate(found)]

    def where(self, row: int) -> str:
        return f"{shown(self.path)}, row {row}"

    def inputs(
        self, batches: Sequence[Sequence[int]], model: nn.Module, homes: Sequence[Path]
    ) -> tuple[list[dict[str, Tensor]], dict[str, Any]]:
        images = StoredArray(self.path, "images")
        _check_images(images.shape, images.dtype, self.path)
        if images.shape[0] != len(self.labels):
            raise ValueError(f"{shown(self.path)} has {images.shape[0]} images and {len(self.labels)} labels.")
        # All in one pass, for a compressed file is read to its end however few rows are wanted.
        values = images.rows([row for rows in batches for row in rows])
        if values.ndim == 3:
            values = values[:, None]
        elif values.shape[1] not in CHANNELS:
            values = values.transpose(0, 3, 1, 2)
        pieces = np.split(values, np.cumsum([len(rows) for rows in batches])[:-1])
        if images.dtype == np.uint8:
            prepare = Preparation.of(None, self._normalisation, model, homes)
            prepared = [
                prepare(list(each), list(map(self.where, rows))) for each, rows in zip(pieces, batches, strict=True)
            ]
        else:
            prepared = [torch.from_numpy(np.ascontiguousarray(each)).float() for each in pieces]
            if self._normalisation is not None:
                prepared = list(map(self._normalisation, prepared))
            elif values.min() >= 0 and values.max() <= 1 and (home := normalising_home(homes)) is not None:
                raise ValueError(
                    f"The images in {shown(self.path)} lie in 0 ... 1, and the model in {shown(home)} was trained on "
                    "normalised ones; give mean and std, or mean: none if they are to be taken as they are."
                )
        return [{self.keyword: each} for each in prepared], {}


@final
class StoredArray:
    """Describe an array in a .npz file, whose header has been read and agrees with the size of what it heads."""

    def __init__(self, path: Path, name: str) -> None:
        if not path.is_file():
            raise ValueError(f"There is no data file {shown(path)}.")
        self.path, self.name = path, name
        with self._opened() as (stream, entry):
            size = stream.tell() + math.prod(self.shape) * self.dtype.itemsize
            if self.dtype.hasobject or entry.file_size != size:
                raise ValueError(f"{name} is no array of {self.dtype} {self.shape}")
            if entry.file_size > max(BOMB, RATIO * entry.compress_size):
                raise ValueError(f"{name} has {entry.file_size} bytes, packed into {entry.compress_size}")

    @contextmanager
    def _opened(self) -> Iterator[tuple[IO[bytes], zipfile.ZipInfo]]:
        """Yield a stream of the values, whose header has been read; whatever fails becomes one ValueError."""
        try:
            with zipfile.ZipFile(self.path) as archive:
                full = f"{self.name}.npy"
                entry = archive.getinfo(full if full in archive.namelist() else self.name)
                with archive.open(entry) as stream:
                    version = npy.read_magic(stream)
                    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
                    if version not in readers:
                        raise ValueError(f"its arrays are of version {version} of NumPy's format")
                    self.shape, self.fortran, self.dtype = readers[version](stream)
                    yield stream, entry
        except KeyError as error:
            raise ValueError(f"{shown(self.path)} has no array {self.name!r}: expected images and labels.") from error
        except Exception as error:  # zipfile, zlib and numpy raise half a dozen kinds for damaged files
            what = f"{shown(self.path)} is no readable .npz file of plain arrays"
            raise ValueError(f"{what}: {first_line(error)}") from error

    def rows(self, wanted: Sequence[int]) -> NDArray[Any]:
        """Return these rows, (len(wanted), *shape[1:]).

        The file is read to its end, a piece at a time, for its checksum tells only then whether it is damaged.
        """
        order = np.asarray(wanted, dtype=np.intp)
        with self._opened() as (stream, _):
            if self.fortran:
                return np.frombuffer(stream.read(), self.dtype).reshape(self.shape[::-1]).T[order]
            found = np.empty((len(order), *self.shape[1:]), self.dtype)
            row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
            step = max(1, PIECE // max(1, row_bytes))
            for start in range(0, self.shape[0], step):
                count = min(step, self.shape[0] - start)
                piece = np.frombuffer(stream.read(count * row_bytes), self.dtype).reshape(count, *self.shape[1:])
                here = (start <= order) & (order < start + count)
                found[here] = piece[order[here] - start]
            stream.read(1)  # the end, where the checksum is compared
            return found


def _check_images(shape: tuple[int, ...], dtype: Any, path: Path) -> None:
    """Raise ValueError unless an array of this shape is one of images."""
    if dtype != np.uint8 and dtype.kind != "f":
        raise ValueError(f"{shown(path)}: images must be uint8 or floating point, found {dtype}.")
    axes = sum(shape[axis] in CHANNELS for axis in (1, 3)) if len(shape) == 4 else 0
    if 0 in shape[1:] or (len(shape) != 3 and axes != 1):
        why = ", where either axis may be the channels" if axes == 2 else ""
        raise ValueError(
            f"{shown(path)}: images must be (N, channels, height, width), (N, height, width, channels) or "
            f"(N, height, width), found {shape}{why}."
        )
