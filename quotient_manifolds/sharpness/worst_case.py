"""Worst-case sharpness in any geometry [paper, Eq. 3 and Algorithm 1]."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, final

import torch
from torch import nn

from quotient_manifolds.geometry import Geometry, as_geometry
from quotient_manifolds.progress import Progress
from quotient_manifolds.sharpness.auto_pgd import Ascent, AutoPGD
from quotient_manifolds.sharpness.losses import Loss
from quotient_manifolds.sharpness.measure import (
    Measure,
    PreparedModel,
    Tick,
    check_radius,
    check_whole,
    counted,
    warned,
)
from quotient_manifolds.sharpness.objective import autograd_available
from quotient_manifolds.sharpness.result import BatchResult, MeasureResult
from quotient_manifolds.symmetries import Params


@final
@dataclass(frozen=True)
class WorstCase(Measure):
    """max { L(gamma(1)) - L(w) : gamma a geodesic from w of length <= radius }, see `worst_case_sharpness`.

    after: smaller radii, ascending, climbed before; each climb starts where the one before it ended.
    """

    name: ClassVar[str] = "worst-case sharpness"

    radius: float
    steps: int = 20
    restarts: int = 0
    tolerance: float = 0.0
    seed: int = 0
    after: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_whole("seed", self.seed, 0)
        _ = self.ascent  # refuses what it cannot use
        for radius in (*self.after, self.radius):
            check_radius(radius)
        if any(not smaller < larger for smaller, larger in pairwise((*self.after, self.radius))):
            raise ValueError(f"Radii must ascend. Found {self.radius!r} after {self.after!r}")

    @property
    def ascent(self) -> AutoPGD:
        return AutoPGD(steps=self.steps, restarts=self.restarts, tolerance=self.tolerance)

    def ticks(self, subject: PreparedModel) -> int:
        return (1 + self.restarts) * (self.steps + 1)

    def on(self, subject: PreparedModel, index: int, tick: Tick) -> BatchResult:
        return self.at(subject, self.maximum(subject, index, tick))

    def at(self, subject: PreparedModel, best: Ascent) -> BatchResult:
        """The measure, given where its ascent ended."""
        reached = subject.space.reached(best.z)  # shorter than z where the geodesic ends before t = 1
        return BatchResult(
            value=best.loss - best.base,
            base_loss=best.base,
            forward_passes=best.forward_passes,
            backward_passes=best.backward_passes,
            losses=best.losses,
            norm=subject.space.length(reached),
            critical_start=best.critical_start,
            reach=subject.space.reach(best.z),
            reach_limit=subject.space.reach_limit,
            spacing=subject.precision * abs(best.base),
        )

    def maximum(self, subject: PreparedModel, index: int, tick: Tick) -> Ascent:
        """The ascent on batch `index`, whose end the subject then holds."""
        start, base = self._start(subject, index)
        return self._climb(subject, index, tick, start, base)

    def _start(self, subject: PreparedModel, index: int) -> tuple[Params | None, float | None]:
        """Where the climb at the next smaller radius ended: known from just before, or climbed again."""
        if not self.after:
            return None, None
        smaller = replace(self, radius=self.after[-1], after=self.after[:-1])
        kept = subject.maximisers.get((smaller, index))
        if kept is None:
            start, base = smaller._start(subject, index)
            kept = smaller._climb(subject, index, lambda: None, start, base)
        return kept.z, kept.base

    def _climb(
        self, subject: PreparedModel, index: int, tick: Tick, start: Params | None, base: float | None
    ) -> Ascent:
        best = self.ascent.maximise(
            subject.objective(index, tick),
            self.radius,
            torch.Generator().manual_seed(self.seed + index),
            norm=subject.space.norm,
            start=start,
            base=base,
        )
        if start is None:
            _check_resolved(best, self.radius, index)
        subject.maximisers.clear()
        subject.maximisers[self, index] = best
        return best


def worst_case_sharpness(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    *,
    geometry: Geometry | str | float,
    radius: float,
    steps: int = 20,
    restarts: int = 0,
    tolerance: float = 0.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> MeasureResult:
    """Measure how much the loss can rise in a ball around the model's weights w, on each batch for itself.

    On a batch with the loss L that is max { L(gamma(1)) - L(w) : gamma a geodesic from w of length <= radius }, or what
    an ascent finds of it: a lower bound. The mean over batches is `MeasureResult.mean`.

    loss(model, batch) returns a scalar tensor; a batch is whatever it understands (`cross_entropy` takes (inputs,
    targets) and dicts with "labels"). Each batch is maximised on its own by Auto-PGD, from the model itself and from
    `restarts` random points of its sphere. With a tolerance > 0 a climb ends early, at a checkpoint since the one
    before which its rise grew by less than that part. The model must be in eval mode and deterministic, and is never
    written. Symmetries that a quotient geometry relies on are first tried on this loss and the first batch, and refused
    where it changes along them. Parameters with requires_grad=False stay fixed; parameters the loss does not use have
    gradient 0 and do no harm.

    geometry: what a ball is: `Euclidean()`, `Adaptive()` or `Quotient(...)`, or a name: "inv" is Quotient("inv"), and
    so on. A radius means another thing in each.

    Invariant along the orbit in a quotient geometry in its own norm with eps = 0 (the random starts of restarts only in
    distribution); Euclidean and adaptive sharpness are not.

    Where truncated geodesics are followed further than they reach, a `TruncationWarning` says so (see
    `BatchResult.reach` and `truncation_error`); where more than 5 % of the rise came in the last quarter of the
    steps, a `ConvergenceWarning` (see `MeasureResult.late_rise`).

    progress(what, finished, total) is called after every forward pass of the ascent. Raises ValueError or TypeError,
    one sentence, for anything that cannot be measured, including a loss or gradient that is not finite somewhere in the
    ball: a maximum that ignored such points would mean nothing.
    """
    measure = WorstCase(as_geometry(geometry), radius, steps=steps, restarts=restarts, tolerance=tolerance, seed=seed)
    return warned(measure.of(model, loss, batches, progress))


def worst_case_profile(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    *,
    geometry: Geometry | str | float,
    radii: Sequence[float],
    steps: int = 20,
    restarts: int = 0,
    tolerance: float = 0.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[MeasureResult, ...]:
    """Measure `worst_case_sharpness` at several ascending radii; return one measurement for each.

    Each climb starts where the one at the radius before ended, so the sharpness found never falls with the radius, on
    any batch. Other arguments, checks, warnings and errors are those of `worst_case_sharpness`.
    """
    if not radii:
        raise ValueError("There must be at least one radius. Found none")
    chain = [
        WorstCase(as_geometry(geometry), radius, steps, restarts, tolerance, seed, after=tuple(radii[:k]))
        for k, radius in enumerate(radii)
    ]
    subject = PreparedModel.of(model, loss, batches, chain[0].geometry)
    total = len(subject.batches) * sum(measure.ticks(subject) for measure in chain)
    tick = counted(progress, f"{chain[0].name}, {chain[0].geometry.name}", total)
    with autograd_available():
        found = [[measure.on(subject, index, tick) for measure in chain] for index in range(len(subject.batches))]
    by_radius = zip(chain, zip(*found, strict=True), strict=True)
    profile = tuple(measure.measurement(values) for measure, values in by_radius)
    for each in profile:
        warned(each)
    return profile


def _check_resolved(found: Ascent, radius: float, index: int) -> None:
    """Raises if no step changed the loss by so much as its last digit: the sharpness would be 0 for want of digits."""
    if len(set(found.losses)) == 1 and not found.critical_start:
        raise ValueError(
            f"The loss on batch {index} has a gradient, yet stays at {found.base!r} to its last digit within radius "
            f"{radius:g}: the steps are lost in rounding; take a larger radius, or float64"
        )
