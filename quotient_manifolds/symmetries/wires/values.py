"""Read the numbers of weights and vectors as somebody asks for them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from quotient_manifolds.sharded import Whole
from quotient_manifolds.symmetries.wires.entries import CHUNK, Entries
from quotient_manifolds.symmetries.wires.generic import Generic
from quotient_manifolds.symmetries.wires.linear_algebra import Array
from quotient_manifolds.symmetries.wires.uses import Linear, Vector

T = TypeVar("T")
FEW = 16


class Values:
    """Read numbers in float64, of parameters that somebody else holds, and remember of which.

    Vectors are kept, weights are read a part at a time.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self._hold(params)
        self._asked: dict[str, int] = {}
        self._kept: dict[int, Array] = {}
        self.few: dict[str, Array] = {}
        """A few numbers of each parameter that was asked for; whoever wants to know who asks begins with none."""

    def hold(self, params: Mapping[str, Tensor]) -> bool:
        """Return whether these parameters have the numbers that were read; if so, read the others of them, too."""
        if isinstance(params, Generic) or not self._params:
            return self._made is not None and self._made() is params
        held = dict(params.items())
        now = ((held[name], self._params[name](), at) for name, at in self._asked.items())
        if not all(w is own and w._version == at for w, own, at in now):
            return False
        self._hold(params)
        return True

    def _hold(self, params: Mapping[str, Tensor]) -> None:
        """Refer to parameters, and to a mapping that makes them when they are asked for: here are only their parts."""
        self._made: weakref.ref[Any] | None = weakref.ref(params) if isinstance(params, (Generic, Whole)) else None
        held = {} if isinstance(params, Generic) else dict(params.items())
        self._params = {name: weakref.ref(w) for name, w in held.items()}

    def vector(self, vector: Vector) -> Array:
        """Return the numbers that are added, (rows, n), or of a gain those of every place, (n,)."""
        self._note(vector.entries.name)
        if id(vector) not in self._kept:
            entries = vector.entries
            if vector.gain:
                entries = replace(entries, layout=torch.from_numpy(vector.index))
            self._kept[id(vector)] = self._read(entries).copy()
        return self._kept[id(vector)]

    def chunks(self, linear: Linear, tap: int = 0) -> Iterator[tuple[int, Array]]:
        """Yield the rows of a weight in parts, each with the place of its first."""
        (entries,), width = linear.entries.apply(itemgetter(tap)), linear.shape[2]
        for start, part in entries.parts(0, max(width, CHUNK // width, 1)):
            yield start, self._read(part)

    def columns(self, linear: Linear, rows: Array) -> Iterator[Array]:
        """Yield some of the rows of a plain weight, in parts of their columns."""
        first, last = int(rows.min()), int(rows.max()) + 1
        (entries,) = linear.entries.apply(itemgetter((0, slice(first, last))))
        for _, part in entries.parts(1, max(len(rows) + 1, CHUNK // (last - first), 1)):
            yield self._read(part)[rows - first]

    def answer(self, linear: Linear, x: Array) -> Array:
        """Return what a plain weight makes of columns (in, k)."""
        return np.concatenate([W @ x for _, W in self.chunks(linear)])

    def _read(self, entries: Entries) -> Array:
        held = {}
        if entries.name in self._params:
            held = {entries.name: _alive(self._params[entries.name])}
            self._asked[entries.name] = held[entries.name]._version
        self._note(entries.name)
        return entries.read(_alive(self._made) if self._made else held, copy=False).numpy()

    def _note(self, name: str) -> None:
        if name in self.few:
            return
        params = _alive(self._made) if self._made else {name: _alive(self._params[name])}
        count = params.count(name) if isinstance(params, Generic) else params[name].numel()
        places = torch.linspace(0, max(count - 1, 0), min(count, FEW)).long()
        found = params.at(name, places) if isinstance(params, Generic) else params[name].detach().reshape(-1)[places]
        self.few[name] = found.double().cpu().numpy()


def _alive(what: weakref.ref[T]) -> T:
    found = what()
    if found is None:
        raise RuntimeError("numbers must be read while the parameters are there. Found them gone")
    return found
