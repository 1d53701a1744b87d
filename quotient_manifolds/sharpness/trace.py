"""The trace of the loss's Hessian in any geometry, by Hutchinson's estimator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from quotient_manifolds.geometry import Geometry
from quotient_manifolds.sharpness.blocks import dot
from quotient_manifolds.sharpness.hessian import Hessian, Products, check_products
from quotient_manifolds.sharpness.losses import Loss
from quotient_manifolds.sharpness.measurement import Measurement, Subject, check_whole, counted, measured
from quotient_manifolds.sharpness.objective import BatchObjective, Progress, autograd_available
from quotient_manifolds.sharpness.result import mean_and_error


def hessian_trace(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    *,
    geometry: Geometry,
    samples: int = 32,
    products: Products = "exact",
    seed: int = 0,
    progress: Progress | None = None,
) -> Measurement:
    """tr Hess L on the (horizontal) tangent space: the mean of <v, H v> over v = N(0, I) in orthonormal coordinates.

    The Riemannian Hessian for a quotient geometry; with first-order geodesics it lacks their bend. To second order in
    the radius, average-case sharpness is radius^2 / 2 times this trace. Its distribution is invariant along the orbit
    in a quotient geometry with eps = 0, in the others it is not. Batch i draws its directions from the seed + i.

    products: how H v is found, see `Hessian`. Arguments, checks and errors as for `worst_case_sharpness`; progress
    counts directions.
    """
    check_whole("samples", samples, 2)
    check_products(products)
    with autograd_available():
        subject = Subject.of(model, loss, batches, geometry)
        tick = counted(progress, len(subject.batches) * samples)
        out = {name: torch.empty_like(w) for name, w in subject.space.point.items()}
        bases, values, errors = [], [], []
        forwards = backwards = 0
        for index, batch in enumerate(subject.batches):
            hessian = Hessian(
                BatchObjective(subject.loss, subject.space, batch, f"batch {index}", out, lambda: None), products
            )
            generator = torch.Generator().manual_seed(seed + index)
            curvatures = []
            for _ in range(samples):
                v = subject.space.sample(generator)
                curvatures.append(dot(v, hessian.times(v)))
                tick()
            mean, error = mean_and_error(curvatures)
            bases.append(hessian.base)
            values.append(mean)
            errors.append(error or 0.0)
            forwards += hessian.forward_passes
            backwards += hessian.backward_passes
    return measured(
        "Hessian trace",
        values,
        bases,
        subject.geometry,
        passes=(2 + forwards, backwards),
        errors=errors,
        sampled=True,
        samples=samples,
        products=products,
        seed=seed,
    )
