"""What every measure but the worst case returns, and what is checked before any of them begins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch import nn

from quotient_manifolds.geometry import Geometry, TangentSpace
from quotient_manifolds.sharpness.losses import Loss
from quotient_manifolds.sharpness.objective import LossOf, Progress, check_deterministic, check_model
from quotient_manifolds.sharpness.result import Record, mean_and_error
from quotient_manifolds.sharpness.worst_case import listed_batches
from quotient_manifolds.version import VERSION

Setting = str | int | float | bool


@final
@dataclass(frozen=True)
class Measurement(Record):
    """One measure of one model: per batch, and its mean over batches.

    standard_error: of the mean. Over batches if there are several; random directions are drawn anew for each, so their
    scatter is in it. For a single batch that of the directions alone, None where nothing is random. errors: per batch,
    what the value itself is uncertain by: the standard error over the directions drawn, or the residual of an
    eigenpair; empty for what is exact. base_losses: L(w). settings: the other arguments of the call.
    """

    kind: ClassVar[str] = "measurement"

    measure: str
    mean: float
    standard_error: float | None
    values: tuple[float, ...]
    errors: tuple[float, ...]
    base_losses: tuple[float, ...]
    geometry: str
    settings: Mapping[str, Setting]
    forward_passes: int
    backward_passes: int
    version: str

    def __str__(self) -> str:
        error = "" if self.standard_error is None else f" +- {self.standard_error:.3g}"
        stated = [f"{len(self.values)} batches", *(f"{key} {value}" for key, value in self.settings.items())]
        return f"{self.geometry} {self.measure} {self.mean:.6g}{error} ({', '.join(stated)})"


@final
@dataclass(frozen=True)
class Subject:
    """A model, its loss and its batches, checked and ready to be measured in one geometry."""

    loss: LossOf
    space: TangentSpace
    batches: list[Any]
    geometry: str

    @classmethod
    def of(cls, model: nn.Module, loss: Loss, batches: Iterable[Any], geometry: Geometry) -> Subject:
        """Raises ValueError or TypeError, one sentence, for a model, loss or batches that cannot be measured."""
        check_model(model)
        listed = listed_batches(batches)
        space = geometry.at(model)
        objective = LossOf(model, loss)
        check_deterministic(objective, space.point, listed[0])
        proved = geometry.proved(model, loss, listed[0])
        return cls(objective, space if proved == geometry else proved.at(model), listed, geometry.name)


def measured(
    measure: str,
    values: list[float],
    base_losses: list[float],
    geometry: str,
    *,
    passes: tuple[int, int],
    errors: list[float] | None = None,
    sampled: bool = False,
    **settings: Setting,
) -> Measurement:
    """The record; the error of a single sampled batch is that of its directions."""
    errors = errors or []
    mean, error = mean_and_error(values)
    return Measurement(
        measure=measure,
        mean=mean,
        standard_error=errors[0] if error is None and sampled else error,
        values=tuple(values),
        errors=tuple(errors),
        base_losses=tuple(base_losses),
        geometry=geometry,
        settings=settings,
        forward_passes=passes[0],
        backward_passes=passes[1],
        version=VERSION,
    )


def counted(progress: Progress | None, total: int) -> Callable[[], None]:
    """A tick that calls progress(done, total)."""
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    return tick


def check_whole(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number, at least {least}. Found {value!r}")
