"""Maximise a function in a ball by Auto-PGD (Croce & Hein, arXiv 2003.01690, Algorithm 1).

The ascent sees a plain vector space: dicts of blocks z, a smooth objective, the ball |z| <= radius in the l2 or the
linf norm. What the coordinates mean is the objective's business, so every geometry is climbed by the same steps:

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

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol, final

import torch

from quotient_manifolds.sharpness.ball import BALLS, Ball, Iterate
from quotient_manifolds.symmetries import Params


def released_checkpoints(steps: int) -> tuple[int, ...]:
    """Return the checkpoints of the authors' code.

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


def stated_checkpoints(steps: int) -> tuple[int, ...]:
    """Return the checkpoints of the authors' paper.

    ceil(p_j steps) for p_0 = 0, p_1 = 0.22, p_j+1 = p_j + max(p_j - p_j-1 - 0.03, 0.06) <= 1.
    """
    earlier, p = 0, 22  # in hundredths: as floats the sums round, and 0.7 * 20 would be a little above 14
    checks: list[int] = []
    while p <= 100:
        checks.append(-(-p * steps // 100))
        earlier, p = p, p + max(p - earlier - 3, 6)
    return tuple(sorted(set(checks)))


SCHEDULES = {"released": released_checkpoints, "stated": stated_checkpoints}


class Objective(Protocol):
    """Describe what is climbed: a function of z on a vector space of blocks."""

    def zero(self) -> Params: ...

    def sample(self, generator: torch.Generator) -> Params:
        """Return a standard Gaussian in the space; uniform in [-1, 1] for the random points of a linf ball."""
        ...

    def value(self, z: Params) -> float: ...

    def value_and_gradient(self, z: Params) -> tuple[float, Params]:
        """Return the value and the gradient, in tensors that are new at every call: the ascent keeps them."""
        ...


@final
@dataclass(frozen=True)
class Ascent:
    """Hold the best point that an ascent found, and the losses of the climb that found it, from its start on.

    loss: at the best point z, and `base` at z = 0. norm: |z| in the norm of the ball. critical_start: the gradient at
    the start of the first climb was exactly 0, so its first step was random. The passes are those of all climbs.
    """

    z: Params
    loss: float
    base: float
    losses: tuple[float, ...]
    norm: float
    critical_start: bool
    forward_passes: int
    backward_passes: int


@final
@dataclass(frozen=True)
class AutoPGD:
    """Hold the settings of the ascent by which sharpness is measured, Auto-PGD (Croce & Hein, arXiv 2003.01690).

    `maximise` climbs an objective in a ball. One forward and one backward pass per step; the last point needs only a
    forward pass. steps: of one climb. alpha: the weight of the new step against the momentum. rho: the share of steps
    that must rise for the step size to stay.

    restarts: further climbs from random points of the sphere (l2) or the box (linf); the best of all is kept.

    tolerance: a climb ends early, at the first checkpoint where its best rise over the base has grown by less than this
    share of itself since the checkpoint before; with 0 it never does.

    schedule: when the step size is reconsidered. "released" is the integer rule of the authors' code: for 20 steps,
    after 4, 7, 9, 10, 11, ... of them (0-based 3, 6, 8, 9, 10, ...). "stated" is their paper's ceil(p_j steps): after
    5, 9, 12, 14, 16, 18, 19, 20 (rounding in p_4 = 0.7 makes 14 a 15 elsewhere). For 100 steps the two are the same.
    """

    steps: int = 20
    alpha: float = 0.75
    rho: float = 0.75
    restarts: int = 0
    schedule: str = "released"
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        check_whole("steps", self.steps, 1)
        check_whole("restarts", self.restarts, 0)
        for name in ("alpha", "rho"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in (0, 1]. Found {getattr(self, name)!r}")
        if not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance must lie in [0, 1). Found {self.tolerance!r}")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}. Found {self.schedule!r}")

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """Return the numbers of steps after which the step size is reconsidered, ascending."""
        return SCHEDULES[self.schedule](self.steps)

    def maximise(
        self,
        objective: Objective,
        radius: float,
        generator: torch.Generator,
        *,
        norm: str = "l2",
        start: Params | None = None,
        base: float | None = None,
    ) -> Ascent:
        """Maximise the objective over |z| <= radius; all that is random comes from `generator`.

        start: where the first climb begins, scaled into the ball, instead of z = 0; left as it is. base: the loss at
        z = 0, where it is known; without it a climb from a start evaluates it. Raises ValueError for a radius that is
        not positive, an unknown norm, and a gradient that is not finite.
        """
        check_radius(radius)
        if norm not in BALLS:
            raise ValueError(f"norm must be one of {', '.join(BALLS)}. Found {norm!r}")
        ball = BALLS[norm](radius)
        forwards = 0
        if start is None:
            point = objective.zero()
        else:
            point = {key: block.clone(memory_format=torch.contiguous_format) for key, block in start.items()}
            ball.shrink(point)
            if base is None:
                base, forwards = objective.value(objective.zero()), 1
        best = _Climb(self, objective, ball, generator, base).run(point)
        base, critical = best.base, best.critical_start
        forwards, backwards = forwards + best.forward_passes, best.backward_passes
        for _ in range(self.restarts):
            point = objective.sample(generator)
            ball.spread(point)
            again = _Climb(self, objective, ball, generator, base).run(point)
            forwards, backwards = forwards + again.forward_passes, backwards + again.backward_passes
            best = again if again.loss > best.loss else best
        return replace(best, critical_start=critical, forward_passes=forwards, backward_passes=backwards)


@final
class _Climb:
    """Climb once from one start, and hold the state between its steps.

    Points are never copied: at most three buffers hold the current, the previous and the best point, by reference.
    """

    def __init__(
        self, settings: AutoPGD, objective: Objective, ball: Ball, generator: torch.Generator, base: float | None
    ) -> None:
        self.settings, self.objective, self.ball = settings, objective, ball
        self.generator, self.base, self.eta = generator, base, 2 * ball.radius
        self.losses: list[float] = []
        self.backwards = 0

    def run(self, start: Params) -> Ascent:
        """Climb from `start`, whose tensors become the climb's own."""
        gradient, length = self._differentiate(start), self.ball.length(start)
        self.best_loss = self.losses[0]
        self.now = self._iterate(start, length, gradient)
        critical = self.now.square == 0
        if critical:
            # A minimum (or a saddle) has no steepest ascent, but a maximum in the ball nevertheless: any way leads off.
            self.now = self._iterate(start, length, self.objective.sample(self.generator))
        self.z_old, self.buffers, self.best = start, [start], self.now
        base = self.best_loss if self.base is None else self.base
        # At the last checkpoint: steps done, best loss, whether the step was halved. True before the first one, as in
        # the authors' code: no climb has stalled since a checkpoint that never was.
        self._last_check = (0, self.best_loss, True)
        for step in range(self.settings.steps):
            self._step(first=step == 0, last=step + 1 == self.settings.steps)
            if step + 1 in self.settings.checkpoints:
                before = self._last_check[1]
                self._check(step + 1)
                if self.best_loss - before < self.settings.tolerance * (self.best_loss - base):
                    break
        best, losses = self.best.z, tuple(self.losses)
        length = self.ball.length(best)
        return Ascent(best, self.best_loss, base, losses, length, critical, len(losses), self.backwards)

    def _step(self, first: bool, last: bool) -> None:
        out = self._free_buffer()
        # The first step has no momentum, for there is no earlier point: z = z_old.
        length = self.ball.step(self.now, self.z_old, self.eta, 1.0 if first else self.settings.alpha, out)
        self.z_old = self.now.z
        # Drops the old gradient, as large as the model, before the next one is computed; unless it is the best point's,
        # which is kept because a climb that returns there goes on along it without another pass.
        self.now = Iterate(out, length, {}, 0.0, 0.0)
        if last:
            self.losses.append(self.objective.value(out))  # nothing is stepped from the last point: no gradient
        else:
            self.now = self._iterate(out, length, self._differentiate(out))
        if self.losses[-1] > self.best_loss:
            self.best, self.best_loss = self.now, self.losses[-1]

    def _differentiate(self, z: Params) -> Params:
        loss, gradient = self.objective.value_and_gradient(z)
        self.losses.append(loss)
        self.backwards += 1
        return gradient

    def _iterate(self, z: Params, length: float, gradient: Params) -> Iterate:
        iterate = self.ball.iterate(z, length, gradient)
        if not math.isfinite(iterate.square):
            raise ValueError(
                f"The gradient of the loss must be finite. Found {iterate.square} for its squared norm after "
                f"{len(self.losses) - 1} steps, at |z| = {self.ball.length(z):.3g}; take a smaller radius, or float64"
            )
        return iterate

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


def check_radius(radius: float) -> None:
    """Raise ValueError unless the radius is a positive finite number."""
    if isinstance(radius, bool) or not isinstance(radius, (int, float)) or not 0 < radius < math.inf:
        raise ValueError(f"radius must be a positive finite number. Found {radius!r}")


def check_whole(name: str, value: int, least: int) -> None:
    """Raise ValueError unless the setting is a whole number, at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number, at least {least}. Found {value!r}")
