"""Measure one checkpoint: load it, hash everything that determines its values, and compute the missing ones."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import groupby, product
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from quotient_manifolds.batches import mapped
from quotient_manifolds.compare.code import code_imported, edited
from quotient_manifolds.compare.identity import Identity, batch_hash, computed, model_hash
from quotient_manifolds.compare.spec import MeasureEntry, Spec
from quotient_manifolds.compare.store import Store, task_key
from quotient_manifolds.data_options import CAUSAL
from quotient_manifolds.geometry import KnownSymmetries
from quotient_manifolds.load import Checkpoint, load_checkpoint
from quotient_manifolds.messages import Progress, sentence
from quotient_manifolds.replica import private_batch, replica
from quotient_manifolds.sharpness import PreparedModel
from quotient_manifolds.sharpness.losses import counted_logits
from quotient_manifolds.sharpness.measure import counted
from quotient_manifolds.version import MEANING, VERSION

Made = TypeVar("Made")
_ONE_AT_A_TIME = threading.Lock()  # threads of a process share its random states and its thread count


@dataclass(frozen=True)
class Task:
    """Describe the computation of one measure, or (entry None) of loss and error, on one batch.

    key: the hash of everything that determines the value. split: the batch is from "data" or "test".
    """

    key: str
    split: str
    batch: int
    entry: MeasureEntry | None

    @property
    def label(self) -> str:
        """Return the name of the task in tables and progress bars."""
        return f"loss and error on {self.split}" if self.entry is None else self.entry.label


@dataclass(frozen=True)
class Job:
    """Describe all tasks of a spec on one checkpoint. fingerprint: of its files and data, before they are read.

    A file that changes later has another fingerprint, so the next run loads it again. code: hashes from `code_on_disk`
    at the start of the run.
    """

    spec: Spec
    checkpoint: Checkpoint
    device: str
    fingerprint: str
    code: Mapping[str, str]


@dataclass(frozen=True)
class Loaded:
    """Hold a checkpoint on its device, with its batches by split. known: its symmetries, shared by all measures."""

    model: nn.Module
    batches: Mapping[str, Sequence[Any]]
    identity: Identity
    spec: Spec
    known: KnownSymmetries = field(default_factory=KnownSymmetries)

    def prepared(self, entry: MeasureEntry) -> PreparedModel | str:
        """Return the model, checked on all batches (some may fail), or an error message if none can be measured.

        Symmetries are verified on all batches before the first value, because each value is stored at once.
        """
        loss, geometry = self.spec.loss_of(), entry.measure.geometry
        batches, known = self.batches["data"], self.known
        return attempt(lambda: PreparedModel.of(self.model, loss, batches, geometry, some=True, known=known).verified())

    def value(self, task: Task, prepared: PreparedModel | str | None, progress: Progress | None) -> dict[str, Any]:
        """Compute the value of a task. Raises ValueError for a model that could not be prepared."""
        if isinstance(prepared, str):
            raise ValueError(prepared)
        if task.entry is None or prepared is None:
            return self.score(task.split, task.batch)
        tick = counted(progress, task.label, task.entry.measure.ticks)
        return asdict(task.entry.measure.on(prepared, task.batch, tick))

    def score(self, split: str, index: int) -> dict[str, Any]:
        """Compute the mean loss over the labels that count, their number, and the error, if the loss is cross-entropy.

        With a loss of the user's, every batch has equal weight.
        """
        model, batch = replica(self.model, {}), private_batch(self.batches[split][index])
        with torch.no_grad():
            if self.spec.loss is not None:
                return {"loss": float(self.spec.loss_of()(model, batch)), "examples": 1}
            logits, labels = counted_logits(model, batch, causal=self.spec.data.task == CAUSAL)
            wrong = (logits.argmax(-1) != labels).double().mean()
            return {"error": float(wrong), "loss": float(F.cross_entropy(logits, labels)), "examples": len(labels)}


def attempt(work: Callable[[], Made]) -> Made | str:
    """Return what `work` returns, or a sentence on whatever the user's code raised or exited with."""
    try:
        return work()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's model may raise anything
        return sentence(error)


