"""The library's ascent, Auto-PGD in the l2 ball, on many small problems at once: a step costs hardly more than one's.

Row by row the steps are those of `quotient_manifolds.sharpness.AutoPGD`, which takes one problem of any size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from quotient_manifolds.sharpness import AutoPGD
from studies.diagonal.objectives import Objective


@final
@dataclass(frozen=True)
class Climbed:
    """Hold the rise of the loss that was found in the ball (...,), and where (..., k)."""

    rise: Tensor
    z: Tensor


def climb(objective: Objective, radius: float, steps: int, start: Tensor | None = None) -> Climbed:
    """Find the largest rise over |z| <= radius from z = 0 or from `start` in the ball; several may be stacked."""
    settings = AutoPGD(steps=steps)
    base = objective.value(objective.zero())
    z = z_old = objective.zero() if start is None else start
    loss, gradient = objective.value_and_gradient(z)
    best, best_loss, best_gradient = z, loss, gradient
    eta = torch.full_like(loss, 2 * radius)
    checked, best_before, halved = 0, loss, torch.ones_like(loss, dtype=torch.bool)
    increases = torch.zeros_like(loss)
    for step in range(steps):
        a = 1.0 if step == 0 else settings.alpha
        direction = gradient / _length(gradient).clamp_min(torch.finfo(loss.dtype).tiny)
        u = _into_ball(z + eta[..., None] * direction, radius)
        z, z_old = _into_ball(z + a * (u - z) + (1 - a) * (z - z_old), radius), z
        before = loss
        loss, gradient = objective.value_and_gradient(z)
        increases = increases + (loss > before)
        better = loss > best_loss
        best_loss = torch.where(better, loss, best_loss)
        best, best_gradient = _choose(better, z, best), _choose(better, gradient, best_gradient)
        if step + 1 in settings.checkpoints:
            oscillates = increases <= settings.rho * (step + 1 - checked)
            halve = oscillates | (~halved & (best_before >= best_loss))
            eta = torch.where(halve, eta / 2, eta)
            z, gradient = _choose(halve, best, z), _choose(halve, best_gradient, gradient)
            checked, best_before, halved, increases = step + 1, best_loss, halve, torch.zeros_like(increases)
    return Climbed(best_loss - base, best)


def climb_thoroughly(
    objective: Objective, radius: float, steps: int, restarts: int, generator: torch.Generator
) -> Climbed:
    """Return the best of ascents from z = 0, from `restarts` random points of the sphere, and from the best corner."""
    zero = objective.zero()
    noise = torch.randn((restarts, *zero.shape), generator=generator, dtype=zero.dtype)
    starts = [zero, best_corner(objective, radius).z, *(radius * noise / _length(noise))]
    found = climb(objective, radius, steps, torch.stack(starts))
    place = found.rise.argmax(0)[None]
    return Climbed(found.rise.gather(0, place)[0], found.z.take_along_dim(place[..., None], 0)[0])


def best_corner(objective: Objective, radius: float) -> Climbed:
    """Return the largest rise where one coordinate of z is +-radius and the others 0.

    Such a z changes one coordinate of beta, by t: the rise is t g_i + t^2 |X_i|^2, g the gradient in beta. In adaptive
    sharpness it is a coordinate of u; one of v does the same.
    """
    zero, regression = objective.zero(), objective.regression
    beta = objective.image(zero)
    size = beta.shape[-1]
    moves = torch.zeros((2, *zero.shape), dtype=zero.dtype)
    moves[0, ..., :size], moves[1, ..., :size] = radius, -radius
    change = objective.image(moves) - beta
    rises = change * regression.loss_and_gradient(beta)[1] + change**2 * (regression.X**2).sum(0)  # (2, ..., d)
    rises = torch.cat([rises[0], rises[1]], dim=-1)
    place = rises.argmax(-1, keepdim=True)
    signed = radius * (1 - 2 * (place >= size).to(zero.dtype))
    return Climbed(rises.gather(-1, place)[..., 0], zero.scatter(-1, place % size, signed))


def _length(z: Tensor) -> Tensor:
    return torch.linalg.vector_norm(z, dim=-1, keepdim=True)


def _into_ball(z: Tensor, radius: float) -> Tensor:
    return z * (radius / _length(z).clamp_min(radius))


def _choose(rows: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    return torch.where(rows[..., None], yes, no)
