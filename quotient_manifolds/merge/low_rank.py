"""Add up products of low rank and truncate the sum, in factored form: no n x m matrix is ever made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quotient_manifolds.linalg import product_svd


class Truncation(NamedTuple):
    """Hold the best approximation B A of a sum of products, and what it costs."""

    B: Tensor  # (n, rank), float64
    A: Tensor  # (rank, m), float64
    norm: float  # of the sum (Frobenius)
    lost: float  # of what was cut off


def truncated_sum(terms: Sequence[tuple[float, Tensor, Tensor]], rank: int) -> Truncation:
    """Compute the best approximation of rank `rank` of the sum of c_i B_i A_i over terms (c_i, B_i, A_i).

    B = [c_1 B_1 | ... | c_k B_k] and the A_i, stacked, have the sum as their product, whose first singular values and
    vectors are the best approximation (Eckart and Young 1936).

    The result depends on the products B_i A_i alone: the factors are balanced (B^T B = A A^T = the singular values),
    and the largest entry of every column of B is positive. Shapes: B_i (n, r_i), A_i (r_i, m); rank at most n, m and
    the sum r of the r_i. Time O((n + m) r^2) and memory O((n + m) r), in float64. Raises ValueError on overflow.
    """
    B, A = torch.cat([c * B.double() for c, B, _ in terms], dim=1), torch.cat([A.double() for _, _, A in terms])
    if not math.isfinite(B.shape[1] * float(B.abs().max()) * float(A.abs().max())):
        raise ValueError("the sum of the updates is larger than float64 can hold")
    left, s, right = product_svd(B, A.mT)
    root = s[:rank].sqrt()
    return Truncation(left[:, :rank] * root, (right[:, :rank] * root).mT, float(s.norm()), float(s[rank:].norm()))
