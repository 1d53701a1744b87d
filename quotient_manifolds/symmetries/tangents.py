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


def tangents(symmetries: Symmetries, params: Mapping[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """Return directions that span the tangent space of the orbit of each symmetry at these parameters, by its name.

    Each (moves, numbers of all parameters in their order), in float64: central differences of random moves, a few more
    than the symmetry has dimensions.
    """
    seeds = itertools.count(seed)
    start = {name: value.detach().double() for name, value in params.items()}
    return {
        name: torch.stack([_tangent(step, start, next(seeds)) for _ in range(dimension + MORE)])
        for name, step, dimension in _steps(symmetries)
    }


def span(vectors: Tensor) -> Tensor:
    """Return an orthonormal basis of what the rows span, (rank, columns), each row taken at length 1."""
    sizes = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    _, s, Vh = torch.linalg.svd(vectors / sizes.clamp_min(torch.finfo(vectors.dtype).tiny), full_matrices=False)
    return Vh[s > RANK * s[:1]]


def spanned_dimension(symmetries: Symmetries, params: Mapping[str, Tensor], seed: int = 0) -> int:
    """Compute the dimension of the span of all tangent vectors of the symmetries at these parameters, in float64."""
    found = tangents(symmetries, params, seed)
    return len(span(torch.cat(list(found.values())))) if found else 0


def _steps(symmetries: Symmetries) -> Iterator[tuple[str, _Step, int]]:
    """Yield the name of each symmetry, how it moves, and its dimension."""
    for pair in symmetries.pairs:
        yield pair.name, partial(_move_pair, pair), pair.group_dimension
    for translation in symmetries.translations:
        yield translation.name, partial(_shift, translation), translation.dimension
    for freedom in symmetries.freedoms:
        yield freedom.name, freedom.move, sum(freedom.families.values())


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