def load(job: Job) -> Loaded:
    """Load the model in the spec's precision on the device, and its batches.

    Raises ValueError if this process has imported other code than the run began with.
    """
    spec = job.spec
    beside = os.getcwd() if spec.path is None else str(spec.path.resolve().parent)
    sys.path.extend(each for each in (os.getcwd(), beside) if each not in sys.path)  # to find the user's functions
    model = load_checkpoint(job.checkpoint)
    dtype, device = getattr(torch, spec.dtype), torch.device(job.device)

    def placed(leaf: Tensor) -> Tensor:
        return leaf.to(device, dtype if leaf.is_floating_point() else leaf.dtype)

    def outputs(model: nn.Module, batch: Any) -> Any:
        if spec.loss is not None:
            return spec.loss_of()(model, batch)
        return counted_logits(model, batch, causal=spec.data.task == CAUSAL)[0]

    sources = {"data": spec.data, **({} if spec.test is None else {"test": spec.test})}
    made = {split: source.batches(model, job.checkpoint) for split, source in sources.items()}
    batches = {split: [mapped(placed, batch) for batch in found] for split, found in made.items()}
    model = model.to(device, dtype)
    told = {
        split: [f"{batch_hash(batch)} {computed(model, outputs, spec.loss_of(), batch)}" for batch in found]
        for split, found in batches.items()
    }
    notes = {split: tuple(getattr(found, "notes", ())) for split, found in made.items()}
    held = {type(each) for each in (*model.modules(), *tree_leaves(batches))}
    code = code_imported(spec.code_of(job.checkpoint), held)  # only now, because a forward pass may import modules, too
    if (name := edited(code, job.code)) is not None:
        raise ValueError(
            f"Code must be imported as it is in its files when a run begins. Found that {name} was edited after it was "
            "imported; start Python anew (with a scheduler, its workers)"
        )
    return Loaded(model, batches, Identity(code, model_hash(model), told, notes), spec)


def measure_checkpoint(job: Job, store: Store, progress: Progress | None = None) -> tuple[int, list[dict[str, str]]]:
    """Compute the values that the store lacks, and store each of them at once.

    Returns the number of values added, and the failures as rows of `Comparison.failures`. A checkpoint that cannot be
    loaded is one failure. After an error in the user's code, the other tasks go on. Equal failures on several batches
    are listed as one.
    """
    name, measured, failed = job.checkpoint.name, 0, dict[tuple[str, str], list[str]]()
    with _ONE_AT_A_TIME:
        loaded = attempt(partial(load, job))
        if isinstance(loaded, str):
            if job.spec.calls_functions:  # files do not show whether the model is the same
                store.remember(job.fingerprint, None)
            return 0, [{"checkpoint": name, "what": "", "message": loaded}]
        store.remember(job.fingerprint, asdict(loaded.identity))
        tasks = tasks_of(job.spec, loaded.identity)
        finished = store.finished(each.key for each in tasks)
        left = (each for each in tasks if each.key not in finished)
        for _, alike in groupby(left, key=lambda each: None if each.entry is None else each.entry.setting):
            prepared: PreparedModel | str | None = None  # or an error message, computed once
            for task in alike:
                start = time.perf_counter()
                if task.entry is not None and prepared is None:
                    prepared = loaded.prepared(task.entry)
                found = attempt(partial(loaded.value, task, prepared, progress))
                seconds = time.perf_counter() - start
                try:
                    if isinstance(found, str):
                        raise ValueError(found)
                    measured += store.finish(task.key, name, task.label, task.batch, found, seconds)
                except ValueError as error:  # `finish` raises it for non-finite numbers
                    failed.setdefault((task.label, str(error)), []).append(str(task.batch))
    return measured, [
        {"checkpoint": name, "what": f"{label}, batch {', '.join(batches)}", "message": message}
        for (label, message), batches in failed.items()
    ]


def tasks_of(spec: Spec, identity: Identity) -> list[Task]:
    """Return all tasks, ordered so that tasks with equal settings follow each other."""
    settings = list(dict.fromkeys(each.setting for each in spec.measures))

    def task(split: str, index: int, entry: MeasureEntry | None) -> Task:
        decides = {
            # The index of the batch seeds what is random, so it decides the number too.
            "what": "score" if entry is None else repr((entry.measure, index)),
            "loss": spec.loss,
            "code": dict(identity.code),
            "model": identity.model,
            "batch": identity.batches[split][index],
            "version": VERSION,
            "meaning": MEANING,
        }
        return Task(task_key(decides), split, index, entry)

    scores = [task(split, index, None) for split, found in identity.batches.items() for index in range(len(found))]
    asked = sorted(
        product(spec.measures, range(len(identity.batches["data"]))), key=lambda each: settings.index(each[0].setting)
    )
    return [*scores, *(task("data", index, entry) for entry, index in asked)]
