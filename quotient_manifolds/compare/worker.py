"""Measure one checkpoint: load it, and compute what is not in the store yet, value by value."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import groupby, product
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from quotient_manifolds.compare.identity import batch_hash, computed, model_hash
from quotient_manifolds.compare.spec import MeasureEntry, Spec
from quotient_manifolds.compare.store import Store, task_key
from quotient_manifolds.geometry import KnownSymmetries
from quotient_manifolds.load import Checkpoint, load_checkpoint
from quotient_manifolds.load.tokens import CAUSAL
from quotient_manifolds.messages import Progress, sentence
from quotient_manifolds.replica import private_batch, replica
from quotient_manifolds.sharpness import PreparedModel
from quotient_manifolds.sharpness.losses import logits_and_labels, next_token_logits_and_labels
from quotient_manifolds.sharpness.measure import KnownAscents, counted
from quotient_manifolds.version import MEANING, VERSION

SPLITS = ("data", "test")
Made = TypeVar("Made")
_ONE_AT_A_TIME = threading.Lock()  # random states and the number of a process's threads are shared by its threads


@final
@dataclass(frozen=True)
class Identity:
    """Hold what decides the numbers of a checkpoint: hashes of its model and of every batch it is given.

    computed: what the model computes of each batch; notes: what must be said beside its numbers; both by split.
    """

    model: str
    data: Sequence[str]
    test: Sequence[str]
    computed: Mapping[str, Sequence[str]] = field(default_factory=dict)
    notes: Mapping[str, Sequence[str]] = field(default_factory=dict)


@final
@dataclass(frozen=True)
class Task:
    """Ask for one measure on one batch, or (entry None) for loss and error there; key: of all that decides the value.

    split: "data" or "test", whose batch it is.
    """

    key: str
    split: str
    batch: int
    entry: MeasureEntry | None

    @property
    def label(self) -> str:
        """Return how tables and progress call what is measured."""
        return f"loss and error on {self.split}" if self.entry is None else self.entry.label


@final
@dataclass(frozen=True)
class Job:
    """Ask for all that a spec wants of one checkpoint.

    fingerprint: of its files and data, before they were read; what is written meanwhile makes another, and is loaded by
    the next run.
    """

    spec: Spec
    checkpoint: Checkpoint
    device: str
    fingerprint: str


@final
@dataclass(frozen=True)
class Loaded:
    """Hold a checkpoint on its device, with its batches by split; known: what was found of it, for all measures."""

    model: nn.Module
    batches: Mapping[str, Sequence[Any]]
    identity: Identity
    spec: Spec
    known: KnownSymmetries = field(default_factory=KnownSymmetries)

    def prepared(self, entry: MeasureEntry) -> PreparedModel | str:
        """Return the model, checked on all batches, of which some may fail; what is wrong if none can be measured."""
        loss, geometry = self.spec.loss_of(normalised=entry.normalise_logits), entry.measure.geometry
        batches, known = self.batches["data"], self.known
        return attempt(lambda: PreparedModel.of(self.model, loss, batches, geometry, some=True, known=known))

    def score(self, split: str, index: int) -> dict[str, Any]:
        """Compute the mean loss over the labels that count, their number, and the error, if the loss is cross-entropy.

        A loss of the user's counts every batch the same.
        """
        model, batch = replica(self.model, {}), private_batch(self.batches[split][index])
        with torch.no_grad():
            if self.spec.loss is not None:
                found = {"loss": float(self.spec.loss_of()(model, batch)), "examples": 1}
            else:
                logits, labels = _logits_and_labels(self.spec)(model, batch)
                wrong = (logits.argmax(-1) != labels).double().mean()
                found = {"error": float(wrong), "loss": float(F.cross_entropy(logits, labels)), "examples": len(labels)}
        if not math.isfinite(found["loss"]):
            raise ValueError(f"The loss must be finite. Found {found['loss']} on batch {index} of {split}")
        return found


def attempt(work: Callable[[], Made]) -> Made | str:
    """Return what `work` returns, or a sentence on whatever the user's code raised or exited with."""
    try:
        return work()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the model is the user's
        return sentence(error)


def _logits_and_labels(spec: Spec) -> Callable[[nn.Module, Any], tuple[Tensor, Tensor]]:
    """Return the function of a model and a batch that gives logits and the labels that count."""
    return next_token_logits_and_labels if spec.data.task == CAUSAL else logits_and_labels


