"""Find the largest rise of the loss in a ball: by ascents on many small problems at once, and in closed form.

Row by row the steps are those of `quotient_manifolds.sharpness.AutoPGD`, which takes one problem of any size. In a ball
of the metric with this `radius` the relative velocity of `inv` has |b| <= radius / sqrt(2); the paper's App. E has
|b| <= rho instead, and its values are those at radius sqrt(2) rho.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from scipy.optimize import brentq
from torch import Tensor

from quotient_manifolds.sharpness import AutoPGD
from studies.common import Floats
from studies.diagonal.networks import Objective, Regression


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


def largest_in_ball(curvatures: Floats, slopes: Floats, radius: float) -> tuple[float, Floats]:
    """Return the maximum of sum_i c_i z_i^2 + 2 g_i z_i over |z| <= radius, and where: a trust-region problem.

    On the sphere z = g / (nu - c) with nu >= max c, nu >= 0, and |z| = radius: the secular equation, solved for
    mu = nu - max c, which lies between |g_top| / radius and |g| / radius. Hard case: g vanishes where c is largest and
    |z| < radius at mu = 0; then z gets the rest of its length there, in either direction. Inside the ball the maximum
    is g / -c, if c < 0 everywhere and that is short enough: the constraint is idle in this case only.
    """
    c, g = np.asarray(curvatures, dtype=np.float64), np.asarray(slopes, dtype=np.float64)
    top = c.max()
    gaps = top - c
    highest = gaps == 0
    rest = np.divide(g, gaps, out=np.zeros_like(g), where=~highest)
    if top < 0 and float(np.linalg.norm(g / -c)) <= radius:
        z = g / -c
    elif not g[highest].any() and float(np.linalg.norm(rest)) <= radius:
        z = rest
        z[int(np.argmax(highest))] = math.sqrt(max(0.0, radius**2 - float(rest @ rest)))
    else:

        def excess(mu: float) -> float:
            return 1 / float(np.linalg.norm(g / (gaps + mu))) - 1 / radius

        low = float(np.linalg.norm(g[highest])) / radius * (1 - 1e-12) or sys.float_info.min
        high = float(np.linalg.norm(g)) / radius * (1 + 1e-12)
        z = g / (gaps + brentq(excess, low, high, xtol=sys.float_info.min, rtol=1e-14, maxiter=2000))
    return float(c @ (z * z) + 2 * g @ z), z


def line_bound(regression: Regression, betas: Tensor, radius: float) -> Floats:
    """Bound mix exact for any X: the largest rise over |delta| <= sqrt(2) radius, as if no geodesic ended, (networks,).

    A convex quadratic over a ball, solved in the eigenbasis of X'X; never below mix exact.
    """
    left, sizes, _ = torch.linalg.svd(regression.X, full_matrices=False)
    slopes = sizes * ((betas @ regression.X.mT - regression.y) @ left)
    return np.array([largest_in_ball((sizes**2).numpy(), g.numpy(), math.sqrt(2) * radius)[0] for g in slopes])
