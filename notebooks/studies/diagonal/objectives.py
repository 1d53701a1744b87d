"""What the ascent maximizes on a diagonal network: the loss along geodesics of either metric, and along straight lines.

Only beta = u v matters. All metrics of the family have horizontal vectors (b u, b v), with the squared norm
2 | |beta|^t b |^2, and along the geodesic beta is multiplied by

                 first order      second order                     exact
    inv, t = 0   (1 + b)^2        (1 + b + b^2 / 2)^2              e^(2b)
    mix, t = 1   (1 + b)^2        (1 + b - b^2 / 2)^2              1 + 2b, until that is 0
    t            (1 + b)^2        (1 + b + (1/2 - t) b^2)^2        (1 + 2tb)^(1/t), until 1 + 2tb is 0

In adaptive sharpness u and v move apart, on straight lines: beta becomes beta (1 + a) (1 + c), and |(a, c)| <= radius.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from studies.diagonal.networks import Regression

GEODESICS = ("first", "second", "exact")
METRICS = {"inv": 0.0, "mix": 1.0}  # by name, the t of the metric
ADAPTIVE = "adaptive"
QUOTIENT = tuple(f"{metric} {geodesic}" for metric in METRICS for geodesic in GEODESICS)
MEASURES = (ADAPTIVE, *QUOTIENT)


class Factor(NamedTuple):
    """Map b -> factor(b), by which a geodesic multiplies beta, and its derivative."""

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]


def factor(t: float, geodesic: str) -> Factor:
    """Return the factor along a geodesic of the metric t (0 is inv, 1 is mix), to first or second order or exact."""
    if geodesic == "first":
        return Factor(lambda b: (1 + b) ** 2, lambda b: 2 * (1 + b))
    if geodesic == "second":
        bend = 0.5 - t
        return Factor(lambda b: (1 + b + bend * b**2) ** 2, lambda b: 2 * (1 + b + bend * b**2) * (1 + 2 * bend * b))
    if t == 0:
        return Factor(lambda b: torch.exp(2 * b), lambda b: 2 * torch.exp(2 * b))

    def base(b: Tensor) -> Tensor:
        """Return 1 + 2tb; where that is 0 the geodesic has left the manifold and stays at its last point."""
        return (1 + 2 * t * b).clamp(min=0.0)

    def slope(b: Tensor) -> Tensor:
        inside = base(b)
        return torch.where(inside > 0, 2 * inside.clamp(min=torch.finfo(b.dtype).tiny) ** (1 / t - 1), 0.0)

    return Factor(lambda b: base(b) ** (1 / t), slope)


class Objective(ABC):
    """Map z -> L for many networks at once, a row each; the coordinates z (..., k) are orthonormal in the metric."""

    regression: Regression

    @abstractmethod
    def image(self, z: Tensor) -> Tensor:
        """Compute beta where z leads, (..., k) -> (..., d)."""

    @abstractmethod
    def zero(self) -> Tensor: ...

    @abstractmethod
    def value_and_gradient(self, z: Tensor) -> tuple[Tensor, Tensor]: ...

    def value(self, z: Tensor) -> Tensor:
        """Return the loss, (..., k) -> (...)."""
        return self.regression.loss(self.image(z))


@final
@dataclass(frozen=True)
class Along(Objective):
    """Map z -> |X (beta factor(b)) - y|^2 with b = z / lengths, on the horizontal space: k = d."""

    regression: Regression
    beta: Tensor
    lengths: Tensor
    factor: Factor

    @classmethod
    def of(cls, regression: Regression, beta: Tensor, t: float, geodesic: str) -> Along:
        """Return the objective in the metric t; lengths: |xi| per unit of b, coordinate by coordinate."""
        return cls(regression, beta, math.sqrt(2) * beta.abs() ** t, factor(t, geodesic))

    def image(self, z: Tensor) -> Tensor:
        return self.beta * self.factor.value(z / self.lengths)

    def zero(self) -> Tensor:
        return torch.zeros_like(self.beta)

    def value_and_gradient(self, z: Tensor) -> tuple[Tensor, Tensor]:
        b = z / self.lengths
        value, slope = self.regression.loss_and_gradient(self.beta * self.factor.value(b))
        return value, slope * self.beta * self.factor.slope(b) / self.lengths


@final
@dataclass(frozen=True)
class Apart(Objective):
    """Map z = (a, c) -> |X (beta (1 + a) (1 + c)) - y|^2: adaptive sharpness, k = 2d."""

    regression: Regression
    beta: Tensor

    def image(self, z: Tensor) -> Tensor:
        a, c = z.chunk(2, dim=-1)
        return self.beta * (1 + a) * (1 + c)

    def zero(self) -> Tensor:
        return torch.zeros_like(torch.cat([self.beta, self.beta], dim=-1))

    def value_and_gradient(self, z: Tensor) -> tuple[Tensor, Tensor]:
        a, c = z.chunk(2, dim=-1)
        value, slope = self.regression.loss_and_gradient(self.image(z))
        slope = slope * self.beta
        return value, torch.cat([slope * (1 + c), slope * (1 + a)], dim=-1)


def objective(measure: str, regression: Regression, beta: Tensor) -> Along | Apart:
    """Return what a measure maximizes: "adaptive", or a metric and a geodesic, such as "mix exact"; beta (..., d)."""
    return Apart(regression, beta) if measure == ADAPTIVE else along(measure, regression, beta)


def along(measure: str, regression: Regression, beta: Tensor) -> Along:
    """Return the objective of a metric and a geodesic, such as "mix exact"."""
    metric, geodesic = measure.split()
    return Along.of(regression, beta, METRICS[metric], geodesic)
