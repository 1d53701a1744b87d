"""Count how much of a model is redundant, and compute how well conditioned its pairs are."""

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
    """Give singular values of G H^T over the heads of one pair: largest, smallest, and worst ratio in a head.

    A geodesic's Taylor polynomial holds while steps are short against them (mix), or against one (inv).
    """

    pair: str
    largest: float
    smallest: float
    ratio: float  # the largest over the smallest of the same head; infinite for a pair of deficient rank


@dataclass(frozen=True)
class Count:
    """Count dimensions: of all parameters, and of the symmetries by family.

    families: by the kind of pairs (h^2, 1 or 2 a head), such as "query/key", and of reparameterizations, such as "norm
    gain".
    """

    parameters: int
    families: Mapping[str, int]
    conditioning: tuple[Conditioning, ...]

    @property
    def dimension(self) -> int:
        """Return the dimension of the symmetry group: that many directions change nothing, wherever ranks are full."""
        return sum(self.families.values())

    @property
    def share(self) -> float:
        """Return the share of all directions in parameter space that is redundant."""
        return self.dimension / self.parameters if self.parameters else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON (an infinite ratio is None)."""
        conditioning = [
            {**asdict(each), "ratio": each.ratio if each.ratio < float("inf") else None} for each in self.conditioning
        ]
        dimensions = {"parameters": self.parameters, "families": dict(self.families), "dimension": self.dimension}
        return {**dimensions, "share": self.share, "conditioning": conditioning}


def count_symmetries(model: nn.Module, symmetries: Symmetries) -> Count:
    """Count the directions in parameter space that change nothing, and say how well conditioned every pair is.

    The dimension of the group against that of parameter space, and the singular values of G H^T, in float64.
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
    """Compute singular values in float64: of G H^T, (heads, h) descending; of g k^H, (heads, 1), for planes of a rotary
    embedding.

    Values below rounding count as 0.
    """
    x = pair.read(params).double()
    G, H = x[:, : pair.n], x[:, pair.n :]
    if pair.acts == "GL(1, C)":
        return (torch.linalg.vector_norm(G, dim=(1, 2)) * torch.linalg.vector_norm(H, dim=(1, 2)))[:, None]
    R_G, R_H = (torch.linalg.qr(part, mode="r").R for part in (G, H))
    s = torch.linalg.svdvals(R_G @ R_H.mT)
    return torch.where(s > rank_floor(pair.n, pair.m) * s[:, :1], s, 0.0)
