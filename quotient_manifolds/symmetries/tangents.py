"""Differentiate the action of each symmetry at the identity: generators, the tangents of orbits and what they span."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor

from quotient_manifolds.symmetries.symmetries import Symmetries, Symmetry

RANK = 1e-7  # relative to the largest singular value: what is smaller is neither
MORE = 3  # draws than dimensions


def tangents(symmetries: Symmetries, params: Mapping[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """Return directions that span the tangent space of the orbit of each symmetry at these parameters, by its name.

    Each (random elements, numbers of all parameters in their order), in float64: a few more than the symmetry has
    dimensions.
    """
    seeds = itertools.count(seed)
    start = {name: value.detach().double() for name, value in params.items()}

    def direction(symmetry: Symmetry) -> Tensor:
        along = symmetry.tangent(start, torch.Generator().manual_seed(next(seeds)))
        parts = (along.get(name, torch.zeros_like(value)) for name, value in start.items())
        return torch.cat([part.flatten() for part in parts])

    return {
        each.name: torch.stack([direction(each) for _ in range(each.group_dimension + MORE)])
        for each in symmetries.every
    }


def span(vectors: Tensor) -> Tensor:
    """Return an orthonormal basis of what the rows span, (rank, columns), each row taken at length 1."""
    sizes = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    _, s, Vh = torch.linalg.svd(vectors / sizes.clamp_min(torch.finfo(vectors.dtype).tiny), full_matrices=False)
    return Vh[s > RANK * s[:1]]
