"""A small classifier with attention, and any model moved along its orbit."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from quotient_manifolds.symmetries import find_symmetries, random_representative

Batch = tuple[Tensor, Tensor]


class Classifier(nn.Module):
    """Attention, a head, and a parameter that the loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)
        self.unused = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


def moved(model: nn.Module, inputs: Any, scale: float, seed: int = 0) -> nn.Module:
    """Return a copy of the model elsewhere on its orbit under its pairs."""
    other = copy.deepcopy(model)
    pairs = find_symmetries(model, inputs).within("paper")
    elsewhere = random_representative(model, pairs, scale=scale, seed=seed)
    other.load_state_dict(elsewhere, strict=False)
    return other
