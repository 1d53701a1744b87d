"""Read and write entries of parameters as matrices, one row per channel, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
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


def typical(numbers: Tensor) -> float:
    """Return the root mean square of numbers, and 1 if all of them are 0."""
    parts = (part.double() for part in numbers.detach().reshape(-1).split(1 << 16))
    return (sum(float(part @ part) for part in parts) / max(1, numbers.numel())) ** 0.5 or 1.0


@dataclass(frozen=True, eq=False)
class Rows(Record):
    r"""Number entries of a parameter as a matrix: entry (c, r) has number starts[c, r or 0] + steps[r].

    A model that uses a parameter w through scale * w + offset (Gemma's 1 + g, an adapter's alpha / r) has these as
    constants. They broadcast to the matrix, and the numbers of the matrix are values of scale * w + offset.

    name: of the parameter. shape: of the parameter; entries are counted in the order of a contiguous tensor.
    starts: int64, (rows, 1) or (rows, columns). steps: int64, (columns,). scale, offset: numbers or tensors.
    `Rows.at` takes the numbers of all entries instead, `Rows.along` takes an axis of the parameter.

    ValueError for numbers that are no entries of the parameter, an entry that occurs twice, and a scale of 0.
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
        """Return the rows with these numbers of entries, int64 (rows, columns), stored as a sum if they are one.

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
        """Return the slices of a parameter along an axis, those of an index or all, as rows. affine: scale, offset.

        >>> Rows.along("w", (2, 3), axis=1).places  # the columns, as a reader of three channels has them
        tensor([[0, 3],
                [1, 4],
                [2, 5]])
        """
        places = torch.arange(prod(shape)).view(shape or (1,)).movedim(axis, 0)
        places = places.reshape(len(places), -1)
        return cls.at(name, shape, places if index is None else places[index], **affine)

    @property
    def places(self) -> Tensor:
        """Return the numbers of the entries, int64 (rows, columns)."""
        return self.starts + self.steps

    @property
    def touched(self) -> Tensor:
        """Return which entries of the parameter are among these, bool, in one row."""
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
        """Return the numbers scale * w + offset, float64 (rows, columns).

        ValueError if the parameter is missing, has another shape, or does not hold real floating-point numbers.
        """
        entries = self.entries(params)
        if self.plain:
            return entries
        return self._constant(self.scale, params) * entries + self._constant(self.offset, params)

    def dual(self, cotangent: Mapping[str, Tensor]) -> Tensor:
        """Return y / scale, float64 (rows, columns), which pairs with changes of `read` as y with changes of w."""
        return self.entries(cotangent) / self._constant(self.scale, cotangent)

    def entries(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return the entries as they are stored, float64 (rows, columns); raise as `read` does."""
        flat = flattened(params, self.name, self.shape)
        if self._window is not None:
            return self._within(flat).to(torch.float64, copy=True, memory_format=torch.contiguous_format)
        return flat.index_select(0, self.places.flatten().to(flat.device)).double().view(len(self), self.columns)

    def written(self, flat: Tensor, values: Tensor) -> Tensor:
        """Return the parameter, flattened in float64, with these numbers (rows, columns) in place of `read`'s."""
        if not self.plain:
            scale, offset = (
                torch.as_tensor(each, dtype=torch.float64, device=flat.device) for each in (self.scale, self.offset)
            )
            values = (values - offset) / scale
        if self._window is None:
            return flat.index_copy(0, self.places.flatten().to(flat.device), values.flatten())
        width, row, column, flipped = self._window
        values, whole = values.T if flipped else values, flat.reshape(-1, width)
        if values.numel() == flat.numel():
            return values.reshape(-1)
        if values.shape[1] < width:
            rows = whole[row : row + len(values)]
            values = rows.slice_scatter(values, 1, column, column + values.shape[1])
        return whole.slice_scatter(values, 0, row, row + len(values)).reshape(-1)

    def added(self, flat: Tensor, change: Tensor) -> Tensor:
        """Return the parameter, flattened in float64, with so much more than what `read` returns (rows, columns)."""
        if not self.plain:
            change = change / torch.as_tensor(self.scale, dtype=torch.float64, device=flat.device)
        if self._window is None:
            change = change.expand(len(self), self.columns).flatten()
            return flat.index_add(0, self.places.flatten().to(flat.device), change)
        flat = flat.clone()
        self._within(flat).add_(change)
        return flat

    @cached_property
    def _window(self) -> tuple[int, int, int, bool] | None:
        """Return (width, row, column, flipped) if these are a window, or its transpose, of all in rows of a width."""
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
    """Return the step of numbers that grow evenly, 0 of a single one; None of others, or none."""
    if len(numbers) < 2:
        return 0 if len(numbers) else None
    step = int(numbers[1] - numbers[0])
    even = step > 0 and bool((numbers[1:] - numbers[:-1] == step).all())
    return step if even else None


def flattened(params: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    """Return a parameter in one row, once its name, shape and dtype are what they must be (ValueError)."""
    if name not in params:
        raise ValueError(f"params must hold all that a symmetry acts on. Found no {name!r}.")
    w = params[name]
    if tuple(w.shape) != shape:
        raise ValueError(f"the parameter {name!r} must have shape {shape}. Found {tuple(w.shape)}.")
    if not w.is_floating_point():
        raise ValueError(f"the parameter {name!r} must hold real floating-point numbers. Found {w.dtype}.")
    return w.reshape(-1)


class Draft(dict[str, Tensor]):
    """Hold what a symmetry has written so far, in float64; all else is read where it was given, when it is asked for.

    Nothing is copied that is not written, and of parameters that have to be gathered first only what is acted on.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._given = params

    def __missing__(self, name: str) -> Tensor:
        return self._given[name]

    def __contains__(self, name: object) -> bool:
        return name in self._given

    def write(self, rows: Rows, values: Tensor) -> None:
        """Replace what `rows.read` returns."""
        flat = flattened(self, rows.name, rows.shape).double()
        self[rows.name] = rows.written(flat, values).view(rows.shape)

    def add(self, rows: Rows, change: Tensor) -> None:
        """Add to what `rows.read` returns."""
        flat = flattened(self, rows.name, rows.shape).double()
        self[rows.name] = rows.added(flat, change.to(flat.device)).view(rows.shape)

    def finished(self) -> Params:
        """Return all parameters, those that were written cast to the dtype that they had."""
        return {**self._given, **{name: w.to(self._given[name].dtype) for name, w in self.items()}}