def load(job: Job) -> Loaded:
    """Load the model in the spec's precision on the device, and its batches."""
    spec = job.spec
    sys.path.extend(folder for folder in spec.folders if folder not in sys.path)
    model = load_checkpoint(job.checkpoint)
    dtype, device = getattr(torch, spec.dtype), torch.device(job.device)

    def placed(leaf: Tensor) -> Tensor:
        return leaf.to(device, dtype if leaf.is_floating_point() else leaf.dtype)

    def outputs(model: nn.Module, batch: Any) -> Any:
        return spec.loss_of()(model, batch) if spec.loss else _logits_and_labels(spec)(model, batch)[0]

    sources = {"data": spec.data, **({} if spec.test is None else {"test": spec.test})}
    made = {split: source.batches(model, job.checkpoint) for split, source in sources.items()}
    notes = {split: tuple(getattr(found, "notes", ())) for split, found in made.items()}
    batches = {split: [tree_map_only(Tensor, placed, batch) for batch in found] for split, found in made.items()}
    model = model.to(device, dtype)
    probes = {split: [computed(model, outputs, batch) for batch in given] for split, given in batches.items()}
    hashes = {split: [batch_hash(batch) for batch in batches.get(split, [])] for split in SPLITS}
    return Loaded(model, batches, Identity(model_hash(model), **hashes, computed=probes, notes=notes), spec)


def measure_checkpoint(job: Job, store: Store, progress: Progress | None = None) -> int:
    """Measure what has no value in the store yet, and keep each value or failure there before the next; count values.

    Where a checkpoint cannot be loaded, that is its failure; whatever the user's code raises, the rest goes on.
    """
    name = job.checkpoint.name
    with _ONE_AT_A_TIME:
        loaded = attempt(lambda: load(job))
        if isinstance(loaded, str):
            store.fail(name, None, loaded)
            return 0
        store.mend(name)
        store.remember(job.fingerprint, asdict(loaded.identity))
        tasks = tasks_of(job.spec, loaded.identity)
        finished = store.finished(each.key for each in tasks)
        left = (each for each in tasks if each.key not in finished)
        measured = 0
        for _, alike in groupby(left, key=lambda each: None if each.entry is None else each.entry.setting):
            for task, found, seconds in _measured(loaded, alike, progress):
                try:
                    if isinstance(found, str):
                        raise ValueError(found)
                    measured += store.finish(task.key, name, task.label, task.batch, found, seconds)
                except ValueError as error:  # also of a number that is not finite
                    store.fail(name, task.key, str(error))
        return measured


def _measured(
    loaded: Loaded, tasks: Iterator[Task], progress: Progress | None
) -> Iterator[tuple[Task, dict[str, Any] | str, float]]:
    """Yield tasks of one setting with their values, or what went wrong, and the seconds they took."""
    ascents: KnownAscents = {}  # tasks that go on from where the one before them ended follow it
    prepared: PreparedModel | str | None = None  # or what is wrong, found once

    def value(task: Task) -> dict[str, Any]:
        nonlocal prepared
        if task.entry is None:
            return loaded.score(task.split, task.batch)
        prepared = loaded.prepared(task.entry) if prepared is None else prepared
        if isinstance(prepared, str):
            raise ValueError(prepared)
        measure = task.entry.measure
        tick = counted(progress, task.label, measure.ticks(prepared.model))
        return measure.on(prepared, task.batch, tick, ascents).to_dict()

    for task in tasks:
        start = time.perf_counter()
        found = attempt(partial(value, task))
        yield task, found, time.perf_counter() - start


def tasks_of(spec: Spec, identity: Identity) -> list[Task]:
    """Return what there is to measure, ordered so that tasks of one setting follow each other, and radii ascend."""
    settings = list(dict.fromkeys(each.setting for each in spec.measures))
    families = list(dict.fromkeys(each.family for each in spec.measures))

    def task(split: str, index: int, entry: MeasureEntry | None) -> Task:
        decides = {
            # The index of the batch seeds what is random, so it decides the number too.
            "what": "score" if entry is None else repr((entry.measure, entry.normalise_logits, index)),
            "loss": spec.loss,
            "model": identity.model,
            "computed": identity.computed[split][index],
            "batch": getattr(identity, split)[index],
            "version": VERSION,
            "meaning": MEANING,
        }
        return Task(task_key(decides), split, index, entry)

    def place(asked: tuple[int, MeasureEntry]) -> tuple[float, ...]:
        index, entry = asked
        return settings.index(entry.setting), families.index(entry.family), index, entry.radius or 0.0

    scores = [task(split, index, None) for split in SPLITS for index in range(len(getattr(identity, split)))]
    asked = sorted(product(range(len(identity.data)), spec.measures), key=place)
    return [*scores, *(task("data", index, entry) for index, entry in asked)]
