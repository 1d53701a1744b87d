"""What is measured on diagonal networks: seven measures, a bound for mix, and what tells how truncation works."""

from __future__ import annotations

import math
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from studies.diagonal.ascent import Climbed
from studies.diagonal.closed_form import largest_in_ball
from studies.diagonal.networks import Regression
from studies.diagonal.objectives import GEODESICS, METRICS, Along, Apart

Floats = NDArray[np.float64]

ADAPTIVE = "adaptive"
QUOTIENT = tuple(f"{metric} {geodesic}" for metric in METRICS for geodesic in GEODESICS)
MEASURES = (ADAPTIVE, *QUOTIENT)
FAR = 0.5  # |b| above this counts as outside the reach of the Taylor series: a geodesic of mix ends at b = -1/2


def objective(measure: str, regression: Regression, beta: Tensor) -> Along | Apart:
    """Return what a measure climbs: "adaptive", or a metric and a geodesic, such as "mix exact"; beta (..., d)."""
    return Apart(regression, beta) if measure == ADAPTIVE else along(measure, regression, beta)


def along(measure: str, regression: Regression, beta: Tensor) -> Along:
    metric, geodesic = measure.split()
    return Along.of(regression, beta, METRICS[metric], geodesic)


@final
class LineBound:
    """Bound mix exact: the largest rise over |delta| <= sqrt(2) radius, as if none of its geodesics ended.

    A convex quadratic over a ball, solved in the eigenbasis of X'X; never below mix exact.
    """

    def __init__(self, regression: Regression) -> None:
        left, sizes, _ = torch.linalg.svd(regression.X, full_matrices=False)
        self._regression, self._left, self._sizes = regression, left, sizes

    def at(self, beta: Tensor, radius: float) -> float:
        """Return the bound of one network, beta (d,)."""
        residual = self._regression.X @ beta - self._regression.y
        slopes = self._sizes * (self._left.mT @ residual)
        return largest_in_ball((self._sizes**2).numpy(), slopes.numpy(), math.sqrt(2) * radius).value


def far_share(measure: str, regression: Regression, beta: Tensor, climbed: Climbed) -> Tensor:
    """Return the part of |z|^2 in coordinates with |b| > 1/2, (...,)."""
    square = climbed.z**2
    far = (climbed.z / along(measure, regression, beta).lengths).abs() > FAR
    return (square * far).sum(-1) / square.sum(-1)


def truncation_error(metric: str, regression: Regression, beta: Tensor, climbed: Climbed) -> Tensor:
    """Compute |L(second order) - L(exact)| / rise where the ascent along second-order geodesics ended, (...,)."""
    second, exact = (Along.of(regression, beta, METRICS[metric], geodesic) for geodesic in ("second", "exact"))
    return (second.value(climbed.z) - exact.value(climbed.z)).abs() / climbed.rise


def references(regression: Regression, betas: Tensor) -> dict[str, Floats]:
    """Return quantities without a radius or an ascent, one value a network, to compare the measures with.

    The gradient norms are sharpness over radius in the limit of small radii. nearest: the solution X^+ y of least norm,
    in whose place the paper's closed forms have X'y.
    """
    gradient = regression.loss_and_gradient(betas)[1]
    nearest = torch.linalg.pinv(regression.X) @ regression.y
    found = {
        "1 / min |beta|": 1 / betas.abs().amin(-1),
        "|beta|_1": betas.abs().sum(-1),
        "inv gradient": math.sqrt(2) * (betas * gradient).norm(dim=-1),
        "mix gradient": math.sqrt(2) * gradient.norm(dim=-1),
        "|beta (beta - nearest)|": (betas * (betas - nearest)).norm(dim=-1),
        "|beta - nearest|": (betas - nearest).norm(dim=-1),
    }
    return {name: values.numpy() for name, values in found.items()}
