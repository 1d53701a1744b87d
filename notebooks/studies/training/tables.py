"""The tables of the study, from its record alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from quotient_manifolds.report import Table
from studies.training.adapters import Trained
from studies.training.choices import (
    GOOD,
    LEARNT,
    at_edge,
    chosen,
    chosen_ball,
    curve,
    difference,
    interval,
    least,
    losses_of,
    mean_of,
    told_apart,
    width,
    without_one,
)
from studies.training.few import TASKS
from studies.training.merging import OURS as MERGED
from studies.training.merging import Score
from studies.training.optimizers import ADAMW, CANDIDATES
from studies.training.outcome import Outcome
from studies.training.sharpness_aware import BARE, SHORT, UNITS, Flattened
from studies.training.study import Training

NONE = "—"


def tables(found: Training) -> list[Table]:
    """Return all tables of the study."""
    made = (losses_table, widths_table, starts_table, time_table, sam_table, radii_table, merging_table)
    return [table(found) for table in made]


def losses_table(found: Training) -> Table:
    """Return the loss of every optimizer at its chosen rate, by rank, after equal steps."""
    columns = ["optimizer", "from", "rank", "learning rate", "test loss", "less AdamW's", "error"]
    gaps = {
        (rank, name): difference(
            *(chosen(found.trained, each, rank).outcomes for each in (name, ADAMW)),
        )
        for rank in found.plan.ranks
        for name in CANDIDATES
        if name != ADAMW
    }
    significant = told_apart(gaps)
    rows = [
        [
            name,
            candidate.source,
            str(rank),
            rate_of(found, best),
            interval(mean_of(losses_of(best.outcomes))),
            NONE if name == ADAMW else interval(gaps[rank, name]) + " *" * ((rank, name) in significant),
            error_of(best.outcomes),
        ]
        for rank in found.plan.ranks
        for name, candidate in CANDIDATES.items()
        for best in [chosen(found.trained, name, rank)]
    ]
    return Table("losses", "", columns, rows, [False] * 2 + [True] * 5)


def rate_of(found: Training, best: Trained) -> str:
    """Return a chosen rate, with a dagger where no better one may have been tried; a dash if none left all finite."""
    if not math.isfinite(_mean(losses_of(best.outcomes))):
        return NONE
    return f"{best.cell.rate:.2g}{' †' if at_edge(found.trained, best) else ''}"


def widths_table(found: Training) -> Table:
    """Return how many decades of rates are good, of an optimizer's own best loss and of the best of all."""
    ranks = found.plan.ranks
    columns = ["optimizer", *(f"rank {rank}" for rank in ranks), *(f"rank {rank}, of all" for rank in ranks)]
    best = {rank: min(least(found.trained, name, rank) for name in CANDIDATES) for rank in ranks}
    rows = [
        [
            name,
            *(_own_width(found, name, rank) for rank in ranks),
            *(_width(curve(found.trained, name, rank), GOOD * best[rank]) for rank in ranks),
        ]
        for name in CANDIDATES
    ]
    return Table("widths", "", columns, rows, [False] + [True] * 2 * len(ranks))


def _own_width(found: Training, optimizer: str, rank: int) -> str:
    """Return the width, and its range when a seed is left out; a dash where no rate trains."""
    if least(found.trained, optimizer, rank) > LEARNT:
        return NONE
    cells = curve(found.trained, optimizer, rank)
    others = [width(each)[0] for each in without_one(cells)]
    return _width(cells) + (f" ({min(others):.1f} to {max(others):.1f})" if others else "")


def _width(cells: Sequence[Trained], good: float | None = None) -> str:
    decades, cut = width(cells, good)
    return f"{'≥ ' if cut else ''}{decades:.1f}"


def starts_table(found: Training) -> Table:
    """Return the chosen rates and the losses from starts on one orbit; of the seeds that all starts have."""
    scales = sorted({1.0, *found.plan.moved})
    seeds, rank = found.plan.moved_seeds, found.plan.middle_rank
    columns = [
        "optimizer",
        *(f"rate, A × {said_scale(scale)}" for scale in scales),
        *(f"loss, A × {said_scale(scale)}" for scale in scales),
        *(f"loss, A × {said_scale(scale)}, rate as of A × 1" for scale in found.plan.moved),
    ]
    rows = []
    for name in CANDIDATES:
        best = {scale: chosen(found.trained, name, rank, scale, seeds) for scale in scales}
        kept = {scale: at_rate(found, name, scale, best[1.0].cell.rate) for scale in found.plan.moved}
        rows.append(
            [
                name,
                *(rate_of(found, best[scale]) for scale in scales),
                *(_loss(best[scale].outcomes) for scale in scales),
                *(_loss(kept[scale].outcomes) for scale in found.plan.moved),
            ]
        )
    return Table("starts", "", columns, rows, [False] + [True] * (len(columns) - 1))


