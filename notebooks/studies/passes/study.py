"""How many passes each ascent needs for 99 % of the maximum, and how well a tolerance is kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

from quotient_manifolds import Quotient, Symmetries, declare_pair
from quotient_manifolds.demo.zoo import one_thread
from quotient_manifolds.geometry import Adaptive, Geometry, as_geometry
from quotient_manifolds.progress import Progress
from quotient_manifolds.report import Table
from quotient_manifolds.sharpness import AutoPGD, LegacyWorstCase, PreparedModel, QuasiNewton
from quotient_manifolds.sharpness.ascent import Method
from quotient_manifolds.symmetries import Params
from quotient_manifolds.version import VERSION
from studies.common import Saves, numbers, resume
from studies.passes import models
from studies.passes.models import Diagonal, Made

BUDGETS: Final = (5, 10, 20, 40)  # steps of Auto-PGD, whose schedule depends on them
STEPS: Final = 40  # of the quasi-Newton ascent
TOLERANCE: Final = 0.01
REACHED: Final = 0.99  # of the maximum
RELEASED_STEPS: Final = 20
NEVER: Final = 1_000_000  # passes of a climb that does not reach it

Radii = Mapping[str, tuple[float, ...]]
_VISION: Final[Radii] = {
    "euclidean": (0.05, 0.15, 0.3),
    "adaptive": (0.5, 1.0, 2.0),
    "inv": (0.1, 0.3, 0.6),
    "mix": (0.1, 0.3, 0.6),
}
_LANGUAGE: Final[Radii] = {
    "euclidean": (0.02, 0.1, 0.3),
    "adaptive": (0.2, 0.8, 2.5),
    "inv": (0.04, 0.15, 0.5),
    "mix": (0.015, 0.03, 0.05),
}


@final
@dataclass(frozen=True)
class Model:
    """Hold what makes a model, the radii at which the loss rises by about 0.1, 1 and 4, and how it is climbed most.

    thorough: steps and restarts of the climbs whose best is taken for the maximum.
    """

    make: Callable[[], Made]
    radii: Radii
    thorough: tuple[int, int] = (60, 1)


MODELS: Final[dict[str, Model]] = {
    "diagonal network": Model(
        partial(models.diagonal, 0), dict.fromkeys(("euclidean", "adaptive", "inv", "mix"), (0.1, 0.5, 1.0))
    ),
    "vision transformer 0": Model(partial(models.vision, 0), _VISION),
    "GPT-2": Model(partial(models.causal, models.GPT2), _LANGUAGE),
    "Llama": Model(partial(models.causal, models.LLAMA), _LANGUAGE),
    "vision transformer 1": Model(partial(models.vision, 1), _VISION),
    "fine-tuned BERT": Model(
        models.fine_tuned, {"euclidean": (0.05,), "adaptive": (1.0,), "inv": (0.1,), "mix": (0.1,)}, (40, 0)
    ),
}
FAST: Final[dict[str, Model]] = {
    "vision transformer": Model(partial(models.vision, 0, 5), {"inv": (0.3,), "euclidean": (0.1,)}, (5, 0)),
    "diagonal network": Model(partial(models.diagonal, 0, 20), {"adaptive": (0.1,)}, (5, 1)),
}


@final
@dataclass(frozen=True)
class Climbed:
    """Hold the best rise of the loss after 1, 2, ... evaluations of loss and gradient, the model's own first."""

    rises: tuple[float, ...]

    def passes(self, rise: float) -> int:
        """Return how many evaluations it took to rise so far; NEVER if it did not."""
        return next((place + 1 for place, each in enumerate(self.rises) if each >= rise), NEVER)

    def after(self, passes: int) -> float:
        """Return the best rise after so many evaluations."""
        return self.rises[min(passes, len(self.rises)) - 1]


@final
@dataclass(frozen=True)
class Case:
    """Hold the climbs in one ball around one model. maximum: the best rise that any climb found.

    auto_pgd: by its steps. released: one iteration an entry, three passes each (two forward, one backward), in
    Euclidean and adaptive balls. stopped: of each method with the tolerance.
    """

    model: str
    geometry: str
    radius: float
    loss: float
    maximum: float
    auto_pgd: dict[str, Climbed]
    quasi_newton: Climbed
    released: Climbed | None
    stopped: dict[str, Climbed]

    @property
    def goal(self) -> float:
        """Return 99 % of the maximum."""
        return REACHED * self.maximum

    def passes(self, method: str) -> float:
        """Return the passes to 99 % of the maximum, a forward and a backward one counting as one; NEVER if not."""
        if method == "released":
            taken = NEVER if self.released is None else self.released.passes(self.goal)
            return taken if taken == NEVER else 1.5 * (taken - 1)
        return (
            self.quasi_newton.passes(self.goal) if method == "quasi_newton" else self.auto_pgd[method].passes(self.goal)
        )

    def ratio(self, steps: int) -> float:
        """Return the quasi-Newton ascent's rise over that of Auto-PGD with so many steps, at equal passes."""
        return self.quasi_newton.after(steps + 1) / self.auto_pgd[str(steps)].rises[-1]

    def misses(self, method: str) -> bool:
        """Say whether the climb that was stopped by the tolerance lacks more than that of the maximum."""
        return self.stopped[method].rises[-1] < (1 - TOLERANCE) * self.maximum


