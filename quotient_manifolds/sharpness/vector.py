"""Compute with dicts of tensors as with one long vector: few passes over memory, sums accurate in float32.

A step of the ascent reads and writes several vectors, each as large as the model. One operation at a time, it would
take ten passes over memory or more. Here it takes one or two, on pieces that stay in a processor's cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from quotient_manifolds.sharded import gathered
from quotient_manifolds.symmetries import Params

_RESOLVED = 1e-25  # a sum of squares in float32 below this may have lost terms to underflow
_CHUNK = 131072  # elements of a CPU tensor handled at once: stays in the cache, and sums in float32 stay accurate
_DEVICE: ContextVar[torch.device | None] = ContextVar("_DEVICE", default=None)


@contextmanager
def over_processes(device: torch.device | None) -> Iterator[None]:
    """Treat vectors inside as this process's parts, on this device, of longer vectors; None: as whole vectors.

    Sums are then taken over all processes, and are the same on each to the last digit, so that all decide alike.
    """
    token = _DEVICE.set(device)
    try:
        yield
    finally:
        _DEVICE.reset(token)


def dot(x: Params, y: Params) -> float:
    """Return <x, y> over all blocks, accumulated in float64 over short chunks."""
    return dots(x, y)[0]


def dots(x: Params, *others: Params, dtype: torch.dtype | None = None) -> list[float]:
    """Return <x, y> for every y of `others`, in one pass over x; in float64 if float32 under- or overflows."""
    parts: list[list[Tensor]] = [[] for _ in others]
    for first, *rest in _chunks(x, *others):
        for part, other in zip(parts, rest, strict=True):
            part.append(_dot(first.to(dtype or first.dtype), other.to(dtype or other.dtype)))
    sums = [_sum(part) for part in parts]
    return sums if dtype or all(map(_resolved, sums)) else dots(x, *others, dtype=torch.float64)


def _resolved(total: float) -> bool:
    return _RESOLVED < abs(total) < math.inf


def norm(x: Params) -> float:
    """Return |x|_2 over all blocks."""
    return math.sqrt(dot(x, x))


def largest(x: Params) -> float:
    """Return max |x_i| over all blocks."""
    sizes = [torch.linalg.vector_norm(block, math.inf).double() for block in x.values() if block.numel()]
    own = torch.stack(sizes).max() if sizes else torch.zeros((), dtype=torch.float64)
    device = _DEVICE.get()
    return float(own if device is None else gathered(own.reshape(1).to(device)).max())


def absolute_sum(x: Params) -> float:
    """Return sum |x_i| over all blocks."""
    return _sum([torch.linalg.vector_norm(piece, 1, dtype=torch.float64) for (piece,) in _chunks(x)])


def scale(x: Params, factor: float) -> None:
    """Multiply x by a factor, in place."""
    for block in x.values():
        block.mul_(factor)


def combine(terms: Iterable[tuple[float, Params]], out: Params) -> float:
    """Write the sum of factor * term to `out`, which may be one of the terms, in one pass; return |out|^2."""
    terms = sorted(terms, key=lambda term: term[1] is not out)  # out first: its old value is read before it is written
    factors = [factor for factor, _ in terms]
    squares = []
    for target, first, *others in _chunks(out, *(blocks for _, blocks in terms)):
        torch.mul(first, factors[0], out=target)
        for factor, other in zip(factors[1:], others, strict=True):
            if factor:  # a factor 0 saves a pass: z_old at the first step, or a gradient that is 0
                target.add_(other, alpha=factor)
        squares.append(_dot(target, target))  # while the piece is in the cache
    total = _sum(squares)
    return total if _resolved(total) else dot(out, out)


def signed_step(z: Params, z_old: Params, g: Params, eta: float, a: float, radius: float, out: Params) -> None:
    """Write P(z + a (u - z) + (1 - a) (z - z_old)), u = P(z + eta sign(g)), P = clamp to +-radius; out may be z_old.

    It interpolates between 2 z - z_old and u, so that a vertex of the box that is its own next point stays exact.
    """
    scratch = torch.empty(0)
    for target, old, here, slope in _chunks(out, z_old, z, g):
        if scratch.shape != slope.shape or scratch.dtype != slope.dtype or scratch.device != slope.device:
            scratch = torch.empty_like(slope)
        u = torch.add(here, torch.sign(slope, out=scratch), alpha=eta, out=scratch).clamp_(-radius, radius)
        torch.lerp(old, here, 2.0, out=target)
        target.lerp_(u, a).clamp_(-radius, radius)


def _chunks(*blocks: Params) -> Iterator[tuple[Tensor, ...]]:
    """Yield equal flat pieces of all given dicts: views of contiguous tensors (so outputs must be contiguous)."""
    for key, leader in blocks[0].items():
        flat = [other[key].reshape(-1) for other in blocks]
        if leader.is_cpu and leader.numel() > _CHUNK:
            yield from zip(*(tensor.split(_CHUNK) for tensor in flat), strict=True)
        else:
            yield tuple(flat)


def _dot(x: Tensor, y: Tensor) -> Tensor:
    # torch.dot of half precision also sums in half precision, with three digits and infinity at 65504.
    return torch.dot(x.float(), y.float()) if x.dtype in (torch.float16, torch.bfloat16) else torch.dot(x, y)


def _sum(parts: list[Tensor]) -> float:
    # The sum is in float64: in float32, thousands of pieces of a large model would lose digits that decide, near a
    # maximum, whether a step leaves the ball. One conversion at the end waits for a GPU only once.
    own = torch.stack([part.double() for part in parts]).sum() if parts else torch.zeros((), dtype=torch.float64)
    device = _DEVICE.get()
    return float(own if device is None else gathered(own.reshape(1).to(device)).sum())
