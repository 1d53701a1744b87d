"""Measures every unit of a comparison that is not in its store yet, and writes each before the next begins."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import groupby
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from quotient_manifolds.compare.database import StoreError
from quotient_manifolds.compare.failing import sentence
from quotient_manifolds.compare.identity import (
    batch_hash,
    files_fingerprint,
    model_hash,
    source_hash,
    symmetries_hash,
)
from quotient_manifolds.compare.measures import Measured
from quotient_manifolds.compare.spec import Spec
from quotient_manifolds.compare.store import Store
from quotient_manifolds.compare.unit import Unit
from quotient_manifolds.compare.units import Identity, MeasureUnit, ScoreUnit, measure_units, score_units
from quotient_manifolds.compare.workers import Worker
from quotient_manifolds.geometry import Geometry, Quotient
from quotient_manifolds.load import Batches, Checkpoint, load_checkpoint, load_symmetries
from quotient_manifolds.progress import Progress
from quotient_manifolds.replica import private_batch, replica
from quotient_manifolds.sharpness import PreparedModel
from quotient_manifolds.sharpness.losses import logits_and_labels
from quotient_manifolds.sharpness.measure import KnownAscents
from quotient_manifolds.symmetries import Symmetries
from quotient_manifolds.version import VERSION

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@final
@dataclass(frozen=True)
class Loaded:
    """A checkpoint on its device, with its data."""

    model: nn.Module
    data: list[Any]
    test: list[Any]
    symmetries: Symmetries | None = None  # None: those that are found
    declared_by: str | None = None
    notes: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def identity(self) -> Identity:
        data, test = (tuple(map(batch_hash, batches)) for batches in (self.data, self.test))
        declared = None if self.symmetries is None else f"{self.declared_by} {symmetries_hash(self.symmetries)[:16]}"
        return Identity(model_hash(self.model), data, test, declared, self.notes)

    def geometry(self, measured: Measured) -> Geometry:
        """The measure's geometry, with the symmetries that were declared for the model."""
        geometry = measured.measure.geometry
        if self.symmetries is None or not isinstance(geometry, Quotient):
            return geometry
        return replace(geometry, symmetries=self.symmetries)


