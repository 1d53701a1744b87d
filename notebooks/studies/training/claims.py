"""Sentences that sum the tables up, each made of the record's numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from studies.training.choices import (
    GOOD,
    LEARNT,
    Mean,
    chosen,
    chosen_ball,
    curve,
    difference,
    interval,
    least,
    losses_of,
    told_apart,
    width,
)
from studies.training.few import TASKS
from studies.training.optimizers import ADAMW, CANDIDATES, OURS
from studies.training.sharpness_aware import BARE, SHORT, UNITS
from studies.training.study import Training
from studies.training.tables import at_rate, error_of, said_scale


def in_short(found: Training) -> list[str]:
    """Return all of them."""
    said = (_primary, _told, _widths, _moved, _rates, _timed, _lost)
    return [*filter(None, (each(found) for each in said)), *(_kinds(found, task) for task in TASKS), _merging(found)]


def _primary(found: Training) -> str:
    rank = found.plan.middle_rank
    gap = difference(*(chosen(found.trained, name, rank).outcomes for name in (OURS, ADAMW)))
    return (
        f"**Primary comparison**, fixed before the runs: test loss of {OURS} less that of {ADAMW} at rank {rank}, "
        f"after equal steps, each at the learning rate chosen for it, {len(found.plan.seeds)} seeds: {interval(gap)} "
        f"nats, {_verdict(gap)}."
    )


def _told(found: Training) -> str:
    """Say which optimizers are told from AdamW after equal steps."""
    gaps = {}
    for rank in found.plan.ranks:
        usual = chosen(found.trained, ADAMW, rank).outcomes
        for name in CANDIDATES:
            if name != ADAMW:
                gaps[f"{name} at rank {rank}"] = difference(chosen(found.trained, name, rank).outcomes, usual)
    told = told_apart(gaps)
    better = [name for name in gaps if name in told and gaps[name].value < 0]
    worse = [name for name in gaps if name in told and gaps[name].value > 0]
    return (
        f"Told from {ADAMW} after equal steps, given the chosen rates, by Holm's correction for {len(gaps)} "
        f"comparisons: better {_listed(better)}; worse {_listed(worse)}."
    )


def _lost(found: Training) -> str:
    """Say which optimizers left the finite numbers at several rates, and what they reached at others."""
    said = []
    for name in CANDIDATES:
        for rank in found.plan.ranks:
            cells = curve(found.trained, name, rank)
            lost = [each for each in cells if not math.isfinite(_mean(losses_of(each.outcomes)))]
            if len(lost) > 1:
                best = min(_mean(losses_of(each.outcomes)) for each in cells)
                said.append(
                    f"{name} at rank {rank} at {len(lost)} of {len(cells)} rates (best of the others {_number(best)})"
                )
    return f"Runs left the finite numbers, or were refused for that: {'; '.join(said)}." if said else ""


def _widths(found: Training) -> str:
    """Say how exactly the learning rate has to be known."""
    ranks = found.plan.ranks
    said = []
    for name in CANDIDATES:
        if all(least(found.trained, name, rank) <= LEARNT for rank in ranks):
            widths = [width(curve(found.trained, name, rank)) for rank in ranks]
            said.append(f"{name} {', '.join(f'{chr(8805) * cut}{decades:.1f}' for decades, cut in widths)}")
    return (
        f"Decades of learning rates within {100 * (GOOD - 1):.0f} % of an optimizer's own best loss, at ranks "
        f"{', '.join(map(str, ranks))}: {'; '.join(said)}."
    )


def _rates(found: Training) -> str:
    """Say how the chosen rates move with the rank."""
    said = [
        f"{name} {', '.join(f'{chosen(found.trained, name, rank).cell.rate:.2g}' for rank in found.plan.ranks)}"
        for name in CANDIDATES
        if all(least(found.trained, name, rank) <= LEARNT for rank in found.plan.ranks)
    ]
    return f"Learning rates chosen at ranks {', '.join(map(str, found.plan.ranks))}: {'; '.join(said)}."


def _moved(found: Training) -> str:
    """Say what starts elsewhere on the orbit do at the rate of the usual start."""
    rank, seeds, scales = found.plan.middle_rank, found.plan.moved_seeds, found.plan.moved
    said = []
    for name in CANDIDATES:
        best = chosen(found.trained, name, rank, seeds=seeds)
        if least(found.trained, name, rank) <= LEARNT:
            cells = (best, *(at_rate(found, name, scale, best.cell.rate) for scale in scales))
            said.append(" / ".join(_number(_mean(losses_of(each.outcomes))) for each in cells) + f" {name}")
    factors = " / ".join(said_scale(scale) for scale in scales)
    return f"Test loss with A as it is / multiplied by {factors} at the start, at one learning rate: {'; '.join(said)}."


def _timed(found: Training) -> str:
    """Say what is left at equal time."""
    timed = {(each.cell.optimizer, each.cell.rank): each.outcomes for each in found.timed}
    gaps = {rank: difference(timed[OURS, rank], timed[ADAMW, rank]) for rank in found.plan.ranks}
    said = "; ".join(f"rank {rank} {interval(gap)}, {_verdict(gap)}" for rank, gap in gaps.items())
    return f"After equal time {OURS} less {ADAMW}: {said}."


def _kinds(found: Training, task: str) -> str:
    """Say how the kinds of SAM compare with none, and with Euclidean SAM."""
    kinds = [kind for kind, unit in UNITS.items() if unit > 0]
    of = {kind: chosen_ball(found.flattened, task, kind).outcomes for kind in UNITS}
    to_none = ", ".join(f"{kind} {interval(difference(of[kind], of[BARE]))}" for kind in kinds)
    to_short = ", ".join(f"{kind} {interval(difference(of[kind], of[SHORT]))}" for kind in kinds)
    errors = ", ".join(f"{kind} {error_of(outcomes)}" for kind, outcomes in of.items())
    to_plain = ", ".join(f"{kind} {interval(difference(of[kind], of['euclidean']))}" for kind in kinds[1:])
    return (
        f"Few {task}, test loss with SAM less that of {ADAMW} at as many passes: {to_none}. Less that of {ADAMW} at "
        f"as many steps, half the passes: {to_short}. Less that of Euclidean SAM: {to_plain}. Errors on the test set: "
        f"{errors}."
    )


def _merging(found: Training) -> str:
    """Say how ways to merge adapters compare."""
    names = [score.method for score in found.mixed[0].scores]
    losses = {name: _mean([each.scores[place].loss for each in found.mixed]) for place, name in enumerate(names)}
    return f"Merged adapters, mean test loss: {', '.join(f'{name} {loss:.3f}' for name, loss in losses.items())}."


def _verdict(gap: Mean) -> str:
    if not math.isfinite(gap.value):
        return "a run left the finite numbers"
    if not gap.decided:
        return "not decided"
    return "ours is better" if gap.value < 0 else "ours is worse"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "none"


def _number(loss: float) -> str:
    return f"{loss:.3f}" if math.isfinite(loss) else "not finite"


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))
