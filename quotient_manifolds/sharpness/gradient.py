"""The norm of the loss's gradient in any geometry."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from quotient_manifolds.geometry import Geometry
from quotient_manifolds.sharpness.blocks import norm
from quotient_manifolds.sharpness.losses import Loss
from quotient_manifolds.sharpness.measurement import Measurement, Subject, counted, measured
from quotient_manifolds.sharpness.objective import BatchObjective, Progress, autograd_available


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
    with autograd_available():
        subject = Subject.of(model, loss, batches, geometry)
        tick = counted(progress, len(subject.batches))
        out = {name: torch.empty_like(w) for name, w in subject.space.point.items()}
        bases, values = [], []
        for index, batch in enumerate(subject.batches):
            objective = BatchObjective(subject.loss, subject.space, batch, f"batch {index}", out, tick)
            base, gradient = objective.value_and_gradient(objective.zero())
            bases.append(base)
            values.append(norm(gradient))
    passes = (2 + len(values), len(values))
    return measured("gradient norm", values, bases, subject.geometry, passes=passes)
