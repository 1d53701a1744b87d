"""Symmetric pairs of one shape, over layers and heads, moved along the geodesics of their quotient."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from quotient_manifolds.manifolds import HorizontalSpace, Metric, QuotientManifold
from quotient_manifolds.manifolds.horizontal import PullBack
from quotient_manifolds.manifolds.relative import RelativeSpace
from quotient_manifolds.symmetries import Params, SymmetricPair

Gradients = Mapping[str, Tensor | None]

REACH = {"first": 0.2, "second": 0.5}
"""By degree of the Taylor polynomial, the relative speed up to which it follows a geodesic.

There it misses the product of a scalar pair by about a tenth of the way gone, in all metrics from `inv` to `mix`: of
that way, (1 + b)^2 and (1 + b +- b^2 / 2)^2 are to lowest order b / 2, and b^2 / 6 in `inv`, b^2 / 2 in `mix`, away
from e^2b and 1 + 2b. At 1/2 geodesics of `mix` end.
"""


@final
@dataclass(frozen=True)
class StackedPairs:
    """Pairs of equal shape and group, over layers and heads, as one batched point of their quotient manifold.

    Factored in float64 whatever the model's dtype. Steps in z then run in the model's own precision (at least float32)
    where they are a few products of well-scaled matrices, and in float64 where they are exponentials or an ODE.
    """

    key: str
    pairs: tuple[SymmetricPair, ...]
    manifold: QuotientManifold
    space: HorizontalSpace
    order: str

    @classmethod
    def at(
        cls,
        pairs: tuple[SymmetricPair, ...],
        point: Params,
        metric: Metric,
        geodesic: str,
        eps: float,
        *,
        relative: bool = False,
    ) -> StackedPairs:
        """relative: coordinates xi / x in place of the metric's."""
        n, m, h = pairs[0].n, pairs[0].m, pairs[0].h
        x = _read(pairs, point)
        manifold = pairs[0].manifold(metric, eps)
        space = manifold.at(x.to(torch.float64))
        if geodesic != "exact":
            space = _in_precision(space, torch.promote_types(x.dtype, torch.float32))
        if relative:
            space = RelativeSpace(space)
        return cls(f"pairs {pairs[0].acts} {n} {m} {h} {x.device}", pairs, manifold, space, geodesic)

    def exact(self) -> StackedPairs:
        """The same pairs, coordinates and velocities, followed along the exact geodesics."""
        space = self.manifold.at(self.space.point.to(torch.float64))
        relative = isinstance(self.space, RelativeSpace)
        return replace(self, space=RelativeSpace(space) if relative else space, order="exact")

    @cached_property
    def _groups(self) -> tuple[tuple[tuple[SymmetricPair, ...], HorizontalSpace], ...]:
        """What is moved at once: one pair, whose heads fit into a cache; all where an ODE is solved."""
        if self.order == "exact":
            return ((self.pairs, self.space),)
        ends = accumulate((pair.heads for pair in self.pairs), initial=0)
        spans = zip(self.pairs, pairwise(ends), strict=True)
        return tuple(((pair,), _heads(self.space, start, stop)) for pair, (start, stop) in spans)

    def reached(self, z: Tensor) -> Tensor:
        """z, cut to where its geodesic leaves the manifold; the polynomials never do."""
        if self.order != "exact":
            return z
        with torch.no_grad():
            times = self.space.follow(z, self.order)[1]
        return z * times[..., None, None]

    def relative_speed(self, z: Tensor) -> float:
        """The largest over pairs and heads."""
        with torch.no_grad():
            return max(float(space.relative_speed(part).max()) for _, space, part in self._parts(z))

    def move(self, z: Tensor, out: Params, order: str | None = None) -> None:
        """Writes the moved pairs into `out`."""
        for pairs, space, part in self._parts(z):
            moved = space.follow(part, order or self.order)[0]
            for pair, heads in zip(pairs, moved.split([pair.heads for pair in pairs]), strict=True):
                pair.write(out, heads)

    def linearise(self, z: Tensor, out: Params) -> Callable[[Gradients, Params], Tensor]:
        """The same; returns the pull-back of the gradients of all parameters at a point."""
        pull_backs: list[PullBack] = []
        for pairs, space, part in self._parts(z):
            rows = _rows(pairs, out)
            pull_backs.append(space.linearised(self.order)(part, rows))
            _settle(pairs, rows, out)

        def pull(grads: Gradients, point: Params) -> Tensor:
            pulled = torch.empty_like(z)
            for (pairs, _, part), pull_back in zip(self._parts(pulled), pull_backs, strict=True):
                names = {name for pair in pairs for name in pair.names}
                pull_back(_rows(pairs, {name: _or_zero(grads.get(name), point[name]) for name in names}), part)
            return pulled

        return pull

    def _parts(self, z: Tensor) -> Iterator[tuple[tuple[SymmetricPair, ...], HorizontalSpace, Tensor]]:
        pairs, spaces = zip(*self._groups, strict=True)
        return zip(pairs, spaces, z.split([len(space.point) for space in spaces]), strict=True)


