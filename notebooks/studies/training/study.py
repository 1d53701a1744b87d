"""Whether optimizers on the quotient and geodesic SAM train better than others.

Fixed before these runs. Learning rates are half a decade apart, over three decades around a middle that one run each of
seed 0 chose (rank 16), and so are the units of the radii. Of every optimizer, rank and start the rate is that of the
least mean loss on the sentences to choose by; what is reported is the loss on others. Primary comparison: the mean over
seeds of the test loss of `OURS` less that of AdamW, at rank 16, from the usual start, after an equal number of steps.
Everything else is exploratory. The radii of SAM are chosen likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar, final

from joblib import cpu_count
from pydantic import TypeAdapter

from quotient_manifolds.progress import Progress
from quotient_manifolds.version import VERSION
from studies.common import Saves, resume
from studies.sentiment.sentences import fetched
from studies.training.adapters import BATCH, Cell, Cost, Trained, measure_costs, train_cell
from studies.training.choices import chosen
from studies.training.few import TASKS
from studies.training.merging import Merge, Mixed, Size, merge_seed
from studies.training.optimizers import ADAMW, CANDIDATES, HEAD_RATE, LORA_PLUS
from studies.training.sharpness_aware import UNITS, Ball, Flattened, train_ball

PACKAGES = ("torch", "transformers", "peft", "pytorch_optimizer")
Done = TypeVar("Done", Trained, Flattened, Mixed)


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

    @classmethod
    def fast(cls) -> Plan:
        """Return two steps of everything, to try the code."""
        return cls(
            sizes=(16, 8, 16), ranks=(2,), middle_rank=2, moved=(16.0,), moved_seeds=1, rates=(1.0,), seeds=(1, 2),
            steps=2, rounds=1, radii=(0.01,), ball_seeds=(1, 2), share=0.01, merging=Size(24, 16, 2, 2),
        )  # fmt: skip

    def cells(self) -> list[Cell]:
        """Return the cells of equal steps."""
        starts = [(rank, 1.0, self.seeds) for rank in self.ranks]
        starts += [(self.middle_rank, scale, self.seeds[: self.moved_seeds]) for scale in self.moved]
        return [
            Cell(name, rank, scale, float(f"{candidate.middle * over:.3g}"), self.steps, seeds)
            for rank, scale, seeds in starts
            for over in self.rates
            for name, candidate in CANDIDATES.items()
        ]

    def balls(self) -> list[Ball]:
        """Return what SAM is run with."""
        return [
            Ball(
                task,
                kind,
                float(f"{few.unit * unit * radius:.3g}"),
                max(2, round(few.passes * self.share)),
                self.ball_seeds,
            )
            for task, few in TASKS.items()
            for kind, unit in UNITS.items()
            for radius in (self.radii if unit > 0 else (0.0,))
        ]


@final
@dataclass(frozen=True)
class Training(Saves):
    """Hold what was run. timed: as many steps as AdamW's time allows."""

    plan: Plan
    trained: tuple[Trained, ...]
    timed: tuple[Trained, ...]
    costs: tuple[Cost, ...]
    flattened: tuple[Flattened, ...]
    mixed: tuple[Mixed, ...]
    versions: dict[str, str]
    command: str
    version: str


@final
@dataclass(frozen=True)
class _Costs(Saves):
    costs: tuple[Cost, ...]


def run(out: Path, *, fast: bool, command: str, progress: Progress) -> Training:
    """Make all runs and write OUT/training.json; OUT/runs has a file for each cell, from which a run continues."""
    plan, workers = (Plan.fast(), 1) if fast else (Plan(), cpu_count())
    found = study_training(out, fetched(), plan, command=command, workers=workers, progress=progress)
    found.save(out / "training.json")
    return found


def load(folder: Path) -> Training:
    """Read the record in a folder."""
    return Training.load(folder / "training.json")


def study_training(out: Path, archive: Path, plan: Plan, *, command: str, workers: int, progress: Progress) -> Training:
    """Make all runs. archive: of the sentences; out: receives a file for each cell, and those that are there stay.

    Raises ValueError if those are of other settings.
    """
    folder = out / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    costs = _costs(folder / "costs.json", archive, plan)
    settings = [
        plan.sizes,
        plan.rounds,
        plan.ranks,
        BATCH,
        HEAD_RATE,
        LORA_PLUS,
        {k: asdict(v) for k, v in TASKS.items()},
    ]

    def all_of(what: str, listed: Sequence[Any], run: Callable[..., Done], kind: type[Done]) -> tuple[Done, ...]:
        cells = {each.name: partial(run, each, archive, plan.sizes) for each in listed}
        made = resume(folder, cells, what=what, settings=settings, workers=workers, progress=progress)
        return tuple(TypeAdapter(kind).validate_python(each) for each in made)

    trained = all_of("adapters", plan.cells(), train_cell, Trained)
    timed = all_of("adapters, equal time", _timed_cells(trained, costs), train_cell, Trained)
    flattened = all_of("SAM", plan.balls(), train_ball, Flattened)
    mixed = all_of("merging", [Merge(seed, plan.merging) for seed in plan.seeds], merge_seed, Mixed)
    versions = {name: version(name) for name in PACKAGES}
    return Training(plan, trained, timed, costs, flattened, mixed, versions, command, VERSION)


def _costs(file: Path, archive: Path, plan: Plan) -> tuple[Cost, ...]:
    """Measure what steps cost, before the processors are busy with runs."""
    if not file.is_file():
        found = [cost for rank in plan.ranks for cost in measure_costs(rank, archive, plan.sizes, plan.rounds)]
        _Costs(tuple(found)).save(file)
    return _Costs.load(file).costs


def _timed_cells(trained: Sequence[Trained], costs: Sequence[Cost]) -> list[Cell]:
    """Return cells at the chosen rates, with as many steps as AdamW's whole run leaves time for."""
    seconds = {(cost.optimizer, cost.rank): cost.passes + cost.step for cost in costs}
    best = [chosen(trained, name, rank) for rank in sorted({cost.rank for cost in costs}) for name in CANDIDATES]
    return [
        Cell(
            cell.optimizer,
            cell.rank,
            cell.scale,
            cell.rate,
            max(1, round(cell.steps * seconds[ADAMW, cell.rank] / seconds[cell.optimizer, cell.rank])),
            cell.seeds,
        )
        for cell in (each.cell for each in best)
    ]