def at_rate(found: Training, optimizer: str, scale: float, rate: float) -> Trained:
    """Return the cell of a start, at the rank of all starts, with a rate."""
    return next(
        each for each in curve(found.trained, optimizer, found.plan.middle_rank, scale) if each.cell.rate == rate
    )


def time_table(found: Training) -> Table:
    """Return what steps cost, and the losses after as many as AdamW's time leaves room for."""
    timed = {(each.cell.optimizer, each.cell.rank): each for each in found.timed}
    columns = ["optimizer", "rank", "passes, ms", "step, ms", "steps", "test loss", "less AdamW's"]
    rows = []
    for cost in found.costs:
        run, usual = timed[cost.optimizer, cost.rank], timed[ADAMW, cost.rank]
        rows.append(
            [
                cost.optimizer,
                str(cost.rank),
                f"{cost.passes:.0f}",
                f"{cost.step:.1f}",
                str(run.cell.steps),
                interval(mean_of(losses_of(run.outcomes))),
                NONE if cost.optimizer == ADAMW else interval(difference(run.outcomes, usual.outcomes)),
            ]
        )
    return Table("time", "", columns, rows, [False] + [True] * 6)


def sam_table(found: Training) -> Table:
    """Return the kinds of SAM at their chosen radii, beside the bare optimizer at as many passes, and as many steps."""
    columns = ["task", "kind", "radius", "test loss", "less AdamW's", "less AdamW's of as many steps", "error"]
    rows = []
    for task in TASKS:
        bare, short = (chosen_ball(found.flattened, task, kind) for kind in (BARE, SHORT))
        for kind, unit in UNITS.items():
            best = chosen_ball(found.flattened, task, kind)
            rows.append(
                [
                    task,
                    kind,
                    _radius(found, best) if unit > 0 else NONE,
                    interval(mean_of(losses_of(best.outcomes))),
                    *(
                        NONE if kind == to.ball.kind else interval(difference(best.outcomes, to.outcomes))
                        for to in (bare, short)
                    ),
                    error_of(best.outcomes),
                ]
            )
    return Table("sam", "", columns, rows, [False] * 2 + [True] * 5)


def _radius(found: Training, best: Flattened) -> str:
    """Return a chosen radius, with a dagger where it is the least or the largest that was tried."""
    ball = best.ball
    tried = [each.ball.radius for each in found.flattened if (each.ball.task, each.ball.kind) == (ball.task, ball.kind)]
    return f"{ball.radius:.2g}{' †' if ball.radius in (min(tried), max(tried)) else ''}"


def radii_table(found: Training) -> Table:
    """Return the test losses at all radii."""
    columns = ["task", "kind", *(f"{radius:g} units" for radius in found.plan.radii)]
    rows = [
        [
            task,
            kind,
            *(_loss(each.outcomes) for each in found.flattened if (each.ball.task, each.ball.kind) == (task, kind)),
        ]
        for task in TASKS
        for kind, unit in UNITS.items()
        if unit > 0
    ]
    return Table("radii", "", columns, rows, [False] * 2 + [True] * len(found.plan.radii))


def merging_table(found: Training) -> Table:
    """Return what ways to merge lead to, and whether they see how an adapter is written."""
    by_method = {score.method: place for place, score in enumerate(found.mixed[0].scores)}
    of = {name: [each.scores[place] for each in found.mixed] for name, place in by_method.items()}
    ours = [score.loss for score in of[MERGED]]
    rows = [
        [
            name,
            interval(mean_of([score.loss for score in scores])),
            NONE if name == MERGED else interval(mean_of([a.loss - b for a, b in zip(scores, ours, strict=True)])),
            f"{float(np.mean([score.error for score in scores])):.3f}",
            _changed(scores),
        ]
        for name, scores in of.items()
    ]
    columns = ["merged by", "test loss", "less that of merge_adapters", "error", "change of the loss by refactoring"]
    return Table("merging", "", columns, rows, [False] + [True] * 4)


def _changed(scores: Sequence[Score]) -> str:
    """Return the largest change of the loss over seeds."""
    changes = [abs(score.moved - score.loss) for score in scores if score.moved is not None]
    if not changes:
        return NONE
    return f"{max(changes):.3f}" if max(changes) > 1e-3 else f"{max(changes):.0e}".replace("e-0", "e-")


def error_of(outcomes: Sequence[Outcome]) -> str:
    """Return the mean error over seeds, if all runs have one."""
    errors = [each.error for each in outcomes if each.error is not None]
    return f"{_mean(errors):.3f}" if len(errors) == len(outcomes) else "not finite"


def _loss(outcomes: Sequence[Outcome]) -> str:
    value = _mean(losses_of(outcomes))
    return f"{value:.3f}" if math.isfinite(value) else "not finite"


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def said_scale(scale: float) -> str:
    """Return 16 or 1/16."""
    return f"{scale:g}" if scale >= 1 else f"1/{1 / scale:g}"
