"""Time the steps of an ascent beside bare forward and backward passes that take turns with them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from quotient_manifolds.sharpness.objective import BatchObjective
from quotient_manifolds.symmetries import Params


class Alternating:
    """The objective of a model, with a bare forward + backward run and timed between any two evaluations.

    clock: seconds of the processor, which other processes disturb less; an accelerator needs one that waits for it.
    """

    def __init__(
        self, objective: BatchObjective, bare: Callable[[], None], clock: Callable[[], float] = time.process_time
    ) -> None:
        self.objective, self.bare, self.clock = objective, bare, clock
        self.steps: list[float] = []
        self.bares: list[float] = []
        self.resumed: float | None = None

    def zero(self) -> Params:
        return self.objective.zero()

    def sample(self, generator: torch.Generator) -> Params:
        return self.objective.sample(generator)

    def value(self, z: Params) -> float:
        return self.objective.value(z)

    def value_and_gradient(self, z: Params) -> tuple[float, Params]:
        result = self.objective.value_and_gradient(z)
        now = self.clock()
        if self.resumed is not None:  # from gradient to gradient: update, move, forward, backward, pull-back
            self.steps.append(now - self.resumed)
        self.bare()
        self.resumed = self.clock()
        self.bares.append(self.resumed - now)
        return result

    @property
    def ratios(self) -> dict[str, float]:
        """A step over the bare passes next to it, the median, and the fastest over the fastest.

        The first steps allocate the buffers that later ones reuse.
        """
        steps, bares = self.steps[2:], self.bares[3:]
        pairs = zip(steps, bares, self.bares[2:-1], strict=True)
        median = statistics.median(2 * step / (bare + before) for step, bare, before in pairs)
        return {"ratio_median": round(median, 3), "ratio_of_minima": round(min(steps) / min(bares), 3)}
