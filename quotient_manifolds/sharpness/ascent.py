"""Maximise a function in a ball by Auto-PGD (Croce & Hein, arXiv 2003.01690, Algorithm 1).

The ascent sees a plain vector space: dicts of blocks z, a smooth objective, the ball |z| <= radius in the l2 or the
linf norm. What the coordinates mean is the objective's business, so one ascent serves every geometry.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, Protocol, final

import torch

from quotient_manifolds.check import check_integer, check_number, check_one_of
from quotient_manifolds.sharpness.vector import combine, dots, largest, norm, scale, signed_step
from quotient_manifolds.symmetries import Params


class Objective(Protocol):
    """Describe what is maximised: a function of z on a vector space of blocks.

    sample: a standard Gaussian; uniform in [-1, 1] for the random points of a linf ball. value_and_gradient: in tensors
    that are new at every call, for the ascent keeps them.
    """

    def zero(self) -> Params: ...
    def sample(self, generator: torch.Generator) -> Params: ...
    def value(self, z: Params) -> float: ...
    def value_and_gradient(self, z: Params) -> tuple[float, Params]: ...


@final
@dataclass(frozen=True)
class Ascent:
    """Hold the best point that an ascent found, and the losses of the run that found it, from its start on.

    loss: at the best point z, and `base` at z = 0. norm: |z| in the norm of the ball. critical_start: the gradient at
    the start of the first run was exactly 0, so its first step was random. The passes are those of all runs.
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
    """Hold the settings of Auto-PGD, the ascent that published sharpness comes from; `maximise` does it.

    In the ball |z| <= radius of the l2 or the linf norm, from z and the point z_old before it:

        u     = P(z + eta d)                            P(v) the point of the ball nearest to v
        z_new = P(z + a (u - z) + (1 - a) (z - z_old))  a = 1 at the first step, then alpha = 0.75

    with d the steepest ascent of the norm, g / |g| or sign(g), and eta = 2 radius, halved at a checkpoint if the last
    stretch of k steps saw at most rho k = 0.75 k increases of the loss, or if neither eta nor the best loss changed
    since the last checkpoint; the ascent then goes on from the best point with the best point's gradient.

    A step of 2 radius is as long as the ball is wide, and explores it. Where the loss no longer increases at most
    steps, the ascent oscillates across a maximum, and half the step from the best point comes nearer. P is applied
    twice because of the momentum: u lies in the ball, but going on along z - z_old may leave it again.

    steps: of one run; each is a forward and a backward pass, and the last point needs a forward pass alone. restarts:
    further runs from random points of the sphere (l2) or the box (linf); the best of all is kept. Source: Croce &
    Hein, arXiv 2003.01690, Algorithm 1.
    """

    steps: int = 20
    restarts: int = 0

    alpha: ClassVar[float] = 0.75
    rho: ClassVar[float] = 0.75

    def __post_init__(self) -> None:
        check_integer("steps", self.steps, 1)
        check_integer("restarts", self.restarts, 0)

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """Return the numbers of steps after which the step size is reconsidered, by the rule of the authors' code.

        Stretches of int(0.22 steps), each int(0.03 steps) shorter than the last, at least int(0.06 steps) and 1 long:
        for 20 steps after 4, 7, 9, 10, 11, ... of them. Their paper's ceil(p_j steps) is the same for 100 steps.
        """
        length, shrink, least = (max(int(part * self.steps), 1) for part in (0.22, 0.03, 0.06))
        checks: list[int] = []
        while (done := sum(checks[-1:]) + length) <= self.steps:
            checks.append(done)
            length = max(length - shrink, least)
        return tuple(checks)

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

        start: where the first run begins, scaled into the ball, instead of z = 0; left as it is. base: the loss at
        z = 0, where it is known; without it a run from a start evaluates it. Raises ValueError for a radius that is
        not positive, an unknown norm, and a gradient that is not finite.
        """
        check_radius(radius)
        check_one_of("norm", norm, BALLS)
        ball = BALLS[norm](radius)
        if start is None:
            point = objective.zero()
        else:
            point = {key: block.clone(memory_format=torch.contiguous_format) for key, block in start.items()}
            scale(point, min(1.0, radius / max(ball.length(point), TINY)))
        more = int(start is not None and base is None)
        base = objective.value(objective.zero()) if more else base
        best = _Run(self, objective, ball, generator, base).run(point)
        critical, runs = best.critical_start, 1 + self.restarts
        for _ in range(self.restarts):
            point = objective.sample(generator)
            ball.spread(point)
            again = _Run(self, objective, ball, generator, best.base).run(point)
            best = again if again.loss > best.loss else best
        forwards, backwards = runs * best.forward_passes + more, runs * best.backward_passes
        return replace(best, critical_start=critical, forward_passes=forwards, backward_passes=backwards)


@final
class _Run:
    """Ascend once, from one start. At most three buffers hold the current, the previous and the best point."""

    def __init__(
        self, settings: AutoPGD, objective: Objective, ball: Ball, generator: torch.Generator, base: float | None
    ) -> None:
        self.steps, self.checkpoints, self.eta = settings.steps, settings.checkpoints, 2 * ball.radius
        self.objective, self.ball, self.generator, self.base = objective, ball, generator, base
        self.losses: list[float] = []
        self.best_loss = -math.inf

    def run(self, start: Params) -> Ascent:
        """Ascend from `start`, whose tensors become the run's own."""
        z, length = start, self.ball.length(start)
        self.z_old, self.buffers = z, [z]
        for step in range(self.steps + 1):
            # Drops the old gradient, as large as the model, before the next one is computed; unless it is the best
            # point's, which is kept because a run that returns there goes on along it without another pass.
            self.now = Iterate(z, length, {}, 0.0, 0.0)
            if step == self.steps:
                self.losses.append(self.objective.value(z))  # nothing is stepped from the last point: no gradient
            else:
                loss, gradient = self.objective.value_and_gradient(z)
                self.losses.append(loss)
                self.now = self._iterate(z, length, gradient)
                del gradient  # this frame would hold it as long as the run lasts
            if step == 0:
                critical = self.now.square == 0
                if critical:
                    # A minimum (or a saddle) has no steepest ascent, but a maximum in the ball nevertheless: any way
                    # leads off.
                    self.now = self._iterate(z, length, self.objective.sample(self.generator))
                # At the last checkpoint: steps done, best loss, whether the step was halved. True before the first one,
                # as in the authors' code: no run has stalled since a checkpoint that never was.
                self._last_check = (0, self.losses[0], True)
            if self.losses[-1] > self.best_loss:
                self.best, self.best_loss = self.now, self.losses[-1]
            if step < self.steps:
                if step in self.checkpoints:
                    self._reconsider(step)
                z, length = self._next(step + 1)
        best, losses, base = self.best.z, tuple(self.losses), self.losses[0] if self.base is None else self.base
        length = self.ball.length(best)
        return Ascent(best, self.best_loss, base, losses, length, critical, self.steps + 1, self.steps)

    def _reconsider(self, step: int) -> None:
        """Halve the step size and return to the best point, where the run oscillates or has stalled."""
        before, best_before, halved_before = self._last_check
        increases = sum(later > earlier for earlier, later in pairwise(self.losses[before : step + 1]))
        oscillates = increases <= AutoPGD.rho * (step - before)
        halve = oscillates or (not halved_before and best_before >= self.best_loss)
        self._last_check = (step, self.best_loss, halve)
        if halve:
            self.eta /= 2
            # z_old stays the point before: the momentum of the next step is best - z_old, as in Algorithm 1.
            self.now = self.best

    def _next(self, step: int) -> tuple[Params, float]:
        """Return the next point, of step 1, 2, ..., in a buffer of the run's own, and its length."""
        # Into a buffer that holds neither the current nor the best point: that of the previous point, or a third. The
        # previous point may be overwritten, although the step reads it: each element is read before it is written.
        free = [each for each in self.buffers if each is not self.now.z and each is not self.best.z]
        if not free:
            free = [{key: torch.empty_like(block) for key, block in self.now.z.items()}]
            self.buffers += free
        # The first step has no momentum, for there is no earlier point: z = z_old.
        length = self.ball.step(self.now, self.z_old, self.eta, 1.0 if step == 1 else AutoPGD.alpha, free[0])
        self.z_old = self.now.z
        return free[0], length

    def _iterate(self, z: Params, length: float, gradient: Params) -> Iterate:
        square, product = dots(gradient, gradient, z)
        if not math.isfinite(square):
            raise ValueError(
                f"The gradient of the loss must be finite. Found {square} for its squared norm after "
                f"{len(self.losses) - 1} steps, at |z| = {self.ball.length(z):.3g}; take a smaller radius, or float64"
            )
        return Iterate(z, length, gradient, square, product)


