"""Read the numbers of weights and vectors of a walk, at any parameters."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from quotient_manifolds.symmetries.wires.walk import Walk

Array = np.ndarray


class Values(dict[int, Array]):
    """Read numbers when they are asked for, and remember of which parameters: of gains those of every place."""

    def __init__(self, walk: Walk, params: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._walk, self._params = walk, params
        self._parts = {id(each): each for each in (*walk.linears, *walk.vectors)}
        self.asked: set[str] = set()

    def __missing__(self, key: int) -> Array:
        part = self._parts[key]
        entries = part.entries
        self.asked.add(entries.name)
        if getattr(part, "gain", False):
            index, _ = self._walk.notes["gain index", key]
            flat = self._params[entries.name].detach().reshape(-1)
            self[key] = (entries.scale * flat[torch.tensor(index)].double() + entries.offset).cpu().numpy()
        else:
            self[key] = entries.read(self._params).cpu().numpy()
        return self[key]
