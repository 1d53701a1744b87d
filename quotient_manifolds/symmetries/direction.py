"""Represent directions on parameters compactly, and take their products with gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Direction:
    """Hold a direction on numbers of one parameter: (several, rows, columns) of which each is left right^T, or left.

    read: takes those numbers from tensors by the names of parameters, in the shape of the direction. left: (several,
    rows), and right: (several, columns), or (columns,) for all; without right left has the shape of the direction.
    """

    name: str
    read: Callable[[Mapping[str, Tensor]], Tensor]
    left: Tensor
    right: Tensor | None = None

    @property
    def length(self) -> float:
        """Return the Euclidean norm."""
        if self.right is None:
            return float(torch.linalg.vector_norm(self.left))
        sizes = (torch.linalg.vector_norm(side, dim=-1) for side in (self.left, self.right))
        return float(torch.linalg.vector_norm(next(sizes) * next(sizes)))

    def along(self, grads: Mapping[str, Tensor | None]) -> tuple[float, float]:
        """Return <grad, xi>, and the norm of its summands; a gradient that is missing is 0."""
        held = grads.get(self.name)
        if held is None:
            return 0.0, 0.0
        g, left = self.read({self.name: held}), self.left.to(held)
        if self.right is None:
            products = g * left
            return float(products.sum(dtype=torch.float64)), _norm(products)
        right = self.right.to(held).expand(len(left), -1)[..., None]
        inner, squares = (g @ right)[..., 0].double(), (g.square() @ right.square())[..., 0].double()
        left = left.double()
        return float((inner * left).sum()), float((squares * left.square()).sum()) ** 0.5


def _norm(numbers: Tensor) -> float:
    return float(torch.linalg.vector_norm(numbers, dtype=torch.float64))
