"""Compute the dimension of a model's symmetry group, and the condition numbers of its pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.linalg import rank_floor
from quotient_manifolds.symmetries.checks import check_model, check_weights
from quotient_manifolds.symmetries.pair import SymmetricPair
from quotient_manifolds.symmetries.symmetries import Symmetries, check_symmetries


@dataclass(frozen=True)
class Conditioning:
    """Store the largest and smallest singular value of G H^T over the heads of one pair, and the largest ratio.

    The Taylor polynomial of a geodesic is accurate for steps much shorter than these values (metric mix), or than 1
    (metric inv).
    """

    pair: str
    largest: float
    smallest: float
    ratio: float  # the largest over the smallest within one head; infinite for a pair of deficient rank


@dataclass(frozen=True)
class Count:
    """Store the number of parameters and the dimension of the symmetry group by family.

    families: the dimension by the kind of pairs (h^2, 1 or 2 per head), such as "query/key", and by the kind of
    reparameterizations, such as "norm gain".
    """

    parameters: int
    families: Mapping[str, int]
    conditioning: tuple[Conditioning, ...]

    @property
    def dimension(self) -> int:
        """Return the dimension of the symmetry group, and of its orbits at full rank."""
        return sum(self.families.values())

    @property
    def share(self) -> float:
        """Return the dimension of the symmetry group divided by the number of parameters."""
        return self.dimension / self.parameters if self.parameters else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON (an infinite ratio is None)."""
        conditioning = [
            {**asdict(each), "ratio": each.ratio if each.ratio < float("inf") else None} for each in self.conditioning
        ]
        dimensions = {"parameters": self.parameters, "families": dict(self.families), "dimension": self.dimension}
        return {**dimensions, "share": self.share, "conditioning": conditioning}


def count_symmetries(model: nn.Module, symmetries: Symmetries) -> Count:
    """Count the directions in parameter space that leave the function unchanged, and the conditioning of every pair.

    Compares the dimension of the group with the number of parameters, and computes singular values of G H^T in float64.
    """
    check_model(model)
    check_symmetries(symmetries)
    params = {name: value.detach() for name, value in model.named_parameters()}
    check_weights(params, symmetries.names)
    return Count(
        parameters=sum(value.numel() for value in params.values()),
        families=symmetries.families,
        conditioning=tuple(_conditioning(pair, params) for pair in symmetries.pairs),
    )


def _conditioning(pair: SymmetricPair, params: Mapping[str, Tensor]) -> Conditioning:
    s = singular_values(pair, params)
    smallest = s[:, -1]
    ratio = torch.where(smallest > 0, s[:, 0] / smallest, torch.inf)
    return Conditioning(pair.name, float(s.max()), float(smallest.min()), float(ratio.max()))


def singular_values(pair: SymmetricPair, params: Mapping[str, Tensor]) -> Tensor:
    """Compute the singular values (heads, h) of G H^T in float64, descending; (heads, 1) of g k^H for rotary planes.

    Values below rounding count as 0.
    """
    x = pair.read(params).double()
    G, H = x[:, : pair.n], x[:, pair.n :]
    if pair.acts == "GL(1, C)":
        return (torch.linalg.vector_norm(G, dim=(1, 2)) * torch.linalg.vector_norm(H, dim=(1, 2)))[:, None]
    R_G, R_H = (torch.linalg.qr(part, mode="r").R for part in (G, H))
    s = torch.linalg.svdvals(R_G @ R_H.mT)
    return torch.where(s > rank_floor(pair.n, pair.m) * s[:, :1], s, 0.0)
