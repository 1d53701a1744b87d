"""Maximize a function over a ball by Auto-PGD (Croce & Hein, arXiv 2003.01690, Algorithm 1); base of all ascents.

An ascent works in a plain vector space: dicts of blocks z, a smooth objective, and the ball |z| <= radius in the l2 or
linf norm. Only the objective knows what the coordinates mean, so one ascent serves every geometry.
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
"""An increase below this share of `Ascent.promise` means that the loss bends down well inside the ball."""


class Objective(Protocol):
    """Describe the function to maximize: a function of z on a vector space of blocks.

    `sample` draws a standard Gaussian, or uniform entries in [-1, 1] for the random points of a linf ball.
    `value_and_gradient` returns new tensors at every call, because the ascent keeps them.
    """

    def zero(self) -> Params: ...
    def sample(self, generator: torch.Generator) -> Params: ...
    def value(self, z: Params) -> float: ...
    def value_and_gradient(self, z: Params) -> tuple[float, Params]: ...


@final
@dataclass(frozen=True)
class Ascent:
    """Hold the best point of an ascent, and the losses of the run that found it, from its start on.

    loss, base: the loss at the best point z, and at z = 0. norm: |z| in the norm of the ball. change: the largest
    |L - base| at any point of any run. multiplier, product: |g|_* and <g, z> for the gradient g at z, with the dual
    norm |.|_*. The last point of a run and points on the gradient's ray have no gradient; if z is one of them, both
    belong to the best earlier point. slope: |g|_* at z = 0; None if no run began there. inner_radius: the radius of the
    smaller ball that was also searched. critical_start: the gradient at the start of the first run was exactly 0, so
    its first step was random. forward_passes, backward_passes: totals over all runs.
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

        It is 0 exactly at critical points of the loss on the ball. The maximum of a concave loss is higher by at most
        the gap.
        """
        return max(0.0, self.radius * self.multiplier - self.product)

    @property
    def promise(self) -> float | None:
        """Return radius |g|_* at z = 0, the increase of a linear loss; None if that gradient was not computed."""
        return None if self.slope is None else self.radius * self.slope

    @property
    def overshot(self) -> bool:
        """Return whether the first step of a run from z = 0 gained less than `KEPT` of the promise."""
        return bool(self.promise) and self.losses[1] - self.base < KEPT * (self.promise or 0.0)

    def or_better(self, other: Ascent) -> Ascent:
        """Return the better of two ascents of one objective, with the passes of both and the start of this one."""
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
    """Hold the settings of an ascent, which `maximise` runs.

    steps: the largest number of steps of one run. restarts: the number of further runs from random points of the sphere
    (l2) or the box (linf); the best run is kept.
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

        The first interval has int(0.22 steps) steps. Each further one is int(0.03 steps) shorter, down to int(0.06
        steps); these numbers are at least 1. For 20 steps the checkpoints are 4, 7, 9, 10, 11, ...; for 100 steps they
        equal ceil(p_j steps), the rule of the paper.
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
        """Maximize the objective over |z| <= radius; `generator` is the only source of randomness.

        start: a point that is scaled to begin there, such as the maximizer in a smaller ball; it is not modified.
        Raises ValueError if the radius is not positive, the norm unknown, or a gradient not finite.
        """
        check_radius(radius)
        check_one_of("norm", norm, BALLS)
        ball = BALLS[norm](radius)
        best = self._first(objective, ball, generator, start)()
        overshot = start is None and best.overshot
        for ascend in self._further(objective, ball, generator, best.base, overshot=overshot):
            best = best.or_better(ascend())
            del ascend  # it keeps a run and its points alive
        return best

    @abstractmethod
    def _first(
        self, objective: Objective, ball: Ball, generator: torch.Generator, start: Params | None
    ) -> Callable[[], Ascent]:
        """Return the first run, from z = 0 or a start, for `maximise` to call, which saves a stack frame."""

    def _further(
        self, objective: Objective, ball: Ball, generator: torch.Generator, base: float, *, overshot: bool
    ) -> Iterator[Callable[[], Ascent]]:
        """Yield the runs to try after the first one. overshot: whether the first run overshot, see `Ascent`."""
        for _ in range(self.restarts):
            point = objective.sample(generator)
            ball.spread(point)
            yield partial(self._run(objective, ball, generator, base).run, point)
            del point  # the run owns it now

    def _run(self, objective: Objective, ball: Ball, generator: torch.Generator, base: float) -> Run:
        return Run(self, objective, ball, generator, base)


