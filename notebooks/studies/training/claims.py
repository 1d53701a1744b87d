"""Sentences that sum the tables up, each made of the record's numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from studies.training.choices import Mean, chosen, chosen_ball, curve, difference, interval, losses_of
from studies.training.few import TASKS
from studies.training.optimizers import ADAMW, CANDIDATES, OURS
from studies.training.sharpness_aware import BARE, SHORT, UNITS
from studies.training.study import Training


def in_short(found: Training) -> list[str]:
    """Return all of them."""
    said = (_primary, _told, _rates, _moved, _timed)
    return [*(each(found) for each in said), *(_kinds(found, task) for task in TASKS), _merging(found)]


def _primary(found: Training) -> str:
    rank = found.plan.middle_rank
    gap = difference(*(chosen(found.trained, name, rank).outcomes for name in (OURS, ADAMW)))
    return (
        f"**Primary comparison**, fixed before anything was measured: test loss of {OURS} less that of {ADAMW} at rank "
        f"{rank}, after equal steps, each at the learning rate chosen for it, {len(found.plan.seeds)} seeds: "
        f"{interval(gap)} nats, {_verdict(gap)}."
    )


def _told(found: Training) -> str:
    """Say which optimizers are told from AdamW after equal steps."""
    said = []
    for rank in found.plan.ranks:
        usual = chosen(found.trained, ADAMW, rank).outcomes
        gaps = {
            name: difference(chosen(found.trained, name, rank).outcomes, usual) for name in CANDIDATES if name != ADAMW
        }
        better = [name for name, gap in gaps.items() if gap.high < 0]
        worse = [name for name, gap in gaps.items() if gap.low > 0]
        said.append(f"at rank {rank} {_listed(better)} better, {_listed(worse)} worse")
    return f"After equal steps these are told from {ADAMW}: {'; '.join(said)}."


def _rates(found: Training) -> str:
    """Say how the chosen rates move with the rank."""
    said = [
        f"{name} {', '.join(f'{chosen(found.trained, name, rank).cell.rate:g}' for rank in found.plan.ranks)}"
        for name in CANDIDATES
    ]
    return f"Learning rates chosen at ranks {', '.join(map(str, found.plan.ranks))}: {'; '.join(said)}."


def _moved(found: Training) -> str:
    """Say what starts elsewhere on the orbit do at the rate of the usual start."""
    rank, seeds, scales = found.plan.middle_rank, found.plan.moved_seeds, found.plan.moved
    said = []
    for name in CANDIDATES:
        best = chosen(found.trained, name, rank)
        moved = [
            _mean(losses_of(each.outcomes))
            for scale in scales
            for each in curve(found.trained, name, rank, scale)
            if each.cell.rate == best.cell.rate
        ]
        said.append(
            " / ".join(_number(loss) for loss in (_mean(losses_of(best.outcomes[:seeds])), *moved)) + f" {name}"
        )
    factors = " / ".join(f"{scale:g}" for scale in scales)
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
    to_plain = ", ".join(f"{kind} {interval(difference(of[kind], of['euclidean']))}" for kind in kinds[1:])
    return (
        f"Few {task}: test loss with SAM less that without at as many passes: {to_none}; with half the passes and "
        f"without SAM {interval(difference(of[SHORT], of[BARE]))}. Less that of Euclidean SAM: {to_plain}."
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
    return " and ".join(names) if names else "none"


def _number(loss: float) -> str:
    return f"{loss:.3f}" if math.isfinite(loss) else "not finite"


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))
