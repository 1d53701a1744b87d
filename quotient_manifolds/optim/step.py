"""Step on the quotient: directions in orthonormal coordinates, the way there, and what becomes of momentum."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from quotient_manifolds.linalg import spectral_norm
from quotient_manifolds.optim.frame import Both, Frame, pair_frame

CROOKED = 10.0
"""How many times the rounding of balanced factors those of a pair may have before it is moved."""


@final
@dataclass(frozen=True, eq=False)
class Point:
    """Hold factors (heads, n, h) and (heads, m, h), their frame, and how the metric weighs singular directions.

    t: 1 for `mix`, 0 for `inv`. In the coordinates M right s^(1-t) and M^T left s^(1-t) of a gradient M in G H^T the
    metric is the Euclidean one. Where a singular value is 0 the power is that of 1: there `inv` steps as `mix` does,
    for in its own metric the place is infinitely far away, and its gradient 0.
    """

    G: Tensor
    H: Tensor
    t: float
    complex: bool

    @cached_property
    def frame(self) -> Frame:
        return pair_frame(self.G, self.H, scalar=self.complex)

    @cached_property
    def _bases(self) -> Both:
        return self.frame.to_G.to(self.G), self.frame.to_H.to(self.G)

    @cached_property
    def _weight(self) -> Tensor:
        s = self.frame.s[:, None, :]
        return torch.where(s > 0, s, 1.0).pow(1 - self.t).to(self.G)

    def coordinates(self, covector: Both) -> Both:
        """Return a gradient in orthonormal coordinates of the metric, (heads, n, h) and (heads, m, h)."""
        (to_G, to_H), (g, k) = self._bases, covector
        return g @ (to_G * self._weight), k @ (to_H * self._weight)

    def moved(self, direction: Both, lr: float, shrink: float = 1.0) -> Both:
        """Return the factors after the step -lr times a direction, given in coordinates; first scaled by `shrink`.

        The step of G is straight. So is that of H, whose part along a singular value s is s / (s + d) of the whole,
        with d the spectral norm of the step of G. It is divided by s, and where s is smaller than the step, the product
        of both steps would outgrow either; so it is at most as large as the whole step of H.

        A pair whose factors all but cancel moves to its representative of good condition besides: the same product.
        ValueError for a step that overflows.
        """
        (to_G, to_H), weight = self._bases, self._weight
        z, w = direction[0] * weight, direction[1] * weight
        _require_finite(z, w)
        d = abs(lr) * spectral_norm(z).to(z)[:, None, None]
        s = self.frame.s[:, None, :].to(d)
        w = w * torch.where(s + d > 0, s / (s + d), 1.0)
        G = torch.baddbmm(self.G, z, to_G.mT, beta=shrink, alpha=-lr)
        H = torch.baddbmm(self.H, w, to_H.mT, beta=shrink, alpha=-lr)
        _require_finite(G, H)
        crooked = self._crooked
        if not bool(crooked.any()):
            return G, H
        # All digits of what cancels are needed, and then one rounding.
        T, T_inverse = self.frame.T[crooked], self.frame.T_inverse[crooked]
        to_G, to_H = self.frame.to_G[crooked], self.frame.to_H[crooked]
        G[crooked] = ((shrink * self.G[crooked].double() - lr * z[crooked].double() @ to_G.mT) @ T).to(G)
        H[crooked] = ((shrink * self.H[crooked].double() - lr * w[crooked].double() @ to_H.mT) @ T_inverse).to(H)
        return G, H

    @property
    def _crooked(self) -> Tensor:
        """Tell which pairs have factors that all but cancel in their product: |G| |H| > CROOKED sqrt(h) |G H^T|.

        That is how many times the rounding of a balanced pair theirs is. Where the product is 0 the columns of the
        other factor are looked at instead. Shape (heads,).
        """
        s, width = self.frame.s, self.G.shape[-1]
        size_G, size_H = (torch.linalg.vector_norm(x, dim=(-2, -1), dtype=torch.float64) for x in (self.G, self.H))
        spread = torch.linalg.matrix_norm(self.frame.T) * torch.linalg.matrix_norm(self.frame.T_inverse) / width
        cancelled = size_G * size_H > CROOKED * width**0.5 * torch.linalg.vector_norm(s, dim=-1)
        return torch.where(s[:, -1] > 0, cancelled, spread > CROOKED)

    def carried(self, covector: Both, end: Both) -> Both:
        """Return a remembered gradient, as M H and M^T G, at the factors `end`.

        Of M are known M right and M^T left, its products with the spans of H and of G; with what these spans become
        they are M right right^T H and M^T left left^T G, each row by itself: a row without gradient stays without.
        """
        to_G, to_H = self.frame.to_G, self.frame.to_H
        # In float64: bases multiply the rounding of these products by the condition of the representative, twice.
        on_G = to_G @ self._linear((self.H.double() @ to_G).mT @ end[1].double())
        on_H = to_H @ self._linear((self.G.double() @ to_H).mT @ end[0].double())
        return covector[0] @ on_G.to(self.G), covector[1] @ on_H.to(self.H)

    def _linear(self, A: Tensor) -> Tensor:
        """Return a^H b for A = a^T b (heads, 2, 2) where columns are real and imaginary part; else A itself."""
        if not self.complex:
            return A
        re, im = A[:, 0, 0] + A[:, 1, 1], A[:, 0, 1] - A[:, 1, 0]
        return torch.stack([torch.stack([re, im], dim=-1), torch.stack([-im, re], dim=-1)], dim=-2)


def _require_finite(*parts: Tensor) -> None:
    """Raise ValueError for a step that is NaN or infinite, or so near to it that its entries cannot be added up."""
    if not bool(torch.isfinite(torch.stack([part.sum() for part in parts])).all()):
        raise ValueError(
            "steps of pairs must be finite. Found one that overflows, and nothing was changed: go back to an earlier "
            "checkpoint and take a smaller lr"
        )
