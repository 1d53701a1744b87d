"""Batched factorisations of small matrices; nothing here knows of manifolds."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SingularFrame(NamedTuple):
    """The thin SVD G H^T = left diag(s) right^T, with the changes of basis that lead to it.

    `left = G @ to_left` and `G = left @ from_left` (so `from_left` is the inverse of `to_left`); `right` alike for H.
    """

    left: Tensor  # (..., n, h)
    right: Tensor  # (..., m, h)
    s: Tensor  # (..., h), descending
    to_left: Tensor  # (..., h, h)
    to_right: Tensor  # (..., h, h)
    from_left: Tensor  # (..., h, h)
    from_right: Tensor  # (..., h, h)


def singular_frame(G: Tensor, H: Tensor, eps: float = 0.0) -> SingularFrame:
    """Thin SVD of G H^T through the QR factors of G and H, never forming G^T G, whose condition number is squared.

    With `eps > 0` the triangular factors are those of G^T G + eps I and H^T H + eps I (QR of G stacked on sqrt(eps) I);
    `left` and `right` then have columns shorter than one. Singular values are floored at machine precision relative to
    the largest, so that weights stay finite and the result depends on the orbit of (G, H) only.

    Shapes: G (..., n, h), H (..., m, h), with n, m >= h, finite. Where a factor is singular the frame is not finite.
    """
    (Q_G, R_G), (Q_H, R_H) = _qr(G, eps), _qr(H, eps)
    U, s, Vh = torch.linalg.svd(R_G @ R_H.mT)
    V = Vh.mT
    floor = (G.shape[-2] + H.shape[-2]) * torch.finfo(s.dtype).eps
    s = torch.maximum(s, floor * s[..., :1].detach())
    to_left = torch.linalg.solve_triangular(R_G, U, upper=True)
    to_right = torch.linalg.solve_triangular(R_H, V, upper=True)
    return SingularFrame(Q_G @ U, Q_H @ V, s, to_left, to_right, U.mT @ R_G, V.mT @ R_H)


def _qr(G: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Q (..., n, h) and upper triangular R with G = Q R and R^T R = G^T G + eps I."""
    n, h = G.shape[-2:]
    if eps:
        ridge = eps**0.5 * torch.eye(h, dtype=G.dtype, device=G.device).expand(*G.shape[:-2], h, h)
        G = torch.cat([G, ridge], dim=-2)
    Q, R = torch.linalg.qr(G)
    return Q[..., :n, :], R


def product_gap(G1: Tensor, H1: Tensor, G2: Tensor, H2: Tensor) -> Tensor:
    """|G1 H1^T - G2 H2^T| (Frobenius) in O((n + m) h^2), without the n x m products. Shape (...,)."""
    R_G = torch.linalg.qr(torch.cat([G1, -G2], dim=-1), mode="r").R
    R_H = torch.linalg.qr(torch.cat([H1, H2], dim=-1), mode="r").R
    return torch.linalg.matrix_norm(R_G @ R_H.mT)
