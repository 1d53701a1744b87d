"""Diagonal networks trained on one regression problem from many initialisations [paper, Sec. 6.1].

A network predicts x'(u * v). The paper states d = 200, a truth with 90 % zeros and 50 networks trained to the loss
1e-5; how many points of data, how initialised and with which learning rates it does not say: a `Setting` here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

DIMENSION = 200
SPARSITY = 0.9
NETWORKS = 50
TARGET = 1e-5
MOST_STEPS = 200_000
DIVERGED = 1e12  # a loss above this does not come back
MOST_DRAWS = 20  # batches of networks drawn for one cell before it is given up


@final
@dataclass(frozen=True)
class Setting:
    """Hold the number of points of data, and the ranges that scale and learning rate are drawn from log-uniformly."""

    points: int
    scales: tuple[float, float]
    rates: tuple[float, float]


@final
@dataclass(frozen=True)
class Regression:
    """Hold the problem L(beta) = |X beta - y|^2 with y = X beta*, X of shape (n, d)."""

    X: Tensor
    y: Tensor
    truth: Tensor

    @classmethod
    def draw(cls, points: int, generator: torch.Generator, *, dimension: int = DIMENSION) -> Regression:
        """Draw X with entries N(0, 1/n), beta* with one entry in ten N(0, 1) and the others 0."""
        X = torch.randn(points, dimension, generator=generator, dtype=torch.float64) / math.sqrt(points)
        truth = torch.randn(dimension, generator=generator, dtype=torch.float64)
        kept = torch.randperm(dimension, generator=generator)[: round((1 - SPARSITY) * dimension)]
        mask = torch.zeros(dimension, dtype=torch.float64).index_fill(0, kept, 1.0)
        return cls(X, X @ (truth * mask), truth * mask)

    def loss(self, beta: Tensor) -> Tensor:
        """Compute |X beta - y|^2, (..., d) -> (...)."""
        residual = beta @ self.X.mT - self.y
        return (residual * residual).sum(-1)

    def loss_and_gradient(self, beta: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the loss and its gradient in beta, (..., d) -> (...), (..., d)."""
        residual = beta @ self.X.mT - self.y
        return (residual * residual).sum(-1), 2 * (residual @ self.X)

    def test_loss(self, beta: Tensor) -> Tensor:
        """Return the expectation of (x'beta - x'beta*)^2 over x ~ N(0, I): |beta - beta*|^2."""
        return ((beta - self.truth) ** 2).sum(-1)


def train(
    regression: Regression, scales: Tensor, rates: Tensor, generator: torch.Generator, *, most: int = MOST_STEPS
) -> tuple[Tensor, Tensor]:
    """Descend along gradients of u and v, all networks at once, from scale * N(0, I) until its loss is at most 1e-5.

    Returns (u, v), a row a network: NaN where the loss passed 1e12, or was not reached within `most` steps.
    """
    size = (len(scales), regression.X.shape[1])
    u, v = (scales[:, None] * torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(2))
    ends = torch.full((2, *size), math.nan, dtype=torch.float64)
    running = torch.arange(len(scales))
    for _ in range(most + 1):
        loss, slope = regression.loss_and_gradient(u * v)
        arrived = loss <= TARGET
        ends[:, running[arrived]] = torch.stack([u[arrived], v[arrived]])
        stays = ~arrived & (loss <= DIVERGED)
        u, v, slope, running = (x[stays] for x in (u, v, slope, running))
        if not len(running):
            break
        change = rates[running, None] * slope
        u, v = u - change * v, v - change * u
    return ends[0], ends[1]


def draw_networks(
    regression: Regression, setting: Setting, generator: torch.Generator, *, networks: int = NETWORKS
) -> tuple[Tensor, Tensor]:
    """Train and return (u, v), each (networks, d); those that fail are drawn again with new scale, rate and start.

    Raises ValueError if too few arrive within 20 draws.
    """
    found = torch.empty(2, 0, regression.X.shape[1], dtype=torch.float64)
    for _ in range(MOST_DRAWS):
        missing = networks - found.shape[1]
        scales = _log_uniform(setting.scales, missing, generator)
        drawn = torch.stack(train(regression, scales, _log_uniform(setting.rates, missing, generator), generator))
        found = torch.cat([found, drawn[:, ~drawn.isnan().any(-1).any(0)]], dim=1)
        if found.shape[1] == networks:
            return found[0], found[1]
    raise ValueError(
        f"All networks must reach the loss {TARGET:g} in {setting}. Found {networks - found.shape[1]} of {networks} "
        f"that do not in {MOST_DRAWS} draws; take smaller learning rates"
    )


def _log_uniform(ends: tuple[float, float], size: int, generator: torch.Generator) -> Tensor:
    low, high = (math.log(end) for end in ends)
    return torch.exp(low + (high - low) * torch.rand(size, generator=generator, dtype=torch.float64))
