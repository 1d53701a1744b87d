"""Diagonal networks trained on one regression problem from many initialisations [paper, Sec. 6.1].

A network predicts x'(u * v). The paper states d = 200, a truth with 90 % zeros and 50 networks trained to the loss
1e-5; how many points of data, how initialised and with which learning rates it does not say: a `Setting` here.

An ascent maximizes the loss along geodesics of either metric, and along straight lines. Only beta = u v
matters. All metrics of the family have horizontal vectors (b u, b v), with the squared norm
2 | |beta|^t b |^2, and along the geodesic beta is multiplied by

                 first order      second order                     exact
    inv, t = 0   (1 + b)^2        (1 + b + b^2 / 2)^2              e^(2b)
    mix, t = 1   (1 + b)^2        (1 + b - b^2 / 2)^2              1 + 2b, until that is 0
    t            (1 + b)^2        (1 + b + (1/2 - t) b^2)^2        (1 + 2tb)^(1/t), until 1 + 2tb is 0

In adaptive sharpness u and v move apart, on straight lines: beta becomes beta (1 + a) (1 + c), and |(a, c)| <= radius.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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


# ---- what an ascent maximizes

GEODESICS = ("first", "second", "exact")
METRICS = {"inv": 0.0, "mix": 1.0}  # by name, the t of the metric
ADAPTIVE = "adaptive"
QUOTIENT = tuple(f"{metric} {geodesic}" for metric in METRICS for geodesic in GEODESICS)
MEASURES = (ADAPTIVE, *QUOTIENT)


@final
@dataclass(frozen=True)
class Objective:
    """Map z -> |X (beta factor(z / lengths)) - y|^2 for many networks at once, a row each.

    The coordinates z (..., k) are orthonormal in the metric; lengths: |xi| per unit of b, coordinate by coordinate.
    """

    regression: Regression
    beta: Tensor  # (..., d)
    lengths: Tensor  # (..., k)
    factor: Callable[[Tensor], Tensor]  # (..., k) -> (..., d)

    def image(self, z: Tensor) -> Tensor:
        """Compute beta where z leads, (..., k) -> (..., d)."""
        return self.beta * self.factor(z / self.lengths)

    def zero(self) -> Tensor:
        """Return z of the networks themselves."""
        return torch.zeros_like(self.lengths)

    def value(self, z: Tensor) -> Tensor:
        """Compute the loss, (..., k) -> (...)."""
        return self.regression.loss(self.image(z))

    def value_and_gradient(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the loss and its gradient in z, by automatic differentiation."""
        leaf = z.detach().requires_grad_()
        value = self.value(leaf)
        return value.detach(), torch.autograd.grad(value.sum(), leaf)[0]


def geodesic_factor(t: float, geodesic: str, b: Tensor) -> Tensor:
    """Return the factor along a geodesic of the metric t (0 is inv, 1 is mix), to first or second order or exact."""
    if geodesic == "first":
        return (1 + b) ** 2
    if geodesic == "second":
        return (1 + b + (0.5 - t) * b**2) ** 2
    if t == 0:
        return torch.exp(2 * b)
    inside = 1 + 2 * t * b  # where it is 0 the geodesic has left the manifold and stays at its last point
    return torch.where(inside > 0, inside.clamp(min=torch.finfo(b.dtype).tiny) ** (1 / t), 0.0)


def adaptive_factor(z: Tensor) -> Tensor:
    """Compute (1 + a) (1 + c) of z = (a, c)."""
    a, c = z.chunk(2, dim=-1)
    return (1 + a) * (1 + c)


def along(regression: Regression, beta: Tensor, t: float, geodesic: str) -> Objective:
    """Return the objective along geodesics of the metric t, on the horizontal space: k = d."""
    return Objective(regression, beta, math.sqrt(2) * beta.abs() ** t, partial(geodesic_factor, t, geodesic))


def objective(measure: str, regression: Regression, beta: Tensor) -> Objective:
    """Return what a measure maximizes: "adaptive", or a metric and a geodesic, such as "mix exact"; beta (..., d)."""
    if measure == ADAPTIVE:
        return Objective(regression, beta, torch.ones_like(torch.cat([beta, beta], dim=-1)), adaptive_factor)
    metric, geodesic = measure.split()
    return along(regression, beta, METRICS[metric], geodesic)