# ---- balls: for each norm the steepest step, the nearest point, a random one

TINY = torch.finfo(torch.float64).tiny


class Iterate(NamedTuple):
    """Hold a point of the ball and the gradient there, with the numbers that a step from it needs."""

    z: Params
    length: float  # |z|
    gradient: Params
    square: float  # |gradient|_2^2
    product: float  # <gradient, z>


@final
@dataclass(frozen=True)
class L2Ball:
    """Describe {z : |z| <= radius}, |z|^2 = sum z_i^2: steepest ascent along g, P(v) = v min(1, radius / |v|).

    step: write P(z + a (u - z) + (1 - a) (z - z_old)) with u = P(z + eta * steepest ascent) to `out`, which may be
    z_old, and return |out|; steepest ascent is the direction of length 1 of the largest slope. spread: make a random
    point to start from of a sample of the space, in place.
    """

    radius: float

    def length(self, z: Params) -> float:
        return norm(z)

    def step(self, at: Iterate, z_old: Params, eta: float, a: float, out: Params) -> float:
        # With c = eta / |g|, u = s (z + c g), where s = min(1, radius / |z + c g|). That length is known from the
        # products |z|, <g, z> and |g|, so u is never formed: the step is one combination of z, z_old and g,
        #     (a s + 2 (1 - a)) z  -  (1 - a) z_old  +  a s c g,
        # one pass over memory that also sums |out|^2, and one more where that lies outside.
        c = eta / math.sqrt(at.square) if at.square > 0 else 0.0
        u = math.sqrt(max(0.0, at.length**2 + 2 * c * at.product + c * c * at.square))
        s = self.radius / u if u > self.radius else 1.0
        length = math.sqrt(combine(((a * s + 2 * (1 - a), at.z), (a - 1, z_old), (a * s * c, at.gradient)), out))
        if length > self.radius:
            scale(out, self.radius / length)
        return min(length, self.radius)

    def spread(self, sample: Params) -> None:
        """Scale a Gaussian sample to a uniform point of the sphere, as in the authors' code."""
        scale(sample, self.radius / max(norm(sample), TINY))


@final
@dataclass(frozen=True)
class LinfBall:
    """Describe the box of |z| = max |z_i| likewise: steepest ascent along sign(g), P(v)_i = v_i cut to +-radius."""

    radius: float

    def length(self, z: Params) -> float:
        return largest(z)

    def step(self, at: Iterate, z_old: Params, eta: float, a: float, out: Params) -> float:
        signed_step(at.z, z_old, at.gradient, eta, a, self.radius, out)
        return self.radius  # which no step asks for

    def spread(self, sample: Params) -> None:
        """Scale a sample, uniform in [-1, 1], to a uniform point of the box."""
        scale(sample, self.radius)


Ball = L2Ball | LinfBall
BALLS: dict[str, type[L2Ball] | type[LinfBall]] = {"l2": L2Ball, "linf": LinfBall}


def check_radius(radius: Any, name: str = "radius") -> None:
    """Raise ValueError unless the radius, or what else is called so, is a positive finite number."""
    if isinstance(radius, (list, tuple)):
        raise ValueError(f"{name} must be one number. Found {radius!r}; use worst_case_profile for several radii")
    check_number(name, radius, positive=True)
