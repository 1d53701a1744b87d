"""Which learning rates and radii are chosen, how wide the range of good ones is, and how runs compare seed by seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import scipy.stats

from studies.training.adapters import Trained
from studies.training.outcome import Outcome
from studies.training.sharpness_aware import Flattened
from studies.wording import minus

GOOD = 1.02  # a loss over the least, up to which a learning rate is good


@final
@dataclass(frozen=True)
class Mean:
    """Hold a mean over seeds and its 95 % confidence interval, of Student's t."""

    value: float
    low: float
    high: float

    @property
    def decided(self) -> bool:
        """Return whether the interval leaves 0 out."""
        return self.low > 0 or self.high < 0


def mean_of(values: Sequence[float]) -> Mean:
    """Return the mean of values of several seeds; of values that are all alike the interval is a point."""
    value = float(np.mean(values))
    if len(values) < 2 or not math.isfinite(value) or float(np.ptp(values)) == 0:
        return Mean(value, value, value)
    interval = scipy.stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    return Mean(value, float(interval.low), float(interval.high))


def interval(mean: Mean) -> str:
    """Return 0.376 [0.370, 0.382]."""
    if not math.isfinite(mean.value):
        return "not finite"
    return minus(f"{mean.value:.3f} [{mean.low:.3f}, {mean.high:.3f}]")


def losses_of(outcomes: Sequence[Outcome]) -> list[float]:
    """Return the test losses, infinite of runs that left the finite numbers."""
    return [math.inf if each.test is None else each.test for each in outcomes]


def chosen(trained: Sequence[Trained], optimizer: str, rank: int, scale: float = 1.0) -> Trained:
    """Return the cell whose rate has the least mean loss on what choices are made by."""
    return min(curve(trained, optimizer, rank, scale), key=lambda each: _validation(each.outcomes))


def chosen_ball(flattened: Sequence[Flattened], task: str, kind: str) -> Flattened:
    """Return the ball whose radius has the least mean loss on what choices are made by."""
    balls = [each for each in flattened if (each.ball.task, each.ball.kind) == (task, kind)]
    return min(balls, key=lambda each: _validation(each.outcomes))


def curve(trained: Sequence[Trained], optimizer: str, rank: int, scale: float = 1.0) -> list[Trained]:
    """Return the cells of an optimizer, rank and start, from the lowest rate to the highest."""
    wanted = (optimizer, rank, scale)
    cells = [each for each in trained if (each.cell.optimizer, each.cell.rank, each.cell.scale) == wanted]
    return sorted(cells, key=lambda each: each.cell.rate)


def _validation(outcomes: Sequence[Outcome]) -> float:
    return float(np.mean([math.inf if each.validation is None else each.validation for each in outcomes]))


def difference(one: Sequence[Outcome], other: Sequence[Outcome]) -> Mean:
    """Return the mean over seeds of the test loss of one less that of the other."""
    return mean_of([a - b for a, b in zip(losses_of(one), losses_of(other), strict=True)])


def width(cells: Sequence[Trained], good: float | None = None) -> tuple[float, bool]:
    """Return how many decades of rates around the best are good, and whether that range is cut off by those tried.

    Between rates that were tried the mean test loss is interpolated linearly in log(rate). good: the largest loss of a
    good rate; of itself `GOOD` times the least.
    """
    rates = np.log10([each.cell.rate for each in cells])
    losses = np.minimum([np.mean(losses_of(each.outcomes)) for each in cells], 10.0)  # no slope leads to infinity
    best = int(np.argmin(losses))
    limit = GOOD * float(losses[best]) if good is None else good
    if losses[best] > limit:
        return 0.0, False
    left, cut_left = _reach(rates[best::-1], losses[best::-1], limit)
    right, cut_right = _reach(rates[best:], losses[best:], limit)
    return abs(left) + abs(right), cut_left or cut_right


def _reach(rates: np.ndarray, losses: np.ndarray, limit: float) -> tuple[float, bool]:
    """Return how far from the first rate the loss stays below the limit, and whether it does to the end."""
    beyond = np.flatnonzero(losses > limit)
    if len(beyond) == 0:
        return float(rates[-1] - rates[0]), True
    end = int(beyond[0])
    share = (limit - losses[end - 1]) / (losses[end] - losses[end - 1])
    return float(rates[end - 1] + share * (rates[end] - rates[end - 1]) - rates[0]), False
