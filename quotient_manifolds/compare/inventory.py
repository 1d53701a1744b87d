"""Look up what a store knows of the checkpoints of a spec, without loading any."""

from __future__ import annotations

from typing import final

from quotient_manifolds.compare.identity import files_fingerprint, source_hash
from quotient_manifolds.compare.spec import Spec
from quotient_manifolds.compare.store import Store
from quotient_manifolds.compare.worker import Identity, Task, tasks_of
from quotient_manifolds.load import Checkpoint
from quotient_manifolds.version import MEANING, VERSION


@final
class Inventory:
    """Tell what there is to measure on each checkpoint, as far as it was loaded before with these files and data."""

    def __init__(self, spec: Spec, store: Store) -> None:
        self.spec, self.store = spec, store
        self._data = [None if split is None else split.fingerprint() for split in (spec.data, spec.test)]
        self._functions = [] if spec.symmetries is None else [spec.symmetries, source_hash(spec.symmetries)]
        self._loaded: dict[str, Identity] = {}  # by name of checkpoint

    @property
    def always_loads(self) -> bool:
        """Return whether a function of the user's decides what a checkpoint is: nobody knows what it reads."""
        return self.spec.symmetries is not None or any(":" in each.loader for each in self.spec.checkpoints)

    def fingerprint(self, checkpoint: Checkpoint) -> str:
        """Return what tells, without loading, that a checkpoint and its data are as they were."""
        files = files_fingerprint(checkpoint.path)
        return repr((VERSION, MEANING, self.spec.dtype, checkpoint.loader, files, *self._data, *self._functions))

    def learn(self, name: str, identity: Identity, fingerprint: str) -> None:
        """Keep what loading a checkpoint has shown of it; fingerprint: that of its files before it was loaded."""
        if self._loaded.get(name) != identity:
            self._loaded[name] = identity
            self.store.remember(fingerprint, identity.to_dict())
            self.store.mend(name)

    def identity(self, checkpoint: Checkpoint) -> Identity | None:
        """Return what is known of a checkpoint; None if it must be loaded for that."""
        if checkpoint.name in self._loaded:
            return self._loaded[checkpoint.name]
        record = self.store.recall(self.fingerprint(checkpoint))
        return None if record is None else Identity.from_dict(record)

    def current(self, checkpoint: Checkpoint) -> Identity | None:
        """Return the identity where a run may rely on it: not where a function has not been called in this run."""
        function = ":" in checkpoint.loader or self.spec.symmetries is not None
        return None if function and checkpoint.name not in self._loaded else self.identity(checkpoint)

    def tasks(self, checkpoint: Checkpoint) -> list[Task]:
        """Return all there is to measure on a checkpoint; none if it was never loaded."""
        identity = self.identity(checkpoint)
        return [] if identity is None else tasks_of(checkpoint.name, identity, self.spec.measures)

    def all_tasks(self) -> list[Task]:
        """Return all there is to measure on all checkpoints, in the order of the spec."""
        return [task for checkpoint in self.spec.checkpoints for task in self.tasks(checkpoint)]

    def seconds(self) -> dict[str, list[float]]:
        """Return by the label of every measure the seconds that its units took, finished ones of this spec."""
        tasks = self.all_tasks()
        took = {each.unit.key: each.seconds for each in self.store.results(task.unit for task in tasks)}
        found: dict[str, list[float]] = {each.label: [] for each in self.spec.measures}
        for task in tasks:
            if task.entry is not None and task.unit.key in took:
                found[task.label].append(took[task.unit.key])
        return found