@final
class Run:
    """One process's part of a comparison."""

    def __init__(self, spec: Spec, store: Store, worker: Worker, report: Progress) -> None:
        self.spec = spec
        self.store = store
        self.worker = worker
        self.report = report
        self.done = 0  # units finished by this process
        self._data = [None if part is None else part.fingerprint() for part in (spec.data, spec.test)]
        self._functions = [] if spec.symmetries is None else [spec.symmetries, source_hash(spec.symmetries)]
        self._loaded: dict[str, Identity] = {}  # by name of checkpoint
        self._failed: set[str] = set()  # keys of units, and names of checkpoints, that this process will not try again

    @property
    def always_loads(self) -> bool:
        """Whether a function of the user's decides what a checkpoint is: nobody knows what it reads."""
        return self.spec.symmetries is not None or any(":" in each.loader for each in self.spec.checkpoints)

    def measure_all(self) -> None:
        """Every checkpoint, this process's share first, until nothing is left but what others are measuring.

        A unit that another process was at when it died is found in the next round.
        """
        before = -1
        while before < self.done:
            before = self.done
            self.store.claim(())  # finds out who has died
            for position, checkpoint in enumerate(self.worker.own_first(self.spec.checkpoints)):
                self.report("checkpoints", position, len(self.spec.checkpoints))
                self._measure(checkpoint)
        self.report("checkpoints", len(self.spec.checkpoints), len(self.spec.checkpoints))

    def _measure(self, checkpoint: Checkpoint) -> None:
        if checkpoint.name in self._failed:
            return
        # Before loading: what is written meanwhile makes another fingerprint, and is loaded by the next run.
        fingerprint = self._fingerprint(checkpoint)
        # Of a function nobody knows what it reads.
        function = ":" in checkpoint.loader or self.spec.symmetries is not None
        known = None if function and checkpoint.name not in self._loaded else self.identity(checkpoint)
        if known is not None and not self._open(checkpoint, known):
            self._mend(checkpoint)
            return
        try:
            loaded = self.load(checkpoint)
            identity = loaded.identity
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # whatever the user's code raises: the rest goes on
            self._failed.add(checkpoint.name)
            self.store.fail(checkpoint.name, sentence(error))
            return
        self._loaded[checkpoint.name] = identity
        self._mend(checkpoint)
        self.store.remember(fingerprint, identity.to_dict())
        units = self._open(checkpoint, identity)
        self._score(loaded, [each for each in units if isinstance(each, ScoreUnit)])
        measures = [each for each in units if isinstance(each, MeasureUnit)]
        for _, alike in groupby(measures, key=lambda each: each.setting):
            self._measure_alike(loaded, list(alike))

    def waiting(self) -> int:
        """How many units other processes are measuring now."""
        return len(self.store.claimed(self.all_units()))

    def all_units(self) -> list[Unit]:
        """The units of all checkpoints that have been loaded once."""
        known = [(checkpoint, self.identity(checkpoint)) for checkpoint in self.spec.checkpoints]
        return [each.unit for one, identity in known if identity for each in self.units(one, identity)]

    def identity(self, checkpoint: Checkpoint) -> Identity | None:
        """What is known of a checkpoint without loading it again: its files and the data are as they were then."""
        if checkpoint.name in self._loaded:
            return self._loaded[checkpoint.name]
        record = self.store.recall(self._fingerprint(checkpoint))
        return None if record is None else Identity.from_dict(record)

    def units(self, checkpoint: Checkpoint, identity: Identity) -> list[ScoreUnit | MeasureUnit]:
        measures = measure_units(checkpoint.name, identity, self.spec.measures)
        return [*score_units(checkpoint.name, identity), *measures]

    def _fingerprint(self, checkpoint: Checkpoint) -> str:
        files = files_fingerprint(checkpoint.path)
        return repr((VERSION, self.spec.dtype, checkpoint.loader, files, *self._data, *self._functions))

    def _mend(self, checkpoint: Checkpoint) -> None:
        if any(each.unit is None and each.checkpoint == checkpoint.name for each in self.store.failures()):
            self.store.mend(checkpoint.name)

    def _open(self, checkpoint: Checkpoint, identity: Identity) -> list[ScoreUnit | MeasureUnit]:
        """Units that are not finished, not claimed by another process, and have not failed here."""
        units = self.units(checkpoint, identity)
        taken = self.store.finished([each.unit.key for each in units]) | self._failed
        taken |= set(self.store.claimed([each.unit for each in units]))
        return [each for each in units if each.unit.key not in taken]

    def load(self, checkpoint: Checkpoint) -> Loaded:
        """The model in the spec's precision on this worker's device, its batches, and its symmetries if declared."""
        model = load_checkpoint(checkpoint)
        data: list[Any] = self.spec.data.batches(model, checkpoint)
        test: list[Any] = [] if self.spec.test is None else self.spec.test.batches(model, checkpoint)
        dtype, device = DTYPES[self.spec.dtype], self.worker.device

        def placed(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return leaf.to(device, dtype if leaf.is_floating_point() else leaf.dtype)

        declared = None if self.spec.symmetries is None else load_symmetries(self.spec.symmetries, model)
        notes = {part: made.notes for part, made in (("data", data), ("test", test)) if isinstance(made, Batches)}
        data, test = ([tree_map(placed, batch) for batch in batches] for batches in (data, test))
        return Loaded(model.to(device, dtype), data, test, declared, self.spec.symmetries, notes)

    def _score(self, loaded: Loaded, units: Sequence[ScoreUnit]) -> None:
        for each in units:
            batch = (loaded.data if each.part == "data" else loaded.test)[each.unit.batch]
            self._attempt(each.unit, partial(score, loaded.model, batch, f"batch {each.unit.batch} of {each.part}"))

    def _measure_alike(self, loaded: Loaded, units: Sequence[MeasureUnit]) -> None:
        """Units in one geometry with one loss, on one subject, which is made once the first of them is claimed."""

        ascents: KnownAscents = {}  # units that go on from where the one before them ended follow it

        @cache
        def subject() -> PreparedModel | str:
            return subject_of(loaded, units[0].measured)

        def on(each: MeasureUnit) -> dict[str, Any]:
            made = subject()
            if isinstance(made, str):
                raise ValueError(made)
            return each.measured.measure.on(made, each.unit.batch, self._tick(each, made), ascents).to_dict()

        for each in units:
            self._attempt(each.unit, partial(on, each))

    def _attempt(self, unit: Unit, work: Callable[[], dict[str, Any]]) -> None:
        """The unit, unless another process is at it: its value, or its failure, is written before this returns."""
        if not self.store.claim([unit]):
            return
        start = time.perf_counter()
        try:
            self.store.finish(unit, work(), time.perf_counter() - start)
            self.done += 1
        except StoreError:
            raise
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # as above
            self._failed.add(unit.key)
            self.store.fail(unit, sentence(error))

    def _tick(self, each: MeasureUnit, subject: PreparedModel) -> Callable[[], None]:
        total, done = each.measured.measure.ticks(subject), 0

        def tick() -> None:
            nonlocal done
            done += 1
            self.report(each.measured.label, done, total)

        return tick


def subject_of(loaded: Loaded, measured: Measured) -> PreparedModel | str:
    """Checked on the first batch on which the checks pass; the first complaint if there is none."""
    complaints: list[str] = []
    for probe in range(len(loaded.data)):
        try:
            return PreparedModel.of(loaded.model, measured.loss, loaded.data, loaded.geometry(measured), probe=probe)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the model is the user's
            complaints.append(sentence(error))
    return complaints[0]


def score(model: nn.Module, batch: Any, where: str) -> dict[str, Any]:
    """Mean cross-entropy and error over the labels that count, and how many these are, of a copy of the model."""
    with torch.no_grad():
        logits, labels = logits_and_labels(replica(model, {}), private_batch(batch))
        loss = float(F.cross_entropy(logits, labels))
    if not math.isfinite(loss):
        raise ValueError(f"The loss must be finite. Found {loss} on {where}, over {len(labels)} labels")
    return {"error": float((logits.argmax(-1) != labels).double().mean()), "loss": loss, "examples": len(labels)}
