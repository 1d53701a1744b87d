"""Give the gradients of a pair (G, H) orthonormal coordinates, also where G H^T has not full rank."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

Both = tuple[Tensor, Tensor]  # one tensor for G (heads, n, h), one for H (heads, m, h)


class Frame(NamedTuple):
    """Hold bases with G to_H = left and H to_G = right, the singular vectors of G H^T, where these determine them.

    A function of G H^T with the gradient M has gradients M H and M^T G in the factors. Times to_G and to_H they are
    M right and M^T left, which no change of representative changes: (G A^-1, H A^T) has the bases A^-T to_G, A to_H.
    A velocity z right^T of the product is z to_G^T in G.

    (G T, H T^-T) is a representative of good condition: the balanced one, whose Gram matrices are diag(s); where a
    singular value is 0, the columns of the anchor (see `pair_frame`) keep their size. All in float64.
    """

    s: Tensor  # (heads, h), ascending; 0 where it is no more than rounding
    to_G: Tensor  # (heads, h, h)
    to_H: Tensor
    T: Tensor
    T_inverse: Tensor  # T^-T


FLOOR = 1e-7
"""Singular values below this, relative to the largest, count as 0: Gram matrices hold their squares to 1e-16."""

NOISE = 4.0
"""Times machine epsilon and the lengths of the columns of G and H: below, singular values are rounding of factors."""


def pair_frame(G: Tensor, H: Tensor, *, scalar: bool = False) -> Frame:
    """Compute the frame of pairs from their Gram matrices, in float64; in two passes where the factors are float64.

    Unlike `linalg.singular_frame`, which geodesics are followed in, it has no tall matrices and takes every rank.

    The Gram matrix of one factor, the anchor, is factored, P = L L^T, and the other seen in its basis: with
    L^T N L = V S^2 V^T the bases are L^-T V and L V S^-1. So one of the two may have any rank, as in the start of
    low-rank adaptation, where G is 0. The anchor is H unless its columns are dependent and those of G less so. Where a
    singular value is 0, so is the column of the basis that would divide by it. Where both factors lack columns, what
    lacks in the anchor stays where it is; if the other one has something there, no rule commutes with the action.

    Gram matrices square condition numbers. In float64 a second pass therefore starts from the factors in the first
    frame, where they are balanced.
    scalar: h = 2 columns are real and imaginary part, and bases are multiples of the identity.
    """
    scalar, noise = scalar or G.shape[-1] == 1, NOISE * torch.finfo(G.dtype).eps
    N, P = _gram(G, scalar), _gram(H, scalar)
    if not bool((N.isfinite() & P.isfinite()).all()):
        raise ValueError(
            "factors of pairs must be finite, and so must their squares. Found NaN or infinity: go back to an "
            "earlier checkpoint and take a smaller lr"
        )
    frame = _from_grams(N, P, noise, scalar)
    if G.dtype != torch.float64 or scalar:
        return frame
    T, T_inverse = frame.T, frame.T_inverse
    again = _from_grams(_gram(G @ T, False), _gram(H @ T_inverse, False), noise, False)
    return Frame(again.s, T_inverse @ again.to_G, T @ again.to_H, T @ again.T, T_inverse @ again.T_inverse)


def _gram(G: Tensor, scalar: bool) -> Tensor:
    G = G.double()
    if scalar:
        size = (G * G).sum(dim=(-2, -1))[:, None, None]
        return size * torch.eye(G.shape[-1], dtype=G.dtype, device=G.device)
    return G.mT @ G


def _from_grams(N: Tensor, P: Tensor, noise: float, scalar: bool) -> Frame:
    """Compute the frame from N = G^T G and P = H^T H."""
    roots_N, roots_P = _roots(N), _roots(P)
    swap = (~roots_P.regular & (roots_N.lead > roots_P.lead))[:, None, None]  # G is the anchor
    L, inverse = (torch.where(swap, a, b) for a, b in zip(roots_N[:2], roots_P[:2], strict=True))
    regular = torch.where(swap, roots_N.regular[:, None, None], roots_P.regular[:, None, None])
    other = torch.where(swap, P, N)
    seen = L.mT @ other @ L
    if scalar:  # no sign or turn: the group may be that of positive numbers
        squares = seen.diagonal(dim1=-2, dim2=-1)
        V = torch.eye(N.shape[-1], dtype=N.dtype, device=N.device).expand_as(N)
    else:
        squares, V = torch.linalg.eigh((seen + seen.mT) / 2)
    s = squares.clamp_min(0).sqrt()
    lengths = (N.diagonal(dim1=-2, dim2=-1) * P.diagonal(dim1=-2, dim2=-1)).sqrt().sum(dim=-1, keepdim=True)
    s = torch.where((s > FLOOR * s[:, -1:]) & (s > noise * lengths), s, 0.0)[:, None, :]
    own, dual = inverse @ V, L @ V
    across = dual * torch.where(s > 0, 1 / s, 0.0)
    anchor = torch.where(swap, N, P).diagonal(dim1=-2, dim2=-1).mean(dim=-1).sqrt()[:, None, None]
    length = torch.where(s > 0, s.sqrt(), anchor)
    eye = torch.eye(N.shape[-1], dtype=N.dtype, device=N.device)
    T, T_inverse = torch.where(regular, dual / length, eye), torch.where(regular, own * length, eye)
    to_G, to_H, T, T_inverse = (
        torch.where(swap, b, a) for a, b in ((own, across), (across, own), (T, T_inverse), (T_inverse, T))
    )
    return Frame(s[:, 0], to_G, to_H, T, T_inverse)


class _Roots(NamedTuple):
    """Hold L with P = L L^T and its inverse transposed, a pseudo-inverse where P is singular to rounding."""

    L: Tensor
    inverse: Tensor
    regular: Tensor  # (heads,)
    lead: Tensor  # the smallest pivot, relative to the size of P; 0 where P is singular


def _roots(P: Tensor) -> _Roots:
    size = P.diagonal(dim1=-2, dim2=-1).amax(dim=-1)
    L, info = torch.linalg.cholesky_ex(P)
    pivots = L.diagonal(dim1=-2, dim2=-1).amin(dim=-1)
    regular = (info == 0) & (pivots > FLOOR * size.sqrt())
    eye = torch.eye(P.shape[-1], dtype=P.dtype, device=P.device)
    L = torch.where(regular[:, None, None], L, eye)
    inverse = torch.linalg.solve_triangular(L.mT, eye.expand_as(L), upper=True)
    if not bool(regular.all()):
        eigenvalues, E = torch.linalg.eigh(P)
        there = eigenvalues > FLOOR**2 * size[:, None]
        root = torch.where(there, eigenvalues, 0.0).sqrt()[:, None, :]
        L = torch.where(regular[:, None, None], L, E * root)
        inverse = torch.where(regular[:, None, None], inverse, E * torch.where(root > 0, 1 / root, 0.0))
    return _Roots(L, inverse, regular, torch.where(regular, pivots / size.clamp_min(1e-300).sqrt(), 0.0))
