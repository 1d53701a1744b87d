"""Represent a recorded forward pass as a program: operations in static single assignment form on numbered values."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_INDEXED = {"embedding": 1, "nll_loss_forward": 1}
_INDEXED |= dict.fromkeys(("index_select", "gather", "scatter", "scatter_add", "index_add"), 2)
"""The argument that holds indices into the first argument. If it is argument 2, argument 1 is the axis."""
_TAKING = ("clone", "_to_copy", "index", "masked_select", "masked_fill")
"""Operations that copy entries of their first argument unchanged, for example to select the labels that count."""
_PLAIN = (int, float, type(None), torch.dtype)


@dataclass(frozen=True)
class Ref:
    """Refer to a value of the program in the arguments of an operation."""

    number: int


@dataclass(frozen=True)
class Layout:
    """Describe the place of a value in its memory; strides and offset count entries. Views share their memory."""

    memory: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    room: int
    """Number of entries of the memory."""

    @property
    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def of(self, memory: Tensor) -> Tensor:
        """Return the value as a view of its memory, given as a vector of `room` entries."""
        return memory.as_strided(self.shape, self.stride, memory.storage_offset() + self.offset)

    def write(self, memory: Tensor, values: Tensor) -> None:
        """Write the value into its memory, given as a vector of `room` entries."""
        if self.expanded:  # the last of the entries with the same place is written
            memory[self.of(torch.arange(self.room))] = values
        else:
            self.of(memory).copy_(values)

    @cached_property
    def expanded(self) -> bool:
        """Return whether several entries of the value share one entry of its memory."""
        return any(size > 1 and stride == 0 for size, stride in zip(self.shape, self.stride, strict=True))

    @property
    def whole(self) -> bool:
        """Return whether the entries of the value cover all of its memory, in order."""
        steps = [prod(self.shape[k + 1 :]) for k in range(len(self.shape))]
        return self.dense and all(
            size == 1 or s == t for size, s, t in zip(self.shape, self.stride, steps, strict=True)
        )

    @cached_property
    def dense(self) -> bool:
        """Return whether the entries of the value cover all of its memory, each once, with axes in any order."""
        count = 1
        for stride, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size > 1 and stride != count:
                return False
            count *= size
        return count == self.room and not self.offset


@dataclass(frozen=True, eq=False)
class Operation:
    """Hold one call of an ATen operation: Refs stand for tensors, and `module` is the path of the calling module."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outs: tuple[int, ...]
    module: str = ""

    @cached_property
    def name(self) -> str:
        """Return ATen's name without the prefix `_unsafe_`; a quotient's rounding mode is part of the name."""
        name, rounding = str(self.func.overloadpacket.__name__), self.kwargs.get("rounding_mode")
        name = re.sub("^_?unsafe_", "", name)
        return f"{name} {rounding}" if rounding else name

    @property
    def writes(self) -> bool:
        """Return whether it writes one value for each place in an index."""
        return str(self.func.overloadpacket.__name__) == "index_put"

    @cached_property
    def ins(self) -> tuple[int, ...]:
        """Return the numbers of the values among its arguments, in order and with repetitions."""
        return tuple(ref.number for ref in refs((self.args, self.kwargs)))

    @cached_property
    def direct(self) -> Mapping[int, int] | None:
        """Return the numbers of the values it takes, by place among args; None if lists or keywords contain some."""
        found = {place: each.number for place, each in enumerate(self.args) if isinstance(each, Ref)}
        return found if len(found) == len(self.ins) else None

    @cached_property
    def in_double(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return args and kwargs with float64 in place of narrower floating point types."""
        return _widened(self.args), _widened(dict(self.kwargs))


@dataclass(frozen=True, eq=False)
class Program:
    """Hold the operations of a forward pass in order, and describe its values.

    layouts: the layout of each value, by number. parameters: the name of the parameter for each value that is one, or a
    view of one; if several share all their memory, the first name. inputs: numbers of the inputs, which no operation
    produces. constants: other tensors of the model, by number. outputs: numbers of the floating point outputs. chosen:
    values that a replay uses as they are and does not compute, by number.
    """

    operations: tuple[Operation, ...]
    layouts: tuple[Layout, ...]
    parameters: Mapping[int, str]
    inputs: tuple[int, ...]
    constants: Mapping[int, Tensor]
    outputs: tuple[int, ...]
    chosen: Mapping[int, Tensor] = field(default_factory=dict)

    @cached_property
    def choices(self) -> frozenset[int]:
        """Return the computed integers and booleans that operations with a data-dependent size take or return."""
        made = {number for each in self.operations for number in each.outs}
        deciding = (each for each in self.operations if torch.Tag.dynamic_output_shape in each.func.tags or each.writes)
        numbers = {number for each in deciding for number in (*each.ins, *each.outs)} & made
        kinds = {number: self.layouts[number].dtype for number in numbers}
        return frozenset(n for n, kind in kinds.items() if not (kind.is_floating_point or kind.is_complex))

    @cached_property
    def computing(self) -> tuple[int, ...]:
        """Return the places of all operations except views, whose number depends on sizes: full slices are omitted."""
        memory = [layout.memory for layout in self.layouts]
        pairs = (({memory[n] for n in each.ins}, {memory[n] for n in each.outs}) for each in self.operations)
        return tuple(place for place, (ins, outs) in enumerate(pairs) if not outs or outs - ins)

    @cached_property
    def names(self) -> list[Any]:
        """Return a list that is equal for programs with the same operations apart from views, at any sizes."""
        views = [(n, name, self.layouts[n]) for n, name in self.parameters.items()]
        computing = [self.operations[place] for place in self.computing]
        memories = ([[self.layouts[n].memory for n in some] for some in (each.ins, each.outs)] for each in computing)
        return [views, *((each.func, *some) for each, some in zip(computing, memories, strict=True))]

    @cached_property
    def limits(self) -> dict[int, int]:
        """Return, by place among the inputs, the number of rows of the smallest table that the input indexes.

        Inputs whose differences are computed, such as corners of boxes, are left out: their order matters.
        """
        of = {self.layouts[number].memory: place for place, number in enumerate(self.inputs)}
        found: dict[int, int] = {}
        ordered = set[int]()
        for operation in self.operations:
            places = [of.get(self.layouts[number].memory) for number in operation.ins]
            if operation.name == "sub" and len(places) == 2 and places[0] is not None and places[0] == places[1]:
                ordered.add(places[0])
            if operation.name in _TAKING and self.layouts[operation.ins[0]].memory in of:
                for out in operation.outs:
                    of.setdefault(self.layouts[out].memory, of[self.layouts[operation.ins[0]].memory])
            for rows, number in _lookups(self, operation.name, operation.args):
                place = of.get(self.layouts[number].memory)
                if place is not None and self.layouts[number].dtype != torch.bool:
                    found[place] = min(found.get(place, rows), rows)
        return {place: rows for place, rows in found.items() if place not in ordered}


def _lookups(program: Program, name: str, args: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """Yield (rows of the table, number of the index) for each lookup of an operation."""
    if not args or not isinstance(args[0], Ref):
        return
    shape = program.layouts[args[0].number].shape
    if name == "index":
        yield from ((shape[a], ref.number) for a, ref in enumerate(args[1]) if isinstance(ref, Ref))
    elif name in _INDEXED and shape:
        index = args[_INDEXED[name]]
        axis = args[1] if _INDEXED[name] == 2 else 1 if name == "nll_loss_forward" and len(shape) > 1 else 0
        yield shape[axis], index.number


def refs(tree: Any) -> Iterator[Ref]:
    """Yield the Refs of nested arguments, in order."""
    if isinstance(tree, Ref):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from refs(item)
    elif isinstance(tree, dict):
        yield from refs(list(tree.values()))


def substituted(tree: Any, at: Callable[[int], Any]) -> Any:
    """Return nested arguments with values in place of their Refs."""
    if isinstance(tree, Ref):
        return at(tree.number)
    if isinstance(tree, (list, tuple)):
        return type(tree)([each if isinstance(each, _PLAIN) else substituted(each, at) for each in tree])
    return {key: substituted(item, at) for key, item in tree.items()} if isinstance(tree, dict) else tree


def _widened(tree: Any) -> Any:
    if isinstance(tree, torch.dtype):
        return torch.float64 if tree in _NARROW else tree
    if isinstance(tree, (list, tuple)) and not isinstance(tree, torch.Size):
        return type(tree)(map(_widened, tree))
    return {key: _widened(item) for key, item in tree.items()} if isinstance(tree, dict) else tree
