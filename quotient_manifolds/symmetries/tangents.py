"""Compute how many directions symmetries span together: what two of them share counts once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from quotient_manifolds.symmetries.freedom import gaussian
from quotient_manifolds.symmetries.move import act
from quotient_manifolds.symmetries.pair import Params, SymmetricPair
from quotient_manifolds.symmetries.symmetries import Symmetries
from quotient_manifolds.symmetries.translations import Translation

STEP = 1e-5  # of central differences: their error is its square, and rounding divided by it
RANK = 1e-7  # relative to the largest singular value: what is smaller is neither
MORE = 3  # draws than dimensions

_Step = Callable[[Params, torch.Generator, float], None]


def spanned_dimension(
    symmetries: Symmetries, params: Mapping[str, Tensor], fixed: Mapping[str, Tensor] | None = None, seed: int = 0
) -> int:
    """Compute the dimension of the span of all tangent vectors of the symmetries at these parameters, in float64.

    Tangent vectors are central differences of random moves of each, a few more than its dimensions. fixed: masks of
    numbers of parameters, by name, of which directions are not to be counted: the rank is that of the others.
    """
    seeds = itertools.count(seed)
    start = {name: value.detach().double() for name, value in params.items()}
    fixed = fixed or {}
    kept = torch.cat([~fixed.get(name, torch.zeros_like(w, dtype=torch.bool)).flatten() for name, w in start.items()])
    rows = [
        _tangent(step, start, next(seeds))[kept]
        for step, dimension in _steps(symmetries)
        for _ in range(dimension + MORE)
    ]
    if not rows:
        return 0
    T = torch.stack(rows)
    T = T / torch.linalg.vector_norm(T, dim=1, keepdim=True).clamp_min(torch.finfo(T.dtype).tiny)
    s = torch.linalg.svdvals(T)
    return int((s > RANK * s[0]).sum())


def _steps(symmetries: Symmetries) -> Iterator[tuple[_Step, int]]:
    """Yield how each symmetry moves, and its dimension."""
    for pair in symmetries.pairs:
        yield partial(_move_pair, pair), pair.group_dimension
    for translation in symmetries.translations:
        yield partial(_shift, translation), translation.dimension
    for freedom in symmetries.freedoms:
        yield freedom.move, sum(freedom.families.values())


def _move_pair(pair: SymmetricPair, params: Params, generator: torch.Generator, size: float) -> None:
    x = pair.read(params)
    if pair.acts == "GL(1, C)":
        A = 1 + size * torch.randn(pair.heads, generator=generator, dtype=torch.complex128)
    else:
        A = torch.eye(pair.h).double() + size * gaussian(x, generator, pair.heads, pair.h, pair.h).cpu()
    pair.write(params, act(pair, A, x))


def _shift(translation: Translation, params: Params, generator: torch.Generator, size: float) -> None:
    translation.shift(params, size * gaussian(translation.bias.read(params), generator))


def _tangent(step: _Step, start: Params, seed: int) -> Tensor:
    """Return the direction in which all parameters move, flat."""
    ends = []
    for size in (STEP, -STEP):
        params = {name: value.clone() for name, value in start.items()}
        step(params, torch.Generator().manual_seed(seed), size)
        ends.append(torch.cat([value.flatten() for value in params.values()]))
    return (ends[0] - ends[1]) / (2 * STEP)
