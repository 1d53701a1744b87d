"""Maximise a function in a ball by Auto-PGD (Croce & Hein, arXiv 2003.01690, Algorithm 1).

In the ball |z| <= radius of the l2 or the linf norm, from z and the point z_old before it:

    u     = P(z + eta d)                            P(v) the point of the ball nearest to v
    z_new = P(z + a (u - z) + (1 - a) (z - z_old))  a = 1 at the first step, then alpha

with d the steepest ascent of the norm, g / |g| or sign(g), and eta = 2 radius, halved at a checkpoint if the last
stretch of k steps saw at most rho k increases of the loss, or if neither eta nor the best loss changed since the last
checkpoint; the ascent then goes on from the best point with the best point's gradient.

Why so: a step of 2 radius is as long as the ball is wide, and explores it; where the loss no longer rises at most
steps, the climb jumps to and fro across a maximum, and half the step from the best point comes nearer. Only losses
decide, so there is no line search. P is applied twice because of the momentum: u lies in the ball, but going on along
z - z_old may leave it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import final

import torch

from quotient_manifolds.sharpness.ascent import Climb, Method, Objective
from quotient_manifolds.sharpness.ball import Ball
from quotient_manifolds.symmetries import Params


def released_checkpoints(steps: int) -> tuple[int, ...]:
    """Return the checkpoints of the authors' code, numbers of steps.

    Stretches of int(0.22 steps), each int(0.03 steps) shorter than the last, at least int(0.06 steps) and 1 long.
    """
    length, shrink, least = (max(int(part * steps), 1) for part in (0.22, 0.03, 0.06))
    checks: list[int] = []
    done = length
    while done <= steps:
        checks.append(done)
        length = max(length - shrink, least)
        done += length
    return tuple(checks)


@final
@dataclass(frozen=True)
class AutoPGD(Method):
    """Hold the settings of the ascent by which sharpness is measured, Auto-PGD (Croce & Hein, arXiv 2003.01690).

    `maximise` climbs an objective in a ball. One forward and one backward pass per step; the last point needs only a
    forward pass. steps: of one climb. alpha: the weight of the new step against the momentum. rho: the share of steps
    that must rise for the step size to stay.

    restarts, tolerance: see `Method`.

    checkpoints: the step size is reconsidered by the integer rule of the authors' code: for 20 steps, after 4, 7, 9,
    10, 11, ... of them (0-based 3, 6, 8, 9, 10, ...). Their paper's ceil(p_j steps) is the same for 100 steps.
    """

    steps: int = 20
    alpha: float = 0.75
    rho: float = 0.75
    restarts: int = 0
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        self.check()
        for name in ("alpha", "rho"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in (0, 1]. Found {getattr(self, name)!r}")

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """Return the numbers of steps after which the step size is reconsidered, ascending."""
        return released_checkpoints(self.steps)

    def climb(self, objective: Objective, ball: Ball, generator: torch.Generator, base: float | None) -> Climb:
        return _Climb(self, objective, ball, generator, base)


@final
class _Climb(Climb):
    """Climb once. At most three buffers hold the current, the previous and the best point, by reference."""

    def __init__(
        self, settings: AutoPGD, objective: Objective, ball: Ball, generator: torch.Generator, base: float | None
    ) -> None:
        super().__init__(settings, objective, ball, generator, base)
        self.settings, self.eta = settings, 2 * ball.radius

    def _arrived(self, step: int) -> None:
        if step == 0:
            self.z_old, self.buffers = self.now.z, [self.now.z]
            # At the last checkpoint: steps done, best loss, whether the step was halved. True before the first one, as
            # in the authors' code: no climb has stalled since a checkpoint that never was.
            self._last_check = (0, self.best_loss, True)
        elif step in self.settings.checkpoints:
            self._check(step)

    def _next(self, step: int) -> tuple[Params, float]:
        out = self._free_buffer()
        # The first step has no momentum, for there is no earlier point: z = z_old.
        length = self.ball.step(self.now, self.z_old, self.eta, 1.0 if step == 1 else self.settings.alpha, out)
        self.z_old = self.now.z
        return out, length

    def _check(self, done: int) -> None:
        """Halve the step and return to the best point, if the climb oscillates or has stalled since the last check."""
        before, best_before, halved_before = self._last_check
        stretch = self.losses[before : done + 1]
        increases = sum(later > earlier for earlier, later in pairwise(stretch))
        oscillates = increases <= self.settings.rho * (done - before)
        stalled = not halved_before and best_before >= self.best_loss
        halve = oscillates or stalled
        self._last_check = (done, self.best_loss, halve)
        if halve:
            self.eta /= 2
            # z_old stays the point before: the momentum of the next step is best - z_old, as in Algorithm 1.
            self.now = self.best

    def _free_buffer(self) -> Params:
        """Return a buffer that holds neither the current nor the best point: that of the previous point, or a third.

        The previous point may be overwritten, although the step reads it: each element is read before it is written.
        """
        used = (self.now.z, self.best.z)
        for buffer in self.buffers:
            if all(buffer is not other for other in used):
                return buffer
        self.buffers.append({key: torch.empty_like(block) for key, block in self.now.z.items()})
        return self.buffers[-1]
