"""Hold a merged adapter: its tensors and settings as peft stores them, and what the truncation of each module lost."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quotient_manifolds.files import expanded
from quotient_manifolds.linalg import product_svd
from quotient_manifolds.load.lora import write_adapter


@dataclass(frozen=True)
class MergedModule:
    """Hold what became of the updates of one module.

    name: its path in the base model. size: (n, m) of its update. ranks: those of the adapters' updates, 0 where an
    adapter has none. rank: that of the merged update. norm: that of the mean (Frobenius). lost: that of what truncation
    cut off.
    """

    name: str
    size: tuple[int, int]
    ranks: tuple[int, ...]
    rank: int
    norm: float
    lost: float

    @property
    def relative_error(self) -> float:
        """Return which part of the mean is lost by truncation to the rank, |mean - merged| / |mean| (Frobenius)."""
        return self.lost / self.norm if self.norm else 0.0


@dataclass(frozen=True)
class MergedAdapter:
    """Hold an adapter that was merged of others, in memory.

    settings: the content of adapter_config.json. tensors: that of adapter_model.safetensors, by name. modules: what
    became of each module's updates. weights: those of the adapters.
    """

    settings: dict[str, Any]
    tensors: dict[str, Tensor]
    modules: tuple[MergedModule, ...]
    weights: tuple[float, ...]

    @property
    def relative_error(self) -> float:
        """Return which part of the mean of all updates together is lost by truncation (Frobenius)."""
        norm = math.hypot(*(module.norm for module in self.modules))
        return math.hypot(*(module.lost for module in self.modules)) / norm if norm else 0.0

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write the adapter to a new directory, as peft does: `PeftModel.from_pretrained` and `load_model` read it.

        The directory is complete or not there at all. Raises ValueError if it is there already.
        """
        write_adapter(expanded(os.fspath(directory)), self.settings, self.tensors)


def truncated_sum(terms: Sequence[tuple[float, Tensor, Tensor]], rank: int) -> tuple[Tensor, Tensor, float, float]:
    """Compute the best approximation B A of this rank of the sum of c_i B_i A_i over terms (c_i, B_i, A_i).

    With [c_1 B_1 | ... | c_k B_k] and the A_i, stacked, it is found without an n x m matrix, and depends on the
    products B_i A_i alone: the factors are balanced (B^T B = A A^T = the singular values), and the largest entry of
    every column of B is positive. Shapes: B_i (n, r_i), A_i (r_i, m); rank at most n, m and the sum r of the r_i. Time
    O((n + m) r^2) and memory O((n + m) r), in float64.

    Returns B (n, rank) and A (rank, m), the norm of the sum (Frobenius), and that of what was cut off.
    """
    B, A = torch.cat([c * B.double() for c, B, _ in terms], dim=1), torch.cat([A.double() for _, _, A in terms])
    left, s, right = product_svd(B, A.mT)
    root = s[:rank].sqrt()
    return left[:, :rank] * root, (right[:, :rank] * root).mT, float(s.norm()), float(s[rank:].norm())
