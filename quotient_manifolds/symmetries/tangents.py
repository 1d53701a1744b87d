"""Differentiate the action of each symmetry at the identity: generators, the tangents of orbits and what they span."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from quotient_manifolds.symmetries.pair import Params, SymmetricPair
from quotient_manifolds.symmetries.reparameterization import Act, central_difference, gaussian
from quotient_manifolds.symmetries.representatives import act
from quotient_manifolds.symmetries.symmetries import Symmetries

RANK = 1e-7  # relative to the largest singular value: what is smaller is neither
MORE = 3  # draws than dimensions


@dataclass(frozen=True)
class Action:
    """Hold how the group of one symmetry acts on parameters: exp(size xi), xi a random element of its Lie algebra.

    names: the parameters that the action reads or changes. dimension: of the group. act: (params, generator, size,
    control) acts in place; with `control` on one side only (G alone, a bias without its compensation), which changes
    the function. derive: (params, generator, control) returns its derivative by size at 0, on `names`.
    """

    name: str
    names: tuple[str, ...]
    dimension: int
    act: Act
    derive: Callable[[Mapping[str, Tensor], torch.Generator, bool], Params]

    def tangent(self, params: Mapping[str, Tensor], seed: int, control: bool = False) -> Params:
        """Return the generator xi(w) of this seed at float64 parameters, on `names`."""
        return self.derive(params, torch.Generator().manual_seed(seed), control)


def actions(symmetries: Symmetries) -> list[Action]:
    """Return the action of every pair and reparameterization, in this order."""
    found = [(pair, partial(_on_pair, pair)) for pair in symmetries.pairs]
    return [
        Action(pair.name, pair.names, pair.group_dimension, act, partial(_derived, act, pair.names))
        for pair, act in found
    ] + [
        Action(each.name, each.names, each.group_dimension, each.transform, each.tangent)
        for each in symmetries.reparameterizations
    ]


def _derived(
    act: Act, names: tuple[str, ...], params: Mapping[str, Tensor], generator: torch.Generator, control: bool
) -> Params:
    return central_difference(act, params, names, generator, control)


def tangents(symmetries: Symmetries, params: Mapping[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """Return directions that span the tangent space of the orbit of each symmetry at these parameters, by its name.

    Each (random elements, numbers of all parameters in their order), in float64: a few more than the symmetry has
    dimensions.
    """
    seeds = itertools.count(seed)
    start = {name: value.detach().double() for name, value in params.items()}

    def direction(action: Action) -> Tensor:
        along = action.tangent(start, next(seeds))
        parts = (along.get(name, torch.zeros_like(value)) for name, value in start.items())
        return torch.cat([part.flatten() for part in parts])

    return {
        action.name: torch.stack([direction(action) for _ in range(action.dimension + MORE)])
        for action in actions(symmetries)
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


def _on_pair(pair: SymmetricPair, params: Params, generator: torch.Generator, size: float, control: bool) -> None:
    """Act by (G A^-1, H A^T), A = exp(size Z), Z Gaussian of length about 1 in every head."""
    x = pair.read(params)
    if pair.acts == "GL(1, C)":
        A = torch.exp(size * torch.randn(pair.heads, generator=generator, dtype=torch.complex128))
    else:
        A = torch.matrix_exp(size / pair.h**0.5 * gaussian(x, generator, pair.heads, pair.h, pair.h).cpu())
    moved = act(pair, A, x)
    pair.G.write(params, moved[:, : pair.n])
    if not control:
        pair.H.write(params, moved[:, pair.n :])
