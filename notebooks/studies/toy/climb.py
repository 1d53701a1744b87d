"""The package's ascent on the scalar network, for any measure of `MEASURES`."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from quotient_manifolds.geometry import Adaptive, Euclidean
from quotient_manifolds.manifolds import DiagonalQuotient
from quotient_manifolds.sharpness import AutoPGD, worst_case_sharpness
from studies.toy.closed import MEASURES
from studies.toy.network import Point, Scalar, batch, network, squared_error

Blocks = dict[str, Tensor]

STEPS = 30
RESTARTS = 3  # a ball that is a line segment has two maxima, one at each end

_STRAIGHT = {"euclidean": Euclidean(), "adaptive": Adaptive()}


def climb(problem: Scalar, point: Point, measure: str, radius: float) -> float:
    """Return worst-case sharpness as Auto-PGD finds it.

    Quotient measures climb on DiagonalQuotient, whose geodesics are closed forms in both metrics. `Quotient` measures
    the same on FixedRankQuotient(1, 1), where an exact geodesic of mix is an ODE.
    """
    if measure not in MEASURES:
        raise ValueError(f"measure must be one of {', '.join(MEASURES)}. Found {measure!r}")
    if measure in _STRAIGHT:
        return worst_case_sharpness(
            network(point),
            squared_error,
            [batch(problem)],
            geometry=_STRAIGHT[measure],
            radius=radius,
            steps=STEPS,
            restarts=RESTARTS,
        ).mean
    metric, order = measure.rstrip(")").split(" (")
    objective = _OnGeodesics(problem, point, metric, order.removesuffix(" order"))
    found = AutoPGD(steps=STEPS, restarts=RESTARTS).maximise(objective, radius, torch.Generator().manual_seed(0))
    return found.loss - found.base


@final
class _OnGeodesics:
    """Represent z -> L(gamma_z(1)) in orthonormal coordinates z of the horizontal line at a point."""

    def __init__(self, problem: Scalar, point: Point, metric: str, order: str) -> None:
        self.problem, self.order = problem, order
        self.space = DiagonalQuotient(metric).at(torch.tensor(point, dtype=torch.float64)[:, None])

    def zero(self) -> Blocks:
        return {"z": torch.zeros_like(self.space.point)}

    def sample(self, generator: torch.Generator) -> Blocks:
        noise = torch.randn(self.space.point.shape, generator=generator, dtype=torch.float64)
        return {"z": self.space.project(noise).clone()}

    def value(self, z: Blocks) -> float:
        return float(self.problem.loss(self.space.follow(z["z"], self.order)[0]))

    def value_and_gradient(self, z: Blocks) -> tuple[float, Blocks]:
        leaf = z["z"].detach().requires_grad_()
        value = self.problem.loss(self.space.follow(leaf, self.order)[0])
        (gradient,) = torch.autograd.grad(value, leaf)
        return float(value.detach()), {"z": self.space.project(gradient).clone()}
