"""Number entries of parameters, and of functions of parameters if each entry depends on one parameter entry.

Theta is the vector of all P parameter entries. A transposed, split, stacked or scaled parameter is a parameter, too:
its entries are entries of theta. Its derivative by these, its slope, converts changes of one into changes of the other.
A view, copy, cast or affine function of a parameter is numbered by start and strides alone, so that nothing of its size
is allocated. Any other function is followed by forward derivatives along r and r * (1 + entry). Their quotient is
1 + entry if there is one entry, and not an integer if there are several.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from quotient_manifolds.symmetries.trace.program import Layout, Operation, Program, Ref
from quotient_manifolds.symmetries.trace.replay import Weights, arguments, wide

_GOLDEN = 0.6180339887498949
_INTEGER = 1e-6


def grid(count: int) -> Tensor:
    """Return the numbers 0, ..., count - 1 without memory: a meta tensor, whose views number by offset and strides.

    Torch's own view operations thus act on the numbers; `numbers` computes them.
    """
    return torch.empty(count, dtype=torch.int8, device="meta")


def numbers(view: Tensor) -> Tensor:
    """Return the numbers of a view of a grid, int64; a tensor of numbers is returned as is."""
    if not view.is_meta:
        return view
    made = torch.full((), int(view.storage_offset()))
    for size, stride in zip(view.shape, view.stride(), strict=True):
        made = made[..., None] + torch.arange(size) * stride
    return made


def repeats(view: Tensor) -> bool:
    """Return whether all slices along the first axis have the same numbers."""
    return len(view) < 2 or (view.stride(0) == 0 if view.is_meta else bool((view == view[:1]).all()))


@dataclass(frozen=True, eq=False)
class Affine:
    """Describe a memory as scale * w + offset, for entries w of a parameter that a view of theta's grid numbers.

    layout: of the value that was computed into the memory, with all of its entries, each once.
    """

    name: str
    layout: Layout
    view: Tensor
    scale: float = 1.0
    offset: float = 0.0

    @cached_property
    def _digits(self) -> list[tuple[int, int, int]]:
        """Return (stride in the memory, size, stride in theta) of each axis, outermost first, with axes merged."""
        axes = zip(self.layout.stride, self.layout.shape, self.view.stride(), strict=True)
        digits: list[tuple[int, int, int]] = []
        for place, size, step in sorted((axis for axis in axes if axis[1] > 1), reverse=True):
            if digits and digits[-1][2] == step * size:
                digits[-1] = place, digits[-1][1] * size, step
            else:
                digits.append((place, size, step))
        return digits or [(1, 1, 0)]

    def of(self, layout: Layout) -> Tensor | None:
        """Return the entries of theta of a value in this memory as a view of the grid; None if there is none."""
        start, rest, reach = self.view.storage_offset(), layout.offset, []
        for place, _, step in self._digits:
            digit, rest = divmod(rest, place)
            start += digit * step
            reach.append(digit)
        strides = []
        for size, stride in zip(layout.shape, layout.stride, strict=True):
            if size < 2 or not stride:
                strides.append(0)
                continue
            k = next(k for k, (place, *_) in enumerate(self._digits) if place <= stride)
            steps, rest = divmod(stride, self._digits[k][0])
            if rest:
                return None
            reach[k] += (size - 1) * steps
            strides.append(steps * self._digits[k][2])
        if any(digit >= size for digit, (_, size, _) in zip(reach, self._digits, strict=True)):
            return None
        return self.view.as_strided(layout.shape, strides, start)

    def at(self, places: Tensor) -> Tensor:
        """Return the entries of theta at places of the memory."""
        digits = (places // place % size * step for place, size, step in self._digits)
        return sum(digits, start=torch.full_like(places, int(self.view.storage_offset())))


@dataclass(frozen=True, eq=False)
class Reading:
    """Evaluate parameters and functions of them at some weights, with slopes: derivatives by entries of theta.

    values, slopes: by memory, of the functions that are not affine; affine ones are evaluated on demand.
    """

    entries: Entries
    weights: Weights
    values: Mapping[int, Tensor]
    slopes: Mapping[int, Tensor]

    def at(self, memory: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return values and slopes at places of a memory."""
        if (affine := self.entries.strided.get(memory)) is None:
            return self.values[memory][places], self.slopes[memory][places]
        own = affine.at(places) - self.entries.start[affine.name]
        values = wide(self.weights(affine.name).reshape(-1)[own])
        return affine.scale * values + affine.offset, torch.full_like(values, affine.scale)

    def viewed(self, memory: int, theta: Tensor, spots: Tensor) -> Tensor:
        """Return values at `spots` of a memory, with entries `theta`; both are views of a grid or numbers."""
        affine = self.entries.strided.get(memory)
        if affine is None or not theta.is_meta:
            return self.at(memory, numbers(spots))[0]
        start, w = int(theta.storage_offset()) - self.entries.start[affine.name], self.weights(affine.name).reshape(-1)
        values = wide(w.as_strided(theta.shape, theta.stride(), w.storage_offset() + start))
        return values if (affine.scale, affine.offset) == (1.0, 0.0) else affine.scale * values + affine.offset


