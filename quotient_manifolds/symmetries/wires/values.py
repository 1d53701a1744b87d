"""Read the numbers of weights and vectors of a walk, at any parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from quotient_manifolds.symmetries.freedom import gaussian, typical
from quotient_manifolds.symmetries.wires.walk import Walk

Array = np.ndarray
NOISE = 0.03  # relative to the typical size of a parameter


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


class Values(dict[int, Array]):
    """Read numbers when they are asked for, and remember of which parameters: of gains those of every place."""

    def __init__(self, walk: Walk, params: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._walk, self._params = walk, params
        self._parts = {id(each): each for each in (*walk.linears, *walk.vectors)}
        self.asked: dict[str, tuple[weakref.ref[Tensor], int]] = {}

    def __missing__(self, key: int) -> Array:
        part = self._parts[key]
        entries = part.entries
        w = self._params[entries.name]
        self.asked[entries.name] = weakref.ref(w), w._version
        if getattr(part, "gain", False):
            index, _ = self._walk.notes["gain index", key]
            flat = w.detach().reshape(-1)
            self[key] = (entries.scale * flat[torch.tensor(index)].double() + entries.offset).cpu().numpy()
        else:
            self[key] = entries.read(self._params).cpu().numpy()
        return self[key]

    def hold(self, params: Mapping[str, Tensor]) -> bool:
        """Say whether these parameters have the numbers that were read."""
        if not isinstance(params, dict):
            return isinstance(params, Generic) and params is self._params
        return all(params[name] is w() and params[name]._version == at for name, (w, at) in self.asked.items())
