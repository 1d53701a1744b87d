"""Tell which entries of a parameter a tensor holds, through views, without their numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter, methodcaller
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from quotient_manifolds.symmetries.wires.generic import Generic

CHUNK = 1 << 18  # entries of a weight that are read together


@dataclass(frozen=True, eq=False)
class Entries:
    """Hold a view of a parameter times a number, plus another.

    layout: a tensor without memory, whose strides tell the entries; or, where these do not suffice, the place of each.
    It is stored as integers, since torch pickles and copies a tensor without memory without its offset.
    """

    name: str
    layout: Tensor
    scale: float = 1.0
    offset: float = 0.0

    @staticmethod
    def of(name: str, parameter: Tensor) -> Entries:
        return Entries(name, torch.empty(parameter.shape, device="meta"))

    def __reduce__(self) -> tuple[Any, ...]:
        layout = self.layout
        if not layout.is_meta:
            return Entries, (self.name, layout, self.scale, self.offset)
        place = tuple(layout.shape), layout.stride(), layout.storage_offset(), _memory(layout)
        return _stored, (self.name, place, self.scale, self.offset)

    @property
    def shape(self) -> torch.Size:
        return self.layout.shape

    def apply(self, view: Callable[[Tensor], Any]) -> list[Entries]:
        """Return what a view makes of them, in parts."""
        if self.layout.is_meta:
            try:
                made = view(self.layout)
                parts = [made] if isinstance(made, Tensor) else list(made)
                if all(p.untyped_storage()._cdata == self.layout.untyped_storage()._cdata for p in parts):
                    return [replace(self, layout=part) for part in parts]
            except RuntimeError:  # strides do not suffice
                pass
        made = view(self.index().contiguous())
        return [replace(self, layout=part) for part in ([made] if isinstance(made, Tensor) else made)]

    def parts(self, axis: int, step: int) -> Iterator[tuple[int, Entries]]:
        """Yield so many of them along an axis after others, each time with the place of the first."""
        for start in range(0, self.shape[axis], step):
            (part,) = self.apply(methodcaller("narrow", axis, start, min(step, self.shape[axis] - start)))
            yield start, part

    def viewed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Entries]:
        """Return what a recorded view operation makes of them."""
        return self.apply(lambda layout: func(*tree_map_only(Tensor, lambda _: layout, args), **kwargs))

    def times(self, factor: float) -> Entries:
        return replace(self, scale=self.scale * factor, offset=self.offset * factor)

    def plus(self, number: float) -> Entries:
        return replace(self, offset=self.offset + number)

    @property
    def key(self) -> tuple[Any, ...]:
        """What two views of the same entries in the same order have in common."""
        if self.layout.is_meta:
            axes = zip(self.layout.shape, self.layout.stride(), strict=True)
            steps = tuple((size, step if size > 1 else 0) for size, step in axes)
            return self.name, self.layout.storage_offset(), steps
        return self.name, tuple(self.layout.shape), self.layout.numpy().tobytes()

    def is_multiple(self, other: Entries) -> bool:
        """Return whether both are the same entries in the same order, up to a factor."""
        return self.key == other.key and self.offset * other.scale == other.offset * self.scale

    @property
    def turned(self) -> Entries:
        """Return the transpose of a weight."""
        return replace(self, layout=self.layout.mT)

    def meets(self, other: Entries) -> bool:
        """Return whether two views of one parameter have entries in common."""
        (first, last), (start, stop) = self.span, other.span
        if last < start or stop < first:
            return False
        return self.key == other.key or bool(torch.isin(self.index().reshape(-1), other.index().reshape(-1)).any())

    def narrowed(self) -> Entries:
        """Return the view without its repetitions: one along every axis that is expanded."""
        layout = self.layout
        for axis, stride in enumerate(layout.stride()):
            if stride == 0 and layout.shape[axis] > 1:
                layout = layout.narrow(axis, 0, 1)
        return replace(self, layout=layout)

    @property
    def overlap(self) -> bool:
        """Return whether a number of the parameter stands at several places."""
        if self.layout.is_meta:
            extent = 0
            for stride, size in sorted(zip(self.layout.stride(), self.layout.shape, strict=True)):
                if size > 1 and stride <= extent:
                    break
                extent += (size - 1) * stride
            else:
                return False
        return len(self.index().unique()) < self.layout.numel()

    @property
    def first(self) -> int:
        """Return the place of the first entry in the parameter."""
        return int(self.layout.storage_offset() if self.layout.is_meta else self.layout.reshape(-1)[0])

    @property
    def span(self) -> tuple[int, int]:
        """Return the places of the first and of the last number in the parameter, as it is stored."""
        if not self.layout.is_meta:
            return (int(self.layout.min()), int(self.layout.max())) if self.layout.numel() else (0, -1)
        axes = zip(self.layout.shape, self.layout.stride(), strict=True)
        return self.first, self.first + sum((size - 1) * step for size, step in axes)

    def index(self) -> Tensor:
        """Return the place of each entry in the parameter, counted row by row, in the shape of the view."""
        if not self.layout.is_meta:
            return self.layout
        found = torch.full((), self.first)
        for size, stride in zip(self.layout.shape, self.layout.stride(), strict=True):
            found = found[..., None] + torch.arange(size) * stride
        return found

    def add_to(self, parameters: dict[str, Tensor], change: Tensor) -> None:
        """Add a change of the viewed (scaled) tensor to the parameter, in place (clone the tensors first)."""
        w = parameters[self.name]
        flat = w.reshape(-1)
        added = (change if self.scale == 1.0 else change / self.scale).to(flat.device, flat.dtype)
        if self.layout.is_meta:
            start = self.layout.storage_offset() + flat.storage_offset()
            target = flat.as_strided(self.layout.shape, self.layout.stride(), start)
            target += added
        else:
            flat[self.layout.reshape(-1)] += added.reshape(-1)
        parameters[self.name] = flat.view(w.shape)

    def slopes(self, grads: Mapping[str, Tensor]) -> Tensor:
        """Return the numbers of a gradient that stand where the entries do, as a view of it if that is possible."""
        flat = grads[self.name].reshape(-1)
        if not self.layout.is_meta:
            return flat[self.layout.to(flat.device)]
        start = self.layout.storage_offset() + flat.storage_offset()
        return flat.as_strided(self.layout.shape, self.layout.stride(), start)

    def add_product(self, parameters: dict[str, Tensor], left: Tensor, right: Tensor, tap: int = 0) -> None:
        """Add left @ right to what one tap of a weight (taps, out, in) is, in place, without making the product."""
        w, (own,) = parameters[self.name], self.apply(itemgetter(tap))
        if not own.layout.is_meta or own.overlap or w.dtype != left.dtype or not w.is_contiguous():
            own.add_to(parameters, left @ right)
            return
        start = own.layout.storage_offset() + w.storage_offset()
        target = w.as_strided(own.layout.shape, own.layout.stride(), start)
        target.addmm_(left.to(w.device), right.to(w.device), alpha=1 / self.scale)
        parameters[self.name] = w  # which may be parts that others hold

    def write(self, parameters: dict[str, Tensor], value: Tensor) -> None:
        """Set the entries to values, in place (clone the tensors first), cast to the parameter's precision."""
        w = parameters[self.name]
        flat = w.reshape(-1)
        stored = ((value - self.offset) / self.scale).to(flat.device, flat.dtype)
        if self.layout.is_meta:
            start = self.layout.storage_offset() + flat.storage_offset()
            flat.as_strided(self.layout.shape, self.layout.stride(), start).copy_(stored)
        else:
            flat[self.layout.reshape(-1)] = stored.reshape(-1)
        parameters[self.name] = flat.view(w.shape)

    def read(
        self,
        parameters: Mapping[str, Tensor],
        dtype: torch.dtype = torch.float64,
        *,
        there: bool = False,
        copy: bool = True,
    ) -> Tensor:
        """Return the values of the entries as a new tensor; autograd follows it.

        there: on the device of the parameter, for products of whole weights; else on the CPU, where `index` is. copy:
        without it the parameter's own memory may be returned, for whoever writes to neither.
        """
        place, shape, stride = self.layout, self.layout.shape, self.layout.stride()
        start, stop = self.span[0], self.span[1] + 1
        if isinstance(parameters, Generic) and stop - start > 2 * place.numel():  # others stand between them
            found = parameters.at(self.name, self.index())
        else:
            if isinstance(parameters, Generic):
                part = parameters.between(self.name, start, stop)
            else:
                part = parameters[self.name].reshape(-1)[start:stop]
            part = part if there else part.cpu()
            found = part.as_strided(shape, stride, part.storage_offset()) if place.is_meta else part[place - start]
        copy = (copy and not isinstance(parameters, Generic)) or 0 in stride
        found = (found if there else found.cpu()).to(dtype, copy=copy)
        return found if self.scale == 1.0 and self.offset == 0.0 else self.scale * found + self.offset


Place = tuple[Sequence[int], Sequence[int], int, int]
"""Sizes, strides and offset of a view, and how many numbers the parameter has."""


def _memory(layout: Tensor) -> int:
    return layout.untyped_storage().nbytes() // layout.itemsize


def _stored(name: str, place: Place, scale: float, offset: float) -> Entries:
    """Return entries that were stored."""
    shape, strides, start, numbers = place
    return Entries(name, torch.empty(numbers, device="meta").as_strided(shape, strides, start), scale, offset)
