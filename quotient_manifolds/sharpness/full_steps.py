"""Maximize a function over a ball by Auto-PGD with full steps, a stop by the gap, and a second search well inside."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, final

import torch

from quotient_manifolds.sharpness.ascent import KEPT, Ascent, AscentMethod, Objective, Run, copied
from quotient_manifolds.sharpness.ball import TINY, Ball, Iterate
from quotient_manifolds.sharpness.vector import dots, scale
from quotient_manifolds.symmetries import Params


@final
@dataclass(frozen=True)
class FullStepAPGD(AscentMethod):
    """Hold the settings of Auto-PGD with full steps, the default ascent.

    Let |.|_* be the dual of the ball's norm, and top(g) = argmax { <g, z> : |z| <= radius }, which is radius g / |g| or
    radius sign(g). With g the gradient at z, the Frank-Wolfe gap

        gap(z) = radius |g|_* - <g, z>

    is 0 exactly at critical points of the loss on the ball. The steps are as in `AutoPGD`, except:

    1. From z = 0 the first point is z_1 = top(g_0), as in `AutoPGD`.
    2. If <g - g_old, z - z_old> >= 0, the loss is convex along the last step, and the next step is full: u = top(g).
    3. The run ends when the gap at the best point is at most 1e-6 of the increase. The tolerance is this small because
       the gap also falls near a saddle, to the square of the angle by which the ascent misses the saddle.
    4. If z_1 gains less than half of the promise radius |g_0|_*, the loss bends down inside the ball. It is then
       evaluated at z_1 / 4, z_1 / 16, ... until a point gains half of its own promise. If that is not z_1 / 4, a second
       run with half of the steps searches the ball that is larger by a factor of 4. The best of all points is kept, so
       the result is never less than the best value on the gradient's ray.

    steps: the largest number of steps of one run. Rule 4 adds one pass, at most 14 evaluations of the loss, and the
    second run. A start is scaled to the sphere; the run continues from the better of z_1 and that point, without rule
    4. Source of the steps: Croce & Hein, arXiv 2003.01690, Algorithm 1.
    """

    tolerance: ClassVar[float] = 1e-6  # the ratio gap / increase at which a run ends
    shrink: ClassVar[float] = 0.25  # the ratio of successive points on the ray
    smallest: ClassVar[float] = 1e-8  # the share of z_1 at which the search on the ray ends

    def _first(
        self, objective: Objective, ball: Ball, generator: torch.Generator, start: Params | None
    ) -> Callable[[], Ascent]:
        return partial(_FullStepRun(self, objective, ball, generator, start=start).run, objective.zero())

    def _run(self, objective: Objective, ball: Ball, generator: torch.Generator, base: float) -> Run:
        return _FullStepRun(self, objective, ball, generator, base)

    def _further(
        self, objective: Objective, ball: Ball, generator: torch.Generator, base: float, *, overshot: bool
    ) -> Iterator[Callable[[], Ascent]]:
        if overshot:
            half = replace(self, steps=max(1, self.steps // 2))
            run = _FullStepRun(half, objective, ball, generator)
            yield run.look_along_the_ray
            if run.first is not None:
                yield partial(run.run, objective.zero())
            del run  # it keeps points alive, each as large as the model
        yield from super()._further(objective, ball, generator, base, overshot=overshot)


@final
class _FullStepRun(Run):
    """Ascend once, with a full step whenever the loss was convex along the last step.

    start: a point whose multiple on the sphere may replace the first point after z = 0.
    """

    def __init__(
        self,
        settings: FullStepAPGD,
        objective: Objective,
        ball: Ball,
        generator: torch.Generator,
        base: float | None = None,
        *,
        start: Params | None = None,
    ) -> None:
        super().__init__(settings, objective, ball, generator, base)
        self.start, self.whole, self.convex, self.expected = start, ball, False, 0.0

    def look_along_the_ray(self) -> Ascent:
        """Evaluate the loss at z_1 / 4, z_1 / 16, ..., up to the first point that gains half of its promise.

        If that is not z_1 / 4, this run is then restricted to the ball through the point before it, and `first` holds
        the gradient at its start. If it is z_1 / 4, or no point gains that much, `first` is None: nothing is to be run.
        """
        zero = self.objective.zero()
        base, gradient = self.objective.value_and_gradient(zero)
        at = Run._iterate(self, zero, 0.0, gradient)
        z = {key: torch.empty_like(block) for key, block in zero.items()}
        self.ball.step(at, zero, math.inf, 1.0, z)
        radius, promise, losses = self.ball.radius, self.ball.radius * at.dual, [base]
        inner, share = None, 1.0
        while inner is None and share > FullStepAPGD.smallest:
            share *= FullStepAPGD.shrink
            scale(z, FullStepAPGD.shrink)
            losses.append(self.objective.value(z))
            if losses[-1] - base >= KEPT * share * promise:
                inner = radius * share / FullStepAPGD.shrink
        if inner is not None and inner < radius:
            self.first = base, gradient
            self.ball, self.eta = replace(self.ball, radius=inner), 2 * inner
        best = max(range(1, len(losses)), key=losses.__getitem__)
        scale(z, FullStepAPGD.shrink ** (best + 1 - len(losses)))
        loss, length, change = losses[best], self.ball.length(z), max(abs(each - base) for each in losses)
        passes = len(losses), 1
        return Ascent(z, loss, base, tuple(losses), length, radius, change, at.dual, 0.0, at.dual, False, *passes)

    def _found(self, slope: float | None, critical: bool) -> Ascent:
        found, inside = super()._found(slope, critical), self.ball is not self.whole
        return replace(found, radius=self.whole.radius, inner_radius=self.ball.radius if inside else None)

    def _is_done(self) -> bool:
        increase, gap = self.best_loss - (self.base or 0.0), self.ball.radius * self.multiplier - self.product
        return increase > 0 and gap <= FullStepAPGD.tolerance * increase

    def _reconsider(self, step: int) -> None:
        super()._reconsider(step)
        if self.now is self.best:
            self.convex = False

    def _next(self, step: int) -> tuple[Params, float]:
        z, length = self._stepped(step, math.inf if self.convex else self.eta)
        if step == 1 and self.start is not None:
            length = self._replaced_by_start(z, length)
        if step < self.steps:  # the increase that the gradient at the current point predicts
            self.expected = dots(self.now.gradient, z)[0] - self.now.product
        return z, length

    def _replaced_by_start(self, z: Params, length: float) -> float:
        """Replace the point by the start, scaled to the sphere, if the loss is higher there; return its length."""
        assert self.start is not None
        start = copied(self.start)
        if (own := self.ball.length(start)) < TINY:
            return length
        scale(start, self.ball.radius / own)
        self.forward_passes += 2
        if self.objective.value(start) <= self.objective.value(z):
            return length
        for key, block in start.items():
            z[key].copy_(block)
        return self.ball.radius

    def _iterate(self, z: Params, length: float, gradient: Params) -> Iterate:
        now = super()._iterate(z, length, gradient)
        self.convex = z is not self.z_old and now.product - dots(gradient, self.z_old)[0] >= self.expected
        return now
