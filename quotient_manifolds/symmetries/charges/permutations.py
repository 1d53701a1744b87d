"""Keep the permutations of proposed units - neurons, heads, experts, channels - that leave all outputs unchanged.

First, all proposed units are permuted at once, at random. Proposals that change outputs are then found by bisection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quotient_manifolds.symmetries.charges.units import proposed
from quotient_manifolds.symmetries.charges.walk import Walk
from quotient_manifolds.symmetries.groups import Params, Permutation
from quotient_manifolds.symmetries.trace.record import movable

CHANGE = 1e-9
"""The largest relative change of outputs at which a permutation is kept."""
_NOISE, _OFFSET, _LEAST = 0.3, 0.1, 1e-3
_TRIES = 200
"""The maximum number of trials to find which units of rejected proposals may be permuted."""

Check = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], float]
"""(parameters and buffers before, after) -> the largest relative change of an output."""


@dataclass(frozen=True)
class Refused:
    """Hold a permutation that changed outputs, and the relative change."""

    permutation: Permutation
    change: float


def permutations(
    walk: Walk, check: Check, generator: torch.Generator | None = None, refused: list[Refused] | None = None
) -> tuple[Permutation, ...]:
    """Return the permutations of units that leave all outputs unchanged, at generic weights and statistics.

    walk: must be made with `keep`. refused: a list to which proposals that change outputs are appended.
    """
    generator = generator or torch.Generator().manual_seed(0)
    found = list(proposed(walk)) if walk.leaves or walk.uses else []
    return tuple(_Judge(walk, check, generator, [] if refused is None else refused).kept(found))


class _Judge:
    """Permute units at generic weights and statistics, and check whether outputs change."""

    def __init__(self, walk: Walk, check: Check, generator: torch.Generator, refused: list[Refused]) -> None:
        self.recording, self.check, self.generator, self.refused = walk.recording, check, generator, refused
        self.before: Params = {}
        self.left = _TRIES

    def kept(self, found: list[Permutation]) -> Iterator[Permutation]:
        """Yield the permutations that change no output, and for the others their units that may be permuted."""
        moved, recording = {name for each in found for name in each.names}, self.recording
        for name, w in recording.parameters.items():
            if movable(w):
                self.before[name] = self._other(w, torch.randn)
        for number, name in recording.buffers.items():
            if name in moved:
                self.before[name] = self._other(recording.values[number], torch.rand)  # variances are positive
        yield from self._bisected(found)

    def _other(self, w: Tensor, draw: Callable[..., Tensor]) -> Tensor:
        w = w.detach().double()
        size = w.square().mean().sqrt().clamp(_LEAST)
        a, b = (draw(w.shape, generator=self.generator, dtype=torch.float64).to(w.device) for _ in range(2))
        return w * (1 + _NOISE * a) + _OFFSET * size * b

    def change(self, some: Iterable[Permutation]) -> float:
        """Return the largest change of outputs if two units of each permutation are exchanged, and if all move."""
        some = list(some)
        worst = 0.0
        for order in (self._two, self._all):
            after = self.before
            for each in some:
                after = each.act(after, order(each.units))
            worst = max(worst, self.check(self.before, after))
            if not worst < CHANGE:
                break
        return worst

    def _two(self, units: int) -> Tensor:
        order, (a, b) = torch.arange(units), torch.randperm(units, generator=self.generator)[:2]
        order[a], order[b] = b.clone(), a.clone()
        return order

    def _all(self, units: int) -> Tensor:
        order, which = torch.arange(units), torch.randperm(units, generator=self.generator)
        order[which] = which.roll(1)  # no unit stays in place
        return order

    def _bisected(self, some: list[Permutation]) -> Iterator[Permutation]:
        change = self.change(some) if some else 0.0
        if change < CHANGE:
            yield from some
        elif len(some) == 1:
            self.refused.append(Refused(some[0], change))
            yield from self._apart(some[0])
        else:
            half = len(some) // 2
            yield from self._bisected(some[:half])
            yield from self._bisected(some[half:])

    def _apart(self, of: Permutation) -> Iterator[Permutation]:
        """Yield permutations of some units: halve recursively, then merge parts whose first units may swap."""

        def holds(units: list[int]) -> bool:
            self.left -= 1
            return self.left >= 0 and self.change([of.some(torch.tensor(units))]) < CHANGE

        def parts(units: list[int]) -> list[list[int]]:
            if len(units) < 2 or (len(units) < of.units and holds(units)):
                return [units]
            half, made = len(units) // 2, list[list[int]]()
            for part in (*parts(units[:half]), *parts(units[half:])):
                to = next((each for each in made if holds([each[0], part[0]])), None)
                if to is None:
                    made.append(part)
                else:
                    to += part
            return made

        yield from (of.some(torch.tensor(each)) for each in parts(list(range(of.units))) if len(each) > 1)
