"""Several measurements of one model: the file that the commands write, and the frame that is made of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final, overload

from quotient_manifolds.files import write_text
from quotient_manifolds.frames import data_frame
from quotient_manifolds.sharpness.measurement import Measurement, OnBatch, Setting, read_record, to_json
from quotient_manifolds.version import VERSION

if TYPE_CHECKING:
    from quotient_manifolds.frames import DataFrame

FORMAT = 1  # of the file; raise when a reader of the old form would misread the new one


@final
@dataclass(frozen=True)
class Measurements(Sequence[Measurement]):
    """Measurements of one model, and what was measured; `save` and `load` are inverse to each other.

    model, data: where they came from. settings: how the model was run and how batches were made, as dtype and
    batch_size. at: for each measurement what tells it from the others besides measure, geometry and settings, as the
    scale of a move along the orbit; empty where nothing does. asked: how many measurements were asked for, more than
    there are in the file of a run that was interrupted.
    """

    measurements: tuple[Measurement, ...]
    model: str
    data: str | None = None
    settings: Mapping[str, Setting | None] = field(default_factory=dict)
    command: str | None = None
    at: tuple[Mapping[str, Setting | None], ...] = ()
    asked: int | None = None
    version: str = VERSION

    def __post_init__(self) -> None:
        if self.at and len(self.at) != len(self.measurements):
            raise ValueError(f"at must be as many as the {len(self.measurements)} measurements. Found {len(self.at)}")

    def __len__(self) -> int:
        return len(self.measurements)

    @overload
    def __getitem__(self, index: int) -> Measurement: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Measurement, ...]: ...

    def __getitem__(self, index: int | slice) -> Measurement | tuple[Measurement, ...]:
        return self.measurements[index]

    def __iter__(self) -> Iterator[Measurement]:
        return iter(self.measurements)

    @property
    def complete(self) -> bool:
        """Whether all measurements that were asked for are there."""
        return self.asked is None or len(self.measurements) >= self.asked

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader of the values must know, a sentence each."""
        return tuple(each.warning for each in self.measurements if each.warning is not None)

    def with_one(self, found: Measurement, **at: Setting | None) -> Measurements:
        """Return these and one more; `at` says what tells it from the others."""
        places = (*(self.at or ({},) * len(self)), at)
        return replace(self, measurements=(*self.measurements, found), at=places if any(places) else ())

    def frame(self, *, batches: bool = False) -> DataFrame:
        """Return a row for every measurement, or with `batches` for every measurement on every batch.

        Columns: model, what `at` says, measure, geometry, `geometry.NAME` for its settings, `settings.NAME` for those
        of the measure, and the numbers: mean, standard_error, ..., or value, base_loss, ... on the batch. Raises
        ImportError where pandas is not installed.
        """
        places: Sequence[Mapping[str, Any]] = self.at or [{} for _ in self.measurements]
        rows: list[dict[str, Any]] = []
        for place, each in zip(places, self.measurements, strict=True):
            known = {"model": self.model, **place, **_identity(each)}
            if batches:
                rows += [{**known, "batch": index, **_numbers(found)} for index, found in enumerate(each.batches)]
            else:
                rows.append({**known, **_summary(each)})
        return data_frame(rows, ["model", "measure", "geometry"])

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        places: Sequence[Mapping[str, Any]] = self.at or [{} for _ in self.measurements]
        return {
            "format": FORMAT,
            "version": self.version,
            "command": self.command,
            "model": self.model,
            "data": self.data,
            "settings": dict(self.settings),
            "asked": len(self) if self.asked is None else self.asked,
            "results": [
                {**each.to_dict(), **({"at": dict(place)} if place else {})}
                for place, each in zip(places, self.measurements, strict=True)
            ],
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Measurements:
        """Return the inverse of `to_dict`; the files of earlier versions and a single `Measurement` are read too.

        Raises ValueError for anything else.
        """
        if "batches" in record:
            return cls((Measurement.from_dict(record),), model="", version=str(record.get("version")))
        if "results" not in record or "model" not in record:
            old = (
                "; it holds ratios along an orbit as earlier versions wrote them: measure again"
                if "rows" in record
                else ""
            )
            raise ValueError(f"Not a record of measurements: expected model and results, found {sorted(record)}{old}")
        if record.get("format", FORMAT) != FORMAT:
            raise ValueError(f"Expected measurements of format {FORMAT}. Found {record['format']!r}")
        results = [dict(each) for each in record["results"]]
        places = tuple(each.pop("at", {}) for each in results)
        # Before there was a format, settings stood beside the results.
        apart = {"version", "model", "data", "results"}
        settings = record.get("settings", {key: value for key, value in record.items() if key not in apart})
        return cls(
            tuple(Measurement.from_dict(each) for each in results),
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
        write_text(Path(path), to_json(self.to_dict()))

    @classmethod
    def load(cls, path: str | Path) -> Measurements:
        """Read what `save` or a command wrote. Raises ValueError, one sentence, for any other file."""
        record = read_record(path)
        try:
            return cls.from_dict(record)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} holds no measurements: {error}") from error


def _identity(each: Measurement) -> dict[str, Any]:
    geometry = {f"geometry.{key}": value for key, value in (each.geometry_settings or {}).items()}
    settings = {f"settings.{key}": value for key, value in each.settings.items()}
    return {"measure": each.measure, "geometry": each.geometry, **geometry, **settings}


def _summary(each: Measurement) -> dict[str, Any]:
    return {
        "mean": each.mean,
        "standard_error": each.standard_error,
        "batches": len(each.batches),
        "base_loss": sum(each.base_losses) / len(each.batches),
        "late_rise": each.late_rise,
        "reach": each.reach,
        "beyond_reach": len(each.beyond_reach),
        "forward_passes": each.forward_passes,
        "backward_passes": each.backward_passes,
        "warning": each.warning,
    }


def _numbers(found: OnBatch) -> dict[str, Any]:
    record = found.to_dict()
    return {key: value for key, value in record.items() if key != "losses"}