class Entries:
    """Map each entry of a parameter, or of a function of parameters, to the entry of theta that it depends on.

    start: by name, the first entry of a parameter. plain: by memory, the name of the parameter in it. strided: by
    memory, the parameters and their affine functions. made: by memory, the entry of theta of each entry, or -1, for all
    other functions. operations: the ones on parameters and constants only. erased: entries of theta that such an
    operation multiplies by a constant 0.
    """

    def __init__(self, program: Program, shapes: Mapping[str, torch.Size]) -> None:
        self.program, self.shapes = program, shapes
        self.start: dict[str, int] = {}
        self.size = 0
        for name, shape in shapes.items():
            self.start[name] = self.size
            self.size += shape.numel()
        self.plain = {program.layouts[number].memory: name for number, name in program.parameters.items()}
        self.strided: dict[int, Affine] = {}
        self.made: dict[int, Tensor] = {}
        self.operations: list[Operation] = []
        self.erased = torch.zeros(0, dtype=torch.long)
        theta = grid(self.size)
        for number, name in program.parameters.items():
            count, layout = shapes[name].numel(), program.layouts[number]
            whole = replace(layout, shape=(count,), stride=(1,), offset=0)
            self.strided.setdefault(layout.memory, Affine(name, whole, theta[self.start[name] :][:count]))

    def known(self, number: int) -> bool:
        """Return whether a value is a parameter or a function of parameters."""
        memory = self.program.layouts[number].memory
        return memory in self.strided or memory in self.made

    def affine(self, memory: int) -> tuple[float, float] | None:
        """Return scale and offset if a memory is an affine function of a parameter, else None."""
        found = self.strided.get(memory)
        return None if found is None else (found.scale, found.offset)

    def view(self, number: int) -> Tensor:
        """Return the entries of theta of a value, as a view of the grid if possible, else as numbers."""
        layout = self.program.layouts[number]
        affine = self.strided.get(layout.memory)
        if affine is None:
            return layout.of(self.made[layout.memory])
        found = affine.of(layout)
        return layout.of(affine.at(torch.arange(layout.room))) if found is None else found

    def of(self, number: int) -> Tensor:
        """Return the entry of theta of each entry of a value, -1 for constants."""
        return numbers(self.view(number))

    def places(self, number: int) -> Tensor:
        """Return the place of each entry of a value in its memory, as a view of a grid."""
        layout = self.program.layouts[number]
        return layout.of(grid(layout.room))

    def follow(self, operation: Operation, values: Callable[[int], Tensor]) -> bool:
        """Record a function of parameters. Return False unless each of its entries depends on one of theta."""
        (out, *more), layouts = operation.outs, self.program.layouts
        if more or not layouts[out].is_floating_point:
            return False
        return self._follow_affine(operation, layouts[out], values) or self._follow_any(operation, layouts[out], values)

    def _follow_affine(self, operation: Operation, layout: Layout, values: Callable[[int], Tensor]) -> bool:
        found = affine(operation, lambda number: None if self.known(number) else values(number))
        if found is None or not self.known(found[0]) or not layout.dense:
            return False
        number, scale, offset = found
        of, view = self.strided.get(self.program.layouts[number].memory), self.view(number)
        if of is None or not view.is_meta or tuple(view.shape) != layout.shape:
            return False
        self.strided[layout.memory] = Affine(of.name, layout, view, scale * of.scale, scale * of.offset + offset)
        return True

    def _follow_any(self, operation: Operation, layout: Layout, values: Callable[[int], Tensor]) -> bool:
        taken = [number for number in dict.fromkeys(operation.ins) if self.known(number)]
        entries = [self.of(number) for number in taken]
        where = dict(zip(taken, range(len(taken)), strict=True))

        def computed(*given: Tensor) -> Tensor:
            def at(number: int) -> Tensor:
                return given[where[number]] if number in where else wide(values(number))

            args, kwargs = arguments(operation, at, generic=False)
            made: Tensor = operation.func(*args, **kwargs)
            return made

        here = tuple(wide(values(number)).clone() for number in taken)
        weights = [torch.where(e < 0, 0.0, 0.5 + (e.double() * _GOLDEN) % 1) for e in entries]
        one = torch.func.jvp(computed, here, tuple(weights))[1]
        tangents = tuple(w * (1 + e) for w, e in zip(weights, entries, strict=True))
        other = torch.func.jvp(computed, here, tangents)[1]
        quotient = torch.where(one == 0, 1.0, other / one) - 1
        found = quotient.round().long()
        exact = ((quotient - found).abs() <= _INTEGER * (1 + found)) | (one == 0)
        if not bool(exact.all()) or bool((one == 0).all()) or layout.expanded:
            return False
        if self._scales(operation):
            erased = entries[0][(entries[0] >= 0) & ~torch.isin(entries[0], found[one != 0])]
            self.erased = torch.cat([self.erased, erased]).unique()
        memory = torch.full((layout.room,), -1)
        layout.write(memory, torch.where(one == 0, -1, found))
        self.made[layout.memory] = memory
        return True

    def _scales(self, operation: Operation) -> bool:
        """Return whether an operation multiplies one function of parameters by constants, or writes some into it."""
        taken = [number for number in operation.ins if self.program.layouts[number].memory not in self._fixed]
        return len(taken) == 1 and operation.name in ("mul", "masked_fill", "where", "tril", "triu")

    @cached_property
    def _fixed(self) -> set[int]:
        """Return the memories that depend on no parameter and no input."""
        layouts, program = self.program.layouts, self.program
        varying = {layouts[number].memory for number in (*program.inputs, *program.parameters)}
        for operation in program.operations:
            if any(layouts[number].memory in varying for number in operation.ins):
                varying.update(layouts[number].memory for number in operation.outs)
        return {layout.memory for layout in layouts} - varying

    @cached_property
    def _needed(self) -> tuple[list[Operation], list[int]]:
        """Return the operations that compute functions that are not affine, and the parameters that they take."""
        wanted, needed, leaves = set[int](), list[Operation](), dict[int, None]()
        for operation in reversed(self.operations):
            if any(n in wanted or self.program.layouts[n].memory in self.made for n in operation.outs):
                needed.insert(0, operation)
                wanted.update(operation.ins)
                leaves.update(dict.fromkeys(n for n in operation.ins if n in self.program.parameters))
        return needed, list(leaves)

    def read(self, weights: Weights) -> Reading:
        """Evaluate all parameters and functions of them at these weights, with their slopes."""
        needed, leaves = self._needed
        layouts, constants = self.program.layouts, self.program.constants
        outs: list[int] = []

        def run(*given: Tensor) -> tuple[Tensor, ...]:
            known = {**{n: wide(t).cpu() for n, t in constants.items()}, **dict(zip(leaves, given, strict=True))}
            outs.clear()
            for operation in needed:
                args, kwargs = arguments(operation, known.__getitem__, generic=False)
                made = args[0] if operation.func is torch.ops.aten.detach.default else operation.func(*args, **kwargs)
                parts = (made,) if isinstance(made, Tensor) else [t for t in made if isinstance(t, Tensor)]
                known.update(zip(operation.outs, parts, strict=True))
                outs.extend(n for n in operation.outs if layouts[n].memory in self.made and n not in outs)
            return tuple(known[n] for n in outs)

        values: dict[int, Tensor] = {}
        slopes: dict[int, Tensor] = {}
        if needed:
            here = tuple(wide(layouts[n].of(weights(self.program.parameters[n]).reshape(-1)).clone()) for n in leaves)
            found, derived = torch.func.jvp(run, here, tuple(torch.ones_like(w) for w in here))[:2]
            for number, value, slope in zip(outs, found, derived, strict=True):
                layout = layouts[number]
                for store, part in ((values, value), (slopes, slope)):
                    layout.write(store.setdefault(layout.memory, torch.zeros(layout.room, dtype=torch.float64)), part)
        return Reading(self, weights, values, slopes)