@final
@dataclass(frozen=True)
class AutoPGD(AscentMethod):
    """Hold the settings of Auto-PGD as published, the ascent behind published values of sharpness.

    In the ball |z| <= radius of the l2 or the linf norm, from z and the point z_old before it:

        u     = P(z + eta d)                            P(v) the point of the ball nearest to v
        z_new = P(z + a (u - z) + (1 - a) (z - z_old))  a = 1 at the first step, then alpha = 0.75

    Here d is the direction of steepest ascent in the norm, g / |g| or sign(g). The step size eta begins at 2 radius. It
    is halved at a checkpoint if at most rho k = 0.75 k of the last k steps increased the loss, or if neither eta nor
    the best loss has changed since the last checkpoint. The ascent then continues from the best point and its gradient.

    A step of 2 radius spans the ball and explores it. If too few steps increase the loss, the ascent oscillates across
    a maximum, and half the step from the best point comes closer. P is applied twice because of the momentum: u lies in
    the ball, but the step along z - z_old may leave it again.

    steps: the number of steps of one run, all of which are taken. Each costs a forward and a backward pass, and the
    last point one more forward pass. A start is scaled into the ball, and the first run begins there. Source: Croce &
    Hein, arXiv 2003.01690, Algorithm 1.
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

    base: the loss at z = 0; None if the run begins there. first: the loss and gradient at its start, if known.
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
            # This frees the old gradient, as large as the model, before the next one is computed. The best point keeps
            # its gradient, so that a run that returns there needs no further pass.
            self.now = Iterate(z, length, {}, 0.0, 0.0, 0.0)
            if step == self.steps:
                self.losses.append(self.objective.value(z))  # no step follows, so no gradient
                self.forward_passes += 1
            else:
                if self.first is None:
                    loss, gradient = self.objective.value_and_gradient(z)
                    self.forward_passes, self.backward_passes = self.forward_passes + 1, self.backward_passes + 1
                else:
                    (loss, gradient), self.first = self.first, None
                self.losses.append(loss)
                self.now = self._iterate(z, length, gradient)
                del gradient  # this frame would keep it alive during the whole run
            if step == 0:
                slope = self.now.dual if self.base is None else None
                self.base = self.losses[0] if self.base is None else self.base
                critical = self.now.square == 0
                if critical:
                    # A minimum or saddle has no direction of steepest ascent, yet the ball has a maximum: a random
                    # direction leaves the critical point.
                    random = self._iterate(z, length, self.objective.sample(self.generator))
                    self.now = random._replace(product=0.0, dual=0.0)
                    del random
                # Values at the last checkpoint: steps done, best loss, whether eta was halved. The last begins with
                # True, as in the authors' code, so that no run counts as stalled at its first checkpoint.
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
        """Return whether to stop before all steps are taken."""
        return False

    def _reconsider(self, step: int) -> None:
        """Halve the step size and return to the best point if the run oscillates or has stalled."""
        before, best_before, halved_before = self._last_check
        increases = sum(later > earlier for earlier, later in pairwise(self.losses[before : step + 1]))
        oscillates = increases <= AscentMethod.rho * (step - before)
        halve = oscillates or (not halved_before and best_before >= self.best_loss)
        self._last_check = (step, self.best_loss, halve)
        if halve:
            self.eta /= 2
            # z_old remains the previous point, so the next momentum is best - z_old, as in Algorithm 1.
            self.now = self.best

    def _next(self, step: int) -> tuple[Params, float]:
        """Return the point after step 1, 2, ..., in one of the run's buffers, and its length."""
        return self._stepped(step, self.eta)

    def _stepped(self, step: int, eta: float) -> tuple[Params, float]:
        # The step needs a buffer that holds neither the current nor the best point: the previous point's, or a third
        # one. It may overwrite the previous point, because it reads each element before it writes it.
        free = [each for each in self.buffers if each is not self.now.z and each is not self.best.z]
        if not free:
            free = [{key: torch.empty_like(block) for key, block in self.now.z.items()}]
            self.buffers += free
        # The first step has no momentum, because there is no earlier point: z = z_old.
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
    """Return a copy with contiguous blocks, because ascents write to them."""
    return {key: block.clone(memory_format=torch.contiguous_format) for key, block in z.items()}
