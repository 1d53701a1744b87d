"""Vary a batch: draw tensors of other sizes, with numbers, words and masks of the same kinds as the given ones.

Words are integers that index a table, such as token ids.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from quotient_manifolds.batches import mapped, taken_apart

MOODS = ("normal", "positive", "negative", "normal", "large", "small", "huge")
_SCALES = {"large": 5.0, "huge": 50.0, "small": 0.2, "far": 1e3, "near": 1e-3}
_HIDDEN = -1e4
"""A tensor of zeros and one other number is a mask of scores if that number is at most this."""
_SHOWN = 0.7
"""Mean fraction of a drawn mask that is visible."""


@dataclass(frozen=True)
class Axes:
    """Hold axes of one size, which vary together, each as (tensor, axis)."""

    size: int
    places: tuple[tuple[int, int], ...]

    @property
    def leads(self) -> bool:
        """Return whether these axes may be the batch axis."""
        return any(axis == 0 for _, axis in self.places)


@contextmanager
def unwarned() -> Iterator[None]:
    """Suppress the model's warnings about generated batches, which no user gave it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def numbers(
    like: Tensor, shape: Sequence[int], generator: torch.Generator, mood: str, limit: int | None = None
) -> Tensor:
    """Draw a tensor of this shape and of the same kind as `like`: real numbers, a mask, words or integers.

    mood: the sign and scale of real numbers. If it is `positive`, masks hide nothing; if it is neither that nor
    `normal`, masks hide the first entries in half of the rows. limit: the number of words; all are dealt before one is
    dealt again.
    """
    like = like.detach().cpu()
    if not like.numel():
        return like.new_zeros(shape)
    if limit is None and (pair := _mask(like)) is not None:
        shown, hidden = pair
        made = torch.rand(shape, generator=generator, dtype=torch.float32) < (1 if mood == "positive" else _SHOWN)
        if made.ndim and made.numel():  # tokens are on the last axis of size > 1, e.g. of (batch, tokens, 1)
            axis = next((k for k in reversed(range(1, made.ndim)) if made.shape[k] > 1), -1)
            made = made.movedim(axis, -1).contiguous()
            first = torch.zeros(made.shape[:-1], dtype=torch.long)
            if mood not in ("normal", "positive"):  # half of the rows are padded in front
                first = torch.randint(made.shape[-1], first.shape, generator=generator)
                first = first * torch.randint(2, first.shape, generator=generator)
            made &= torch.arange(made.shape[-1]) >= first[..., None]
            made = made.scatter_(-1, first[..., None], True).movedim(-1, axis)
        return torch.where(made, shown, hidden).to(like.dtype)
    if like.is_floating_point() or like.is_complex():
        return _real(like, shape, generator, mood)
    if limit is None:
        return torch.randint(int(like.min()), int(like.max()) + 1, shape, generator=generator).to(like.dtype)
    deals = [torch.randperm(limit, generator=generator) for _ in range(-(-prod(shape) // limit))]
    words = torch.cat(deals)[: prod(shape)].view(shape) if deals else torch.zeros(shape, dtype=torch.long)
    return torch.where(wrapped(like, shape) < 0, wrapped(like, shape), words).to(like.dtype)  # -100: no class


def _real(like: Tensor, shape: Sequence[int], generator: torch.Generator, mood: str) -> Tensor:
    known = like if like.is_complex() else like.double()
    known = known[torch.isfinite(known)]
    spread = float(known.std(correction=0)) if known.numel() else 0.0
    spread = spread or float(known.abs().mean() if known.numel() else 0.0) or 1.0
    made = torch.randn(shape, generator=generator, dtype=torch.complex128 if like.is_complex() else torch.float64)
    made = spread * made
    if known.numel() and bool(torch.randint(2, (), generator=generator)):
        made = made + known.mean()
    if mood in ("positive", "negative") and not like.is_complex():
        made = made.abs() * (1 if mood == "positive" else -1)
    return (made * _SCALES.get(mood, 1.0)).to(like.dtype)


def _mask(like: Tensor) -> tuple[Any, Any] | None:
    """Return the visible and the hidden value of a mask, None for others; of 0 and 1 the frequent one is visible."""
    if like.is_complex() or not bool(((like == like.min()) | (like == like.max())).all()):
        return None
    values, counts = like.unique(return_counts=True)
    known = values.tolist()
    if all(value in (0, 1) for value in known):
        shown = known[int(counts.argmax())] if int(counts.min()) < int(counts.max()) or len(known) == 1 else 1
        return torch.tensor(shown, dtype=like.dtype), torch.tensor(1 - int(shown), dtype=like.dtype)
    return (values[1], values[0]) if len(known) == 2 and known[0] <= _HIDDEN and known[1] == 0 else None


def wrapped(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor of the given shape that repeats or crops the entries of another."""
    for axis, size in enumerate(shape):
        if size != like.shape[axis]:
            like = like.index_select(axis, torch.arange(size, device=like.device) % like.shape[axis])
    return like


def other_sizes(axes: Axes, small: bool) -> Iterator[int]:
    """Yield other sizes of axes, larger ones first unless `small`; an axis that may count examples has at least 2."""
    size, least = axes.size, 2 if axes.leads else 1
    larger, smaller = [size + max(1, size // 2), 2 * size], [max(least, size // 2), size - 1]
    few = [3, 2] if axes.leads else [5, 4, size // 4]
    tried = [*(n for n in few if 1 < n < size // 2), *smaller, *larger] if small else [*larger, *smaller]
    yield from (n for n in dict.fromkeys(tried) if n >= least and n != size)


class Variations:
    """Generate batches like a given one, with other sizes and other values.

    Axes of one size vary together. As sizes may agree by chance, e.g. a length with the number of channels, axis 0 and
    the other axes also vary separately, and then each axis alone. limits: the number of words, by index of the tensor
    in it.
    """

    def __init__(self, batch: Any, generator: torch.Generator, limits: Mapping[int, int]) -> None:
        self.batch, self.generator, self.limits = batch, generator, limits
        self.tensors: list[Tensor] = []
        self.names: list[str] = []
        for path, leaf in taken_apart(batch):
            if isinstance(leaf, Tensor) and not any(leaf is other for other in self.tensors):
                self.tensors.append(leaf)
                self.names.append(path.rpartition(" ")[2].strip("'") or "inputs")

    @property
    def real(self) -> bool:
        """Return whether the batch has real or complex numbers that are not masks."""
        return any((t.is_floating_point() or t.is_complex()) and t.numel() and _mask(t) is None for t in self.tensors)

    @property
    def axes(self) -> list[Axes]:
        """Return the sets of axes that may vary together."""
        places = [(k, a, size) for k, t in enumerate(self.tensors) for a, size in enumerate(t.shape) if t.numel()]
        found = []
        for wanted in dict.fromkeys(size for *_, size in places):
            every = tuple((k, a) for k, a, size in places if size == wanted)
            leading = tuple(place for place in every if place[1] == 0)
            parts = [leading, tuple(place for place in every if place[1] != 0)] if 0 < len(leading) < len(every) else []
            alone = [tuple(place for place in every if place[1] == axis) for axis in sorted({a for _, a in every})]
            found += [Axes(wanted, each) for each in dict.fromkeys((*parts, every, *alone))]
        return found

    def held(self, varied: Sequence[Axes]) -> tuple[str, ...]:
        """Return a sentence for each axis that is not in `varied`, except channels, whose number the model fixes."""
        free = {place for axes in varied for place in axes.places}
        said = []
        for k, tensor in enumerate(self.tensors):
            channels = min(1, tensor.ndim - 1) if tensor.ndim > 3 else tensor.ndim - 1
            for a, size in enumerate(tensor.shape):
                fixed = tensor.is_floating_point() and a == channels and tensor.ndim > 1
                if (k, a) not in free and not fixed:
                    said.append(f"{self.names[k]}: axis {a} always has size {size}")
        return tuple(said)

    def numel(self, sizes: Mapping[Axes, int]) -> int:
        """Return the number of entries of a batch of these sizes."""
        return sum(prod(shape) for shape in self.shapes(sizes))

    def shapes(self, sizes: Mapping[Axes, int]) -> list[list[int]]:
        """Return the shapes of the tensors with these sizes of axes."""
        made = [list(tensor.shape) for tensor in self.tensors]
        for axes, size in sizes.items():
            for k, a in axes.places:
                made[k][a] = size
        return made

    def made(self, sizes: Mapping[Axes, int], mood: str | None) -> Any:
        """Return a batch of these sizes with drawn values or, without a mood, with the given values repeated."""
        drawn = [
            wrapped(tensor, shape).clone()
            if mood is None
            else numbers(tensor, shape, self.generator, mood, self.limits.get(k)).to(tensor.device)
            for k, (tensor, shape) in enumerate(zip(self.tensors, self.shapes(sizes), strict=True))
        ]

        def other(tensor: Tensor) -> Tensor:
            return drawn[next(k for k, own in enumerate(self.tensors) if own is tensor)]

        return mapped(other, self.batch)
