"""Plan the runs of optimizers and of SAM, and make those that are missing."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Final, final

from joblib import cpu_count

from quotient_manifolds.messages import Progress
from studies.common import Record, resume
from studies.training.adapters import ADAMW, BATCH, CANDIDATES, HEAD_RATE, LORA_PLUS, Cell, measure_costs, train_cell
from studies.training.sharpness_aware import TASKS, UNITS, Ball, train_ball
from studies.training.tables import chosen, frame
from studies.zoos.sentences import fetched

PACKAGES = ("torch", "transformers", "peft", "pytorch_optimizer")


@final
@dataclass(frozen=True)
class Plan:
    """Hold what is run. sizes: sentences to train on, to choose by, to test on; rates: over the middle one.

    Starts other than the usual one are at `middle_rank`, of the first `moved_seeds` seeds. radii: in units of the task
    and of the kind of SAM; share: of the passes of a task.
    """

    sizes: tuple[int, int, int] = (1600, 300, 900)
    ranks: tuple[int, ...] = (2, 16, 64)
    middle_rank: int = 16
    moved: tuple[float, ...] = (1 / 16, 16.0)
    moved_seeds: int = 3
    rates: tuple[float, ...] = tuple(float(f"{10 ** (power / 2):.3g}") for power in range(-3, 4))
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    steps: int = 100
    rounds: int = 30
    radii: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3)
    ball_seeds: tuple[int, ...] = tuple(range(1, 11))
    share: float = 1.0

    def cells(self) -> list[Cell]:
        """Return the cells of equal steps."""
        starts = [(rank, 1.0, self.seeds) for rank in self.ranks]
        starts += [(self.middle_rank, scale, self.seeds[: self.moved_seeds]) for scale in self.moved]
        return [
            Cell(name, rank, scale, float(f"{middle * over:.3g}"), self.steps, seeds)
            for rank, scale, seeds in starts
            for over in self.rates
            for name, (_, middle, _) in CANDIDATES.items()
        ]

    def balls(self) -> list[Ball]:
        """Return what SAM is run with."""
        return [
            Ball(
                *(task, kind, float(f"{few.unit * unit * radius:.3g}")),
                *(max(2, round(few.passes * self.share)), self.ball_seeds),
            )
            for task, few in TASKS.items()
            for kind, unit in UNITS.items()
            for radius in (self.radii if unit > 0 else (0.0,))
        ]

    def timed(self, found: Record) -> list[Cell]:
        """Return cells at the chosen rates, with as many steps as AdamW's whole run leaves time for."""
        seconds = {(cost["optimizer"], cost["rank"]): cost["passes"] + cost["step"] for cost in found["costs"]}
        runs, cells = frame(found["trained"], "cell"), []
        for rank in sorted(self.ranks):
            for name in CANDIDATES:
                steps = max(1, round(self.steps * seconds[ADAMW, rank] / seconds[name, rank]))
                rate = float(chosen(runs, name, rank).rate.iloc[0])
                cells.append(Cell(name, rank, 1.0, rate, steps, self.seeds))
        return cells


FAST: Final = Plan(
    sizes=(16, 8, 16), ranks=(2,), middle_rank=2, moved=(16.0,), moved_seeds=1, rates=(1.0,), seeds=(1, 2),
    steps=2, rounds=1, radii=(0.01,), ball_seeds=(1, 2), share=0.01,
)  # fmt: skip
"""Two steps of everything, to try the code."""


def run(out: Path, *, fast: bool, progress: Progress) -> Record:
    """Make all runs; OUT/runs has a file for each cell, from which a run continues.

    timed: as many steps as AdamW's time allows.
    """
    plan, archive, workers = (FAST if fast else Plan()), fetched(), 1 if fast else cpu_count()
    settings = [plan.sizes, plan.rounds, plan.ranks, BATCH, HEAD_RATE, LORA_PLUS, TASKS]
    resumed = partial(resume, out / "runs", settings=settings, progress=progress)

    def trained(cells: list[Cell], what: str) -> list[Record]:
        runs = {cell.name: partial(train_cell, cell, archive, plan.sizes) for cell in cells}
        return resumed(runs, what=what, workers=workers)

    # What steps cost is measured before the processors are busy with runs.
    costs = {f"costs-rank{rank}": partial(measure_costs, rank, archive, plan.sizes, plan.rounds) for rank in plan.ranks}
    found: Record = {"plan": asdict(plan), "costs": [cost for each in resumed(costs, what="costs") for cost in each]}
    found["trained"] = trained(plan.cells(), "adapters")
    found["timed"] = trained(plan.timed(found), "adapters, equal time")
    balls = {ball.name: partial(train_ball, ball, archive, plan.sizes) for ball in plan.balls()}
    found["flattened"] = resumed(balls, what="SAM", workers=workers)
    return found | {"versions": {name: version(name) for name in PACKAGES}}