@final
@dataclass(frozen=True)
class Passes(Saves):
    """Hold all cases."""

    cases: tuple[Case, ...]
    command: str
    version: str

    def quantile(self, method: str, share: float) -> tuple[float, float, float]:
        """Return a quantile over cases of the passes to 99 % of the maximum, with a bootstrap interval (95 %)."""
        kept = [case for case in self.cases if method != "released" or case.released is not None]
        taken = np.array([case.passes(method) for case in kept], float)
        return _bootstrapped(taken, partial(np.quantile, q=share, method="higher"))

    def missed(self, method: str) -> tuple[int, float, float]:
        """Return in how many cases a stopped climb lacks more than the tolerance; an interval of the share (95 %)."""
        count = sum(case.misses(method) for case in self.cases)
        found = stats.binomtest(count, len(self.cases)).proportion_ci(0.95, "exact")
        return count, float(found.low), float(found.high)


def _bootstrapped(values: NDArray[np.float64], statistic: Callable[..., Any]) -> tuple[float, float, float]:
    draw = np.random.default_rng(0)
    drawn = [float(statistic(draw.choice(values, len(values)))) for _ in range(2000)]
    low, high = np.quantile(drawn, (0.025, 0.975), method="nearest")
    return float(statistic(values)), float(low), float(high)


@one_thread()
def run(out: Path, *, fast: bool, command: str, progress: Progress) -> Passes:
    """Ascend in all cases and write OUT/passes.json; OUT/cases holds one file for each, from which a run continues."""
    chosen = FAST if fast else MODELS
    make = lru_cache(maxsize=1)(lambda name: chosen[name].make())  # one model at a time
    cells = {
        f"{name} {geometry} {radius:g}": partial(_case, make, name, geometry, radius, model.thorough)
        for name, model in chosen.items()
        for geometry, radii in model.radii.items()
        for radius in radii
    }
    found = Passes(resume(out / "cases", Case, cells, what="passes", progress=progress), command, VERSION)
    found.save(out / "passes.json")
    return found


def load(folder: Path) -> Passes:
    """Read the record in a folder."""
    return Passes.load(folder / "passes.json")


def _case(make: Callable[[str], Made], name: str, geometry: str, radius: float, thorough: tuple[int, int]) -> Case:
    return climb_case(name, make(name), geometry, radius, thorough)


@final
class _Traced:
    """An objective whose losses are kept."""

    def __init__(self, objective: Any) -> None:
        self.objective = objective
        self.losses: list[float] = []

    def zero(self) -> Params:
        zero: Params = self.objective.zero()
        return zero

    def sample(self, generator: torch.Generator) -> Params:
        drawn: Params = self.objective.sample(generator)
        return drawn

    def value(self, z: Params) -> float:
        self.losses.append(self.objective.value(z))
        return self.losses[-1]

    def value_and_gradient(self, z: Params) -> tuple[float, Params]:
        loss, gradient = self.objective.value_and_gradient(z)
        self.losses.append(loss)
        return loss, gradient


def climb_case(name: str, made: Made, geometry: str, radius: float, thorough: tuple[int, int]) -> Case:
    """Climb in one ball by every ascent."""
    resolved = _geometry(made, geometry)
    objective = PreparedModel.of(made.model, made.loss, [made.batch], resolved).objective(0)

    def climbed(method: Method) -> Climbed:
        traced = _Traced(objective)
        method.maximise(traced, radius, torch.Generator().manual_seed(0))
        return _best_so_far(traced.losses)

    found = {str(steps): climbed(AutoPGD(steps=steps)) for steps in BUDGETS}
    newton = climbed(QuasiNewton(steps=STEPS))
    stopped = {
        "auto_pgd": climbed(AutoPGD(steps=STEPS, tolerance=TOLERANCE)),
        "quasi_newton": climbed(QuasiNewton(steps=STEPS, tolerance=TOLERANCE)),
    }
    steps, restarts = thorough
    most = [climbed(AutoPGD(steps=steps, restarts=restarts)), climbed(QuasiNewton(steps=steps, restarts=restarts))]
    released = None
    if geometry in ("euclidean", "adaptive"):
        legacy = LegacyWorstCase(resolved, radius, RELEASED_STEPS).of(made.model, made.loss, [made.batch])
        released = _best_so_far(legacy.loss_steps[0])
    everything = [*found.values(), newton, *stopped.values(), *most]
    # The released ascent leaves the ball where a weight is 0: its rises count only where it stays inside.
    if released is not None and (legacy.norms[0] or math.inf) <= radius * (1 + 1e-6):
        everything.append(released)
    maximum = max(each.rises[-1] for each in everything)
    loss = objective.value(objective.zero())
    return Case(name, geometry, radius, loss, maximum, found, newton, released, stopped)


