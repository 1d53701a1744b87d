"""Represent directions on parameters compactly, and take their products with gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 1 << 18  # numbers that a processor keeps at hand


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
        right = self.right.to(held).expand(len(left), -1)
        total, squares = torch.zeros(2, dtype=torch.float64, device=g.device)
        axis = 1 if g.stride(1) >= g.stride(2) else 2  # the outer one
        step = max(1, CHUNK * g.shape[axis] // max(1, g.numel()))
        sides = [left.split(step, 1) if axis == 1 else itertools.repeat(left)]
        sides.append(right.split(step, 1) if axis == 2 else itertools.repeat(right))
        for part, rows, columns in zip(g.split(step, axis), *sides, strict=False):
            inner, square = part @ columns[..., None], part.square() @ columns.square()[..., None]
            total += (inner[..., 0].double() * rows).sum()
            squares += (square[..., 0].double() * rows.square()).sum()
        return float(total), float(squares) ** 0.5


def _norm(numbers: Tensor) -> float:
    return float(torch.linalg.vector_norm(numbers, dtype=torch.float64))
