"""Diagonal networks trained on one regression problem from many initialisations [paper, Sec. 6.1].

A network predicts x'(u * v). The paper states d = 200, a truth with 90 % zeros and 50 networks trained to the loss
1e-5; how many points of data, how initialised and with which learning rates it does not say: a `Setting` here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, final

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


class Trained(NamedTuple):
    """Hold where gradient descent ended, one row a network, and after how many steps; NaN where it did not arrive."""

    u: Tensor
    v: Tensor
    steps: Tensor
    diverged: Tensor
    unfinished: Tensor


def train(
    regression: Regression, scales: Tensor, rates: Tensor, generator: torch.Generator, *, most: int = MOST_STEPS
) -> Trained:
    """Descend along gradients of u and v, all networks at once, from scale * N(0, I) until its loss is at most 1e-5.

    diverged: the loss passed 1e12; unfinished: it was neither above that nor at most 1e-5 within `most` steps.
    """
    size = (len(scales), regression.X.shape[1])
    u, v = (scales[:, None] * torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(2))
    ends = torch.full((2, *size), math.nan, dtype=torch.float64)
    steps = torch.full((len(scales),), most)
    diverged, running = torch.zeros(len(scales), dtype=torch.bool), torch.arange(len(scales))
    for step in range(most + 1):
        loss, slope = regression.loss_and_gradient(u * v)
        arrived, lost = loss <= TARGET, ~(loss <= DIVERGED)
        stopped = arrived | lost
        if bool(stopped.any()):
            ends[:, running[arrived]] = torch.stack([u[arrived], v[arrived]])
            steps[running[stopped]] = step
            diverged[running[lost]] = True
            u, v, slope, running = (x[~stopped] for x in (u, v, slope, running))
            if not len(running):
                break
        change = rates[running, None] * slope
        u, v = u - change * v, v - change * u
    unfinished = torch.zeros_like(diverged).index_fill(0, running, True)
    return Trained(ends[0], ends[1], steps, diverged, unfinished)


def draw_networks(
    regression: Regression, setting: Setting, generator: torch.Generator, *, networks: int = NETWORKS
) -> tuple[Tensor, Tensor, dict[str, int]]:
    """Train and return (u, v), each (networks, d), and what it took.

    Networks that fail are drawn again with new scale, rate and start: the counts are how many were drawn until there
    were enough, how the others failed, and the median of steps.

    Raises ValueError if too few arrive within 20 draws.
    """
    batches: list[Trained] = []
    missing, drawn = networks, 0
    while missing:
        if len(batches) == MOST_DRAWS:
            raise ValueError(
                f"All networks must reach the loss {TARGET:g} in {setting}. Found {missing} of {networks} that do not "
                f"in {MOST_DRAWS} draws; take smaller learning rates"
            )
        scales = _log_uniform(setting.scales, missing, generator)
        batch = train(regression, scales, _log_uniform(setting.rates, missing, generator), generator)
        batches.append(batch)
        drawn += missing
        missing = int((batch.diverged | batch.unfinished).sum())
    every = Trained(*(torch.cat(column) for column in zip(*batches, strict=True)))
    u, v, steps = (column[~(every.diverged | every.unfinished)] for column in every[:3])
    failed = {"diverged": int(every.diverged.sum()), "unfinished": int(every.unfinished.sum())}
    return u, v, {"drawn": drawn, **failed, "steps": int(steps.double().quantile(0.5))}


def _log_uniform(ends: tuple[float, float], size: int, generator: torch.Generator) -> Tensor:
    low, high = (math.log(end) for end in ends)
    return torch.exp(low + (high - low) * torch.rand(size, generator=generator, dtype=torch.float64))
