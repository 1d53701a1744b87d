"""What the ascent climbs on a diagonal network: the loss along geodesics of either metric, and along straight lines.

Only beta = u v matters. Both metrics of the paper have horizontal vectors (b u, b v), with the squared norms 2 |b|^2
(inv) and 2 |beta b|^2 (mix), and along the geodesic beta is multiplied by

                 first order      second order             exact
    inv          (1 + b)^2        (1 + b + b^2 / 2)^2      e^(2b)
    mix          (1 + b)^2        (1 + b - b^2 / 2)^2      1 + 2b, until that is 0

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

from quotient_manifolds.experiments.diagonal.networks import Regression


class Factor(NamedTuple):
    """b -> factor(b), by which a geodesic multiplies beta, and its derivative."""

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]


_STRAIGHT = Factor(lambda b: (1 + b) ** 2, lambda b: 2 * (1 + b))

FACTORS: dict[tuple[str, str], Factor] = {
    ("inv", "first"): _STRAIGHT,
    ("inv", "second"): Factor(lambda b: (1 + b + b**2 / 2) ** 2, lambda b: 2 * (1 + b + b**2 / 2) * (1 + b)),
    ("inv", "exact"): Factor(lambda b: torch.exp(2 * b), lambda b: 2 * torch.exp(2 * b)),
    ("mix", "first"): _STRAIGHT,
    ("mix", "second"): Factor(lambda b: (1 + b - b**2 / 2) ** 2, lambda b: 2 * (1 + b - b**2 / 2) * (1 - b)),
    # Where 1 + 2b is 0 the geodesic has left the manifold: it stays at its last point.
    ("mix", "exact"): Factor(lambda b: (1 + 2 * b).clamp(min=0.0), lambda b: 2.0 * (b > -0.5)),
}


def lengths(beta: Tensor, metric: str) -> Tensor:
    """|xi| per unit of b, coordinate by coordinate: sqrt(2) (inv) or sqrt(2) |beta| (mix)."""
    return math.sqrt(2) * (torch.ones_like(beta) if metric == "inv" else beta.abs())


class Objective(ABC):
    """z -> L for many networks at once, a row each: the coordinates z (..., k) are orthonormal in the metric."""

    regression: Regression

    @abstractmethod
    def image(self, z: Tensor) -> Tensor:
        """beta where z leads, (..., k) -> (..., d)."""

    @abstractmethod
    def zero(self) -> Tensor: ...

    @abstractmethod
    def value(self, z: Tensor) -> Tensor:
        """The loss, (..., k) -> (...)."""

    @abstractmethod
    def value_and_gradient(self, z: Tensor) -> tuple[Tensor, Tensor]: ...


@final
@dataclass(frozen=True)
class Along(Objective):
    """z -> |X (beta factor(b)) - y|^2 with b = z / lengths, on the horizontal space: k = d."""

    regression: Regression
    beta: Tensor
    lengths: Tensor
    factor: Factor

    @classmethod
    def of(cls, regression: Regression, beta: Tensor, metric: str, geodesic: str) -> Along:
        return cls(regression, beta, lengths(beta, metric), FACTORS[metric, geodesic])

    def image(self, z: Tensor) -> Tensor:
        return self.beta * self.factor.value(z / self.lengths)

    def zero(self) -> Tensor:
        return torch.zeros_like(self.beta)

    def value(self, z: Tensor) -> Tensor:
        return self.regression.loss(self.image(z))

    def value_and_gradient(self, z: Tensor) -> tuple[Tensor, Tensor]:
        b = z / self.lengths
        value, slope = self.regression.loss_and_gradient(self.beta * self.factor.value(b))
        return value, slope * self.beta * self.factor.slope(b) / self.lengths


@final
@dataclass(frozen=True)
class Apart(Objective):
    """z = (a, c) -> |X (beta (1 + a) (1 + c)) - y|^2: adaptive sharpness, k = 2d."""

    regression: Regression
    beta: Tensor

    def image(self, z: Tensor) -> Tensor:
        a, c = z.chunk(2, dim=-1)
        return self.beta * (1 + a) * (1 + c)

    def zero(self) -> Tensor:
        return torch.zeros_like(torch.cat([self.beta, self.beta], dim=-1))

    def value(self, z: Tensor) -> Tensor:
        return self.regression.loss(self.image(z))

    def value_and_gradient(self, z: Tensor) -> tuple[Tensor, Tensor]:
        a, c = z.chunk(2, dim=-1)
        value, slope = self.regression.loss_and_gradient(self.beta * (1 + a) * (1 + c))
        slope = slope * self.beta
        return value, torch.cat([slope * (1 + c), slope * (1 + a)], dim=-1)
