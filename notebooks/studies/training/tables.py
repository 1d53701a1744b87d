"""The tables of the page."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from quotient_manifolds.report import Table
from studies.training.choices import GOOD, chosen, chosen_ball, curve, difference, interval, losses_of, mean_of, width
from studies.training.few import TASKS
from studies.training.merging import OURS as MERGED
from studies.training.merging import Score
from studies.training.optimizers import ADAMW, CANDIDATES
from studies.training.outcome import Outcome
from studies.training.sharpness_aware import BARE, UNITS
from studies.training.study import Training

NONE = "—"


def losses_table(found: Training) -> Table:
    """Return the loss of every optimizer at its chosen rate, by rank, after equal steps."""
    columns = ["optimizer", "from", "rank", "learning rate", "test loss", "less AdamW's", "error"]
    rows = [
        [
            name,
            candidate.source,
            str(rank),
            f"{best.cell.rate:g}",
            interval(mean_of(losses_of(best.outcomes))),
            NONE if name == ADAMW else interval(difference(best.outcomes, chosen(found.trained, ADAMW, rank).outcomes)),
            _error(best.outcomes),
        ]
        for rank in found.plan.ranks
        for name, candidate in CANDIDATES.items()
        for best in [chosen(found.trained, name, rank)]
    ]
    return Table("losses", "Test loss (nats) after equal steps", columns, rows, [False] * 2 + [True] * 5)


def widths_table(found: Training) -> Table:
    """Return how many decades of rates are good, of an optimizer's own best loss and of the best of all."""
    ranks = found.plan.ranks
    columns = ["optimizer", *(f"rank {rank}" for rank in ranks), *(f"rank {rank}, of all" for rank in ranks)]
    best = {rank: min(least(found, name, rank) for name in CANDIDATES) for rank in ranks}
    rows = [
        [
            name,
            *(_width(found, name, rank) for rank in ranks),
            *(_width(found, name, rank, GOOD * best[rank]) for rank in ranks),
        ]
        for name in CANDIDATES
    ]
    return Table("widths", "Decades of good learning rates", columns, rows, [False] + [True] * 2 * len(ranks))


def least(found: Training, optimizer: str, rank: int) -> float:
    """Return the least mean test loss over rates."""
    return min(float(np.mean(losses_of(each.outcomes))) for each in curve(found.trained, optimizer, rank))


def _width(found: Training, optimizer: str, rank: int, good: float | None = None) -> str:
    cells = curve(found.trained, optimizer, rank)
    if not math.isfinite(least(found, optimizer, rank)):
        return NONE
    decades, cut = width(cells, good)
    return f"{'≥ ' if cut else ''}{decades:.2f}"


def starts_table(found: Training) -> Table:
    """Return the chosen rates and the losses from starts on one orbit; seeds that all starts have."""
    scales = sorted({1.0, *found.plan.moved})
    seeds, rank = found.plan.moved_seeds, found.plan.middle_rank
    columns = [
        "optimizer",
        *(f"rate, A × {_scale(scale)}" for scale in scales),
        *(f"loss, A × {_scale(scale)}" for scale in scales),
        *(f"loss, A × {_scale(scale)}, rate as of A × 1" for scale in found.plan.moved),
    ]
    rows = []
    for name in CANDIDATES:
        best = {scale: chosen(found.trained, name, rank, scale) for scale in scales}
        rate = best[1.0].cell.rate
        kept = {
            scale: next(each for each in curve(found.trained, name, rank, scale) if each.cell.rate == rate)
            for scale in found.plan.moved
        }
        rows.append(
            [
                name,
                *(f"{best[scale].cell.rate:g}" for scale in scales),
                *(_loss(best[scale].outcomes[:seeds]) for scale in scales),
                *(_loss(kept[scale].outcomes) for scale in found.plan.moved),
            ]
        )
    return Table("starts", "Starts on one orbit", columns, rows, [False] + [True] * (len(columns) - 1))


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
    return Table("time", "Equal time", columns, rows, [False] + [True] * 6)


def sam_table(found: Training) -> Table:
    """Return the kinds of SAM at their chosen radii, beside the bare optimizer at as many passes."""
    columns = ["task", "kind", "radius", "test loss", "less bare AdamW's", "error", "less bare AdamW's error"]
    rows = []
    for task in TASKS:
        bare = chosen_ball(found.flattened, task, BARE)
        for kind in UNITS:
            best = chosen_ball(found.flattened, task, kind)
            same, plain = kind == BARE, UNITS[kind] == 0
            rows.append(
                [
                    task,
                    kind,
                    NONE if plain else f"{best.ball.radius:g}",
                    interval(mean_of(losses_of(best.outcomes))),
                    NONE if same else interval(difference(best.outcomes, bare.outcomes)),
                    _error(best.outcomes),
                    NONE if same else errors(best.outcomes, bare.outcomes),
                ]
            )
    return Table("sam", "Kinds of SAM", columns, rows, [False] * 2 + [True] * 5)


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
    return Table("radii", "All radii", columns, rows, [False] * 2 + [True] * len(found.plan.radii))


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
    return Table("merging", "Merged adapters", columns, rows, [False] + [True] * 4)


def _changed(scores: Sequence[Score]) -> str:
    """Return the largest change of the loss over seeds."""
    changes = [abs(score.moved - score.loss) for score in scores if score.moved is not None]
    if not changes:
        return NONE
    return f"{max(changes):.3f}" if max(changes) > 1e-3 else f"{max(changes):.0e}".replace("e-0", "e-")


def errors(one: Sequence[Outcome], other: Sequence[Outcome]) -> str:
    """Return the mean difference of errors with its interval, in words."""
    gaps = [_or_all(a.error) - _or_all(b.error) for a, b in zip(one, other, strict=True)]
    return interval(mean_of(gaps))


def _or_all(error: float | None) -> float:
    return 1.0 if error is None else error


def _error(outcomes: Sequence[Outcome]) -> str:
    return f"{float(np.mean([_or_all(each.error) for each in outcomes])):.3f}"


def _loss(outcomes: Sequence[Outcome]) -> str:
    value = float(np.mean(losses_of(outcomes)))
    return f"{value:.3f}" if math.isfinite(value) else "not finite"


def _scale(scale: float) -> str:
    return f"{scale:g}" if scale >= 1 else f"1/{1 / scale:g}"
