"""Average-case sharpness in any geometry."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from quotient_manifolds.geometry import Geometry
from quotient_manifolds.sharpness.blocks import scale
from quotient_manifolds.sharpness.losses import Loss
from quotient_manifolds.sharpness.measurement import Measurement, Subject, check_whole, counted, measured
from quotient_manifolds.sharpness.objective import BatchObjective, Progress, autograd_available
from quotient_manifolds.sharpness.result import mean_and_error
from quotient_manifolds.sharpness.worst_case import check_radius


def average_sharpness(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    *,
    geometry: Geometry,
    radius: float,
    samples: int = 32,
    seed: int = 0,
    progress: Progress | None = None,
) -> Measurement:
    """E[L(gamma_z(1)) - L(w)] over z = radius * N(0, I) in orthonormal coordinates of the (horizontal) tangent space.

    In the adaptive geometry that is the N(0, rho^2 diag(w^2)) of Andriushchenko et al. (arXiv 2302.07011) with
    rho = radius: the radius is the standard deviation per dimension, so |z| is about radius * sqrt(dimension), unlike
    the worst case's ball. Each of `samples` directions is used with both signs, which cancels the odd orders of the
    loss; batch i draws its own from the seed + i.

    The distribution, and so the measure, is invariant along the orbit in a quotient geometry with eps = 0; Euclidean
    and adaptive averages are not. A geodesic that leaves the manifold counts with its last point.

    Arguments, checks and errors as for `worst_case_sharpness`; progress counts forward passes.
    """
    check_radius(radius)
    check_whole("samples", samples, 2)
    with autograd_available():
        subject = Subject.of(model, loss, batches, geometry)
        tick = counted(progress, len(subject.batches) * (2 * samples + 1))
        out = {name: torch.empty_like(w) for name, w in subject.space.point.items()}
        bases, values, errors = [], [], []
        for index, batch in enumerate(subject.batches):
            objective = BatchObjective(subject.loss, subject.space, batch, f"batch {index}", out, tick)
            base = objective.value(objective.zero())
            generator = torch.Generator().manual_seed(seed + index)
            mean, error = mean_and_error([_pair(objective, radius, generator) - base for _ in range(samples)])
            bases.append(base)
            values.append(mean)
            errors.append(error or 0.0)
    return measured(
        "average-case sharpness",
        values,
        bases,
        subject.geometry,
        passes=(2 + len(values) * (2 * samples + 1), 0),
        errors=errors,
        sampled=True,
        radius=float(radius),
        samples=samples,
        seed=seed,
    )


def _pair(objective: BatchObjective, radius: float, generator: torch.Generator) -> float:
    """The mean loss at z and -z."""
    z = objective.sample(generator)
    scale(z, radius)
    there = objective.value(z)
    scale(z, -1.0)
    return (there + objective.value(z)) / 2
