"""Differentiate the action of each symmetry at the identity, and compute the tangent spaces of orbits."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quotient_manifolds.symmetries import groups
from quotient_manifolds.symmetries.symmetries import Symmetries

RANK = 1e-7  # singular values below this, relative to the largest, count as 0
MORE = 3  # random generators than dimensions


def tangents(symmetries: Symmetries, params: Mapping[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """Return directions that span the tangent space of the orbit of each symmetry at these parameters, by its name.

    Shapes: (random generators, entries of all parameters in their order), float64. A symmetry gets 3 more random
    generators than its group has dimensions.
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
    """Return an orthonormal basis (rank, columns) of the span of the rows, which are normalized first."""
    sizes = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    _, s, Vh = torch.linalg.svd(vectors / sizes.clamp_min(torch.finfo(vectors.dtype).tiny), full_matrices=False)
    return Vh[s > RANK * s[:1]]
