"""Say which entries of a parameter every process holds, and read whole parameters of which each holds a part.

All processes call everything here together, in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

Params = dict[str, Tensor]
Box = tuple[slice, ...]
"""Which entries of a parameter a process holds: a range in every dimension."""


@final
@dataclass(frozen=True)
class Layout:
    """Say which entries of a parameter of this shape each process holds, by its rank."""

    shape: torch.Size
    boxes: tuple[Box, ...]

    @cached_property
    def senders(self) -> frozenset[int]:
        """Return the processes whose parts make up the parameter: of several that hold the same part, the first."""
        first: dict[tuple[tuple[int, int], ...], int] = {}
        for rank, box in enumerate(self.boxes):
            if box_size(box):
                first.setdefault(tuple((each.start, each.stop) for each in box), rank)
        return frozenset(first.values())

    @property
    def split(self) -> bool:
        """Tell whether every entry is held by exactly one process."""
        return sum(map(box_size, self.boxes)) == prod(self.shape)


@final
class Whole(dict[str, Tensor]):
    """Behave as a dict of whole parameters, of which every process holds its part: what is read is gathered.

    Items are gathered when they are read and stored in parts when they are written. A tensor that was read and then
    changed in place must be written back. One whole parameter is kept, the last: folding reads a table row by row.
    All processes must read and write the same, in the same order.
    """

    def __init__(self, parts: Params, layouts: Mapping[str, Layout]) -> None:
        super().__init__(parts)
        self._layouts = layouts
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None  # before the next is made
            self._last = name, self._gathered(name)
        return self._last[1]

    def get(self, name: str, default: Any = None) -> Any:  # as __getitem__: dict's own would return the part
        return self[name] if name in self.keys() else default

    def __setitem__(self, name: str, whole: Tensor) -> None:
        layout = self._layouts[name]
        if whole.shape != layout.shape:
            raise ValueError(f"{name} must have shape {tuple(layout.shape)}. Found {tuple(whole.shape)}")
        super().__setitem__(name, whole[layout.boxes[dist.get_rank()]].clone(memory_format=torch.contiguous_format))
        self._last = name, whole

    def parts(self) -> Params:
        """Return what this process holds."""
        return {name: super(Whole, self).__getitem__(name) for name in self}

    def _gathered(self, name: str) -> Tensor:
        part, layout = super().__getitem__(name), self._layouts[name]
        whole = part.new_empty(layout.shape)
        flat = [part.new_empty(box_size(box)) for box in layout.boxes]
        flat[dist.get_rank()] = part.reshape(-1).contiguous()
        for source, numbers in enumerate(flat):
            if source in layout.senders:
                dist.broadcast(numbers, source)
                whole[layout.boxes[source]] = numbers.view(box_shape(layout.boxes[source]))
        return whole


def box_shape(box: Box) -> tuple[int, ...]:
    return tuple(each.stop - each.start for each in box)


def box_size(box: Box) -> int:
    return prod(box_shape(box))
