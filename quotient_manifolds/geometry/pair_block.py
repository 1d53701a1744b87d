"""Move symmetric pairs of a model along the geodesics of their quotient manifold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from quotient_manifolds.linalg import SingularFrame
from quotient_manifolds.manifolds import FixedRankQuotient, HorizontalSpace, RotaryQuotient
from quotient_manifolds.manifolds.horizontal import Linearised
from quotient_manifolds.symmetries import Params, SymmetricPair

Gradients = Mapping[str, Tensor | None]

PairManifold = FixedRankQuotient | RotaryQuotient

REACH = {"first": 0.2, "second": 0.5}
"""The relative speed up to which a Taylor polynomial follows a geodesic, by its degree.

There the product of a scalar pair is off by about a tenth of its change, in all metrics from `inv` to `mix`. The exact
product is e^2b in `inv`, 1 + 2b in `mix`. To lowest order and relative to the change, (1 + b)^2 is off by b / 2, and
(1 + b +- b^2 / 2)^2 by b^2 / 6 in `inv`, b^2 / 2 in `mix`. Geodesics of `mix` end at speed 1/2.
"""


@final
@dataclass(frozen=True)
class PairBatch:
    """Hold pairs of one shape, read as one point (heads of all pairs, n + m, h) with G stacked on H."""

    pairs: tuple[SymmetricPair, ...]

    @cached_property
    def names(self) -> frozenset[str]:
        """Return the parameters that the pairs own entries of."""
        return frozenset(name for pair in self.pairs for name in pair.names)

    @cached_property
    def heads(self) -> list[int]:
        """Return the number of heads of each pair."""
        return [pair.heads for pair in self.pairs]

    def read(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return the point, a new tensor in the parameters' dtype."""
        first, own = self.pairs[0], [params.get(name) for name in self.names]
        like = own[0]
        if like is None or torch.is_grad_enabled() or any(w is None or w.dtype != like.dtype for w in own):
            return torch.cat([pair.read(params) for pair in self.pairs])  # several dtypes, or a graph
        x = torch.empty(sum(self.heads), first.n + first.m, first.h, dtype=like.dtype, device=like.device)
        for pair, heads in zip(self.pairs, x.split(self.heads), strict=True):
            pair.read(params, heads)
        return x

    def write(self, x: Tensor, params: Params) -> None:
        """Write a point to the entries of `params` that the pairs own, in place."""
        for pair, heads in zip(self.pairs, x.split(self.heads), strict=True):
            pair.write(params, heads)