def affine(operation: Operation, constant: Callable[[int], Tensor | None]) -> tuple[int, float, float] | None:
    """Return (n, scale, offset) if an operation computes scale * (value n) + offset entry by entry, else None.

    Scale and offset are Python numbers or constants of one entry; the scale is finite and not 0. constant: returns a
    value that does not vary, or None.
    """

    def number(each: object) -> float | None:
        if isinstance(each, Ref):
            known = constant(each.number)
            return None if known is None or known.numel() != 1 or known.is_complex() else float(known)
        return float(each) if isinstance(each, (bool, int, float)) else None

    name, args = operation.name, operation.args
    scale, offset, x = 1.0, 0.0, args[0] if args else None
    if name == "neg":
        scale = -1.0
    elif name in ("add", "sub", "rsub", "mul", "div") and len(args) > 1:
        a, b = map(number, args[:2])
        times = number(args[2] if len(args) > 2 else operation.kwargs.get("alpha", 1))
        if (a is None) == (b is None) or times is None:
            return None
        x = args[0] if a is None else args[1]
        if name == "mul":
            scale = a if b is None else b  # type: ignore[assignment]
        elif name == "div":
            scale = 1 / b if b else 0.0  # a number divided by x is not affine
        else:
            one, other = {"add": (1.0, times), "sub": (1.0, -times), "rsub": (-times, 1.0)}[name]
            scale, offset = (one, other * b) if b is not None else (other, one * a)  # type: ignore[operator]
    elif name == "_to_copy":
        kind = operation.kwargs.get("dtype") or torch.float64
        scale = float(kind.is_floating_point and kind.itemsize > 1)  # a cast to 8 bits rounds in float64, too
    elif name != "clone":
        return None
    good = isinstance(x, Ref) and scale and math.isfinite(scale) and math.isfinite(offset)
    return (x.number, scale, offset) if good else None  # type: ignore[union-attr]
