"""Tell what a comparison would measure, and about how long that takes, before hours are spent on it."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import final

import torch

from quotient_manifolds.compare.comparison import FailureGroup
from quotient_manifolds.compare.inventory import Inventory
from quotient_manifolds.compare.measure_entries import MeasureEntry
from quotient_manifolds.compare.scores import unmatched
from quotient_manifolds.compare.spec import Spec
from quotient_manifolds.compare.store import Store
from quotient_manifolds.compare.worker import Identity, Loaded, job_of, load, setting_of, tasks_of
from quotient_manifolds.messages import sentence
from quotient_manifolds.sharpness import HessianTrace, PreparedModel, TopEigenvalue
from quotient_manifolds.sharpness.objective import autograd_available

LANCZOS = 40  # products that a top eigenvalue is taken to need; it may need fewer, or many more
SCORES = "loss and error"


@final
@dataclass(frozen=True)
class MeasureForecast:
    """Say how many units (a checkpoint and a batch) a measure, or the scores, have, and how many of them are left.

    passes: forward passes of a unit, of a measure each with a backward pass. seconds: of one pass; None where it could
    not be timed.
    """

    label: str
    units: int
    left: int
    passes: int | None
    seconds: float | None

    @property
    def total(self) -> float | None:
        """Return the seconds that what is left takes."""
        return None if self.seconds is None or self.passes is None else self.left * self.passes * self.seconds


@final
@dataclass(frozen=True)
class Forecast:
    """Say what there is to measure. timed: the checkpoint that was loaded, in `loading` seconds; None: none was."""

    measures: tuple[MeasureForecast, ...]
    checkpoints: int
    to_load: int
    timed: str | None
    loading: float
    failures: tuple[FailureGroup, ...]
    notes: tuple[str, ...]

    @property
    def seconds(self) -> float | None:
        """Return the seconds of all that is left and could be timed, with loading; None where nothing could."""
        known = [each.total for each in self.measures if each.total is not None]
        return sum(known) + self.to_load * self.loading if known else None

    @property
    def pass_seconds(self) -> tuple[float, float] | None:
        """Return the shortest and the longest pass that was timed."""
        known = [each.seconds for each in self.measures if each.seconds is not None]
        return (min(known), max(known)) if known else None


def forecast(spec: Spec, out: str | Path, device: str | torch.device = "cpu") -> Forecast:
    """Count the units of a comparison, finished (those in out/store.sqlite) and left, and time one checkpoint.

    Checkpoints are loaded until one of them is read; on its first batch one pass is timed in every geometry, whose
    symmetries are proved there, as they will be for every other. Nothing is measured or kept.
    """
    place = Path(out) / "store.sqlite"
    loaded, name, loading, failures = _first_that_loads(spec, str(device))
    identity = None if loaded is None else loaded.identity
    with tempfile.TemporaryDirectory() as nowhere:
        there = place.is_file()
        with Store(place if there else Path(nowhere) / "store.sqlite", make=not there) as store:
            units, left, to_load = _counted(Inventory(spec, store), identity)
    timer = None if loaded is None else _Timer(loaded, spec)
    found: list[MeasureForecast] = []
    for entry in (None, *spec.measures):
        label = SCORES if entry is None else entry.label
        passes, seconds, wrong = (None, None, None) if timer is None else timer.of(entry)
        if wrong is not None:
            failures.append(FailureGroup((name or "",), (label,), wrong))
        found.append(MeasureForecast(label, units[label], left[label], passes, seconds))
    said = {} if identity is None else identity.notes
    notes = (
        *(f"{name}, {split}: {sentence}" for split, sentences in said.items() for sentence in sentences),
        *unmatched([each.name for each in spec.checkpoints], spec.scores),
    )
    return Forecast(tuple(found), len(spec.checkpoints), to_load, name, loading, tuple(failures), notes)


def _first_that_loads(spec: Spec, device: str) -> tuple[Loaded | None, str | None, float, list[FailureGroup]]:
    failures: list[FailureGroup] = []
    for checkpoint in spec.checkpoints:
        job = job_of(spec, checkpoint, device)
        try:
            load(job)  # pays for what is imported once
            start = time.perf_counter()
            loaded = load(job)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the model is the user's
            failures.append(FailureGroup((checkpoint.name,), (), sentence(error)))
            continue
        return loaded, checkpoint.name, time.perf_counter() - start, failures
    return None, None, 0.0, failures


def _counted(inventory: Inventory, like: Identity | None) -> tuple[Counter[str], Counter[str], int]:
    """Count units by label, those of them without result, and the checkpoints that will be loaded.

    A checkpoint that was never loaded is taken to have as many batches as the one that was.
    """
    units, left = Counter[str](), Counter[str]()
    to_load = 0
    for checkpoint in inventory.spec.checkpoints:
        known = inventory.identity(checkpoint)
        identity = known or like
        tasks = [] if identity is None else tasks_of(checkpoint.name, identity, inventory.spec.measures)
        finished = set() if known is None else inventory.store.finished(each.unit.key for each in tasks)
        labels = [(SCORES if each.entry is None else each.label, each.unit.key in finished) for each in tasks]
        waiting = [label for label, done in labels if not done]
        units.update(label for label, _ in labels)
        left.update(waiting)
        to_load += bool(waiting) or known is None or inventory.always_loads
    return units, left, to_load


@final
class _Timer:
    """Time one pass on the first batch of a checkpoint, once in every geometry."""

    def __init__(self, loaded: Loaded, spec: Spec) -> None:
        self._loaded, self._spec = loaded, spec
        self._known: dict[object, tuple[PreparedModel | None, float | None]] = {}

    def of(self, entry: MeasureEntry | None) -> tuple[int | None, float | None, str | None]:
        """Return passes of a unit, seconds of one, and (once) what is wrong; without entry, those of the scores."""
        try:
            if entry is None:
                return 1, self._seconds(partial(self._loaded.score, "data", 0)), None
            place = setting_of(entry)
            if place not in self._known:
                self._known[place] = None, None
                model = self._loaded.prepared(entry)
                if isinstance(model, str):
                    return None, None, model
                self._known[place] = model, None
                objective = model.objective(0, lambda: None)
                with autograd_available():
                    seconds = self._seconds(lambda: objective.value_and_gradient(objective.zero()))
                self._known[place] = model, seconds
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the model is the user's
            return (1 if entry is None else None), None, sentence(error)
        known, took = self._known[place]
        return (None if known is None else passes(entry, known)), took, None

    def _seconds(self, work: Callable[[], object]) -> float:
        """Return the mean of as many calls as fit into half a second, after one that pays for what is set up once."""
        work()
        self._wait()
        start, calls = time.perf_counter(), 0
        while calls < 1 or (calls < 100 and time.perf_counter() - start < 0.5):
            work()
            self._wait()
            calls += 1
        return (time.perf_counter() - start) / calls

    def _wait(self) -> None:
        if any(w.is_cuda for w in self._loaded.model.parameters()):
            torch.cuda.synchronize()


def passes(entry: MeasureEntry, model: PreparedModel) -> int:
    """Return how many forward passes, with a backward pass each, a unit is taken to need.

    A product with the Hessian counts twice; what stops early is counted to its end.
    """
    measure = entry.measure
    if isinstance(measure, TopEigenvalue):
        return 1 + 2 * LANCZOS
    if isinstance(measure, HessianTrace):
        return 1 + 2 * measure.samples
    return measure.ticks(model.model)
