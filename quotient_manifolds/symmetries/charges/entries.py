"""Entries of parameters, and of functions of parameters each of whose entries depends on one of theirs.

All parameters in a row are theta, a vector of P entries. A transposed, split, stacked or scaled parameter is a
parameter, too: its entries are entries of theta, and its derivative in these (its slope) turns changes of one into
changes of the other. A function is found by forward derivatives along r and along r * (1 + entry): their quotient is
1 + the entry, if there is one, and no integer if there are several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from quotient_manifolds.symmetries.trace.program import Operation, Program, substituted
from quotient_manifolds.symmetries.trace.replay import Weights, lifted, wide

_GOLDEN = 0.6180339887498949
_INTEGER = 1e-6


@dataclass(frozen=True, eq=False)
class Reading:
    """Hold the numbers of parameters and of functions of them, by memory, and their slopes in the entries of theta."""

    values: Mapping[int, Tensor]
    slopes: Mapping[int, Tensor]

    def at(self, memory: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return values and slopes at places of a memory."""
        values = self.values[memory][places]
        slopes = self.slopes.get(memory)
        return values, torch.ones_like(values) if slopes is None else slopes[places]


class Entries:
    """Say which entry of theta each entry of a value depends on, for parameters and functions of them."""

    def __init__(self, program: Program, shapes: Mapping[str, torch.Size]) -> None:
        self.program, self.shapes = program, shapes
        self.start: dict[str, int] = {}
        self.size = 0
        for name, shape in shapes.items():
            self.start[name] = self.size
            self.size += shape.numel()
        self.plain = {program.layouts[number].memory: name for number, name in program.parameters.items()}
        self.made: dict[int, Tensor] = {}
        """By memory of a function of parameters: the entry of theta of each of its entries, or -1."""
        self.operations: list[Operation] = []
        """Operations on parameters and constants alone."""

    def known(self, number: int) -> bool:
        """Return whether a value is a parameter or a function of parameters."""
        memory = self.program.layouts[number].memory
        return memory in self.plain or memory in self.made

    def of(self, number: int) -> Tensor:
        """Return the entry of theta of each entry of a value, -1 where it is a constant."""
        layout = self.program.layouts[number]
        made = self.made.get(layout.memory)
        if made is not None:
            return layout.of(made)
        name = self.plain[layout.memory]
        return layout.of(torch.arange(self.start[name], self.start[name] + self.shapes[name].numel()))

    def follow(self, operation: Operation, values: Callable[[int], Tensor]) -> bool:
        """Take note of a function of parameters. Return False unless each of its entries depends on one of theta."""
        (out, *more), layouts = operation.outs, self.program.layouts
        taken = [number for number in dict.fromkeys(operation.ins) if self.known(number)]
        if more or not layouts[out].is_floating_point:
            return False
        entries = [self.of(number) for number in taken]
        where = dict(zip(taken, range(len(taken)), strict=True))

        def computed(*given: Tensor) -> Tensor:
            def at(number: int) -> Tensor:
                return given[where[number]] if number in where else wide(values(number))

            args, kwargs = substituted((operation.args, dict(operation.kwargs)), at)
            args, kwargs = lifted(operation, args, kwargs, generic=False)
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
        if not bool(exact.all()) or bool((one == 0).all()) or layouts[out].expanded:
            return False
        memory = torch.full((layouts[out].room,), -1)
        memory[layouts[out].places] = torch.where(one == 0, -1, found)
        self.made[layouts[out].memory] = memory
        return True

    @cached_property
    def _needed(self) -> tuple[list[Operation], list[int]]:
        """Return the operations that lead to functions of parameters, and the parameters that these begin with."""
        wanted, needed, leaves = set[int](), list[Operation](), dict[int, None]()
        for operation in reversed(self.operations):
            if any(n in wanted or self.program.layouts[n].memory in self.made for n in operation.outs):
                needed.insert(0, operation)
                wanted.update(operation.ins)
                leaves.update(dict.fromkeys(n for n in operation.ins if n in self.program.parameters))
        return needed, list(leaves)

    def read(self, weights: Weights) -> Reading:
        """Return the numbers and slopes of all parameters and functions of them at these weights."""
        values = {memory: weights(name).reshape(-1) for memory, name in self.plain.items()}
        needed, leaves = self._needed
        if not needed:
            return Reading(values, {})
        layouts, constants = self.program.layouts, self.program.constants
        outs: list[int] = []

        def run(*given: Tensor) -> tuple[Tensor, ...]:
            known = {**{n: wide(t) for n, t in constants.items()}, **dict(zip(leaves, given, strict=True))}
            outs.clear()
            for operation in needed:
                args, kwargs = substituted((operation.args, dict(operation.kwargs)), known.__getitem__)
                args, kwargs = lifted(operation, args, kwargs, generic=False)
                made = args[0] if operation.func is torch.ops.aten.detach.default else operation.func(*args, **kwargs)
                parts = (made,) if isinstance(made, Tensor) else [t for t in made if isinstance(t, Tensor)]
                known.update(zip(operation.outs, parts, strict=True))
                outs.extend(n for n in operation.outs if layouts[n].memory in self.made and n not in outs)
            return tuple(known[n] for n in outs)

        here = tuple(layouts[n].of(values[layouts[n].memory]).clone() for n in leaves)
        found, slopes = torch.func.jvp(run, here, tuple(torch.ones_like(w) for w in here))[:2]
        derived: dict[int, Tensor] = {}
        for number, value, slope in zip(outs, found, slopes, strict=True):
            layout = layouts[number]
            for store, part in ((values, value), (derived, slope)):
                memory = store.setdefault(layout.memory, torch.zeros(layout.room, dtype=torch.float64))
                memory[layout.places] = part
        return Reading(values, derived)
