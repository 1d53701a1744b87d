"""Maximise a function in a ball by Auto-PGD (Croce & Hein, arXiv 2003.01690, Algorithm 1), and what ascents share.

The ascent sees a plain vector space: dicts of blocks z, a smooth objective, the ball |z| <= radius in the l2 or the
linf norm. What the coordinates mean is the objective's business, so one ascent serves every geometry.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import ClassVar, Protocol, final

import torch

from quotient_manifolds.check import check_integer, check_one_of
from quotient_manifolds.sharpness.ball import BALLS, TINY, Ball, Iterate, check_radius
from quotient_manifolds.sharpness.vector import dots, scale
from quotient_manifolds.symmetries import Params

KEPT = 0.5
"""The share of the promise that a loss gains at least unless it bends down well inside the ball."""


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

    loss: at the best point z, and `base` at z = 0. norm: |z| in the norm of the ball. change: the largest |L - base| at
    any point of any run. multiplier, product: |g|_* and <g, z> of the gradient g at z, |.|_* the dual norm; the last
    point of a run and those of the gradient's ray have no gradient, and there these are of the best point before.
    slope: |g|_* at z = 0; None if no run began there. inner_radius: of the smaller ball that was searched, too.
    critical_start: the gradient at the start of the first run was exactly 0, so its first step was random. The passes
    are those of all runs.
    """

    z: Params
    loss: float
    base: float
    losses: tuple[float, ...]
    norm: float
    radius: float
    change: float
    multiplier: float
    product: float
    slope: float | None
    critical_start: bool
    forward_passes: int
    backward_passes: int
    inner_radius: float | None = None

    @property
    def gap(self) -> float:
        """Return radius |g|_* - <g, z>, the Frank-Wolfe gap: the residual of the KKT conditions of the maximum.

        It is 0 exactly at critical points of the loss on the ball. For a concave loss no maximum is higher by more.
        """
        return max(0.0, self.radius * self.multiplier - self.product)

    @property
    def promise(self) -> float | None:
        """Return radius |g|_* at z = 0, the increase if the loss were linear; None if that gradient is not known."""
        return None if self.slope is None else self.radius * self.slope

    @property
    def overshot(self) -> bool:
        """Return whether the first step of a run from z = 0 gained less than `KEPT` of the promise."""
        return bool(self.promise) and self.losses[1] - self.base < KEPT * (self.promise or 0.0)

    def or_better(self, other: Ascent) -> Ascent:
        """Return the better of two ascents of one objective, with the passes of both, beginning as this one did."""
        return replace(
            other if other.loss > self.loss else self,
            change=max(self.change, other.change),
            slope=self.slope,
            critical_start=self.critical_start,
            forward_passes=self.forward_passes + other.forward_passes,
            backward_passes=self.backward_passes + other.backward_passes,
            inner_radius=self.inner_radius or other.inner_radius,
        )


@dataclass(frozen=True)
class AscentMethod(ABC):
    """Hold the settings of an ascent; `maximise` does it.

    steps: of one run, at most. restarts: further runs from random points of the sphere (l2) or the box (linf); the best
    of all is kept.
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
        """Return the numbers of steps after which the step size is reconsidered, by the rule of Auto-PGD's authors.

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
    ) -> Ascent:
        """Maximise the objective over |z| <= radius; all that is random comes from `generator`.

        start: a point that points to where to begin, such as the maximizer in a smaller ball; left as it is. Raises
        ValueError for a radius that is not positive, an unknown norm, and a gradient that is not finite.
        """
        check_radius(radius)
        check_one_of("norm", norm, BALLS)
        ball = BALLS[norm](radius)
        best = self._first(objective, ball, generator, start)()
        overshot = start is None and best.overshot
        for ascend in self._further(objective, ball, generator, best.base, overshot=overshot):
            best = best.or_better(ascend())
            del ascend  # holds a run, with its points
        return best

    @abstractmethod
    def _first(
        self, objective: Objective, ball: Ball, generator: torch.Generator, start: Params | None
    ) -> Callable[[], Ascent]:
        """Return the first run, from z = 0 or by a start. `maximise` calls it: one frame less down to the loss."""

    def _further(
        self, objective: Objective, ball: Ball, generator: torch.Generator, base: float, *, overshot: bool
    ) -> Iterator[Callable[[], Ascent]]:
        """Yield what else to try after the first run; overshot: of that run."""
        for _ in range(self.restarts):
            point = objective.sample(generator)
            ball.spread(point)
            yield partial(self._run(objective, ball, generator, base).run, point)
            del point  # the run's own now

    def _run(self, objective: Objective, ball: Ball, generator: torch.Generator, base: float) -> Run:
        return Run(self, objective, ball, generator, base)


