"""Do the work of a worker: load a checkpoint, and measure what a job asks for, unit by unit."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from quotient_manifolds.compare.identity import batch_hash, computed, model_hash, symmetries_hash
from quotient_manifolds.compare.measure_entries import MeasureEntry
from quotient_manifolds.compare.spec import Spec
from quotient_manifolds.compare.unit import Unit, plain, unit_key
from quotient_manifolds.geometry import Geometry, KnownSymmetries, Quotient
from quotient_manifolds.load import Batches, Checkpoint, DataSource, load_checkpoint, load_symmetries
from quotient_manifolds.load.language import CAUSAL
from quotient_manifolds.messages import sentence
from quotient_manifolds.replica import private_batch, replica
from quotient_manifolds.sharpness import PreparedModel
from quotient_manifolds.sharpness.losses import logits_and_labels, next_token_logits_and_labels
from quotient_manifolds.sharpness.measure import KnownAscents
from quotient_manifolds.sharpness.result import group_key
from quotient_manifolds.symmetries import Symmetries
from quotient_manifolds.version import MEANING, VERSION

Emit = Callable[[dict[str, Any]], None]
"""Take a message of a worker: what it has loaded, finished or failed at, or how far it is; plain JSON."""

DTYPES = {"float32": torch.float32, "float64": torch.float64}
SCORE = "score"
SPLITS = ("data", "test")


@final
@dataclass(frozen=True)
class Identity:
    """Hold what decides the numbers of a checkpoint: hashes of its model and of every batch it is given.

    symmetries: who declares them, and a hash of what was declared; None where they are found in the model. notes: what
    must be said beside its numbers, and computed: what the model computes of each batch, both by split of the data.
    """

    model: str
    data: tuple[str, ...]
    test: tuple[str, ...]
    symmetries: str | None = None
    notes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    computed: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the identity as plain JSON."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Identity:
        """Return what `to_dict` was called on."""
        hashes = record["model"], tuple(record["data"]), tuple(record["test"])
        return cls(*hashes, record.get("symmetries"), record.get("notes", {}), record.get("computed", {}))


@final
@dataclass(frozen=True)
class Task:
    """Pair a unit with the measure that gives its value; None for loss and error on the split `unit.geometry`."""

    unit: Unit
    entry: MeasureEntry | None

    @property
    def setting(self) -> object:
        """Return what tasks that are measured on one `PreparedModel` have in common."""
        return None if self.entry is None else setting_of(self.entry)

    @property
    def label(self) -> str:
        """Return how tables and progress call what is measured."""
        return f"loss and error on {self.unit.geometry}" if self.entry is None else self.entry.label


@final
@dataclass(frozen=True)
class Job:
    """Ask a worker for some measures of a checkpoint, but for the units that are finished.

    scores: whether loss and error are asked for besides. folders: where else functions of the user's are imported from.
    """

    checkpoint: Checkpoint
    data: DataSource
    test: DataSource | None
    symmetries: str | None
    dtype: str
    device: str
    entries: Sequence[MeasureEntry]
    scores: bool
    finished: frozenset[str] = frozenset()
    folders: tuple[str, ...] = ()


def job_of(spec: Spec, checkpoint: Checkpoint, device: str) -> Job:
    """Return the job of all that a spec asks for on a checkpoint."""
    return Job(
        checkpoint, spec.data, spec.test, spec.symmetries, spec.dtype, device, spec.measures, True, folders=spec.folders
    )


@final
@dataclass(frozen=True)
class Loaded:
    """Hold a checkpoint on its device, with its data; symmetries: None where they are found in the model.

    known: what was found of it, for all of its measures.
    """

    model: nn.Module
    data: list[Any]
    test: list[Any]
    symmetries: Symmetries | None
    identity: Identity
    task: str | None = None
    known: KnownSymmetries = field(default_factory=KnownSymmetries)

    def geometry(self, entry: MeasureEntry) -> Geometry:
        """Return the measure's geometry, with the symmetries that were declared for the model."""
        geometry = entry.measure.geometry
        if self.symmetries is None or not isinstance(geometry, Quotient):
            return geometry
        scope = "all" if isinstance(geometry.symmetries, Symmetries) else geometry.symmetries
        return replace(geometry, symmetries=self.symmetries.within(scope), complete=scope == "all")

    def prepared(self, entry: MeasureEntry) -> PreparedModel | str:
        """Return the model, checked on all batches, of which some may fail; what is wrong if none can be measured."""
        try:
            geometry, loss = self.geometry(entry), entry.loss(self.task)
            return PreparedModel.of(self.model, loss, self.data, geometry, some=True, known=self.known)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the model is the user's
            return sentence(error)

    def score(self, split: str, index: int) -> dict[str, Any]:
        """Compute mean cross-entropy and error over the labels that count, and how many these are."""
        batch = (self.data if split == "data" else self.test)[index]
        with torch.no_grad():
            logits, labels = _logits_and_labels(self.task, replica(self.model, {}), private_batch(batch))
            loss = float(F.cross_entropy(logits, labels))
        if not math.isfinite(loss):
            raise ValueError(
                f"The loss must be finite. Found {loss} on batch {index} of {split}, over {len(labels)} labels"
            )
        return {"error": float((logits.argmax(-1) != labels).double().mean()), "loss": loss, "examples": len(labels)}


