"""Treat the inputs of operations without a derivative as further outputs of the model: taps.

A comparison, a rounded number, an index or a Python number that depends on a weight may change while every derivative
vanishes. A transformation is therefore a symmetry only if it leaves the inputs of such operations unchanged, and random
multiples of these are added to the loss. If an operation depends only on signs or an order, the multiples are
orthogonal to the inputs, so that positive scales have no charge. If it depends only on an order, as a maximum does, the
multiples also sum to 0, so that shifts have no charge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from quotient_manifolds.symmetries.trace.program import Operation, Program, substituted
from quotient_manifolds.symmetries.trace.replay import FLAT, arguments

_JUMPS = {"remainder", "fmod", "frac"}
"""Operations that have a derivative but are not continuous."""
_COMPARED = {"gt", "lt", "ge", "le", "eq", "ne"}
_REFUSED = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError)
Change = Callable[[Tensor], Tensor]


def cuts(program: Program) -> dict[int, tuple[int, ...]]:
    """Return by place of an operation the inputs that depend on a weight, if no derivative passes the operation."""
    layouts, live, found = program.layouts, set(program.parameters), dict[int, tuple[int, ...]]()
    taken, needed = set[int](), {layouts[number].memory for number in program.outputs}
    for operation in reversed(program.operations):  # operations that lead to no output do not count
        if not operation.outs or any(layouts[n].memory in needed for n in operation.outs):
            taken.update(operation.ins)
            needed |= {layouts[n].memory for n in operation.ins}
    for place, operation in enumerate(program.operations):
        ins = tuple(number for number in dict.fromkeys(operation.ins) if number in live)
        real = {n for n in operation.outs if layouts[n].is_floating_point or layouts[n].dtype.is_complex}
        indices = any(n in taken for n in operation.outs if n not in real)
        if ins and (not operation.outs or indices or operation.name in FLAT | _JUMPS):
            found[place] = ins
        if ins and operation.name not in FLAT:
            live |= real
    return found


@dataclass(frozen=True, eq=False)
class Tap:
    """Hold the values that an operation takes, with their graph.

    over: the axes over which only the direction of the values matters, or None. level: whether only the direction of
    the values minus their mean over these axes matters.
    """

    values: Tensor
    over: tuple[int, ...] | None
    level: bool = False

    def multiples(self, generator: torch.Generator) -> Tensor:
        """Return random multiples for the values, scaled down by the size of the values."""
        known = self.values.detach()
        finite = torch.isfinite(known)
        known = known.nan_to_num(0.0, 0.0, 0.0)
        drawn = torch.randn(known.shape, generator=generator, dtype=torch.float64).to(known.device) * finite
        if self.over is None:
            return drawn / (1 + known.abs())
        if self.level:
            count = finite.sum(self.over, keepdim=True).clamp(1)
            drawn, known = ((t - t.sum(self.over, keepdim=True) / count) * finite for t in (drawn, known * finite))
        size = known.square().sum(self.over, keepdim=True)
        part = (drawn * known).sum(self.over, keepdim=True) / torch.where(size > 0, size, 1.0)
        return (drawn - part * known) / known.abs().max().clamp(1e-30)


class Taps:
    """Collect the taps of one replay, which calls this object before each operation at `places`."""

    def __init__(self, places: dict[int, tuple[int, ...]]) -> None:
        self.places, self.generator = places, torch.Generator().manual_seed(7)
        self.found: list[Tap] = []

    def __call__(self, place: int, operation: Operation, at: Callable[[int], Tensor]) -> None:
        """Tap the inputs of an operation that have a gradient, unless its result does not depend on them."""
        live = {number: at(number) for number in self.places[place] if at(number).requires_grad}
        if not live:
            return
        if not operation.outs:
            self.found += [Tap(_real(t), None) for t in live.values()]
            return

        def again(change: Change) -> Any:
            def changed(number: int) -> Tensor:
                return change(at(number)) if number in live else at(number)

            args, kwargs = arguments(operation, changed, generic=True)
            made = operation.func(*args, **kwargs)
            made = [made] if isinstance(made, Tensor) else [t for t in made if isinstance(t, Tensor)]
            return made if operation.name in FLAT | _JUMPS else [t for t in made if not t.is_floating_point()]

        with torch.no_grad():
            here = again(lambda t: t)

            def same(change: Change) -> bool:
                try:
                    return all(
                        a.shape == b.shape and torch.equal(a, b) for a, b in zip(here, again(change), strict=True)
                    )
                except _REFUSED:
                    return False

            idle = same(self._away)
            signs = not idle and same(lambda t: 2 * t) and same(lambda t: t / 3)
            ndim = max(t.ndim for t in live.values())
            free = [d for d in range(1, ndim) if signs and same(lambda t, d=d: t * self._along(t, d))]  # type: ignore[misc]
            axes: list[int | None] = [*free] or [None]
            level = signs and all(
                same(lambda t, d=d, sign=sign: t + sign * t.abs().mean() * self._along(t, d))  # type: ignore[misc]
                for d in axes
                for sign in (2, -2)
            )
        if not idle:
            self._tap(operation, at, list(live.values()), signs, free, level)

    def _tap(
        self,
        operation: Operation,
        at: Callable[[int], Tensor],
        live: list[Tensor],
        signs: bool,
        free: Sequence[int],
        level: bool,
    ) -> None:
        if operation.name in _COMPARED and not any(t.is_complex() for t in live):
            a, b = substituted(operation.args[:2], at)
            seen = (a.double() if isinstance(a, Tensor) else a) - (b.double() if isinstance(b, Tensor) else b)
            self.found.append(Tap(seen, _over(seen.shape, range(1, seen.ndim))))
        elif signs and len(live) == 1:
            seen = live[0]
            over = None if seen.is_complex() else _over(seen.shape, free, 3 if level else 2)
            self.found.append(Tap(_real(seen), over, level))
        elif signs:  # all of them share one scale
            seen = torch.cat([_real(t).reshape(-1) for t in live])
            self.found.append(Tap(seen, _over(seen.shape, ())))
        else:
            self.found += [Tap(_real(t), None) for t in live]

    def _away(self, t: Tensor) -> Tensor:
        return t + torch.randn(t.shape, generator=self.generator, dtype=t.dtype).to(t.device) * (1 + t.abs())

    def _along(self, t: Tensor, axis: int | None) -> Tensor:
        """Return positive numbers that differ along an axis; one number without an axis; 1 if t has no such axis."""
        if axis is not None and axis >= t.ndim:
            return torch.ones(())
        size = 1 if axis is None else t.shape[axis]
        numbers = 0.1 + torch.randperm(size, generator=self.generator).double().to(t.device) / size
        return numbers.view([-1 if d == axis else 1 for d in range(t.ndim)])


def _over(shape: Sequence[int], free: Sequence[int], least: int = 2) -> tuple[int, ...] | None:
    """Return the axes that share one scale: all but the free ones, and free ones until they have `least` entries."""
    over = [d for d in range(len(shape)) if d not in free]
    for d in free:
        if prod(shape[k] for k in over) < least:
            over.append(d)
    return tuple(over) if prod(shape[k] for k in over) >= least else None


def _real(t: Tensor) -> Tensor:
    return torch.view_as_real(t) if t.is_complex() else t