@final
@dataclass(frozen=True)
class AutoPGD(AscentMethod):
    """Hold the settings of Auto-PGD as published, the ascent that published sharpness comes from.

    In the ball |z| <= radius of the l2 or the linf norm, from z and the point z_old before it:

        u     = P(z + eta d)                            P(v) the point of the ball nearest to v
        z_new = P(z + a (u - z) + (1 - a) (z - z_old))  a = 1 at the first step, then alpha = 0.75

    with d the steepest ascent of the norm, g / |g| or sign(g), and eta = 2 radius, halved at a checkpoint if the last
    stretch of k steps saw at most rho k = 0.75 k increases of the loss, or if neither eta nor the best loss changed
    since the last checkpoint; the ascent then goes on from the best point with the best point's gradient.

    A step of 2 radius is as long as the ball is wide, and explores it. Where the loss no longer increases at most
    steps, the ascent oscillates across a maximum, and half the step from the best point comes nearer. P is applied
    twice because of the momentum: u lies in the ball, but going on along z - z_old may leave it again.

    steps: of one run, all of which are taken; each is a forward and a backward pass, and the last point needs a forward
    pass alone. A start is scaled into the ball, and the first run begins there. Source: Croce & Hein, arXiv 2003.01690,
    Algorithm 1.
    """

    def _first(
        self, objective: Objective, ball: Ball, generator: torch.Generator, start: Params | None
    ) -> Callable[[], Ascent]:
        if start is None:
            return partial(Run(self, objective, ball, generator, None).run, objective.zero())
        point = copied(start)
        scale(point, min(1.0, ball.radius / max(ball.length(point), TINY)))
        run = self._run(objective, ball, generator, objective.value(objective.zero()))
        run.forward_passes += 1
        return partial(run.run, point)


