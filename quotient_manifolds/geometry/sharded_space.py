"""Represent the tangent space of a sharded model's parameters: of its coordinates every process has a share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch

from quotient_manifolds.geometry.tangent_space import TangentSpace, drawn
from quotient_manifolds.sharded import Ownership, ShardedModel, from_all, gathered
from quotient_manifolds.symmetries import Params, SymmetricPair

Shape = tuple[int, int, int]


class ShardedSpace(TangentSpace):
    """Hold this process's share of a tangent space: its part of what is elementwise, and the pairs that it owns.

    What is computed with z is inherited; lengths and reaches are those of the whole, found by all processes together.
    """

    def __init__(
        self, local: TangentSpace, model: ShardedModel, ownership: Ownership, pairs: Iterable[SymmetricPair] = ()
    ) -> None:
        """Take the local space, and the pairs of all processes in the order of the unsharded model."""
        super().__init__(local._point, local.scale, local.pairs, local.norm)
        self.model, self.ownership, self._everywhere = model, ownership, tuple(pairs)
        scaled = {name for names in from_all(tuple(self.scale)) for name in names}
        self._drawn = tuple(name for name in model.measured if name in scaled)
        own = {
            pair.name: (pair.heads, pair.n, pair.m, pair.h, pair.acts) for block in self.pairs for pair in block.pairs
        }
        self._shapes = {name: shape for each in from_all(own) for name, shape in each.items()}

    def buffers(self) -> Params:
        """Return where moved parameters are written: into the model where nobody owns them, else next to it."""
        held, fresh = self.model.held(), self.ownership.owners
        return {
            name: torch.empty(w.shape, dtype=w.dtype, device=w.device) if name in fresh else held[name]
            for name, w in self._point.items()
        }

    def sample(self, generator: torch.Generator) -> Params:
        """Draw z ~ N(0, I) on the horizontal space, for linf uniform: all draw alike, and each keeps its share.

        That of the unsharded space, where pairs have multiples of 16 numbers, which is how many torch draws at once.
        """
        z: Params = {}
        for name in self._drawn:
            layout, scale = self.model.layouts[name], self.scale.get(name)
            noise = drawn(layout.shape, generator, self.norm)
            if name in self.scale:
                part = noise if name in self.ownership.owners else noise[layout.box]
                own = part.to(self._point[name]).contiguous()
                z[name] = own if scale is None else own.mul_(scale != 0)
        shared: Params = {}
        here = {pair.name for block in self.pairs for pair in block.pairs}
        ordered: dict[tuple[object, ...], list[str]] = {}
        for name in (pair.name for pair in self._everywhere if pair.name in self._shapes):
            ordered.setdefault(self._shapes[name][1:], []).append(name)
        for name in (name for names in ordered.values() for name in names):
            heads, n, m, h, _ = self._shapes[name]
            noise = drawn((heads, n + m, h), generator)
            shared |= {name: noise} if name in here else {}
        with self._undisturbed():
            for block in self.pairs:
                own = torch.cat([shared[pair.name] for pair in block.pairs]).to(block.space.point)
                z[block.key] = block.space.project(block.space.from_balanced(own))
        return z

    def length(self, z: Params) -> float:
        """Compute |z| in the norm of the ball."""
        lengths = self._numbers(super().length(z) if any(block.numel() for block in z.values()) else 0.0)
        return math.hypot(*lengths) if self.norm == "l2" else max(lengths)

    def reach(self, z: Params) -> float | None:
        """Compute the largest relative speed of a pair at the start of gamma_z; None where no geodesic is truncated."""
        return max(self._given(super().reach(z)), default=None)

    def _given(self, number: float | None) -> list[float]:
        return [each for each in self._numbers(math.nan if number is None else number) if not math.isnan(each)]

    def _numbers(self, number: float) -> list[float]:
        numbers = torch.tensor([number], dtype=torch.float64, device=self.model.device)
        return [float(each) for each in gathered(numbers).flatten()]


def elementwise(model: ShardedModel, space: Callable[[Params], TangentSpace]) -> ShardedSpace:
    """Return the space that moves every element by itself, given what makes it of parameters."""
    ownership = Ownership(model.layouts, model.measured, ())
    return ShardedSpace(space(ownership.gather(model.original)), model, ownership)