def _logits_and_labels(task: str | None, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    return (next_token_logits_and_labels if task == CAUSAL else logits_and_labels)(model, batch)


def _outputs(task: str | None, model: nn.Module, batch: Any) -> Tensor:
    return _logits_and_labels(task, model, batch)[0]


def load(job: Job) -> Loaded:
    """Load the model in the spec's precision on the device, its batches, and its symmetries if declared."""
    sys.path.extend(folder for folder in job.folders if folder not in sys.path)
    model = load_checkpoint(job.checkpoint)
    data: list[Any] = job.data.batches(model, job.checkpoint)
    test: list[Any] = [] if job.test is None else job.test.batches(model, job.checkpoint)
    dtype, device = DTYPES[job.dtype], torch.device(job.device)

    def placed(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(device, dtype if leaf.is_floating_point() else leaf.dtype)

    declared = None if job.symmetries is None else load_symmetries(job.symmetries, model)
    notes = {split: made.notes for split, made in (("data", data), ("test", test)) if isinstance(made, Batches)}
    data, test = ([tree_map(placed, batch) for batch in batches] for batches in (data, test))
    model = model.to(device, dtype)
    seen, unseen = (tuple(map(batch_hash, batches)) for batches in (data, test))
    outputs = partial(_outputs, job.data.task)
    probes = {
        split: [computed(model, outputs, batch) for batch in given]
        for split, given in zip(SPLITS, (data, test), strict=True)
    }
    said = None if declared is None else f"{job.symmetries} {symmetries_hash(declared)[:16]}"
    return Loaded(
        model, data, test, declared, Identity(model_hash(model), seen, unseen, said, notes, probes), job.data.task
    )


def measure_job(job: Job, emit: Emit) -> None:
    """Measure what a job asks for, in the order of `tasks_of`; each value or failure is emitted before the next."""
    name = job.checkpoint.name
    try:
        loaded = load(job)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever the user's code raises: the rest goes on
        emit({"kind": "failed", "checkpoint": name, "key": None, "message": sentence(error)})
        return
    emit({"kind": "loaded", "checkpoint": name, "identity": loaded.identity.to_dict()})
    left = [
        each for each in tasks_of(name, loaded.identity, job.entries, job.scores) if each.unit.key not in job.finished
    ]
    for _, alike in groupby(left, key=lambda each: each.setting):
        known: list[PreparedModel | str] = []
        ascents: KnownAscents = {}  # tasks that go on from where the one before them ended follow it

        def prepared(entry: MeasureEntry, known: list[PreparedModel | str] = known) -> PreparedModel | str:
            """Return the model, prepared when the first task needs it; what is wrong is found once, too."""
            if not known:
                known.append(loaded.prepared(entry))
                if not isinstance(known[0], str) and (names := known[0].geometry.group):
                    emit({"kind": "group", "group": group_key(names), "names": list(names)})
            return known[0]

        for task in alike:
            start = time.perf_counter()
            try:
                payload = plain(_value(loaded, task, prepared, ascents, emit), "payload")
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # as above
                found: dict[str, Any] = {
                    "kind": "failed",
                    "checkpoint": name,
                    "key": task.unit.key,
                    "message": sentence(error),
                }
            else:
                seconds = time.perf_counter() - start
                found = {"kind": "finished", "unit": asdict(task.unit), "payload": payload, "seconds": seconds}
            emit(found)


def _value(
    loaded: Loaded,
    task: Task,
    prepared: Callable[[MeasureEntry], PreparedModel | str],
    ascents: KnownAscents,
    emit: Emit,
) -> dict[str, Any]:
    if task.entry is None:
        return loaded.score(task.unit.geometry, task.unit.batch)
    measure = task.entry.measure
    model = prepared(task.entry)
    if isinstance(model, str):
        raise ValueError(model)
    done, total = 0, measure.ticks(model.model)

    def tick() -> None:
        nonlocal done
        done += 1
        emit({"kind": "progress", "what": task.label, "done": done, "total": total})

    return measure.on(model, task.unit.batch, tick, ascents).to_dict()


def setting_of(entry: MeasureEntry) -> tuple[str, bool]:
    """Return what two measures must agree in to be measured on one `PreparedModel`."""
    return repr(entry.measure.geometry), entry.normalise_logits


def tasks_of(checkpoint: str, identity: Identity, entries: Sequence[MeasureEntry], scores: bool = True) -> list[Task]:
    """Return what there is to measure, ordered so that tasks of one setting follow each other, and radii ascend."""
    settings: dict[object, int] = {}
    climbs: dict[str, int] = {}
    found: list[tuple[tuple[float, ...], Task]] = []
    for each in entries:
        climb = climbs.setdefault(each.family, len(climbs))
        for index, batch in enumerate(identity.data):
            place = settings.setdefault(setting_of(each), len(settings))
            task = Task(_unit(checkpoint, identity, batch, index, each), each)
            found.append(((place, climb, index, each.radius or 0.0), task))
    ordered = [task for _, task in sorted(found, key=lambda item: item[0])]
    return [*(_score_tasks(checkpoint, identity) if scores else ()), *ordered]


def _score_tasks(checkpoint: str, identity: Identity) -> Iterator[Task]:
    for split in SPLITS:
        for index, batch in enumerate(getattr(identity, split)):
            key = unit_key({"what": SCORE, **_of(identity, split, index), "batch": batch})
            yield Task(Unit(key, checkpoint, SCORE, split, None, index, {}), None)


def _of(identity: Identity, split: str, index: int) -> dict[str, Any]:
    """Return what decides a number of a model besides the batch and what is measured."""
    return {
        "model": identity.model,
        "computed": identity.computed[split][index],
        "version": VERSION,
        "meaning": MEANING,
    }


def _unit(checkpoint: str, identity: Identity, batch: str, index: int, entry: MeasureEntry) -> Unit:
    measure = entry.measure
    # The index of the batch seeds what is random, so it decides the number too.
    decides = {
        "what": repr((measure, entry.normalise_logits)),
        **_of(identity, "data", index),
        "batch": batch,
        "index": index,
    }
    settings = entry.settings
    if identity.symmetries is not None and isinstance(measure.geometry, Quotient):
        decides["symmetries"] = identity.symmetries
        settings = {**settings, "symmetries": identity.symmetries}
    names = (checkpoint, measure.name, measure.geometry.name)
    return Unit(unit_key(decides), *names, entry.radius, index, settings)
