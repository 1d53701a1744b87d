"""Worst-case sharpness in any geometry [paper, Eq. 3 and Algorithm 1]."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.geometry import Geometry, TangentSpace
from quotient_manifolds.sharpness.ascent import Ascent, AutoPGD
from quotient_manifolds.sharpness.blocks import norm
from quotient_manifolds.sharpness.losses import Loss
from quotient_manifolds.sharpness.objective import (
    BatchObjective,
    LossOf,
    Progress,
    autograd_available,
    check_deterministic,
    check_model,
)
from quotient_manifolds.sharpness.result import SharpnessResult, mean_and_error
from quotient_manifolds.version import VERSION


def worst_case_sharpness(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    *,
    geometry: Geometry,
    radius: float,
    steps: int = 20,
    restarts: int = 0,
    seed: int = 0,
    progress: Progress | None = None,
) -> SharpnessResult:
    """S(w) = mean over batches of max { L(gamma(1)) - L(w) : gamma a geodesic from w of length <= radius }.

    loss(model, batch) returns a scalar tensor; a batch is whatever it understands (`cross_entropy` takes (inputs,
    targets) and dicts with "labels"). Each batch is maximised on its own by Auto-PGD, from the model itself and from
    `restarts` random points of its sphere. The model must be in eval mode and deterministic, and is never written.
    Symmetries that a quotient geometry relies on are first tried on this loss and the first batch, and refused where it
    changes along them. Parameters with requires_grad=False stay fixed; parameters the loss does not use have gradient 0
    and do no harm.

    progress(done, total) is called after every forward pass of the ascent. Raises ValueError or TypeError, one
    sentence, for anything that cannot be measured, including a loss or gradient that is not finite somewhere in the
    ball: a maximum that ignored such points would mean nothing.
    """
    ascent = AutoPGD(steps=steps, restarts=restarts)
    check_radius(radius)
    if not isinstance(geometry, Geometry):
        raise TypeError(f"geometry must be Euclidean(), Adaptive() or Quotient(...). Found {geometry!r}")
    check_model(model)
    listed = listed_batches(batches)
    with autograd_available():
        space = geometry.at(model)
        objective = LossOf(model, loss)
        check_deterministic(objective, space.point, listed[0])
        proved = geometry.proved(model, loss, listed[0])
        space = space if proved == geometry else proved.at(model)
        found = _maximise(ascent, objective, space, listed, radius, seed, progress)
    values = tuple(each.loss - each.base for each in found)
    mean, error = mean_and_error(values)
    return SharpnessResult(
        mean=mean,
        standard_error=error,
        values=values,
        base_losses=tuple(each.base for each in found),
        loss_steps=tuple(each.losses for each in found),
        norms=tuple(each.norm for each in found),
        critical_starts=tuple(i for i, each in enumerate(found) if each.critical_start),
        forward_passes=2 + sum(each.forward_passes for each in found),
        backward_passes=sum(each.backward_passes for each in found),
        geometry=geometry.name,
        radius=float(radius),
        steps=steps,
        restarts=restarts,
        seed=seed,
        version=VERSION,
    )


def _maximise(
    ascent: AutoPGD,
    loss: LossOf,
    space: TangentSpace,
    batches: list[Any],
    radius: float,
    seed: int,
    progress: Progress | None,
) -> list[Ascent]:
    total = len(batches) * (1 + ascent.restarts) * (ascent.steps + 1)
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    out = {name: torch.empty_like(w) for name, w in space.point.items()}
    found = []
    for index, batch in enumerate(batches):
        generator = torch.Generator().manual_seed(seed + index)
        objective = BatchObjective(loss, space, batch, f"batch {index}", out, tick)
        best = ascent.maximise(objective, radius, generator)
        _check_resolved(best, radius, index)
        reached = norm(space.project(best.z))  # shorter than z where the geodesic ends before t = 1
        found.append(replace(best, z={}, norm=reached))  # a point of every batch would be many copies of the model
    return found


def _check_resolved(found: Ascent, radius: float, index: int) -> None:
    """Raises if no step changed the loss by so much as its last digit: the sharpness would be 0 for want of digits."""
    if len(set(found.losses)) == 1 and not found.critical_start:
        raise ValueError(
            f"The loss on batch {index} has a gradient, yet stays at {found.base!r} to its last digit within radius "
            f"{radius:g}: the steps are lost in rounding; take a larger radius, or float64"
        )


def listed_batches(batches: Iterable[Any]) -> list[Any]:
    """The batches as a list; a single batch, easily passed by mistake, is refused."""
    single = isinstance(batches, tuple) and bool(batches) and all(isinstance(item, Tensor) for item in batches)
    if isinstance(batches, (Tensor, Mapping, str)) or single:
        raise TypeError(f"batches must be a list of batches. Found one {type(batches).__name__}; wrap it: [batch]")
    listed = list(batches)
    if not listed:
        raise ValueError("There must be at least one batch to measure on. Found none")
    return listed


def check_radius(radius: float) -> None:
    if isinstance(radius, bool) or not isinstance(radius, (int, float)) or not 0 < radius < float("inf"):
        raise ValueError(f"radius must be a positive finite number. Found {radius!r}")