@final
@dataclass(frozen=True)
class PairBlock:
    """Hold the horizontal space of one pair, or of several of one shape: one block of the coordinates z.

    Truncated geodesics are a few products of well-scaled matrices, and are fastest if their operands fit into a cache.
    So every pair has its own block, in the model's precision (at least float32). Exact geodesics are exponentials or an
    ODE in float64, and an ODE costs nearly the same for one pair as for many. So pairs of one shape share a block. The
    point is factored in float64 in both cases, unless it is `brief` (see `pair_blocks`).
    """

    key: str
    batch: PairBatch
    manifold: PairManifold
    space: HorizontalSpace
    order: str

    @cached_property
    def _linearised(self) -> Linearised:
        return self.space.linearised(self.order)

    @property
    def pairs(self) -> tuple[SymmetricPair, ...]:
        """Return the pairs that share the block."""
        return self.batch.pairs

    @property
    def names(self) -> frozenset[str]:
        """Return the parameters that the pairs own entries of."""
        return self.batch.names

    def double(self) -> PairBlock:
        """Return the block at the same point in float64; coordinates z mean the same vectors in it."""
        return replace(self, space=self.manifold.at(self.space.point.double()))

    def reached(self, z: Tensor) -> Tensor:
        """Shorten z to the point at which its geodesic leaves the manifold; truncated geodesics never leave it."""
        if self.order != "exact":
            return z
        with torch.no_grad():
            times = self.space.follow(z, self.order)[1]
        return z * times[..., None, None]

    def relative_speed(self, z: Tensor) -> float:
        """Compute the largest relative speed of a head."""
        with torch.no_grad():
            return float(self.space.relative_speed(z).max())

    def gradient(self, grads: Gradients, point: Params) -> Tensor:
        """Compute the gradient in z at 0 from the Euclidean gradients; missing ones count as 0."""
        egrad = self.batch.read(self._gradients(grads, point))
        return self.space.project(self.space.covector(egrad.to(self.space.point)))

    def move(self, z: Tensor, out: Params, order: str | None = None) -> None:
        """Write the pairs, moved along the geodesic of z, into `out`."""
        self.batch.write(self.space.follow(z, order or self.order)[0], out)

    def linearise(self, z: Tensor, out: Params) -> Callable[[Gradients, Params], Tensor]:
        """Write the pairs, moved as `move` does, into `out`; return the pull-back of gradients there to z."""
        rows = self._rows(out)
        pull_back = self._linearised(z, rows)
        if len(self.pairs) > 1:
            self.batch.write(rows[0], out)
        else:  # rows that are not views of `out` are copied to it
            for part, moved in zip(self.pairs[0].views, rows, strict=True):
                if address(moved) != address(out[part.name]):
                    part.write(out, moved)

        def pull(grads: Gradients, point: Params) -> Tensor:
            pulled = torch.empty_like(z)
            pull_back(self._rows(self._gradients(grads, point)), pulled)
            return pulled

        return pull

    def _gradients(self, grads: Gradients, point: Params) -> Params:
        own = {name: grads.get(name) for name in self.names}
        return {
            name: point[name].new_zeros(()).expand_as(point[name]) if grad is None else grad
            for name, grad in own.items()
        }

    def _rows(self, params: Params) -> list[Tensor]:
        """Return the rows of one pair by part, as views if strides allow; rows of several pairs in one stacked copy."""
        if len(self.pairs) > 1:
            return [self.batch.read(params)]
        return [view.read(params) for view in self.pairs[0].views]


def in_batches(pairs: Iterable[SymmetricPair], apart: Callable[[SymmetricPair], object]) -> list[PairBatch]:
    """Collect pairs of one shape and group in batches, separately for each value of `apart`."""
    groups: dict[tuple[object, ...], list[SymmetricPair]] = {}
    for pair in pairs:
        groups.setdefault((pair.n, pair.m, pair.h, pair.acts, apart(pair)), []).append(pair)
    return [PairBatch(tuple(group)) for group in groups.values()]


def pair_blocks(
    manifolds: Mapping[SymmetricPair, PairManifold],
    point: Params,
    order: str,
    frames: Mapping[SymmetricPair, SingularFrame] | None = None,
    *,
    brief: bool = False,
) -> tuple[PairBlock, ...]:
    """Build the blocks of pairs on their manifolds, pairs of one shape next to each other.

    frames: singular frames of pairs whose factors are balanced, if known. brief: factor in the model's precision (at
    least float32), because float64 does not pay for a single step.
    """
    blocks: list[PairBlock] = []
    for batch in in_batches(manifolds, lambda pair: point[pair.names[0]].device):
        for part in [batch] if order == "exact" else [PairBatch((pair,)) for pair in batch.pairs]:
            x = part.read(point)
            dtype = torch.float64 if order == "exact" else torch.promote_types(x.dtype, torch.float32)
            manifold = manifolds[part.pairs[0]]
            known = [frame for pair in part.pairs if (frame := (frames or {}).get(pair)) is not None]
            space: HorizontalSpace
            if len(known) == len(part.pairs) and isinstance(manifold, FixedRankQuotient):
                space = manifold.framed(x, SingularFrame(*map(torch.cat, zip(*known, strict=True))), dtype)
            else:
                space = manifold.at(x.to(dtype if brief else torch.float64), dtype=dtype)
            key = f"pairs {len(blocks)} ({part.pairs[0].name})"
            blocks.append(PairBlock(key, part, manifold, space, order))
    return tuple(blocks)


def address(tensor: Tensor) -> int:
    """Return the address at which a tensor's storage begins; its views share it."""
    return tensor.untyped_storage().data_ptr()
