"""Step on the quotient: gradients in orthonormal coordinates, the steps of factors, the transport of momentum."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from quotient_manifolds.linalg import pair_frame, triangle

Both = tuple[Tensor, Tensor]
"""A matrix for G and one for H, (heads, h, h) in float64; numbers (heads, 1, 1) if h = 1 and for complex pairs."""

CROOKED = 10.0
"""A pair is moved to another representative if it rounds by more than this many times as much as balanced factors."""

FLOOR = 1e-7
"""Singular values of G H^T below this, relative to the largest, count as 0."""


@final
@dataclass(frozen=True, eq=False)
class Point:
    """Hold factors x (heads, n + m, h), G stacked on H, their frame, and the metric's weights of singular directions.

    A function of G H^T with the gradient M has gradients M H and M^T G in the factors. In the coordinates
    M right s^(1-t) and M^T left s^(1-t) the metric is Euclidean, with t = 1 for `mix`, 0 for `inv`. If a singular value
    is 0, the power is 1. There `inv` steps as `mix` does, because in its own metric such points are infinitely far
    away, and its gradient is 0.

    complex: the h = 2 columns are real and imaginary part. Raises ValueError if factors are not finite.
    """

    x: Tensor
    n: int
    t: float
    complex: bool = False

    def __post_init__(self) -> None:
        if not all(bool(R.isfinite().all()) for R in self._triangles):
            raise ValueError(
                "factors of pairs must be finite, and so must their squares. Found NaN or infinity: go back to an "
                "earlier checkpoint and take a smaller lr"
            )

    @cached_property
    def _triangles(self) -> Both:
        G, H = (part.flatten(1)[..., None] if self.complex else part for part in _halves(self.x, self.n))
        return triangle(G, rough=True), triangle(H, rough=True)

    @cached_property
    def _frame(self) -> tuple[Tensor, Tensor, Tensor]:
        """Compute s (heads, h), with 0 for values within rounding, and bases: H to_G = right and G to_H = left.

        A velocity z right^T of the product is z to_G^T in G. Directions that G lacks are measured as in `mix`, and are
        0 in to_H; for H alike.
        """
        frame, lost = pair_frame(*self._triangles, floor=FLOOR, unit=torch.finfo(self.x.dtype).eps, triangular=True)
        to_G = torch.where(lost[:, None, :], frame.from_left.mT, frame.to_right)
        to_H = torch.where(lost[:, None, :], frame.from_right.mT, frame.to_left)
        return frame.s.masked_fill(lost, 0.0), to_G, to_H

    @cached_property
    def _weight(self) -> Tensor:
        s = self._frame[0]
        return torch.where(s > 0, s, 1.0).pow(1 - self.t)

    @cached_property
    def _bases(self) -> Both:
        """Compute the matrices that map gradients to coordinates; transposed, they map coordinates to velocities."""
        _, to_G, to_H = self._frame
        return to_G * self._weight[:, None, :], to_H * self._weight[:, None, :]

    def coordinates(self, covector: Tensor, out: Tensor | None = None) -> Tensor:
        """Return a gradient (heads, n + m, h) in orthonormal coordinates of the metric; in `out`, if that is given."""
        return applied(covector, self.n, self._bases, out)

    def stepped(self, z: Tensor, lr: float, shrink: float = 1.0) -> tuple[Tensor, Both]:
        """Return the factors, scaled by `shrink`, after the step -lr z, and (on_G, on_H): the steps are z on_G, z on_H.

        Both steps are straight. The step of H along a singular value s is shortened by s / (s + d), with d the spectral
        norm of the step of G. It is divided by s; if s is smaller than d, the product of both full steps would outgrow
        either. The shortened product is at most as large as the full step of H.

        Raises ValueError if a step overflows.
        """
        s, (on_G, on_H), u = self._frame[0], self._bases, z[:, : self.n]
        gram = (u.mT @ u).double() * self._weight[:, :, None] * self._weight[:, None, :]
        _require_finite(gram)
        d = abs(lr) * torch.linalg.eigvalsh(gram)[:, -1:].clamp_min(0).sqrt()
        short = torch.where(s + d > 0, s / (s + d), 1.0)
        on = -lr * on_G.mT, -lr * short[:, :, None] * on_H.mT
        end = applied(z, self.n, on).add_(self.x, alpha=shrink)
        _require_finite(end)
        return end, on

    def carried(self, covector: Tensor, z: Tensor, on: Both, shrink: float = 1.0) -> Tensor:
        """Transport a remembered gradient, M H and M^T G, along the step that `stepped` made of z; overwrites z.

        Only the products of M with the spans of H and G, M right and M^T left, are known. For the new H and G they give
        M right right^T H and M^T left left^T G. Each row is transported by itself: a row of zeros remains 0.
        """
        _, to_G, to_H = self._frame
        (G, H), (u, w) = _halves(self.x, self.n), _halves(z, self.n)
        # The part shrink I of the new factors is known exactly, so that only their steps are rounded.
        eye = shrink * torch.eye(self.x.shape[-1], dtype=torch.float64, device=z.device)
        by_G = eye + _times(_times(to_G, to_G.mT), _times(self._linear(H.mT @ w), on[1]))
        by_H = eye + _times(_times(to_H, to_H.mT), _times(self._linear(G.mT @ u), on[0]))
        return applied(covector, self.n, (by_G, by_H), z)

    def _linear(self, A: Tensor) -> Tensor:
        """Return a^H b for A = a^T b (heads, 2, 2) if columns are real and imaginary part; else A itself."""
        A = A.double()
        if not self.complex:
            return A
        re, im = A[:, 0, 0] + A[:, 1, 1], A[:, 0, 1] - A[:, 1, 0]
        return torch.stack([torch.stack([re, im], dim=-1), torch.stack([-im, re], dim=-1)], dim=-2)

    def to_balanced(self) -> Both | None:
        """Return T and T^-T such that (G T, H T^-T) is well conditioned, for pairs that need it; None if no pair does.

        These are pairs whose factors almost cancel in their product: |G| |H| > CROOKED sqrt(h) |G H^T|, so that they
        round by more than CROOKED times as much as a balanced pair. If a singular value is 0, the columns of the factor
        of full rank keep their size. A pair in which both factors lack rank does not change.
        """
        s, to_G, to_H = self._frame
        sizes = [torch.linalg.matrix_norm(R) for R in self._triangles]
        width = s.shape[-1] ** 0.5
        crooked = (sizes[0] * sizes[1] > CROOKED * width * torch.linalg.vector_norm(s, dim=-1)) & (s > 0).any(-1)
        if not bool(crooked.any()):
            return None
        by_H, by_G = ((basis != 0).any(-2).all(-1) for basis in (to_G, to_H))
        by_H, crooked = by_H[:, None, None], (crooked & (by_G | by_H))[:, None, None]
        size = torch.where(by_H, sizes[1][:, None, None], sizes[0][:, None, None]) / width
        lengths = torch.where(s > 0, s.sqrt(), 0.0)[:, None, :]
        T = torch.where(by_H, to_G, to_H) * torch.where(lengths > 0, lengths, size)
        T = torch.where(crooked, T, torch.eye(s.shape[-1], dtype=T.dtype, device=T.device))
        other = torch.linalg.inv(T).mT
        return torch.where(by_H, other, T), torch.where(by_H, T, other)


def applied(x: Tensor, n: int, on: Both, out: Tensor | None = None) -> Tensor:
    """Return G on_G stacked on H on_H, in the precision of x; in `out`, another tensor, if that is given."""
    out = torch.empty_like(x) if out is None else out
    for part, into, basis in zip(_halves(x, n), _halves(out, n), on, strict=True):
        _times(part, basis.to(x.dtype), into)
    return out


def _times(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the product a b of matrices, one of which may be a number (heads, 1, 1)."""
    return torch.mul(a, b, out=out) if 1 in (a.shape[-1], b.shape[-1]) else torch.bmm(a, b, out=out)


def _halves(x: Tensor, n: int) -> Both:
    return x[:, :n], x[:, n:]


def _require_finite(x: Tensor) -> None:
    """Raise ValueError if a step is NaN or infinite, or so large that the sum of its entries overflows."""
    if not bool(x.sum().isfinite()):
        raise ValueError(
            "steps of pairs must be finite. Found one that overflows, and nothing was changed: go back to an earlier "
            "checkpoint and take a smaller lr"
        )
