"""Auto-PGD in the l2 ball (Croce & Hein, "Reliable evaluation of adversarial robustness", arXiv 2003.01690, Alg. 1).

The ascent sees a plain Euclidean space: dicts of blocks z, a smooth objective, the ball |z| <= radius. What the
coordinates mean is the objective's business, so every geometry is climbed by the same steps:

    u     = P(z + eta g / |g|)                      P(v) = v min(1, radius / |v|)
    z_new = P(z + a (u - z) + (1 - a) (z - z_old))  a = 1 at the first step, then alpha

with eta = 2 radius, halved at a checkpoint if the last stretch of k steps saw at most rho k increases of the loss, or
if neither eta nor the best loss changed since the last checkpoint; the ascent then goes on from the best point with
the best point's gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, final

import torch

from quotient_manifolds.sharpness.blocks import Blocks, combine, dots, norm, scale


class Objective(Protocol):
    """What is climbed: a function of z on a Euclidean space of blocks."""

    def zero(self) -> Blocks: ...

    def sample(self, generator: torch.Generator) -> Blocks:
        """A standard Gaussian in the space."""
        ...

    def value(self, z: Blocks) -> float: ...

    def value_and_gradient(self, z: Blocks) -> tuple[float, Blocks]:
        """The gradient's tensors are new at every call: the ascent keeps them."""
        ...


