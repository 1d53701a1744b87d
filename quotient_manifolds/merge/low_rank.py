"""Add up products of low rank and truncate the sum, in factored form: no n x m matrix is ever made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Truncation(NamedTuple):
    """Hold the best approximation B A of a sum of products, and what it costs."""

    B: Tensor  # (n, rank), float64
    A: Tensor  # (rank, m), float64
    norm: float  # of the sum (Frobenius)
    lost: float  # of what was cut off


def truncated_sum(terms: Sequence[tuple[float, Tensor, Tensor]], rank: int) -> Truncation:
    """Compute the best approximation of rank `rank` of the sum of c_i B_i A_i over terms (c_i, B_i, A_i).

    B = [c_1 B_1 | ... | c_k B_k] and the A_i, stacked, have the sum as their product. With B = Q R and A^T = P S by QR
    it is Q (R S^T) P^T, so that an SVD of the small core R S^T is one of the sum, and its first singular values and
    vectors are the best approximation (Eckart and Young 1936). QR is accurate column by column, so terms whose factors
    differ in size do not disturb each other.

    The result depends on the products B_i A_i alone: the factors are balanced (B^T B = A A^T = the singular values),
    and the largest entry of every column of B is positive. Shapes: B_i (n, r_i), A_i (r_i, m); rank at most n, m and
    the sum r of the r_i. Time O((n + m) r^2) and memory O((n + m) r), in float64. Raises ValueError on overflow.
    """
    Q, R = torch.linalg.qr(torch.cat([c * B.double() for c, B, _ in terms], dim=1))
    P, S = torch.linalg.qr(torch.cat([A.double() for _, _, A in terms], dim=0).mT)
    core = R @ S.mT
    if not torch.isfinite(core).all():
        raise ValueError("the sum of the updates is larger than float64 can hold")
    U, s, Vh = torch.linalg.svd(core)
    root = s[:rank].sqrt()
    left, right = Q @ U[:, :rank], Vh[:rank] @ P.mT
    # Signs of singular vectors are rounding's choice; a rule makes the factors a function of the sum.
    sign = left.gather(0, left.abs().argmax(dim=0, keepdim=True)).sign()
    return Truncation(left * sign * root, (sign * root).mT * right, float(s.norm()), float(s[rank:].norm()))
