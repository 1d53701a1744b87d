"""Read the numbers of weights and vectors of a walk, at any parameters: never those of all weights at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from quotient_manifolds.symmetries.wires.walk import Linear, Vector, Walk

Array = np.ndarray
CHUNK = 1 << 22  # entries of a weight that are read together


class Values:
    """Read numbers by the id of a linear map or a vector, in float64, and remember of which parameters.

    Of gains they are those of every place. Vectors are kept, and the last weight.
    """

    def __init__(self, walk: Walk, params: Mapping[str, Tensor]) -> None:
        self._walk, self._params = walk, params
        self._parts: dict[int, Linear | Vector] = {id(each): each for each in (*walk.linears, *walk.vectors)}
        self._kept: dict[int, Array] = {}
        self._last: tuple[int, Array] | None = None
        self.asked: set[str] = set()

    def __getitem__(self, key: int) -> Array:
        part = self._parts[key]
        self.asked.add(part.entries.name)
        if isinstance(part, Vector):
            if key not in self._kept:
                self._kept[key] = self._gains(part) if part.gain else part.entries.read(self._params).cpu().numpy()
            return self._kept[key]
        if self._last is None or self._last[0] != key:
            self._last = None
            self._last = key, part.entries.read(self._params).cpu().numpy()
        return self._last[1]

    def _gains(self, vector: Vector) -> Array:
        entries = vector.entries
        index, _ = self._walk.notes["gain index", id(vector)]
        flat = self._params[entries.name].detach().reshape(-1)
        return (entries.scale * flat[torch.tensor(index)].double() + entries.offset).cpu().numpy()

    def chunks(self, linear: Linear, tap: int) -> Iterator[tuple[int, Array]]:
        """Yield the rows of a weight in parts, each with the place of its first."""
        _, out, width = linear.shape
        step = max(width, CHUNK // width, 1)
        self.asked.add(linear.entries.name)
        for start in range(0, out, step):
            (part,) = linear.entries.apply(lambda layout, start=start: layout[tap, start : start + step])
            yield start, part.read(self._params).cpu().numpy()

    def columns(self, linear: Linear, rows: Array) -> Iterator[Array]:
        """Yield some of the rows of a plain weight, in parts of their columns."""
        width = linear.shape[2]
        step = max(len(rows) + 1, CHUNK // len(rows), 1)
        self.asked.add(linear.entries.name)
        place = torch.from_numpy(rows)
        for start in range(0, width, step):
            (part,) = linear.entries.apply(lambda layout, start=start: layout[0, :, start : start + step])
            yield part.read(self._params)[place].cpu().numpy()
