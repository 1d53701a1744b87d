"""Average points of the fixed-rank quotient by generalised Procrustes analysis of their balanced representatives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MAX_STEPS = 100
"""Between points that have little in common the last digits take thousands of steps, which no mean is worth."""
TOLERANCE = 1e-12
"""Change of the mean in a step, relative to the mean, at which it counts as settled."""


def procrustes_mean(z: Tensor, weights: Tensor) -> Tensor:
    """Find M and rotations Q_i that minimise sum_i w_i |Z_i Q_i - M|^2, by turns: M = sum_i w_i Z_i Q_i, Q_i nearest M.

    Balanced representatives Z_i are determined up to such rotations, so the minimum depends on orbits only. The first M
    is the best approximation, of h columns, of all Z_i side by side, whatever their order. [Gower 1975; ten Berge 1977]

    Every step lowers the sum; the last is where the mean settles, or number `MAX_STEPS`.

    Shapes: z (k, ..., n + m, h), weights (k, ...) with sum 1, result (..., n + m, h).
    """
    h = z.shape[-1]
    w = weights[..., None, None]
    beside = torch.cat(list((w.sqrt() * z).unbind(0)), dim=-1)
    U, sigma, _ = torch.linalg.svd(beside, full_matrices=False)
    mean = U[..., :h] * sigma[..., None, :h]
    for _ in range(MAX_STEPS):
        left, _, right = torch.linalg.svd(z.mT @ mean)
        last, mean = mean, (w * (z @ (left @ right))).sum(0)
        change = torch.linalg.matrix_norm(mean - last)
        if bool((change <= TOLERANCE * torch.linalg.matrix_norm(mean)).all()):
            return mean
    return mean


def require_weights(weights: Any, x: Tensor) -> Tensor:
    """Return weights (k, ...) with sum 1 for points x (k, ..., n + m, h), equal ones for None."""
    batch = x.shape[:-2]
    if weights is None:
        return torch.full(batch, 1 / len(x), dtype=torch.float64, device=x.device)
    try:
        w = torch.as_tensor(weights, dtype=torch.float64, device=x.device)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"weights should be numbers, one for each point; found {weights!r}") from None
    if w.ndim == 0 or w.shape[0] != len(x) or w.ndim > len(batch):
        raise ValueError(f"weights should have shape ({len(x)},), one for each point; found shape {tuple(w.shape)}")
    if not bool((w.isfinite() & (w >= 0)).all()) or not bool((w.sum(0) > 0).all()):
        raise ValueError("weights should be finite, at least 0, and not all 0; found others")
    w = w.reshape(w.shape + (1,) * (len(batch) - w.ndim)).expand(batch)
    return w / w.sum(0)
