"""Hold several results of one model with what was measured, as one JSON file and as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from quotient_manifolds.frames import data_frame
from quotient_manifolds.sharpness.result import Result, Setting, read_json, write_json
from quotient_manifolds.version import VERSION

if TYPE_CHECKING:
    from quotient_manifolds.frames import DataFrame

FORMAT = 1  # of the file; raise when a reader of the old form would misread the new one


@final
@dataclass(frozen=True)
class SharpnessRecord(Sequence[Result]):
    """Hold several results of one model, and what was measured.

    model, data: where they came from. settings: how the model was run and how batches were made, as dtype and
    batch_size. at: for each result what tells it from the others besides measure, geometry and settings, as the
    scale of a move along the orbit; empty where nothing does. asked: how many results were asked for, more than
    there are in the file of a run that was interrupted.
    """

    results: tuple[Result, ...]
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

    @property
    def complete(self) -> bool:
        """Say whether all results that were asked for are there."""
        return self.asked is None or len(self.results) >= self.asked

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return what a reader of the values must know, a sentence each."""
        return tuple(each.warning for each in self.results if each.warning is not None)

    @property
    def _placed(self) -> Iterator[tuple[Mapping[str, Setting | None], Result]]:
        return zip(self.at or ({},) * len(self), self.results, strict=True)

    def with_result(self, result: Result, **at: Setting | None) -> SharpnessRecord:
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
            known |= {f"geometry.{key}": value for key, value in each.geometry_settings.items()}
            known |= {f"settings.{key}": value for key, value in each.settings.items()}
            if batches:
                for index, found in enumerate(each.batches):
                    numbers = {key: value for key, value in found.to_dict().items() if key != "losses"}
                    rows.append({**known, "batch": index, **numbers})
                continue
            known |= {"mean": each.mean, "standard_error": each.standard_error, "batches": len(each.batches)}
            known |= {"base_loss": sum(each.base_losses) / len(each.batches), "late_rise": each.late_rise}
            known |= {"reach": each.reach, "beyond_reach": each.beyond_reach}
            known |= {"forward_passes": each.forward_passes, "backward_passes": each.backward_passes}
            rows.append({**known, "warning": each.warning})
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
        """Invert `to_dict`. Raises ValueError for anything else."""
        if record.get("format") != FORMAT:
            raise ValueError(f"The format of measurements must be {FORMAT}. Found {record.get('format')!r}")
        results = [dict(each) for each in record["results"]]
        places = tuple(each.pop("at", {}) for each in results)
        own = {key: record[key] for key in ("model", "data", "settings", "command", "asked", "version")}
        return cls(tuple(Result.from_dict(each) for each in results), at=places if any(places) else (), **own)

    def save(self, path: str | Path) -> None:
        """Write the record as JSON, atomically."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> SharpnessRecord:
        """Read what a command wrote. Raises ValueError, one sentence, for any other file."""
        return read_json(path, cls.from_dict)