def _best_so_far(losses: Any) -> Climbed:
    return Climbed(tuple((np.maximum.accumulate(losses) - losses[0]).tolist()))


def _geometry(made: Made, name: str) -> Geometry:
    if name == "adaptive":
        return Adaptive()
    if isinstance(made.model, Diagonal) and name in ("inv", "mix"):
        pair = declare_pair(
            made.model, "diagonal", "u/v", G=lambda w: w["u"][:, None, None], H=lambda w: w["v"][:, None, None]
        )
        return Quotient(name, "exact", symmetries=Symmetries((pair,)))
    return as_geometry(name)


# ---- tables

METHODS: Final = {
    "quasi_newton": "quasi-Newton",
    "20": "Auto-PGD, 20 steps",
    "40": "Auto-PGD, 40 steps",
    "released": "released ascent, 20 iterations",
}
STOPPED: Final = {"quasi_newton": "quasi-Newton", "auto_pgd": "Auto-PGD"}


def _passes(found: Passes) -> list[list[str]]:
    """Return a row for each ascent: median and 90th percentile of the passes, and where it does not arrive."""
    rows = []
    for method, name in METHODS.items():
        kept = [case for case in found.cases if method != "released" or case.released is not None]
        if not kept:
            continue
        never = sum(case.passes(method) == NEVER for case in kept)
        spread = [_interval(*found.quantile(method, share)) for share in (0.5, 0.9)]
        rows.append([name, *spread, f"{never} of {len(kept)}"])
    return rows


def _budgets(found: Passes) -> list[list[str]]:
    """Return a row for each budget: quasi-Newton over Auto-PGD at equal passes."""
    rows = []
    for steps in BUDGETS:
        ratios = np.array([case.ratio(steps) for case in found.cases])
        less, more = int((ratios < 0.99).sum()), int((ratios > 1.01).sum())
        numbers = [f"{ratios.min():.3f}", f"{np.median(ratios):.3f}", f"{ratios.max():.3f}"]
        rows.append([str(steps), *numbers, f"{less} of {len(ratios)}", str(more)])
    return rows


def _stops(found: Passes) -> list[list[str]]:
    """Return a row for each method: passes until the tolerance ends the climb, and how often that is too early."""
    rows = []
    for method, name in STOPPED.items():
        passes = np.array([len(case.stopped[method].rises) for case in found.cases])
        count, low, high = found.missed(method)
        share = f"{count} of {len(found.cases)} [{100 * low:.0f} %, {100 * high:.0f} %]"
        early = [case for case in found.cases if case.misses(method)]
        within = sum(case.stopped[method].rises[-1] >= (1 - TOLERANCE) * _attained(case, method) for case in early)
        rows.append(
            [name, f"{np.median(passes):.0f}", f"{np.quantile(passes, 0.9, method='higher'):.0f}", share, str(within)]
        )
    return rows


def _attained(case: Case, method: str) -> float:
    """Return what the method finds in 40 steps without a tolerance."""
    climbed = case.quasi_newton if method == "quasi_newton" else case.auto_pgd["40"]
    return float(climbed.rises[-1])


def _interval(value: float, low: float, high: float) -> str:
    shown = ["never" if each == NEVER else f"{each:g}" for each in (value, low, high)]
    return f"{shown[0]} [{shown[1]}, {shown[2]}]"


def tables(found: Passes) -> list[Table]:
    """Return passes to the maximum, the quasi-Newton ascent at equal passes, and what a tolerance keeps."""
    steps = ["Steps", "Smallest", "Median", "Largest", "Over 1 % less", "Over 1 % more"]
    stops = ["Ascent", "Median of passes", "90th percentile", "More than 1 % below the maximum", "Of them as 40 steps"]
    return [
        numbers("passes", "", ["Ascent", "Median of passes to 99 %", "90th percentile", "Never"], _passes(found)),
        numbers("budgets", "", steps, _budgets(found), words=0),
        numbers("stops", "", stops, _stops(found)),
    ]