@final
@dataclass(frozen=True)
class Ascent:
    """The best point found, its loss and norm, and the losses of the climb that found it, from its start on.

    `base` is the loss at z = 0. `critical_start`: the gradient at z = 0 was exactly 0, so the first step there went in
    a random direction. Passes count all climbs.
    """

    z: Blocks
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
    """Settings of the ascent. One forward and one backward per step; the last point needs only a forward.

    restarts: further climbs from random points of the sphere, after the one from z = 0; the best is kept.

    schedule: when the step size is reconsidered. "released" is the integer rule of the authors' code: for 20 steps,
    after 4, 7, 9, 10, 11, ... of them (0-based 3, 6, 8, 9, 10, ...). "stated" is their paper's ceil(p_j steps): after
    5, 9, 12, 14, 16, 18, 19, 20 (rounding in p_4 = 0.7 makes 14 a 15 elsewhere). For 100 steps the two are the same.
    """

    steps: int = 20
    alpha: float = 0.75
    rho: float = 0.75
    restarts: int = 0
    schedule: str = "released"

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("restarts", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number, at least {least}. Found {value!r}")
        for name in ("alpha", "rho"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in (0, 1]. Found {getattr(self, name)!r}")
        if self.schedule not in _SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(_SCHEDULES)}. Found {self.schedule!r}")

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """The numbers of steps after which the step size is reconsidered, ascending."""
        return _SCHEDULES[self.schedule](self.steps)

    def maximise(self, objective: Objective, radius: float, generator: torch.Generator) -> Ascent:
        """max of the objective over |z| <= radius; all that is random comes from `generator`."""
        if not (math.isfinite(radius) and radius > 0):
            raise ValueError(f"radius must be a positive finite number. Found {radius!r}")
        first = _Climb(self, objective, radius, generator)
        first.run(objective.zero())
        best = first
        for _ in range(self.restarts):
            climb = _Climb(self, objective, radius, generator)
            climb.run(_random_point(objective, radius, generator))
            best = climb if climb.best_loss > best.best_loss else best
        return Ascent(
            z=best.best,
            loss=best.best_loss,
            base=first.losses[0],
            losses=tuple(best.losses),
            norm=norm(best.best),
            critical_start=first.critical,
            forward_passes=(1 + self.restarts) * (self.steps + 1),
            backward_passes=(1 + self.restarts) * self.steps,
        )


@final
class _Climb:
    """One ascent from one start: the state between its steps.

    Points are never copied: at most three buffers hold the current, the previous and the best point, by reference.
    """

    def __init__(self, settings: AutoPGD, objective: Objective, radius: float, generator: torch.Generator) -> None:
        self.settings = settings
        self.objective = objective
        self.radius = radius
        self.generator = generator
        self.eta = 2 * radius
        self.square = self.slope = 0.0  # |gradient|^2 and <gradient, z>
        self.length = 0.0  # |z|
        self.losses: list[float] = []
        self.critical = False

    def run(self, start: Blocks) -> None:
        self.z = self.z_old = self.best = start
        self.length = norm(start)
        self.buffers = [start]
        self.best_loss = self._differentiate()
        if self.square == 0:
            self.critical = True
            self.gradient = self.objective.sample(self.generator)
            self.square, self.slope = dots(self.gradient, self.gradient, self.z)
        self.best_state = self._state()
        self.losses.append(self.best_loss)
        self._last_check = (0, self.best_loss, True)  # steps done, best loss, step halved (not before: none was)
        for step in range(self.settings.steps):
            self._step(first=step == 0)
            self._evaluate(last=step + 1 == self.settings.steps)
            if step + 1 in self.settings.checkpoints:
                self._check(step + 1)

    def _step(self, first: bool) -> None:
        """z, z_old = z_new, z, with z_new = p z + q z_old + r g: one pass, one norm, one scaling if outside."""
        a = 1.0 if first else self.settings.alpha
        c = self.eta / math.sqrt(self.square) if self.square > 0 else 0.0
        u = math.sqrt(max(0.0, self.length**2 + 2 * c * self.slope + c * c * self.square))  # |z + c g|
        s = self.radius / u if u > self.radius else 1.0
        out = self._free_buffer()
        terms = ((a * s + 2 * (1 - a), self.z), (a - 1, self.z_old), (a * s * c, self.gradient))
        length = math.sqrt(combine(terms, out))
        if length > self.radius:
            scale(out, self.radius / length)
        self.z, self.z_old, self.length = out, self.z, min(length, self.radius)

    def _evaluate(self, last: bool) -> None:
        loss = self.objective.value(self.z) if last else self._differentiate()
        self.losses.append(loss)
        if loss > self.best_loss:
            self.best, self.best_loss = self.z, loss
            self.best_state = self._state()

    def _differentiate(self) -> float:
        loss, self.gradient = self.objective.value_and_gradient(self.z)
        self.square, self.slope = dots(self.gradient, self.gradient, self.z)
        if not math.isfinite(self.square):
            raise ValueError(
                f"The gradient of the loss must be finite. Found {self.square} for its squared norm after "
                f"{len(self.losses)} steps, at |z| = {norm(self.z):.3g}; take a smaller radius, or float64"
            )
        return loss

    def _check(self, done: int) -> None:
        before, best_before, halved_before = self._last_check
        stretch = self.losses[before : done + 1]
        increases = sum(later > earlier for earlier, later in pairwise(stretch))
        oscillates = increases <= self.settings.rho * (done - before)
        stalled = not halved_before and best_before >= self.best_loss
        halve = oscillates or stalled
        self._last_check = (done, self.best_loss, halve)
        if halve:
            self.eta /= 2
            self.z, self.length, self.gradient, self.square, self.slope = self.best_state

    def _state(self) -> tuple[Blocks, float, Blocks, float, float]:
        """What a step starts from, besides the previous point."""
        return self.z, self.length, self.gradient, self.square, self.slope

    def _free_buffer(self) -> Blocks:
        """A buffer that holds neither the current nor the best point: that of the previous point, or a third."""
        used = (self.z, self.best)
        for buffer in self.buffers:
            if all(buffer is not other for other in used):
                return buffer
        self.buffers.append({key: torch.empty_like(block) for key, block in self.z.items()})
        return self.buffers[-1]


def released_checkpoints(steps: int) -> tuple[int, ...]:
    """Stretches of int(0.22 steps), each int(0.03 steps) shorter than the last, at least int(0.06 steps) and 1 long."""
    length, shrink, least = (max(int(part * steps), 1) for part in (0.22, 0.03, 0.06))
    checks: list[int] = []
    done = length
    while done <= steps:
        checks.append(done)
        length = max(length - shrink, least)
        done += length
    return tuple(checks)


def stated_checkpoints(steps: int) -> tuple[int, ...]:
    """ceil(p_j steps) for p_0 = 0, p_1 = 0.22, p_j+1 = p_j + max(p_j - p_j-1 - 0.03, 0.06) <= 1, in hundredths."""
    earlier, p = 0, 22
    checks: list[int] = []
    while p <= 100:
        checks.append(-(-p * steps // 100))
        earlier, p = p, p + max(p - earlier - 3, 6)
    return tuple(sorted(set(checks)))


_SCHEDULES = {"released": released_checkpoints, "stated": stated_checkpoints}


def _random_point(objective: Objective, radius: float, generator: torch.Generator) -> Blocks:
    """A uniform point of the sphere, as in the authors' code."""
    z = objective.sample(generator)
    scale(z, radius / max(norm(z), torch.finfo(torch.float64).tiny))
    return z
