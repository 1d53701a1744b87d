"""View entries of one parameter as (heads, rows, h) by offset and strides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch
from torch import Tensor, nn

Axis = tuple[tuple[int, int], ...]
"""Sizes and strides of the parts of one axis of a view, the outermost first; () is an axis of length 1."""


@dataclass(frozen=True)
class StridedView:
    """View distinct entries of one parameter as a tensor of shape (heads, rows, h).

    Entry (a, b, c) is number offset + a' + b' + c' of the flattened parameter, where a' is the sum of index times
    stride over the parts of the first axis, and so on. stored: the shape of the parameter.
    """

    name: str
    offset: int
    axes: tuple[Axis, Axis, Axis]
    stored: tuple[int, ...]

    @staticmethod
    def of(name: str, stored: tuple[int, ...], elements: Tensor, rows: Tensor) -> StridedView | None:
        """Return the view (heads, g r, h) of the entries elements (heads, g, h) + rows (r,).

        None if no offset and strides describe them.
        """
        offset = int(elements[0, 0, 0])
        heads, groups, width = elements[:, 0, 0], elements[0, :, 0], elements[0, 0, :]
        sums = heads[:, None, None] + groups[:, None] + width - 2 * offset
        if not torch.equal(sums, elements):
            return None
        axes = [_axis(each) for each in (heads, groups, rows, width)]
        if any(axis is None for axis in axes):
            return None
        first, second, third, last = (axis or () for axis in axes)
        return StridedView(name, offset + int(rows[0]), (first, second + third, last), stored)

    def first(self, columns: int) -> StridedView:
        """Return the view of the first columns; the last axis must have one stride."""
        ((_, stride),) = self.axes[2]
        return replace(self, axes=(*self.axes[:2], ((columns, stride),)))

    @property
    def numel(self) -> int:
        """Return the number of entries of the parameter."""
        return prod(self.stored)

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """Return (heads, rows, h)."""
        heads, rows, h = (prod(size for size, _ in axis) for axis in self.axes)
        return heads, rows, h

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return self.shape[1]

    @property
    def places(self) -> Tensor:
        """Return the indices of the entries in the flattened parameter, (heads, rows, h)."""
        return self.read({self.name: torch.arange(self.numel)})

    def read(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return the entries as (heads, rows, h), in the parameter's dtype, sharing memory if strides allow it."""
        w = params.get(self.name)
        if w is None or self._strides is None or w.numel() != self.numel or not w.is_contiguous():
            return self._opened(self._flat(params)).reshape(self.shape)
        return w.as_strided(self.shape, self._strides, w.storage_offset() + self.offset)  # in one operation

    @cached_property
    def _strides(self) -> tuple[int, ...] | None:
        """Return one stride per axis; None if an axis has several."""
        plain = all(len(axis) < 2 for axis in self.axes)
        return tuple(axis[0][1] if axis else 1 for axis in self.axes) if plain else None

    def write(self, params: dict[str, Tensor], value: Tensor) -> None:
        """Write `value` (heads, rows, h) to the entries in place, cast to the parameter's dtype; inverse of `read`."""
        if isinstance(params.get(self.name), nn.Parameter):
            raise ValueError(f"writing would change the model's own parameter {self.name!r}: pass a dict of clones.")
        flat = self._flat(params)
        target = self._opened(flat)
        target.copy_(value.reshape(target.shape))
        stored = params[self.name]
        if flat.data_ptr() != stored.data_ptr():  # `flat` is a copy, because the strides are unusual
            stored.copy_(flat.view(stored.shape))
        params[self.name] = stored  # notifies mappings of sharded parameters; a dict is unchanged

    def _flat(self, params: Mapping[str, Tensor]) -> Tensor:
        if self.name not in params:
            raise ValueError(f"params must hold {self.name!r}, which a symmetric pair of this model moves. Found none.")
        stored = params[self.name]
        if stored.numel() != self.numel:
            raise ValueError(
                f"{self.name!r} has shape {tuple(stored.shape)}, where {self.numel} numbers were expected, of which "
                f"some are viewed as {self.shape}."
            )
        return stored.reshape(-1).contiguous()  # reshape may return a strided or expanded view

    def _opened(self, flat: Tensor) -> Tensor:
        parts = [part for axis in self.axes for part in axis]
        sizes, strides = [size for size, _ in parts], [stride for _, stride in parts]
        return flat.as_strided(sizes, strides, flat.storage_offset() + self.offset)


def _axis(numbers: Tensor) -> Axis | None:
    """Return sizes and strides that generate these numbers up to a constant; None if none do."""
    if len(numbers) == 1:
        return ()
    steps = numbers.diff()
    stride = int(steps[0])
    other = (steps != stride).nonzero()
    run = int(other[0]) + 1 if len(other) else len(numbers)
    if len(numbers) % run or stride < 1:
        return None
    blocks = numbers.view(-1, run)
    if not torch.equal(blocks - blocks[:, :1], (numbers[:run] - numbers[0]).expand_as(blocks)):
        return None
    outer = _axis(blocks[:, 0])
    return None if outer is None else (*outer, (run, stride))
