"""What every measure is: settings that give a number for a model, a loss and a batch; and what is checked before."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from quotient_manifolds.geometry import Adaptive, Euclidean, Geometry, TangentSpace
from quotient_manifolds.progress import Progress
from quotient_manifolds.sharpness.auto_pgd import Ascent
from quotient_manifolds.sharpness.losses import Loss
from quotient_manifolds.sharpness.objective import (
    BatchObjective,
    LossOf,
    autograd_available,
    check_loss,
    check_model,
)
from quotient_manifolds.sharpness.result import BatchResult, MeasureResult, Setting
from quotient_manifolds.symmetries import Params
from quotient_manifolds.version import VERSION

Tick = Callable[[], None]


@final
@dataclass(frozen=True)
class PreparedModel:
    """A model, its loss and its batches, checked and ready to be measured in one geometry.

    precision: machine epsilon of the loss. maximisers: where the last climb on a batch ended, for one that starts
    there; one point at a time, for it is as large as the model.
    """

    model: nn.Module
    loss: LossOf
    space: TangentSpace
    batches: list[Any]
    out: Params
    precision: float = 0.0
    maximisers: dict[object, Ascent] = field(default_factory=dict)

    @classmethod
    def of(
        cls, model: nn.Module, loss: Loss, batches: Iterable[Any], geometry: Geometry, *, probe: int = 0
    ) -> PreparedModel:
        """Raises ValueError or TypeError, one sentence, for a model, loss or batches that cannot be measured.

        The loss is tried on batch `probe`: finite, the same twice, and unchanged along the symmetries it is divided by.
        """
        if not isinstance(geometry, Geometry):
            raise TypeError(f"geometry must be Euclidean(), Adaptive() or Quotient(...). Found {geometry!r}")
        check_model(model)
        listed = listed_batches(batches)
        with autograd_available():
            space = geometry.at(model)
            objective = LossOf(model, loss)
            precision = check_loss(objective, space.point, listed[probe])
            proved = geometry.proved(model, loss, listed[probe])
            space = space if proved == geometry else proved.at(model)
            out = {name: torch.empty_like(w) for name, w in space.point.items()}
        return cls(model, objective, space, listed, out, precision)

    def objective(self, index: int, tick: Tick) -> BatchObjective:
        """z -> loss on batch `index`; tick is called after every forward pass."""
        return BatchObjective(self.loss, self.space, self.batches[index], f"batch {index}", self.out, tick)


@dataclass(frozen=True)
class Measure(ABC):
    """A measure with all its settings: frozen, so equal ones give equal numbers."""

    name: ClassVar[str]
    geometry: Geometry

    @abstractmethod
    def ticks(self, subject: PreparedModel) -> int:
        """How many times `on` calls its tick on one batch."""

    @abstractmethod
    def on(self, subject: PreparedModel, index: int, tick: Tick) -> BatchResult:
        """The measure on batch `index`: it depends on no other batch, nor on what was measured before."""

    @property
    def settings(self) -> dict[str, Setting]:
        """All fields but the geometry."""
        found = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "geometry"}
        return {key: ", ".join(map(repr, value)) if isinstance(value, tuple) else value for key, value in found.items()}

    @property
    def label(self) -> str:
        """Return what progress calls this measure: its name, geometry and, if it has one, radius."""
        radius = self.settings.get("radius")
        return f"{self.name}, {self.geometry.name}" + ("" if radius is None else f", radius {radius:g}")

    def of(
        self, model: nn.Module, loss: Loss, batches: Iterable[Any], progress: Progress | None = None
    ) -> MeasureResult:
        """The measure of a model on every batch."""
        subject = PreparedModel.of(model, loss, batches, self.geometry)
        return self.over(subject, progress)

    def over(self, subject: PreparedModel, progress: Progress | None = None) -> MeasureResult:
        """The measure on every batch of a subject that was made for its geometry."""
        tick = counted(progress, self.label, len(subject.batches) * self.ticks(subject))
        with autograd_available():
            found = tuple(self.on(subject, index, tick) for index in range(len(subject.batches)))
        return self.measurement(found)

    def measurement(self, found: tuple[BatchResult, ...]) -> MeasureResult:
        """The record of values found one by one."""
        return MeasureResult(self.name, self.geometry.name, self.settings, found, VERSION, self.geometry.to_dict())


class SharpnessWarning(UserWarning):
    """A measured value needs to be read with care; its subclasses say why."""


class TruncationWarning(SharpnessWarning):
    """Truncated geodesics were followed too far (`BatchResult.reach`): take a smaller radius, or exact geodesics."""


class ConvergenceWarning(SharpnessWarning):
    """An ascent still rose when its steps ended (`MeasureResult.late_rise`): take more steps, or a smaller radius."""


class RoundingWarning(SharpnessWarning):
    """A rise of the loss is so small that rounding decides its first digits."""


def warned(measurement: MeasureResult) -> MeasureResult:
    """The measurement, after the warnings to the caller of the public function that there are to give."""
    if measurement.truncation_warning is not None:
        warnings.warn(measurement.truncation_warning, TruncationWarning, stacklevel=3)
    if measurement.convergence_warning is not None:
        warnings.warn(measurement.convergence_warning, ConvergenceWarning, stacklevel=3)
    if measurement.rounding_warning is not None:
        warnings.warn(measurement.rounding_warning, RoundingWarning, stacklevel=3)
    return measurement


def counted(progress: Progress | None, what: str, total: int) -> Tick:
    """Return a tick that counts how often it was called and tells `progress`."""
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(what, done, total)

    return tick


def listed_batches(batches: Iterable[Any]) -> list[Any]:
    """The batches as a list; a single batch, easily passed by mistake, is refused."""
    single = isinstance(batches, tuple) and bool(batches) and all(isinstance(item, Tensor) for item in batches)
    if not isinstance(batches, Iterable):
        raise TypeError(f"batches must be a list of batches. Found {type(batches).__name__}")
    if isinstance(batches, (Tensor, Mapping, str)) or single:
        raise TypeError(f"batches must be a list of batches. Found one {type(batches).__name__}; wrap it: [batch]")
    listed = list(batches)
    if not listed:
        raise ValueError("There must be at least one batch to measure on. Found none")
    return listed


def check_radius(radius: float) -> None:
    if isinstance(radius, bool) or not isinstance(radius, (int, float)) or not 0 < radius < math.inf:
        raise ValueError(f"radius must be a positive finite number. Found {radius!r}")


def check_whole(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number, at least {least}. Found {value!r}")


def check_number(name: str, value: float, least: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < math.inf:
        raise ValueError(f"{name} must be a finite number, at least {least:g}. Found {value!r}")


def check_inner_product(name: str, geometry: Geometry) -> None:
    """Raises for a geometry whose ball is no ellipsoid: it has no inner product, so no Hessian."""
    if isinstance(geometry, Euclidean | Adaptive) and geometry.norm != "l2":
        raise ValueError(f"The {name} needs an inner product, which {geometry.name} has none of; use norm='l2'")
