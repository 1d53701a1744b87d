"""Hold what a measure returns: its value on every batch, the mean over them, and the JSON files that keep them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from quotient_manifolds.files import write_text
from quotient_manifolds.frames import data_frame
from quotient_manifolds.version import VERSION

if TYPE_CHECKING:
    from quotient_manifolds.frames import DataFrame

Setting = str | int | float | bool

FORMAT = 1  # of the file; raise when a reader of the old form would misread the new one

RESOLVED = 100.0
"""The change of the loss, over the spacing of its numbers, from which on about two digits are not rounding."""

CONVERGED = 0.05
"""The share of the rise in the last quarter of the steps up to which an ascent counts as converged."""


@final
@dataclass(frozen=True)
class BatchResult:
    """Hold one measure of one model on one batch, in plain numbers.

    value: the measure. base_loss: L(w). standard_error: of the value, over the random directions drawn. residual:
    |H v - value v| of an eigenpair. losses: those of the best climb, its start first. norm: the length of the worst
    direction in the ball's own norm. critical_start: the gradient at w was exactly 0, so the ascent began in a random
    direction. reach: the largest relative velocity at the start of the truncated geodesics of a quotient geometry, in
    the direction the value comes from. reach_limit: above it they may be far from the exact ones, and the value is of
    something else. spacing: of the floating point numbers that the loss is computed in, at L(w). The passes
    are the measure's own, without the checks before it.
    """

    value: float
    base_loss: float
    forward_passes: int
    backward_passes: int
    standard_error: float | None = None
    residual: float | None = None
    losses: tuple[float, ...] = ()
    norm: float | None = None
    critical_start: bool = False
    reach: float | None = None
    reach_limit: float | None = None
    spacing: float | None = None

    @property
    def beyond_reach(self) -> bool:
        """Say whether truncated geodesics were followed further than their reach."""
        return self.reach is not None and self.reach_limit is not None and self.reach > self.reach_limit

    @property
    def late_rise(self) -> float | None:
        """Return how much of the rise of the best climb its last quarter of steps made; None where nothing climbed.

        A climb that still rises there has not converged: the maximum is larger than what was found.
        """
        steps = len(self.losses) - 1
        if steps < 1:
            return None
        early = self.losses[: len(self.losses) - math.ceil(steps / 4)]
        return max(0.0, max(self.losses) - max(*early, self.base_loss))

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {**asdict(self), "losses": list(self.losses)}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> BatchResult:
        """Invert `to_dict`. Raises ValueError for missing or unknown keys; reach and spacing may be missing."""
        record = {"reach": None, "reach_limit": None, "spacing": None, **record}
        _check_keys("value on a batch", {each.name for each in fields(cls)}, record)
        return cls(**{**record, "losses": tuple(record["losses"])})


@final
@dataclass(frozen=True)
class MeasureResult:
    """Hold one measure of one model: what it is on every batch, and its mean over batches.

    geometry: its name, as tables show it; geometry_settings: what it is, for `geometry_from_dict` (None in records of
    versions that did not keep it). settings: the other arguments of the call. `save` and `load` are inverse to each
    other.
    """

    measure: str
    geometry: str
    settings: Mapping[str, Setting]
    batches: tuple[BatchResult, ...]
    version: str
    geometry_settings: Mapping[str, Setting] | None = None

    @property
    def values(self) -> tuple[float, ...]:
        """Return the measure on every batch."""
        return tuple(each.value for each in self.batches)

    @property
    def base_losses(self) -> tuple[float, ...]:
        """Return L(w) on every batch."""
        return tuple(each.base_loss for each in self.batches)

    @property
    def mean(self) -> float:
        """Return the mean over batches, each counting the same."""
        return mean_and_error(self.values)[0]

    @property
    def standard_error(self) -> float | None:
        """Return the standard error of the mean.

        It is that over batches if there are several: random directions are drawn anew for each, so their scatter is in
        it. For a single batch that of the directions alone, None where nothing is random.
        """
        error = mean_and_error(self.values)[1]
        return self.batches[0].standard_error if error is None else error

    @property
    def errors(self) -> tuple[float | None, ...]:
        """Return by what every batch's own value is uncertain: standard error over directions, residual, or None."""
        return tuple(each.residual if each.standard_error is None else each.standard_error for each in self.batches)

    @property
    def loss_steps(self) -> tuple[tuple[float, ...], ...]:
        """Return, for every batch, the losses of the best climb, its start first."""
        return tuple(each.losses for each in self.batches)

    @property
    def norms(self) -> tuple[float | None, ...]:
        """Return, for every batch, the length of the worst direction."""
        return tuple(each.norm for each in self.batches)

    @property
    def critical_starts(self) -> tuple[int, ...]:
        """Return which batches have a gradient at w that is exactly 0."""
        return tuple(index for index, each in enumerate(self.batches) if each.critical_start)

    @property
    def reach(self) -> float | None:
        """Return the largest `BatchResult.reach`; None where no geodesic is truncated."""
        return max((each.reach for each in self.batches if each.reach is not None), default=None)

    @property
    def beyond_reach(self) -> tuple[int, ...]:
        """Return on which batches truncated geodesics may be far from the exact ones."""
        return tuple(index for index, each in enumerate(self.batches) if each.beyond_reach)

    @property
    def late_rise(self) -> float | None:
        """Return the share of the rise, over all batches, that the climbs made in the last quarter of their steps.

        None where nothing was climbed or nothing rose.
        """
        climbed = [each for each in self.batches if each.late_rise is not None]
        rise = math.fsum(max(0.0, max(each.losses) - each.base_loss) for each in climbed)
        return math.fsum(each.late_rise or 0.0 for each in climbed) / rise if rise > 0 else None

    @property
    def forward_passes(self) -> int:
        """Return how often the model was evaluated, on all batches."""
        return sum(each.forward_passes for each in self.batches)

    @property
    def backward_passes(self) -> int:
        """Return how often the loss was differentiated, on all batches."""
        return sum(each.backward_passes for each in self.batches)

    @property
    def truncation_warning(self) -> str | None:
        """Return a sentence if truncated geodesics were followed further than they reach, else None."""
        beyond = [self.batches[index] for index in self.beyond_reach]
        if not beyond:
            return None
        return (
            f"{self._label}: on {len(beyond)} of {len(self.batches)} batches geodesics were followed to relative speed "
            f"{self.reach:.3g}, beyond {beyond[0].reach_limit:g}, where their Taylor polynomials may be far off; take "
            f"a smaller radius, or geodesic='exact', or ask truncation_error how far"
        )

    @property
    def convergence_warning(self) -> str | None:
        """Return a sentence if the climbs still rose by more than `CONVERGED` of the rise at their end, else None."""
        share = self.late_rise
        if share is None or not share > CONVERGED:
            return None
        return (
            f"{self._label}: {share:.0%} of the rise came in the last quarter of the steps, above {CONVERGED:.0%}, so "
            f"the ascent has not converged and the maximum is larger; take more steps, or a smaller radius"
        )

    @property
    def rounding_warning(self) -> str | None:
        """Return a sentence if the values are less than `RESOLVED` spacings of the loss, else None."""
        spaced = [each for each in self.batches if each.spacing]
        rise = math.fsum(abs(max(each.losses) - each.base_loss if each.losses else each.value) for each in spaced)
        spacing = math.fsum(each.spacing or 0.0 for each in spaced)
        if not spaced or not rise < RESOLVED * spacing:
            return None
        return (
            f"{self._label}: the loss changes by {rise / spacing:.2g} times the spacing of its floating point numbers, "
            f"less than {RESOLVED:g}, so rounding may decide the digits; take a larger radius, or float64"
        )

    @property
    def warning(self) -> str | None:
        """Return all that a reader of the value must know, on one line; None if nothing."""
        sentences = (self.truncation_warning, self.convergence_warning, self.rounding_warning)
        return ". ".join(filter(None, sentences)) or None

    @property
    def _label(self) -> str:
        return f"{self.geometry} {self.measure} at radius {self.settings['radius']:g}"

    def __str__(self) -> str:
        error = "" if self.standard_error is None else f" +- {self.standard_error:.3g}"
        stated = [f"{len(self.batches)} batches", *(f"{key} {value}" for key, value in self.settings.items())]
        if self.beyond_reach:
            stated.append(f"beyond reach on {len(self.beyond_reach)} of them, at relative speed {self.reach:.3g}")
        return f"{self.geometry} {self.measure} {self.mean:.6g}{error} ({', '.join(stated)})"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types, with the mean and its error for whoever reads the file."""
        return {
            "measure": self.measure,
            "geometry": self.geometry,
            "geometry_settings": None if self.geometry_settings is None else dict(self.geometry_settings),
            "settings": dict(self.settings),
            "mean": self.mean,
            "standard_error": self.standard_error,
            "batches": [each.to_dict() for each in self.batches],
            "version": self.version,
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> MeasureResult:
        """Invert `to_dict`. Raises ValueError if other keys than geometry_settings are missing."""
        if "results" in record:
            raise ValueError("This is a record of several measurements: read it with SharpnessRecord.load")
        record = {"geometry_settings": None, **record}
        stored = {each.name for each in fields(cls)}
        _check_keys("measurement", stored | {"mean", "standard_error"}, record)
        batches = tuple(BatchResult.from_dict(each) for each in record["batches"])
        return cls(**{**{key: record[key] for key in stored}, "batches": batches})

    def save(self, path: str | Path) -> None:
        """Write the record as JSON, whole or not at all."""
        _write(self.to_dict(), path)

    @classmethod
    def load(cls, path: str | Path) -> MeasureResult:
        """Read what `save` wrote. Raises ValueError for a file that is not the JSON of a measurement."""
        return cls.from_dict(_read(path))


@final
@dataclass(frozen=True)
class SharpnessRecord(Sequence[MeasureResult]):
    """Hold several results of one model, and what was measured; `save` and `load` are inverse to each other.

    model, data: where they came from. settings: how the model was run and how batches were made, as dtype and
    batch_size. at: for each result what tells it from the others besides measure, geometry and settings, as the
    scale of a move along the orbit; empty where nothing does. asked: how many results were asked for, more than
    there are in the file of a run that was interrupted.
    """

    results: tuple[MeasureResult, ...]
    model: str
    data: str | None = None
    settings: Mapping[str, Setting | None] = field(default_factory=dict)
    command: str | None = None
    at: tuple[Mapping[str, Setting | None], ...] = ()
    asked: int | None = None
    version: str = VERSION

    def __post_init__(self) -> None:
        if self.at and len(self.at) != len(self.results):
            raise ValueError(f"at must be as many as the {len(self.results)} measurements. Found {len(self.at)}")

    def __len__(self) -> int:
        return len(self.results)

    def __getitem__(self, index: Any) -> Any:
        return self.results[index]

    def __iter__(self) -> Iterator[MeasureResult]:
        return iter(self.results)

    @property
    def complete(self) -> bool:
        """Say whether all results that were asked for are there."""
        return self.asked is None or len(self.results) >= self.asked

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return what a reader of the values must know, a sentence each."""
        return tuple(each.warning for each in self.results if each.warning is not None)

    @property
    def _placed(self) -> Iterator[tuple[Mapping[str, Setting | None], MeasureResult]]:
        return zip(self.at or ({},) * len(self), self.results, strict=True)

    def with_result(self, result: MeasureResult, **at: Setting | None) -> SharpnessRecord:
        """Return these and one more; `at` says what tells it from the others."""
        places = (*(place for place, _ in self._placed), at)
        return replace(self, results=(*self.results, result), at=places if any(places) else ())

    def frame(self, *, batches: bool = False) -> DataFrame:
        """Return a row for every result, or with `batches` for every result on every batch.

        Columns: model, what `at` says, measure, geometry, `geometry.NAME` for its settings, `settings.NAME` for those
        of the measure, and the numbers: mean, standard_error, ..., or value, base_loss, ... on the batch. Raises
        ImportError where pandas is not installed.
        """
        rows: list[dict[str, Any]] = []
        for place, each in self._placed:
            known = {"model": self.model, **place, "measure": each.measure, "geometry": each.geometry}
            known |= {f"geometry.{key}": value for key, value in (each.geometry_settings or {}).items()}
            known |= {f"settings.{key}": value for key, value in each.settings.items()}
            if not batches:
                rows.append({**known, **_summary(each)})
                continue
            for index, found in enumerate(each.batches):
                numbers = {key: value for key, value in found.to_dict().items() if key != "losses"}
                rows.append({**known, "batch": index, **numbers})
        return data_frame(rows, ["model", "measure", "geometry"])

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {
            "format": FORMAT,
            "version": self.version,
            "command": self.command,
            "model": self.model,
            "data": self.data,
            "settings": dict(self.settings),
            "asked": len(self) if self.asked is None else self.asked,
            "results": [{**each.to_dict(), **({"at": dict(at)} if at else {})} for at, each in self._placed],
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> SharpnessRecord:
        """Invert `to_dict`; the files of earlier versions and a single `MeasureResult` are read too.

        Raises ValueError for anything else.
        """
        if "batches" in record:
            return cls((MeasureResult.from_dict(record),), model="", version=str(record.get("version")))
        if "results" not in record or "model" not in record:
            old = "; it holds ratios along an orbit as earlier versions wrote them: measure again"
            raise ValueError(
                f"Not a record of measurements: expected model and results, found {sorted(record)}"
                f"{old if 'rows' in record else ''}"
            )
        if record.get("format", FORMAT) != FORMAT:
            raise ValueError(f"Expected measurements of format {FORMAT}. Found {record['format']!r}")
        results = [dict(each) for each in record["results"]]
        places = tuple(each.pop("at", {}) for each in results)
        # Before there was a format, settings stood beside the results.
        apart = {"version", "model", "data", "results"}
        settings = record.get("settings", {key: value for key, value in record.items() if key not in apart})
        return cls(
            tuple(MeasureResult.from_dict(each) for each in results),
            model=record["model"],
            data=record.get("data"),
            settings=settings,
            command=record.get("command"),
            at=places if any(places) else (),
            asked=record.get("asked", len(results)),
            version=record["version"],
        )

    def save(self, path: str | Path) -> None:
        """Write the record as JSON, whole or not at all."""
        _write(self.to_dict(), path)

    @classmethod
    def load(cls, path: str | Path) -> SharpnessRecord:
        """Read what `save` or a command wrote. Raises ValueError, one sentence, for any other file."""
        record = _read(path)
        try:
            return cls.from_dict(record)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} holds no measurements: {error}") from error


def _summary(result: MeasureResult) -> dict[str, Any]:
    return {
        "mean": result.mean,
        "standard_error": result.standard_error,
        "batches": len(result.batches),
        "base_loss": sum(result.base_losses) / len(result.batches),
        "late_rise": result.late_rise,
        "reach": result.reach,
        "beyond_reach": len(result.beyond_reach),
        "forward_passes": result.forward_passes,
        "backward_passes": result.backward_passes,
        "warning": result.warning,
    }


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and its standard error s / sqrt(n), s the sample standard deviation; None for n = 1."""
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return mean, None
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)


def _write(record: Mapping[str, Any], path: str | Path) -> None:
    """Write a JSON file; a number that is not finite is a ValueError."""
    write_text(Path(path), json.dumps(record, indent=1, allow_nan=False) + "\n")


def _read(path: str | Path) -> dict[str, Any]:
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{path} must hold one JSON object. Found {type(record).__name__}")
    return record


def _check_keys(kind: str, expected: set[str], record: Mapping[str, Any]) -> None:
    if set(record) != expected:
        missing, unknown = sorted(expected - set(record)), sorted(set(record) - expected)
        raise ValueError(f"Not a record of a {kind}: missing {missing}, unknown {unknown}")
