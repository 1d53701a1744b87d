"""Read the numbers of weights and vectors of a walk, at any parameters: never those of all weights at once."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from quotient_manifolds.symmetries.freedom import gaussian, typical
from quotient_manifolds.symmetries.wires.entries import Entries
from quotient_manifolds.symmetries.wires.walk import Linear, Vector, Walk

Array = np.ndarray
NOISE = 0.03  # relative to the typical size of a parameter
CHUNK = 1 << 22  # entries of a weight that are read together


class Generic(Mapping[str, Tensor]):
    """Give parameters in float64 with a little noise, one at a time and the same every time it is asked.

    So nothing is zero, one or of low rank because it starts there: gains of 1, biases of 0, the B of an adapter.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self._params = params

    def __getitem__(self, name: str) -> Tensor:
        w = self._params[name].detach()
        seed = torch.Generator().manual_seed(sum(name.encode()))
        return w.double() + NOISE * typical(w) * gaussian(w, seed)

    def __iter__(self) -> Iterator[str]:
        return iter(self._params)

    def __len__(self) -> int:
        return len(self._params)


class Values:
    """Read numbers by the id of a linear map or a vector, in float64, and remember of which parameters.

    Of gains they are those of every place. Vectors are kept, and the last weight.
    """

    def __init__(self, walk: Walk, params: Mapping[str, Tensor]) -> None:
        self._walk, self._params = walk, params
        self._parts: dict[int, Linear | Vector] = {id(each): each for each in (*walk.linears, *walk.vectors)}
        self._kept: dict[int, Array] = {}
        self._last: tuple[int, Array] | None = None
        self.asked: dict[str, tuple[weakref.ref[Tensor], int]] = {}

    def __getitem__(self, key: int) -> Array:
        part = self._parts[key]
        if isinstance(part, Vector):
            if key not in self._kept:
                self._kept[key] = self._gains(part) if part.gain else self._read(part.entries)
            return self._kept[key]
        if self._last is None or self._last[0] != key:
            self._last = None
            self._last = key, self._read(part.entries)
        return self._last[1]

    def hold(self, params: Mapping[str, Tensor]) -> bool:
        """Say whether these parameters have the numbers that were read."""
        if not isinstance(params, dict):
            return isinstance(params, Generic) and params is self._params
        return all(params[name] is w() and params[name]._version == at for name, (w, at) in self.asked.items())

    def _parameter(self, name: str) -> Tensor:
        w = self._params[name]
        self.asked[name] = weakref.ref(w), w._version
        return w

    def _read(self, entries: Entries) -> Array:
        return entries.read({entries.name: self._parameter(entries.name)}).cpu().numpy()

    def _gains(self, vector: Vector) -> Array:
        entries = vector.entries
        index, _ = self._walk.notes["gain index", id(vector)]
        flat = self._parameter(entries.name).detach().reshape(-1)
        return (entries.scale * flat[torch.tensor(index)].double() + entries.offset).cpu().numpy()

    def chunks(self, linear: Linear, tap: int) -> Iterator[tuple[int, Array]]:
        """Yield the rows of a weight in parts, each with the place of its first."""
        _, out, width = linear.shape
        step = max(width, CHUNK // width, 1)
        params = {linear.entries.name: self._parameter(linear.entries.name)}
        for start in range(0, out, step):
            (part,) = linear.entries.apply(lambda layout, start=start: layout[tap, start : start + step])
            yield start, part.read(params).cpu().numpy()

    def columns(self, linear: Linear, rows: Array) -> Iterator[Array]:
        """Yield some of the rows of a plain weight, in parts of their columns."""
        width = linear.shape[2]
        step = max(len(rows) + 1, CHUNK // len(rows), 1)
        params = {linear.entries.name: self._parameter(linear.entries.name)}
        place = torch.from_numpy(rows)
        for start in range(0, width, step):
            (part,) = linear.entries.apply(lambda layout, start=start: layout[0, :, start : start + step])
            yield part.read(params)[place].cpu().numpy()
