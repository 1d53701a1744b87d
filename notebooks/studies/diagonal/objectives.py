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
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor

from studies.diagonal.networks import Regression

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
