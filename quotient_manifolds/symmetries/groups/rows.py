"""Read and write entries of parameters as matrices, one row per channel, in float64."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

Params = dict[str, Tensor]


class Record:
    """Compare frozen dataclasses field by field, tensors by shape, dtype and values."""

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(_equal(getattr(self, each.name), getattr(other, each.name)) for each in fields(self))  # type: ignore[arg-type]

    __hash__ = None  # type: ignore[assignment]

    def _store(self, **values: Any) -> None:
        """Set fields of a frozen dataclass within its constructor."""
        for name, value in values.items():
            object.__setattr__(self, name, value)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return not isinstance(a, Tensor) and not isinstance(b, Tensor) and bool(a == b)


def integers(value: Any, what: str) -> Tensor:
    """Return a copy of integers as int64 on the CPU, which shares no storage."""
    tensor = torch.as_tensor(value)
    if tensor.is_meta or tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        kind = "a meta tensor" if tensor.is_meta else str(tensor.dtype)
        raise ValueError(f"{what} must be integers. Found {kind}.")
    return tensor.detach().to("cpu", torch.int64).clone(memory_format=torch.contiguous_format)


def numbers(value: Any) -> Tensor:
    """Return a copy of real numbers as float64 on the CPU, which shares no storage."""
    tensor = torch.as_tensor(value, dtype=torch.float64).detach()
    return tensor.to("cpu").clone(memory_format=torch.contiguous_format)


def typical(*numbers: Tensor) -> float:
    """Return the root mean square of numbers, or 1 if all of them are 0."""
    parts = (part.double() for each in numbers for part in each.detach().reshape(-1).split(1 << 16))
    count = sum(each.numel() for each in numbers)
    return (sum(float(part @ part) for part in parts) / max(1, count)) ** 0.5 or 1.0


@dataclass(frozen=True, eq=False)
class Rows(Record):
    r"""Arrange entries of a parameter as a matrix: entry (c, r) has the flat index starts[c, r or 0] + steps[r].

    A model may use a parameter w as scale * w + offset (Gemma's 1 + g, an adapter's alpha / r). Scale and offset
    broadcast to the matrix, whose values are then scale * w + offset.

    name, shape: of the parameter. Flat indices count its entries in contiguous order, from 0.
    starts: int64, (rows, 1) or (rows, columns). steps: int64, (columns,). scale, offset: numbers or tensors.
    `Rows.at` takes the flat indices of all entries instead, and `Rows.along` an axis of the parameter.

    Raises ValueError for indices out of range, for an entry that occurs twice, and for a scale of 0.
    """

    name: str
    shape: tuple[int, ...]
    starts: Tensor
    steps: Tensor
    scale: float | Tensor = 1.0
    offset: float | Tensor = 0.0

    def __post_init__(self) -> None:
        self._store(
            shape=tuple(self.shape), starts=integers(self.starts, "starts"), steps=integers(self.steps, "steps")
        )
        for name in ("scale", "offset"):
            if isinstance(value := getattr(self, name), Tensor):
                self._store(**{name: numbers(value)})
        if self.starts.ndim != 2 or self.steps.ndim != 1 or self.starts.shape[1] not in (1, len(self.steps)):
            found = f"{tuple(self.starts.shape)} and {tuple(self.steps.shape)}"
            raise ValueError(f"places of {self.name!r} must have shape (rows, columns). Found {found}.")
        if self._window is None:
            size, places = prod(self.shape), self.places
            if not places.numel() or int(places.min()) < 0 or int(places.max()) >= size:
                raise ValueError(
                    f"places of {self.name!r} must be numbers of its {size} entries. Found others, or none."
                )
            if int(self.touched.sum()) < places.numel():
                raise ValueError(f"places of {self.name!r} must be distinct. Found an entry twice.")
        scale = torch.as_tensor(self.scale, dtype=torch.float64)
        if not bool(torch.isfinite(scale).all()) or not bool(scale.all()):
            raise ValueError(f"the scale of {self.name!r} must be finite and not 0. Found {self.scale}.")

    @classmethod
    def at(cls, name: str, shape: tuple[int, ...], places: Tensor, **affine: float | Tensor) -> Rows:
        """Return the rows with these flat indices, int64 (rows, columns), with starts (rows, 1) if possible.

        affine: scale, offset.
        """
        places = integers(places, f"places of {name!r}")
        if places.ndim != 2 or not places.numel():
            found = tuple(places.shape)
            raise ValueError(f"places of {name!r} must have shape (rows, columns), not empty. Found {found}.")
        steps = places[0] - places[0, 0]
        if torch.equal(places[:, :1] + steps, places):
            return cls(name, shape, places[:, :1], steps, **affine)
        return cls(name, shape, places, torch.zeros_like(steps), **affine)

    @classmethod
    def along(
        cls, name: str, shape: tuple[int, ...], axis: int, index: Tensor | None = None, **affine: float | Tensor
    ) -> Rows:
        """Return the slices of a parameter along an axis as rows: all, or those at `index`. affine: scale, offset.

        >>> Rows.along("w", (2, 3), axis=1).places  # the columns, as a reader of three channels has them
        tensor([[0, 3],
                [1, 4],
                [2, 5]])
        """
        places = torch.arange(prod(shape)).view(shape or (1,)).movedim(axis, 0)
        places = places.reshape(len(places), -1)
        return cls.at(name, shape, places if index is None else places[index], **affine)

    def some(self, rows: Tensor) -> Rows:
        """Return a subset of the rows, given by their numbers, int64 (k,)."""

        def of(value: float | Tensor) -> float | Tensor:
            by_row = isinstance(value, Tensor) and value.ndim == 2 and len(value) == len(self)
            return value[rows] if by_row else value  # type: ignore[index]

        return replace(self, starts=self.starts[rows], scale=of(self.scale), offset=of(self.offset))

    @property
    def places(self) -> Tensor:
        """Return the flat indices of the entries, int64 (rows, columns)."""
        return self.starts + self.steps

    @property
    def touched(self) -> Tensor:
        """Return which entries of the parameter are in the matrix, bool (entries,)."""
        found = torch.zeros(prod(self.shape), dtype=torch.bool)
        if self._window is None:
            return found.index_fill_(0, self.places.flatten(), True)
        self._within(found).fill_(True)
        return found

    def meets(self, other: Rows) -> bool:
        """Return whether two sets of rows have an entry in common."""
        return self.name == other.name and self.shape == other.shape and bool((self.touched & other.touched).any())

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def columns(self) -> int:
        """Return the number of columns."""
        return len(self.steps)

    def read(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return the values scale * w + offset, float64 (rows, columns).

        Raises ValueError if the parameter is missing, has another shape, or does not hold real floating-point numbers.
        """
        entries = self.entries(params)
        if self.plain:
            return entries
        return self._constant(self.scale, params) * entries + self._constant(self.offset, params)

    def seen(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return read(params) for reading only: a window of float64 entries is not copied.

        If gradients are enabled, it is copied: derivatives need the values from before a parameter is written to.
        """
        flat = flattened(params, self.name, self.shape)
        uncopied = self.plain and self._window is not None and flat.dtype == torch.float64
        return self._within(flat) if uncopied and not torch.is_grad_enabled() else self.read(params)

    def times(self, params: Mapping[str, Tensor], M: Tensor, turned: bool = False) -> Tensor:
        """Return read(params) @ M, or read(params)^T @ M if it is turned."""
        found = self.seen(params)
        return (found.mT if turned else found) @ M.to(found.device)

    def dual(self, cotangent: Mapping[str, Tensor]) -> Tensor:
        """Return y / scale, float64 (rows, columns), the cotangent of `read` for a cotangent y of w.

        The result must not be written to: a window of float64 entries is not copied.
        """
        windowed = self._window is not None
        y = self._within(flattened(cotangent, self.name, self.shape)).double() if windowed else self.entries(cotangent)
        return y if self.plain else y / self._constant(self.scale, cotangent)

    def entries(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return the entries w as they are stored, float64 (rows, columns). Raises like `read`."""
        flat = flattened(params, self.name, self.shape)
        if self._window is not None:
            return self._within(flat).to(torch.float64, copy=True, memory_format=torch.contiguous_format)
        return flat.index_select(0, self.places.flatten().to(flat.device)).double().view(len(self), self.columns)

    def write(self, flat: Tensor, values: Tensor) -> None:
        """Write new values (rows, columns) of scale * w + offset to a flattened parameter in float64."""
        if not self.plain:
            scale, offset = (
                torch.as_tensor(each, dtype=torch.float64, device=flat.device) for each in (self.scale, self.offset)
            )
            values = (values - offset) / scale
        if self._window is None:
            flat.index_copy_(0, self.places.flatten().to(flat.device), values.flatten())
        else:
            self._within(flat).copy_(values)

    def add(self, flat: Tensor, change: Tensor, right: Tensor | None = None) -> None:
        """Add a change (rows, columns), or the product change @ right, to scale * w + offset.

        flat: the flattened parameter, in float64.
        """
        if right is not None and self.plain and self._window is not None:
            self._within(flat).addmm_(change, right)
            return
        change = change if right is None else change @ right
        if not self.plain:
            change = change / torch.as_tensor(self.scale, dtype=torch.float64, device=flat.device)
        if self._window is None:
            change = change.expand(len(self), self.columns).flatten()
            flat.index_add_(0, self.places.flatten().to(flat.device), change)
        else:
            self._within(flat).add_(change)

    @cached_property
    def _window(self) -> tuple[int, int, int, bool] | None:
        """Return (width, row, column, flipped) for a window, or its transpose, of the parameter in rows of a width."""
        outer, inner = (None if each is None else _step(each) for each in (self._column, self.steps))
        size = prod(self.shape)
        if outer is None or inner is None or not size:
            return None
        start = int(self.starts[0, 0] + self.steps[0])
        sides = ((outer, len(self), inner, self.columns), (inner, self.columns, outer, len(self)))
        for flipped, (step, count, within, length) in enumerate(sides):
            width = step or size
            row, column = divmod(start, width)
            if within in (0, 1) and size % width == 0 and row >= 0 and column + length <= width:
                return (width, row, column, bool(flipped)) if (row + count) * width <= size else None
        return None

    @property
    def _column(self) -> Tensor | None:
        return self.starts[:, 0] if self.starts.shape[1] == 1 else None

    @property
    def whole(self) -> bool:
        """Return whether `read` returns all entries of a parameter as they are stored, in their order."""
        every = self._window == (self.columns, 0, 0, False) and len(self) * self.columns == prod(self.shape)
        return self.plain and every

    @property
    def plain(self) -> bool:
        """Return whether `read` returns the entries as they are stored."""
        return isinstance(self.scale, float) and self.scale == 1 and isinstance(self.offset, float) and not self.offset

    def _within(self, flat: Tensor) -> Tensor:
        assert self._window is not None
        width, row, column, flipped = self._window
        count, length = (self.columns, len(self)) if flipped else (len(self), self.columns)
        found = flat.reshape(-1, width)[row : row + count, column : column + length]
        return found.T if flipped else found

    def _constant(self, value: float | Tensor, params: Mapping[str, Tensor]) -> float | Tensor:
        return value.to(params[self.name].device) if isinstance(value, Tensor) else value


def _step(numbers: Tensor) -> int | None:
    """Return the constant positive step of a sequence, 0 for a single number; None if there is no such step."""
    if len(numbers) < 2:
        return 0 if len(numbers) else None
    step = int(numbers[1] - numbers[0])
    even = step > 0 and bool((numbers[1:] - numbers[:-1] == step).all())
    return step if even else None


def flattened(params: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    """Return a flattened parameter. Raises ValueError if it is missing, or has another shape or no real dtype."""
    if name not in params:
        raise ValueError(f"params must hold all that a symmetry acts on. Found no {name!r}.")
    w = params[name]
    if tuple(w.shape) != shape:
        raise ValueError(f"the parameter {name!r} must have shape {shape}. Found {tuple(w.shape)}.")
    if not w.is_floating_point():
        raise ValueError(f"the parameter {name!r} must hold real floating-point numbers. Found {w.dtype}.")
    return w.reshape(-1)


class Draft(ChainMap[str, Tensor]):
    """Hold parameters while symmetries act on them; each is copied once, to float64, before it is written to."""

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        super().__init__({}, params)  # type: ignore[arg-type]  # only the first is written to

    def own(self, names: Iterable[str]) -> Draft:
        """Copy parameters to float64, so that they can be written to, and return the draft."""
        for name in names:
            if name not in self.maps[0]:
                self[name] = self[name].detach().to(torch.float64, copy=True, memory_format=torch.contiguous_format)
        return self

    def write(self, rows: Rows, values: Tensor) -> None:
        """Replace the values that `rows.read` returns. The new values must not be used elsewhere."""
        if rows.whole and values.dtype == torch.float64 and values.is_contiguous():
            flattened(self, rows.name, rows.shape)
            self[rows.name] = values.view(rows.shape)
        else:
            rows.write(self._own(rows), values)

    def add(self, rows: Rows, change: Tensor, right: Tensor | None = None) -> None:
        """Add a change, or the product change @ right, to the values that `rows.read` returns."""
        flat = self._own(rows)
        rows.add(flat, change.to(flat.device), None if right is None else right.to(flat.device))

    def _own(self, rows: Rows) -> Tensor:
        """Return a flattened parameter that may be written to."""
        flat = flattened(self, rows.name, rows.shape)
        if rows.name not in self.maps[0]:
            flat = flat.to(torch.float64, copy=True)
            self[rows.name] = flat.view(rows.shape)
        return flat

    def finished(self) -> Params:
        """Return all parameters; those that were written to are cast back to their dtypes."""
        written, given = self.maps
        return {**given, **{name: w.to(given[name].dtype) for name, w in written.items()}}
