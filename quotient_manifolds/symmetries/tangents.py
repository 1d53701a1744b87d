"""Differentiate the action of each symmetry at the identity: generators, the tangents of orbits and what they span."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quotient_manifolds.symmetries import groups
from quotient_manifolds.symmetries.symmetries import Symmetries

RANK = 1e-7  # relative to the largest singular value: what is smaller is neither
MORE = 3  # draws than dimensions


def tangents(symmetries: Symmetries, params: Mapping[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """Return directions that span the tangent space of the orbit of each symmetry at these parameters, by its name.

    Each (random generators, numbers of all parameters in their order), in float64: a few more than the symmetry has
    dimensions.
    """
    generator = torch.Generator().manual_seed(seed)

    def directions(symmetry: groups.Symmetry, count: int) -> Tensor:
        X = torch.randn(count, *symmetry.shape, generator=generator, dtype=torch.float64)
        along = symmetry.tangent(params, symmetry.project(X))
        parts = (along.get(name, torch.zeros_like(w, dtype=torch.float64)) for name, w in params.items())
        return torch.cat(
            [part.expand(count, *w.shape).flatten(1) for part, w in zip(parts, params.values(), strict=True)], 1
        )

    return {each.name: directions(each.symmetry, each.group_dimension + MORE) for each in symmetries.every}


def span(vectors: Tensor) -> Tensor:
    """Return an orthonormal basis of what the rows span, (rank, columns), each row taken at length 1."""
    sizes = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    _, s, Vh = torch.linalg.svd(vectors / sizes.clamp_min(torch.finfo(vectors.dtype).tiny), full_matrices=False)
    return Vh[s > RANK * s[:1]]
