"""Extend the singular frame to pairs (G, H) whose product has a rank below h, where training may start or pass.

Let H have full rank and G not, as where G = 0. Of the orbit then the column span of H is left, and with a basis of it
that H gives, the product is left diag(s) right^T with some s_i = 0. In these directions the metric is that of `mix`,
which needs H alone for velocities of G: |xi_G|^2 = tr(H^T H xi_G^T xi_G), gradient g_G (H^T H)^-1. This is the limit of
`mix`, while `inv` (every t < 1) has the limit 0 and would stay for ever. There xi_H = 0: its limit depends on how G
comes to 0, and its gradient is 0. All of this commutes with the action of GL(h), which a pseudo-inverse of G^T G does
not; with the roles exchanged alike. What lacks in both factors stays as it is: all gradients are 0 there.

In the frame that is: s_i = 1, so that all metrics are one; left_i = 0; velocities of G are measured as `mix` does, with
to_left_i from H; those of H are not seen, to_right_i = 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quotient_manifolds.linalg import SingularFrame, rank_floor


def completed(frame: SingularFrame, G: Tensor, H: Tensor, lower: Tensor) -> tuple[SingularFrame, Tensor]:
    """Return the frame with those of `lower` rank in their places, and the singular values, 0 where there are none."""
    there, lost = lower_rank_frame(G[lower], H[lower])
    whole, s = SingularFrame(*(part.clone() for part in frame)), frame.s.clone()
    for part, new in zip(whole, there, strict=True):
        part[lower] = new.to(part.dtype)
    s[lower] = there.s.masked_fill(lost, 0.0)
    return whole, s


def lower_rank_frame(G: Tensor, H: Tensor) -> tuple[SingularFrame, Tensor]:
    """Compute the frame described above, in float64, and where it lacks a direction.

    The basis is that of the factor of higher rank. Where each factor lacks what only the other one has, no rule
    commutes with the action.
    Shapes: G (k, n, h), H (k, m, h), finite; the second result (k, h).
    """
    level = noise(G.double(), H.double(), G.dtype)
    G, H = G.double(), H.double()
    swap = _scaled_rank(G) > _scaled_rank(H)
    order = torch.cat([(~swap).nonzero(), swap.nonzero()]).squeeze(-1)
    plain, lost = _by_second(G[~swap], H[~swap], level[~swap])
    other, lost_too = _by_second(H[swap], G[swap], level[swap])
    other = SingularFrame(other[1], other[0], other.s, other.to_right, other.to_left, other.from_right, other.from_left)
    back = order.argsort()
    frame = SingularFrame(*(torch.cat(parts)[back] for parts in zip(plain, other, strict=True)))
    return frame, torch.cat([lost, lost_too])[back]


def noise(G: Tensor, H: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute how large singular values of G H^T may be that are no more than the rounding of entries. Shape (...,)."""
    lengths = torch.linalg.vector_norm(G, dim=-2) * torch.linalg.vector_norm(H, dim=-2)
    return 4 * torch.finfo(dtype).eps * lengths.sum(-1)


def _by_second(G: Tensor, H: Tensor, level: Tensor) -> tuple[SingularFrame, Tensor]:
    """Compute the frame in the basis that H gives."""
    Q, sigma, Wh, lengths = _scaled_svd(H)
    known = sigma > 0
    inverse = torch.where(known, 1 / torch.where(known, sigma, 1.0), 0.0)
    coordinates = sigma[..., :, None] * Wh * lengths  # H = Q coordinates
    left, s, Vh = torch.linalg.svd(G @ coordinates.mT, full_matrices=False)
    from_right = Vh @ coordinates
    to_right = (Wh.mT / lengths.mT * inverse[..., None, :]) @ Vh.mT
    lost = ~(s > torch.maximum(rank_floor(G.shape[-2], H.shape[-2]) * s[..., :1], level[..., None]))
    s = torch.where(lost, 1.0, s)
    row, column = lost[..., None, :], lost[..., :, None]
    return SingularFrame(
        left.masked_fill(row, 0.0),
        Q @ Vh.mT,
        s,
        from_right.mT / s[..., None, :],
        to_right.masked_fill(row, 0.0),
        to_right.mT * s[..., :, None],
        from_right.masked_fill(column, 0.0),
    ), lost


def _scaled_svd(H: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute H = Q diag(sigma) Wh diag(lengths) from columns of length 1, sigma at rounding level made 0."""
    lengths = torch.linalg.vector_norm(H, dim=-2, keepdim=True)
    lengths = torch.where(lengths > 0, lengths, 1.0)
    Q, sigma, Wh = torch.linalg.svd(H / lengths, full_matrices=False)
    return Q, torch.where(sigma > rank_floor(*H.shape[-2:]), sigma, 0.0), Wh, lengths


def _scaled_rank(H: Tensor) -> Tensor:
    return (_scaled_svd(H)[1] > 0).sum(-1)
