"""Define a measure of sharpness: settings that give a number for a model, a loss and a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from torch import nn

from quotient_manifolds.check import check_integer
from quotient_manifolds.geometry import Geometry, KnownSymmetries
from quotient_manifolds.messages import Progress
from quotient_manifolds.sharpness.ball import check_radius
from quotient_manifolds.sharpness.losses import Loss
from quotient_manifolds.sharpness.objective import BatchObjective, Tick, autograd_available, check_agreed
from quotient_manifolds.sharpness.prepared_model import PreparedModel
from quotient_manifolds.sharpness.result import SIZES, BatchResult, Result, Setting, group_key, size_of
from quotient_manifolds.sharpness.start import Refuted
from quotient_manifolds.sharpness.vector import over_processes
from quotient_manifolds.version import VERSION

Compute = Callable[[BatchObjective], BatchResult]

_COUNTS = {"seed": 0, "restarts": 0, "steps": 1, "samples": 2}  # integer settings, with their least values


@dataclass(frozen=True)
class Measure(ABC):
    """Define a measure by its settings; frozen, so that equal measures give equal numbers.

    A new measure is a subclass in this folder with a `name` and `compute`. The latter takes the loss as a function of
    orthonormal coordinates z, so that it works in every geometry. Settings with the same name have the same meaning in
    all measures, and are checked here: ValueError, in one sentence. progress(what, done, total) is not a setting; it is
    called while `of` runs.
    """

    name: ClassVar[str]
    has_gradient: ClassVar[bool] = True
    """Whether the measure computes a gradient where it begins, which verifies symmetries; if not, the first batch takes
    one more pass."""

    geometry: Geometry
    progress: Progress | None = field(default=None, kw_only=True, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, least in _COUNTS.items():
            check_integer(name, getattr(self, name, least), least)
        for name in SIZES:
            check_radius(getattr(self, name, 1.0), name)

    @property
    def ticks(self) -> int:
        """Return the number of ticks that `on` counts on one batch: the passes of a usual run."""
        return 1

    @abstractmethod
    def compute(self, objective: BatchObjective) -> BatchResult:
        """Compute the measure of one batch's loss as a function of the coordinates z."""

    def on(self, prepared: PreparedModel, index: int, tick: Tick, compute: Compute | None = None) -> BatchResult:
        """Compute the measure on batch `index`; it depends on no other batch.

        tick: called exactly `ticks` times, once per forward pass (or whatever `ticks` counts). If fewer passes are
        needed, the rest follow at the end; more are not counted. compute: replaces the measure's own `compute`.
        """
        left = self.ticks

        def counted_tick() -> None:
            nonlocal left
            if left > 1:  # the last tick marks the end
                left -= 1
                tick()

        with autograd_available(), over_processes(prepared.processes_on):
            if prepared.processes_on is not None:
                check_agreed({"measure": self.name, **self.settings})
            if not self.has_gradient and prepared.start.by_gradients and index == min(prepared.losses):
                begin = prepared.objective(index)
                begin.value_and_gradient(begin.zero())
            found = (compute or self.compute)(prepared.objective(index, counted_tick))
            prepared.start.check_loss(index, found.base_loss)
            for _ in range(left):
                tick()
            return replace(found, group=group_key(prepared.geometry.group))

    @property
    def settings(self) -> dict[str, Setting]:
        """Return all fields but geometry and progress."""
        return {
            each.name: getattr(self, each.name) for each in fields(self) if each.compare and each.name != "geometry"
        }

    def of(self, model: nn.Module, loss: Loss, batches: Iterable[Any], known: KnownSymmetries | None = None) -> Result:
        """Compute the measure of a model on every batch. Raises as `worst_case_sharpness` does; issues no warnings.

        known: earlier results for this model, with the same weights; they save time if it is measured several times.
        """
        prepared = PreparedModel.of(model, loss, batches, self.geometry, known=known)
        n = len(prepared.batches)
        label = ", ".join(filter(None, (self.name, self.geometry.name, size_of(self.settings))))
        found = list[BatchResult]()
        while len(found) < n:
            tick = counted(self.progress, label, n * self.ticks)
            found = []
            try:
                for index in range(n):  # inline: a function would add a stack frame above the loss
                    found.append(self.on(prepared, index, tick))
            except Refuted as refuted:
                prepared = prepared.without(refuted)
        return self.result(tuple(found))

    def result(self, batches: tuple[BatchResult, ...]) -> Result:
        """Return the results of all batches as one record."""
        return Result(self.name, self.geometry.name, self.settings, batches, VERSION, self.geometry.to_dict())


def counted(progress: Progress | None, what: str, total: int) -> Tick:
    """Return a tick that counts its calls and reports them to `progress`."""
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(what, done, total)

    return tick
