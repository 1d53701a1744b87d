"""Represent the tangent space of all measured parameters, or a process's share of it, in orthonormal coordinates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, groupby
from typing import Literal

import torch
from torch import Tensor

from quotient_manifolds.geometry.pair_block import Gradients, PairBlock, address
from quotient_manifolds.geometry.parameters import precise
from quotient_manifolds.linalg import FullPrecision, full_precision
from quotient_manifolds.sharded import Ownership, ShardedModel, from_all
from quotient_manifolds.symmetries import Params, SymmetricPair

Norm = Literal["l2", "linf"]
"""The norm of z that defines the ball of a geometry: sum of squares, or largest coordinate. A metric has l2."""


class TangentSpace(FullPrecision):
    """Represent the tangent space T_w of all measured parameters w, in orthonormal coordinates z; immutable.

    z has one block per parameter (of its shape, in at least single precision) for the elements in no pair, and blocks
    (heads, n + m, h) for pairs. Weights in half precision are kept as they are, and move in single precision.

    scale: xi = scale * z for a parameter's block, None for 1. A parameter that pairs own entirely has no block; only
    the shape and dtype of its entry in `point` matter. norm: the norm of the ball of z.
    """

    def __init__(
        self, point: Params, scale: Mapping[str, Tensor | None], pairs: tuple[PairBlock, ...], norm: Norm = "l2"
    ) -> None:
        self._point = point
        self.scale = dict(scale)
        self.pairs = pairs
        self.norm = norm

    @property
    def point(self) -> Params:
        """Return the parameters w; parameters that pairs own, whose values only the pairs hold, in new tensors."""
        owned = {name for block in self.pairs for name in block.names}
        point = self._point | {name: _empty(self._point[name]) for name in owned - self.scale.keys()}
        point |= {name: point[name].clone() for name in owned & self.scale.keys()}
        for block in self.pairs:
            block.batch.write(block.space.point, point)
        return point

    @property
    def names(self) -> frozenset[str]:
        """Return the names of the parameters."""
        return frozenset(self._point)

    def double(self) -> TangentSpace:
        """Return the space with the same coordinates in float64; they mean the same vectors."""
        point = {
            name: w.double() if name in self.scale else w.new_empty((), dtype=torch.float64).expand(w.shape)
            for name, w in self._point.items()
        }
        scale = {name: None if each is None else each.double() for name, each in self.scale.items()}
        return TangentSpace(point, scale, tuple(block.double() for block in self.pairs), self.norm)

    def zero(self) -> Params:
        """Return z = 0, the coordinates of w itself."""
        like = {name: self._point[name] for name in self.scale} | {block.key: block.space.point for block in self.pairs}
        return {key: _empty(block).zero_() for key, block in like.items()}

    def buffers(self) -> Params:
        """Return tensors that `move` may write moved parameters into."""
        return {name: _empty(w) for name, w in self._point.items()}

    def sample(self, generator: torch.Generator) -> Params:
        """Draw z ~ N(0, I) on the horizontal space, for linf uniform in [-1, 1]; weights that cannot move get 0.

        A seed gives the same vector of the quotient at every point of an orbit of the pairs' groups, unless singular
        values coincide.
        """
        z: Params = {}
        for name, scale in self.scale.items():
            w = self._point[name]
            noise = drawn(w.shape, generator, self.norm).to(w.device, precise(w.dtype))
            z[name] = noise if scale is None else noise.mul_(scale != 0)
        for _, group in groupby(self.pairs, key=lambda block: (block.manifold, block.space.point.shape[-2:])):
            # Pairs of one shape are drawn together, so that a seed gives one z whether they share a block or not.
            blocks = list(group)
            heads = [len(block.space.point) for block in blocks]
            noise = drawn((sum(heads), *blocks[0].space.point.shape[1:]), generator)
            for block, part in zip(blocks, noise.split(heads), strict=True):
                z[block.key] = block.space.project(block.space.from_balanced(part.to(block.space.point)))
        return z

    def project(self, z: Params) -> Params:
        """Project z orthogonally onto the coordinates that move: horizontal for pairs, 0 where a scale is 0."""
        out = {name: z[name] if scale is None else z[name] * (scale != 0) for name, scale in self.scale.items()}
        out |= {block.key: block.space.project(z[block.key]) for block in self.pairs}
        return {key: part.contiguous() for key, part in out.items()}

    def reached(self, z: Params) -> Params:
        """Shorten z to where its geodesic leaves the manifold, pair by pair, if that is before t = 1."""
        return z | {block.key: block.reached(z[block.key]) for block in self.pairs}

    def reach(self, z: Params) -> float | None:
        """Compute the largest relative speed of a pair at the start of gamma_z; None if no geodesic is truncated."""
        truncated = (block for block in self.pairs if block.order != "exact")
        return max((block.relative_speed(z[block.key]) for block in truncated), default=None)

    def move(self, z: Params, out: Params | None = None, *, order: str | None = None, times: float = 1.0) -> Params:
        """Return all measured parameters, by name, at gamma_z(times), or at the end of gamma_z if that is earlier.

        Without `out` the result is new, and differentiable any number of times if z requires grad. Otherwise it is
        written to `out`, the result of an earlier call or the parameters themselves. order: replaces the space's own
        order of the geodesics of pairs.
        """
        out = self._outside_pairs(z, out, times)
        for block in self.pairs:
            block.move(times * z[block.key], out, order)
        return out

    def gradient(self, grads: Gradients) -> Params:
        """Compute the gradient in z at 0 of loss(move(z)) from the loss's gradients at the point; missing ones are 0.

        Equals the pull-back of `linearise` at 0, without following a geodesic. Blocks may be the given gradients.
        """
        z: Params = {}
        for name, scale in self.scale.items():
            grad = grads.get(name)
            grad = _empty(self._point[name]).zero_() if grad is None else grad
            z[name] = grad if scale is None else grad * scale
        return z | {block.key: block.gradient(grads, self._point) for block in self.pairs}

    def linearise(self, z: Params, out: Params | None = None) -> tuple[Params, Callable[[Gradients], Params]]:
        """Compute move(z) and its pull-back, from a loss's gradients at move(z) to the gradient of loss(move(z)) in z.

        Missing gradients count as 0. The pull-back OVERWRITES the gradients it is given, and empties their dict,
        because copies would take as much memory as the model. No graph kept here contains the network. z must not
        change before the pull-back has been used.
        """
        with torch.no_grad():
            out = self._outside_pairs(z, out)
        pulls = [(block, block.linearise(z[block.key], out)) for block in self.pairs]

        @full_precision
        def pull_back(grads: Gradients) -> Params:
            pulled: Params = {}
            readers = Counter(name for block in self.pairs for name in block.names)
            for block, pull in pulls:
                pulled[block.key] = pull(grads, self._point)
                readers.subtract(block.names)
                for name in block.names - self.scale.keys():
                    if not readers[name] and isinstance(grads, dict):
                        grads.pop(name, None)
            return pulled | self._scaled(grads)  # last, because it overwrites gradients that pairs read

        return out, pull_back

    def _outside_pairs(self, z: Params, out: Params | None, times: float = 1.0) -> Params:
        """Compute w + times scale z for elements in no pair; elements of pairs are left for the pairs to write."""
        moved: Params = {}
        for name, w in self._point.items():
            target = None if out is None else out[name]
            if name not in self.scale:
                moved[name] = _empty(w) if target is None else target
            elif (scale := self.scale[name]) is None:
                moved[name] = torch.add(w, z[name], alpha=times, out=target)
            else:
                moved[name] = torch.addcmul(w.to(z[name].dtype), scale, z[name], value=times, out=target)
        return moved

    def _scaled(self, grads: Gradients) -> Params:
        """Compute scale * gradient, in place if no other tensor shares its memory (autograd may return one twice)."""
        pulled: Params = {}
        known = chain(self._point.values(), grads.values())
        uses = Counter(address(tensor) for tensor in known if tensor is not None)
        for name, scale in self.scale.items():
            # The gradient is removed from the dict if that is allowed, so that it is freed as soon as it is read.
            grad = grads.pop(name, None) if isinstance(grads, dict) else grads.get(name)
            if grad is None:
                pulled[name] = _empty(self._point[name]).zero_()
                continue
            if uses[address(grad)] > 1 or grad.untyped_storage().nbytes() != grad.numel() * grad.element_size():
                grad = grad.clone(memory_format=torch.contiguous_format)
            pulled[name] = grad.contiguous() if scale is None else grad.mul_(scale).contiguous()
        return pulled


class ShardedSpace(TangentSpace):
    """Hold this process's share of a tangent space: its part of the elementwise blocks, and the pairs that it owns.

    Operations on z are inherited. Lengths and reaches are of the whole vector, computed by all processes together.
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
        """Return tensors to write moved parameters into: the model's own, or new ones if a process owns them."""
        held, fresh = self.model.held(), self.ownership.owners
        return {
            name: torch.empty(w.shape, dtype=w.dtype, device=w.device) if name in fresh else held[name]
            for name, w in self._point.items()
        }

    def sample(self, generator: torch.Generator) -> Params:
        """Draw z ~ N(0, I) on the horizontal space, for linf uniform: all processes draw it, and each keeps its share.

        It equals the sample of the unsharded space if pairs have multiples of 16 numbers, as torch draws 16 at once.
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
        for name in chain.from_iterable(ordered.values()):
            heads, n, m, h, _ = self._shapes[name]
            noise = drawn((heads, n + m, h), generator)
            shared |= {name: noise} if name in here else {}
        for block in self.pairs:
            own = torch.cat([shared[pair.name] for pair in block.pairs]).to(block.space.point)
            z[block.key] = block.space.project(block.space.from_balanced(own))
        return z

    def reach(self, z: Params) -> float | None:
        """Compute the largest relative speed of a pair at the start of gamma_z; None if no geodesic is truncated."""
        return max((each for each in from_all(super().reach(z)) if each is not None), default=None)


def drawn(shape: Sequence[int], generator: torch.Generator, norm: Norm = "l2") -> Tensor:
    """Draw N(0, I), for linf uniform in [-1, 1], in float32, so that a seed gives one z for every default dtype."""
    noise = torch.empty(shape, device=generator.device, dtype=torch.float32)
    return noise.normal_(generator=generator) if norm == "l2" else noise.uniform_(-1, 1, generator=generator)


def _empty(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=precise(like.dtype), device=like.device)
