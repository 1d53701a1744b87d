"""Measure the norm of the loss's gradient in any geometry."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch import nn

from quotient_manifolds.geometry import Geometry, as_geometry
from quotient_manifolds.progress import Progress
from quotient_manifolds.sharpness.losses import Loss
from quotient_manifolds.sharpness.measure import KnownAscents, Measure
from quotient_manifolds.sharpness.objective import BatchObjective
from quotient_manifolds.sharpness.result import BatchResult, MeasureResult
from quotient_manifolds.sharpness.vector import absolute_sum, norm


@final
@dataclass(frozen=True)
class GradientNorm(Measure):
    """Measure |grad L(w)| in the metric, see `gradient_norm`."""

    name: ClassVar[str] = "gradient norm"

    def ticks(self, model: nn.Module) -> int:
        return 1

    def compute(self, objective: BatchObjective, ascents: KnownAscents) -> BatchResult:
        base, gradient = objective.value_and_gradient(objective.zero())
        # For a box, the norm dual to that of the box.
        value = norm(gradient) if objective.space.norm == "l2" else absolute_sum(gradient)
        return BatchResult(value, base, forward_passes=1, backward_passes=1)


def gradient_norm(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    *,
    geometry: Geometry | str | float,
    progress: Progress | None = None,
) -> MeasureResult:
    """Measure the length of the loss's gradient in the metric: worst-case sharpness per radius, for small radii.

    With g the gradient in the weights w: |g| in the Euclidean geometry, |w g| in the adaptive one, the length of the
    Riemannian gradient in a quotient geometry; for an linf ball the dual norm, the sum of |g| or |w g| over all
    weights. Per batch: the mean is over the norms of the batches' gradients, not the norm of their mean gradient.
    Invariant along the orbit in a quotient geometry with eps = 0 (the order of its geodesics is of no account), not in
    the others.

    Arguments, checks and errors as for `worst_case_sharpness`.
    """
    return GradientNorm(as_geometry(geometry)).of(model, loss, batches, progress)
