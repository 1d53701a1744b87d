"""What a comparison would measure, and about how long that takes: asked before hours are spent on it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import torch

from quotient_manifolds.compare.comparison import Failed
from quotient_manifolds.compare.failing import sentence
from quotient_manifolds.compare.measures import Measured
from quotient_manifolds.compare.run import Loaded, Run, score, subject_of
from quotient_manifolds.compare.scores import unmatched
from quotient_manifolds.compare.units import Identity, MeasureUnit
from quotient_manifolds.sharpness import HessianTrace, PreparedModel, TopEigenvalue, TruncationError
from quotient_manifolds.sharpness.objective import autograd_available

LANCZOS = 40  # products that a top eigenvalue is taken to need; it may need fewer, or many more
SCORES = "loss and error"
Timing = tuple[int | None, float | None, str | None]  # passes of a unit, seconds of one, what is wrong


@final
@dataclass(frozen=True)
class Planned:
    """A measure (or the scores): how many units (a checkpoint and a batch) it has and how many of them are left.

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
        """Seconds of what is left."""
        return None if self.seconds is None or self.passes is None else self.left * self.passes * self.seconds


@final
@dataclass(frozen=True)
class Plan:
    """What is there to measure. timed: the checkpoint that was loaded, in `loading` seconds; None if none could be."""

    rows: tuple[Planned, ...]
    checkpoints: int
    to_load: int
    timed: str | None
    loading: float
    troubles: tuple[Failed, ...]
    notes: tuple[str, ...]

    @property
    def seconds(self) -> float | None:
        """Of all that is left and could be timed, with the loading; None where nothing could."""
        known = [each.total for each in self.rows if each.total is not None]
        return sum(known) + self.to_load * self.loading if known else None

    @property
    def pass_seconds(self) -> tuple[float, float] | None:
        """The shortest and the longest pass that was timed."""
        known = [each.seconds for each in self.rows if each.seconds is not None]
        return (min(known), max(known)) if known else None


def plan(run: Run) -> Plan:
    """Return the units of a run, finished and left, and the time of those left, from one checkpoint.

    Checkpoints are loaded until one of them is read; on its first batch one pass is timed in every geometry, whose
    symmetries are proved there, as they will be for every other. Nothing is measured or kept.
    """
    loaded, name, loading, troubles = _first_that_loads(run)
    identity = None if loaded is None else loaded.identity
    units, left, to_load = _counted(run, identity)
    timer = None if loaded is None else _Timer(loaded)
    rows: list[Planned] = []
    for measured in (None, *run.spec.measures):
        label = SCORES if measured is None else measured.label
        passes, seconds, trouble = (None, None, None) if timer is None else timer.of(measured, run.spec.measures)
        if trouble is not None:
            troubles.append(Failed((name or "",), (label,), trouble))
        rows.append(Planned(label, units.get(label, 0), left.get(label, 0), passes, seconds))
    said = {} if identity is None else identity.notes
    notes = (
        *(f"{name}, {part}: {sentence}" for part, sentences in said.items() for sentence in sentences),
        *unmatched([each.name for each in run.spec.checkpoints], run.spec.scores),
    )
    return Plan(tuple(rows), len(run.spec.checkpoints), to_load, name, loading, tuple(troubles), notes)


def _first_that_loads(run: Run) -> tuple[Loaded | None, str | None, float, list[Failed]]:
    troubles: list[Failed] = []
    for checkpoint in run.spec.checkpoints:
        try:
            run.load(checkpoint)  # pays for what is imported once
            start = time.perf_counter()
            loaded = run.load(checkpoint)
            loaded.identity  # noqa: B018  (what a run hashes belongs to its loading)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the model is the user's
            troubles.append(Failed((checkpoint.name,), (), sentence(error)))
            continue
        return loaded, checkpoint.name, time.perf_counter() - start, troubles
    return None, None, 0.0, troubles


def _counted(run: Run, like: Identity | None) -> tuple[Counter[str], Counter[str], int]:
    """Units by label, those of them without result, and how many checkpoints will be loaded.

    A checkpoint that was never loaded is taken to have as many batches as the one that was.
    """
    units, left = Counter[str](), Counter[str]()
    to_load = 0
    for checkpoint in run.spec.checkpoints:
        known = run.identity(checkpoint)
        identity = known or like
        listed = [] if identity is None else run.units(checkpoint, identity)
        finished = set() if known is None else run.store.finished([each.unit.key for each in listed])
        labels = [each.measured.label if isinstance(each, MeasureUnit) else SCORES for each in listed]
        waiting = [label for each, label in zip(listed, labels, strict=True) if each.unit.key not in finished]
        units.update(labels)
        left.update(waiting)
        to_load += bool(waiting) or known is None or run.always_loads
    return units, left, to_load


@final
class _Timer:
    """One pass on the first batch of a checkpoint, timed once in every geometry."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._known: dict[tuple[str, bool], tuple[PreparedModel | str, float | None]] = {}

    def of(
        self, measured: Measured | None, all_of_them: Sequence[Measured]
    ) -> tuple[int | None, float | None, str | None]:
        """Passes of a unit, seconds of one, and what is wrong; for the scores where measured is None."""
        if measured is None:
            try:
                return (
                    1,
                    self._seconds(partial(score, self._loaded.model, self._loaded.data[0], "batch 0 of data")),
                    None,
                )
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # the model is the user's
                return 1, None, sentence(error)
        place = (repr(measured.measure.geometry), measured.normalise_logits)
        new = place not in self._known
        if new:
            self._known[place] = self._subject(measured)
        subject, seconds = self._known[place]
        if isinstance(subject, str):
            return None, None, subject if new else None
        return passes(measured, subject, all_of_them), seconds, None

    def _subject(self, measured: Measured) -> tuple[PreparedModel | str, float | None]:
        made = subject_of(self._loaded, measured)
        if isinstance(made, str):
            return made, None
        objective = made.objective(0, lambda: None)
        try:
            with autograd_available():
                return made, self._seconds(lambda: objective.value_and_gradient(objective.zero()))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return sentence(error), None

    def _seconds(self, work: Callable[[], object]) -> float:
        """The mean of as many calls as fit into half a second, after a first one that pays for what is set up once."""
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


def passes(measured: Measured, subject: PreparedModel, all_of_them: Sequence[Measured]) -> int:
    """Return how many forward passes, with a backward pass each, a unit is taken to need.

    A product with the Hessian counts twice; what stops early is counted to its end; a truncation error whose sharpness
    is measured beside it needs one evaluation besides.
    """
    measure = measured.measure
    if isinstance(measure, TopEigenvalue):
        return 1 + 2 * LANCZOS
    if isinstance(measure, HessianTrace):
        return 1 + 2 * measure.samples
    beside = {(each.measure, each.normalise_logits) for each in all_of_them}
    if isinstance(measure, TruncationError) and (measure.worst_case, measured.normalise_logits) in beside:
        return 1
    return measure.ticks(subject)
