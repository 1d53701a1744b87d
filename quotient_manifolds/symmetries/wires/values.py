"""Read the numbers of weights and vectors when somebody asks for them: never those of all weights at once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from quotient_manifolds.symmetries.wires.walk import Linear, Vector, Walk

Array = np.ndarray
CHUNK = 1 << 22  # entries of a weight that are read together


class Values:
    """Give the numbers of what a walk applies, by the id of a linear map or a vector, in float64; the last is kept."""

    def __init__(self, walk: Walk) -> None:
        self.walk = walk
        self._named: dict[int, Linear | Vector] = {id(each): each for each in (*walk.linears, *walk.vectors)}
        self._last: tuple[int, Array] | None = None

    def __getitem__(self, key: int) -> Array:
        if self._last is None or self._last[0] != key:
            self._last = None
            self._last = key, self._named[key].entries.read(self.walk.parameters).cpu().numpy()
        return self._last[1]

    def chunks(self, linear: Linear, tap: int) -> Iterator[tuple[int, Array]]:
        """Yield the rows of a weight in parts, each with the place of its first."""
        _, out, width = linear.shape
        step = max(width, CHUNK // width, 1)
        for start in range(0, out, step):
            (part,) = linear.entries.apply(lambda layout, start=start: layout[tap, start : start + step])
            yield start, part.read(self.walk.parameters).cpu().numpy()

    def columns(self, linear: Linear, rows: Array) -> Iterator[Array]:
        """Yield some of the rows of a plain weight, in parts of their columns."""
        width = linear.shape[2]
        step = max(len(rows) + 1, CHUNK // len(rows), 1)
        place = torch.from_numpy(rows)
        for start in range(0, width, step):
            (part,) = linear.entries.apply(lambda layout, start=start: layout[0, :, start : start + step])
            yield part.read(self.walk.parameters)[place].cpu().numpy()
