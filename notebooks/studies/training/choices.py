"""Which learning rates and radii are chosen, how wide the range of good ones is, and how runs compare seed by seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, final

import numpy as np
import scipy.stats

from studies.common import minus
from studies.training.adapters import Trained
from studies.training.outcome import Outcome
from studies.training.sharpness_aware import Flattened

GOOD = 1.02  # a loss over the least, up to which a learning rate is good
LEARNT = 0.95 * math.log(2)  # nats: whoever ends above it has hardly left the start, which guesses between two classes


Name = TypeVar("Name")


@final
@dataclass(frozen=True)
class Mean:
    """Hold a mean over seeds, its 95 % confidence interval and the p-value of the mean 0, of Student's t."""

    value: float
    low: float
    high: float
    p: float

    @property
    def decided(self) -> bool:
        """Return whether the interval leaves 0 out."""
        return self.low > 0 or self.high < 0


def mean_of(values: Sequence[float]) -> Mean:
    """Return the mean of values of several seeds; of values that are all alike the interval is a point.

    A mean that is infinite, of a run that left the finite numbers, is told from 0; one that is undefined is not.
    """
    value = sum(values) / len(values)
    if len(values) < 2 or not math.isfinite(value) or float(np.ptp(values)) == 0:
        told = math.isinf(value) or (len(values) > 1 and math.isfinite(value) and value != 0)
        return Mean(value, value, value, 0.0 if told else 1.0)
    tested = scipy.stats.ttest_1samp(values, 0.0)
    interval = tested.confidence_interval(0.95)
    return Mean(value, float(interval.low), float(interval.high), float(tested.pvalue))


def told_apart(gaps: Mapping[Name, Mean], level: float = 0.05) -> set[Name]:
    """Return the names of means that are told from 0, whatever their number, by Holm's correction [Holm 1979]."""
    rest, found = sorted(gaps, key=lambda name: gaps[name].p), set()
    for place, name in enumerate(rest):
        if gaps[name].p > level / (len(rest) - place):
            break
        found.add(name)
    return found


def interval(mean: Mean) -> str:
    """Return 0.376 [0.370, 0.382]."""
    if not math.isfinite(mean.value):
        return "not finite"
    return minus(f"{mean.value:.3f} [{mean.low:.3f}, {mean.high:.3f}]")


def losses_of(outcomes: Sequence[Outcome]) -> list[float]:
    """Return the test losses, infinite of runs that left the finite numbers."""
    return [math.inf if each.test is None else each.test for each in outcomes]


def chosen(
    trained: Sequence[Trained], optimizer: str, rank: int, scale: float = 1.0, seeds: int | None = None
) -> Trained:
    """Return the cell whose rate has the least mean loss on what choices are made by, of all or of the first seeds."""
    cells = curve(trained, optimizer, rank, scale)
    best = min(cells, key=lambda each: _validation(each.outcomes[:seeds]))
    return replace(best, outcomes=best.outcomes[:seeds])


def at_edge(trained: Sequence[Trained], best: Trained) -> bool:
    """Return whether a chosen rate is the lowest or the highest of those tried that left all numbers finite."""
    cell = best.cell
    cells = curve(trained, cell.optimizer, cell.rank, cell.scale)
    rates = [each.cell.rate for each in cells if math.isfinite(_validation(each.outcomes))]
    return not rates or cell.rate in (rates[0], rates[-1])


def chosen_ball(flattened: Sequence[Flattened], task: str, kind: str) -> Flattened:
    """Return the ball whose radius has the least mean loss on what choices are made by."""
    balls = [each for each in flattened if (each.ball.task, each.ball.kind) == (task, kind)]
    return min(balls, key=lambda each: _validation(each.outcomes))


def curve(trained: Sequence[Trained], optimizer: str, rank: int, scale: float = 1.0) -> list[Trained]:
    """Return the cells of an optimizer, rank and start, from the lowest rate to the highest."""
    wanted = (optimizer, rank, scale)
    cells = [each for each in trained if (each.cell.optimizer, each.cell.rank, each.cell.scale) == wanted]
    return sorted(cells, key=lambda each: each.cell.rate)


def least(trained: Sequence[Trained], optimizer: str, rank: int) -> float:
    """Return the least mean test loss over rates."""
    return min(float(np.mean(losses_of(each.outcomes))) for each in curve(trained, optimizer, rank))


def _validation(outcomes: Sequence[Outcome]) -> float:
    return float(np.mean([math.inf if each.validation is None else each.validation for each in outcomes]))


def difference(one: Sequence[Outcome], other: Sequence[Outcome]) -> Mean:
    """Return the mean over seeds of the test loss of one less that of the other."""
    return mean_of([a - b for a, b in zip(losses_of(one), losses_of(other), strict=True)])


def width(cells: Sequence[Trained], good: float | None = None) -> tuple[float, bool]:
    """Return how many decades of rates around the best are good, and whether that range is cut off by those tried.

    Between rates that were tried the mean test loss is interpolated linearly in log(rate), and counts as 10 nats where
    runs left the finite numbers. good: the largest loss of a good rate; of itself `GOOD` times the least.
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


def without_one(cells: Sequence[Trained]) -> list[list[Trained]]:
    """Return the cells without the first seed, without the second, and so on."""
    count = min(len(each.outcomes) for each in cells)
    return [
        [replace(each, outcomes=(*each.outcomes[:left], *each.outcomes[left + 1 :])) for each in cells]
        for left in range(count if count > 1 else 0)
    ]