def equal_shapes(pairs: Iterable[SymmetricPair], point: Params) -> list[tuple[SymmetricPair, ...]]:
    groups: dict[tuple[object, ...], list[SymmetricPair]] = {}
    for pair in pairs:
        groups.setdefault((pair.n, pair.m, pair.h, pair.acts, point[pair.names[0]].device), []).append(pair)
    return [tuple(group) for group in groups.values()]


def _rows(pairs: Sequence[SymmetricPair], params: Params) -> list[Tensor]:
    """The rows of one pair part by part, views where strides allow; of several pairs stacked, in new memory."""
    return [part.read(params) for part in pairs[0].parts] if len(pairs) == 1 else [_read(pairs, params)]


def _settle(pairs: Sequence[SymmetricPair], rows: Sequence[Tensor], out: Params) -> None:
    """Puts rows that are no views of `out` where they belong."""
    if len(pairs) > 1:
        for pair, heads in zip(pairs, rows[0].split([pair.heads for pair in pairs]), strict=True):
            pair.write(out, heads)
        return
    for part, written in zip(pairs[0].parts, rows, strict=True):
        if address(written) != address(out[part.name]):
            part.write(out, written)


def _read(pairs: Sequence[SymmetricPair], params: Params) -> Tensor:
    return torch.cat([pair.read(params) for pair in pairs])  # (heads of all pairs, n + m, h)


def _or_zero(grad: Tensor | None, like: Tensor) -> Tensor:
    return like.new_zeros(()).expand_as(like) if grad is None else grad


def address(tensor: Tensor) -> int:
    """Where a tensor's memory begins; the same for its views."""
    return tensor.untyped_storage().data_ptr()


def _in_precision(space: HorizontalSpace, dtype: torch.dtype) -> HorizontalSpace:
    """The same factored space, its tensors rounded to `dtype`."""
    rounded: dict[int, Tensor] = {}  # of one tensor, one copy

    def cast(value: Tensor) -> Tensor:
        return rounded.setdefault(id(value), value.to(dtype)) if value.is_floating_point() else value

    return _mapped(space, cast)


def _heads(space: HorizontalSpace, start: int, stop: int) -> HorizontalSpace:
    """The same factored space for heads start <= i < stop, in the same memory."""
    return _mapped(space, lambda value: value[start:stop])


def _mapped(space: HorizontalSpace, f: Callable[[Tensor], Tensor]) -> HorizontalSpace:
    def each(value: Any) -> Any:
        if isinstance(value, HorizontalSpace):
            return _mapped(value, f)
        return f(value) if isinstance(value, Tensor) else value

    mapped = copy.copy(space)
    mapped.__dict__.update(tree_map(each, vars(space)))
    return mapped
