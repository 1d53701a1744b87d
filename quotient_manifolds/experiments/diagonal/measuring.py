"""Sharpness of one diagonal network by each measure, a thorough ascent to judge it by, and an upper bound for mix."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quotient_manifolds.experiments.diagonal.closed_form import largest_in_ball
from quotient_manifolds.experiments.diagonal.networks import Regression
from quotient_manifolds.experiments.diagonal.objectives import FACTORS, Along, Apart
from quotient_manifolds.sharpness import AutoPGD

Floats = NDArray[np.float64]

ADAPTIVE = "adaptive"
MEASURES = (ADAPTIVE, *(" ".join(names) for names in FACTORS))
METRICS = ("inv", "mix")
FAR = 0.5  # |b| above this counts as outside the reach of the Taylor series: mix's ends at b = -1/2


def objective(measure: str, regression: Regression, beta: Tensor) -> Along | Apart:
    """What a measure climbs: "adaptive", or a metric and a geodesic, such as "mix exact"."""
    if measure == ADAPTIVE:
        return Apart(regression, beta)
    metric, geodesic = measure.split()
    return Along.of(regression, beta, metric, geodesic)


@final
@dataclass(frozen=True)
class Climbed:
    """The rise of the loss that was found in the ball, and where."""

    rise: float
    z: Tensor


def climb(measure: str, regression: Regression, beta: Tensor, radius: float, ascent: AutoPGD) -> Climbed:
    """Sharpness as the library finds it: Auto-PGD from the network itself."""
    found = ascent.maximise(objective(measure, regression, beta), radius, torch.Generator().manual_seed(0))
    return Climbed(found.loss - found.base, found.z["z"])


def climb_thoroughly(measure: str, regression: Regression, beta: Tensor, radius: float, ascent: AutoPGD) -> float:
    """The largest rise that `ascent` finds from the network, its random restarts, and the best single coordinate."""
    goal = objective(measure, regression, beta)
    found = ascent.maximise(goal, radius, torch.Generator().manual_seed(1))
    corner = best_corner(measure, regression, beta, radius)
    again = AutoPGD(steps=ascent.steps, tolerance=ascent.tolerance).maximise(
        goal, radius, torch.Generator().manual_seed(1), start={"z": corner}, base=found.base
    )
    return max(found.loss, again.loss) - found.base


def corners(measure: str, regression: Regression, betas: Tensor, radius: float) -> Tensor:
    """The rise where one coordinate of z is +-radius and the others 0, (..., d) -> (..., 2, d), without an ascent.

    Such a z changes one coordinate of beta, by t: the rise is t g_i + t^2 |X_i|^2, g the gradient in beta. Adaptive
    sharpness has each twice, for u and for v.
    """
    goal = objective(measure, regression, betas)
    signs = torch.tensor([[radius], [-radius]], dtype=betas.dtype)
    beta = betas[..., None, :]
    image = (
        beta * (1 + signs) if isinstance(goal, Apart) else beta * goal.factor.value(signs / goal.lengths[..., None, :])
    )
    change, gradient = image - beta, regression.loss_and_gradient(betas)[1][..., None, :]
    return change * gradient + change**2 * (regression.X**2).sum(0)


def best_corner(measure: str, regression: Regression, beta: Tensor, radius: float) -> Tensor:
    """The z of the largest of `corners`."""
    rises = corners(measure, regression, beta, radius)
    place = int(rises.argmax())
    z = objective(measure, regression, beta).zero()["z"]
    z.view(-1)[place % rises.shape[-1]] = radius if place < rises.shape[-1] else -radius
    return z


@final
class LineBound:
    """max of the rise over beta + delta, |delta| <= sqrt(2) radius: mix exact, as if none of its geodesics ended.

    A convex quadratic over a ball, solved in the eigenbasis of X'X; never below mix exact.
    """

    def __init__(self, regression: Regression) -> None:
        left, sizes, _ = torch.linalg.svd(regression.X, full_matrices=False)
        self._regression, self._left, self._sizes = regression, left, sizes

    def at(self, beta: Tensor, radius: float) -> float:
        residual = self._regression.X @ beta - self._regression.y
        slopes = self._sizes * (self._left.mT @ residual)
        return largest_in_ball((self._sizes**2).numpy(), slopes.numpy(), math.sqrt(2) * radius).value


def far_share(measure: str, regression: Regression, beta: Tensor, z: Tensor) -> float:
    """The part of |z|^2 in coordinates with |b| > 1/2."""
    goal = objective(measure, regression, beta)
    assert isinstance(goal, Along)
    far = (z / goal.lengths).abs() > FAR
    return float((z[far] ** 2).sum() / (z**2).sum())


def truncation_error(metric: str, regression: Regression, beta: Tensor, climbed: Climbed) -> float:
    """|L(second order) - L(exact)| / rise at the point that the ascent along second-order geodesics found."""
    second, exact = (Along.of(regression, beta, metric, geodesic) for geodesic in ("second", "exact"))
    return abs(second.value({"z": climbed.z}) - exact.value({"z": climbed.z})) / climbed.rise


def references(regression: Regression, betas: Tensor) -> dict[str, Floats]:
    """Quantities without a radius or an ascent, one value a network, to compare the measures with.

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
