"""Take the horizontal space of pairs (G, H) of one column for another one's, by a reshape of points and vectors."""

from __future__ import annotations

import abc

import torch
from torch import Tensor

from quotient_manifolds.manifolds.arguments import require_vector
from quotient_manifolds.manifolds.fixed_rank.space import FixedRankSpace
from quotient_manifolds.manifolds.horizontal import HorizontalSpace


class ReshapedSpace(HorizontalSpace, abc.ABC):
    """Hold a space of real pairs of one column, whose points and coordinates are these in another shape.

    `_there` may raise the precision; results have that of what was given.
    """

    def __init__(self, real: FixedRankSpace, dtype: torch.dtype) -> None:
        super().__init__(self._back(real.point).to(dtype))
        self._real = real

    @staticmethod
    @abc.abstractmethod
    def _there(x: Tensor) -> Tensor:
        """Return a point or vector as one of the real pairs, (..., rows, 1)."""

    @staticmethod
    @abc.abstractmethod
    def _back(x: Tensor) -> Tensor:
        """Return what `_there` was given."""

    def coordinates(self, eta: Tensor) -> Tensor:
        require_vector(self.point, eta)
        return self._back(self._real.coordinates(self._there(eta))).to(eta.dtype)

    def vector(self, z: Tensor) -> Tensor:
        return self._back(self._real.vector(self._there(z))).to(z.dtype)

    def covector(self, egrad: Tensor) -> Tensor:
        require_vector(self.point, egrad)
        return self._back(self._real.covector(self._there(egrad))).to(egrad.dtype)

    def _step(self, z: Tensor, order: str) -> Tensor:
        return self._back(self._real._step(self._there(z), order)).to(z.dtype)
