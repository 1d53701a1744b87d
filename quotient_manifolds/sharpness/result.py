"""What a measurement of sharpness returns, and how it is kept as JSON."""

from __future__ import annotations

import abc
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, final

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Record(abc.ABC):
    """Numbers, strings and tuples of them that survive a trip through JSON."""

    kind: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types: tuples become lists."""
        return {key: _as_lists(value) for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Self:
        """The inverse of `to_dict`. Raises ValueError if keys are missing or unknown."""
        expected = {field.name for field in fields(cls)}
        if set(record) != expected:
            missing, unknown = sorted(expected - set(record)), sorted(set(record) - expected)
            raise ValueError(f"Not a record of a {cls.kind}: missing {missing}, unknown {unknown}")
        return cls(**{key: _as_tuples(value) for key, value in record.items()})

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Raises ValueError for a file that is not the JSON of such a record."""
        try:
            record = json.loads(Path(path).read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
        if not isinstance(record, dict):
            raise ValueError(f"{path} must hold one JSON object. Found {type(record).__name__}")
        return cls.from_dict(record)


@final
@dataclass(frozen=True)
class SharpnessResult(Record):
    """Worst-case sharpness: per batch, and its mean over batches.

    values: max over the ball of L(gamma(1)) - L(w) on each batch on its own. standard_error: of the mean over batches,
    None for a single batch. base_losses: L(w). loss_steps: the losses of the best climb per batch, start first (steps
    + 1 numbers). norms: metric norm of the worst direction. critical_starts: the batches whose gradient at w was
    exactly 0, so that their ascent began in a random direction.
    """

    kind: ClassVar[str] = "sharpness result"

    mean: float
    standard_error: float | None
    values: tuple[float, ...]
    base_losses: tuple[float, ...]
    loss_steps: tuple[tuple[float, ...], ...]
    norms: tuple[float, ...]
    critical_starts: tuple[int, ...]
    forward_passes: int
    backward_passes: int
    geometry: str
    radius: float
    steps: int
    restarts: int
    seed: int
    version: str

    def __str__(self) -> str:
        error = "" if self.standard_error is None else f" +- {self.standard_error:.3g}"
        return (
            f"{self.geometry} worst-case sharpness {self.mean:.6g}{error} "
            f"(radius {self.radius:g}, {len(self.values)} batches, {self.steps} steps)"
        )


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and its standard error s / sqrt(n), with s the sample standard deviation; None for n = 1."""
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return mean, None
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)


def _as_lists(value: Any) -> Any:
    return [_as_lists(item) for item in value] if isinstance(value, tuple) else value


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list) else value