class Run:
    """Ascend once, from one start. At most three buffers hold the current, the previous and the best point.

    base: the loss at z = 0; None if the run begins there. first: the loss and the gradient at its start, if known.
    """

    def __init__(
        self, settings: AscentMethod, objective: Objective, ball: Ball, generator: torch.Generator, base: float | None
    ) -> None:
        self.steps, self.checkpoints, self.eta = settings.steps, settings.checkpoints, 2 * ball.radius
        self.objective, self.ball, self.generator, self.base = objective, ball, generator, base
        self.first: tuple[float, Params] | None = None
        self.losses: list[float] = []
        self.best_loss = -math.inf
        self.forward_passes = self.backward_passes = 0

    def run(self, start: Params) -> Ascent:
        """Ascend from `start`, whose tensors become the run's own."""
        z, length = start, self.ball.length(start)
        self.z_old, self.buffers, critical, slope = z, [z], False, None
        for step in range(self.steps + 1):
            # Drops the old gradient, as large as the model, before the next one is computed; unless it is the best
            # point's, which is kept because a run that returns there goes on along it without another pass.
            self.now = Iterate(z, length, {}, 0.0, 0.0, 0.0)
            if step == self.steps:
                self.losses.append(self.objective.value(z))  # nothing is stepped from the last point: no gradient
                self.forward_passes += 1
            else:
                if self.first is None:
                    loss, gradient = self.objective.value_and_gradient(z)
                    self.forward_passes, self.backward_passes = self.forward_passes + 1, self.backward_passes + 1
                else:
                    (loss, gradient), self.first = self.first, None
                self.losses.append(loss)
                self.now = self._iterate(z, length, gradient)
                del gradient  # this frame would hold it as long as the run lasts
            if step == 0:
                slope = self.now.dual if self.base is None else None
                self.base = self.losses[0] if self.base is None else self.base
                critical = self.now.square == 0
                if critical:
                    # A minimum (or a saddle) has no steepest ascent, but a maximum in the ball nevertheless: any way
                    # leads off.
                    random = self._iterate(z, length, self.objective.sample(self.generator))
                    self.now = random._replace(product=0.0, dual=0.0)
                    del random
                # At the last checkpoint: steps done, best loss, whether the step was halved. True before the first one,
                # as in the authors' code: no run has stalled since a checkpoint that never was.
                self._last_check = (0, self.losses[0], True)
            if self.losses[-1] > self.best_loss:
                self.best, self.best_loss = self.now, self.losses[-1]
                if step < self.steps:
                    self.multiplier, self.product = self.now.dual, self.now.product
            if step == self.steps or self._is_done():
                break
            if step in self.checkpoints:
                self._reconsider(step)
            z, length = self._next(step + 1)
        return self._found(slope, critical)

    def _found(self, slope: float | None, critical: bool) -> Ascent:
        best, base = self.best.z, self.losses[0] if self.base is None else self.base
        return Ascent(
            best,
            self.best_loss,
            base,
            tuple(self.losses),
            self.ball.length(best),
            self.ball.radius,
            max(abs(loss - base) for loss in self.losses),
            self.multiplier,
            self.product,
            slope,
            critical,
            self.forward_passes,
            self.backward_passes,
        )

    def _is_done(self) -> bool:
        """Return whether to stop before the steps are spent."""
        return False

    def _reconsider(self, step: int) -> None:
        """Halve the step size and return to the best point, where the run oscillates or has stalled."""
        before, best_before, halved_before = self._last_check
        increases = sum(later > earlier for earlier, later in pairwise(self.losses[before : step + 1]))
        oscillates = increases <= AscentMethod.rho * (step - before)
        halve = oscillates or (not halved_before and best_before >= self.best_loss)
        self._last_check = (step, self.best_loss, halve)
        if halve:
            self.eta /= 2
            # z_old stays the point before: the momentum of the next step is best - z_old, as in Algorithm 1.
            self.now = self.best

    def _next(self, step: int) -> tuple[Params, float]:
        """Return the next point, of step 1, 2, ..., in a buffer of the run's own, and its length."""
        return self._stepped(step, self.eta)

    def _stepped(self, step: int, eta: float) -> tuple[Params, float]:
        # Into a buffer that holds neither the current nor the best point: that of the previous point, or a third. The
        # previous point may be overwritten, although the step reads it: each element is read before it is written.
        free = [each for each in self.buffers if each is not self.now.z and each is not self.best.z]
        if not free:
            free = [{key: torch.empty_like(block) for key, block in self.now.z.items()}]
            self.buffers += free
        # The first step has no momentum, for there is no earlier point: z = z_old.
        length = self.ball.step(self.now, self.z_old, eta, 1.0 if step == 1 else AscentMethod.alpha, free[0])
        self.z_old = self.now.z
        return free[0], length

    def _iterate(self, z: Params, length: float, gradient: Params) -> Iterate:
        square, product = dots(gradient, gradient, z)
        if not math.isfinite(square):
            raise ValueError(
                f"The gradient of the loss must be finite. Found {square} for its squared norm after "
                f"{len(self.losses) - 1} steps, at |z| = {self.ball.length(z):.3g}; take a smaller radius, or float64"
            )
        return Iterate(z, length, gradient, square, product, self.ball.dual(gradient, square))


def copied(z: Params) -> Params:
    """Return a copy whose blocks are contiguous, for ascents write to them."""
    return {key: block.clone(memory_format=torch.contiguous_format) for key, block in z.items()}
