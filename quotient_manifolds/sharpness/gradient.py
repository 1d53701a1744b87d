"""The norm of the loss's gradient in any geometry."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch import nn

from quotient_manifolds.geometry import Geometry
from quotient_manifolds.sharpness.blocks import norm
from quotient_manifolds.sharpness.losses import Loss
from quotient_manifolds.sharpness.measure import Measure, Subject, Tick
from quotient_manifolds.sharpness.measurement import Measurement, OnBatch
from quotient_manifolds.sharpness.objective import Progress


@final
@dataclass(frozen=True)
class GradientNorm(Measure):
    """|grad L(w)| in the metric, see `gradient_norm`."""

    name: ClassVar[str] = "gradient norm"

    def ticks(self, subject: Subject) -> int:
        return 1

    def on(self, subject: Subject, index: int, tick: Tick) -> OnBatch:
        objective = subject.objective(index, tick)
        base, gradient = objective.value_and_gradient(objective.zero())
        return OnBatch(norm(gradient), base, forward_passes=1, backward_passes=1)


def gradient_norm(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    *,
    geometry: Geometry,
    progress: Progress | None = None,
) -> Measurement:
    """|grad L(w)| in the metric: worst-case sharpness per radius, to first order.

    Euclidean |g|, adaptive |w g|, Riemannian for a quotient geometry. Per batch: the mean is over the norms of the
    batches' gradients, not the norm of their mean gradient. Invariant along the orbit in a quotient geometry with
    eps = 0 (the order of its geodesics is of no account), not in the others.

    Arguments, checks and errors as for `worst_case_sharpness`.
    """
    return GradientNorm(geometry).of(model, loss, batches, progress)
