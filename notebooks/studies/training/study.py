"""Whether optimizers on the quotient and geodesic SAM train better than others.

Fixed before these runs. Learning rates are half a decade apart, over three decades around a middle that one run each of
seed 0 chose (rank 16), and so are the units of the radii. Of every optimizer, rank and start the rate is that of the
least mean loss on the sentences to choose by; what is reported is the loss on others. Primary comparison: the mean over
seeds of the test loss of `OURS` less that of AdamW, at rank 16, from the usual start, after an equal number of steps.
Everything else is exploratory. The radii of SAM are chosen likewise.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Final, final

from joblib import cpu_count

from quotient_manifolds.messages import Progress
from studies.common import Record, read_record, resume, write_record
from studies.sentiment.sentences import fetched
from studies.training.adapters import ADAMW, BATCH, CANDIDATES, HEAD_RATE, LORA_PLUS, Cell, measure_costs, train_cell
from studies.training.merging import Size, merge_seed
from studies.training.sharpness_aware import TASKS, UNITS, Ball, train_ball
from studies.training.tables import chosen, frame

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
    merging: Size = field(default_factory=Size)

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
            Ball(task, kind, float(f"{few.unit * unit * radius:.3g}"), max(2, round(few.passes * self.share)), seeds)
            for task, few in TASKS.items()
            for kind, unit in UNITS.items()
            for radius, seeds in ((r, self.ball_seeds) for r in (self.radii if unit > 0 else (0.0,)))
        ]


FAST: Final = Plan(
    sizes=(16, 8, 16), ranks=(2,), middle_rank=2, moved=(16.0,), moved_seeds=1, rates=(1.0,), seeds=(1, 2),
    steps=2, rounds=1, radii=(0.01,), ball_seeds=(1, 2), share=0.01, merging=Size(24, 16, 2, 2),
)  # fmt: skip
"""Two steps of everything, to try the code."""


def run(out: Path, *, fast: bool, command: str, progress: Progress) -> Record:
    """Make all runs and write OUT/training.json; OUT/runs has a file for each cell, from which a run continues.

    timed: as many steps as AdamW's time allows.
    """
    plan, archive, workers = (FAST if fast else Plan()), fetched(), 1 if fast else cpu_count()
    settings = [plan.sizes, plan.rounds, plan.ranks, BATCH, HEAD_RATE, LORA_PLUS, TASKS]
    resumed = partial(resume, out / "runs", settings=settings, progress=progress)
    # What steps cost is measured before the processors are busy with runs.
    costs = {f"costs-rank{rank}": partial(measure_costs, rank, archive, plan.sizes, plan.rounds) for rank in plan.ranks}
    found: Record = {"plan": asdict(plan), "costs": [cost for each in resumed(costs, what="costs") for cost in each]}

    def trained(cells: list[Cell], what: str) -> list[Record]:
        runs = {cell.name: partial(train_cell, cell, archive, plan.sizes) for cell in cells}
        return resumed(runs, what=what, workers=workers)

    found["trained"] = trained(plan.cells(), "adapters")
    found["timed"] = trained(_timed_cells(plan, found), "adapters, equal time")
    balls = {ball.name: partial(train_ball, ball, archive, plan.sizes) for ball in plan.balls()}
    found["flattened"] = resumed(balls, what="SAM", workers=workers)
    merges = {
        f"merge-{seed}-steps{plan.merging.steps}": partial(merge_seed, seed, plan.merging, archive)
        for seed in plan.seeds
    }
    found["mixed"] = resumed(merges, what="merging", workers=workers)
    found["versions"] = {name: version(name) for name in PACKAGES}
    return write_record(out / "training.json", found, command)


def load(folder: Path) -> Record:
    """Read the record in a folder."""
    return read_record(folder / "training.json")


def _timed_cells(plan: Plan, found: Record) -> list[Cell]:
    """Return cells at the chosen rates, with as many steps as AdamW's whole run leaves time for."""
    seconds = {(cost["optimizer"], cost["rank"]): cost["passes"] + cost["step"] for cost in found["costs"]}
    runs, cells = frame(found["trained"], "cell"), []
    for rank in sorted(plan.ranks):
        for name in CANDIDATES:
            steps = max(1, round(plan.steps * seconds[ADAMW, rank] / seconds[name, rank]))
            rate = float(chosen(runs, name, rank).rate.iloc[0])
            cells.append(Cell(name, rank, 1.0, rate, steps, plan.seeds))
    return cells
