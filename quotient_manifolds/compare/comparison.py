"""Hold what a comparison has found: values of every checkpoint, correlations, agreement of measures, failures."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, final

import pandas as pd

from quotient_manifolds.compare.scores import GAPS, Scores
from quotient_manifolds.files import write_text
from quotient_manifolds.frames import data_frame
from quotient_manifolds.geometry import geometry_from_dict
from quotient_manifolds.sharpness.result import CONVERGED
from quotient_manifolds.statistics import FEW_MODELS, Agreement, Correlation, Kind, holm, tau_deviation
from quotient_manifolds.symmetries import Symmetries

FORMAT = 1  # of comparison.json; raise when a reader of the old form would misread the new one


@final
@dataclass(frozen=True)
class ComparedMeasure:
    """Describe a measure of a comparison: its label, that of its family (all radii), and its radius if it has one.

    measure, geometry and settings: the same, taken apart; geometry is what `geometry_from_dict` reads. None in
    comparisons of versions that did not keep them.
    """

    label: str
    family: str
    radius: float | None
    measure: str | None = None
    geometry: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] | None = None

    @property
    def geometry_name(self) -> str | None:
        """Return how tables call the geometry, without its own settings."""
        if self.geometry is None:
            return None
        given = self.geometry.get("symmetries") == "given"
        return geometry_from_dict(self.geometry, Symmetries(()) if given else None).name


@final
@dataclass(frozen=True)
class MeanValue:
    """Hold the mean over batches and its standard error (None for one batch of what is not random).

    reach: the largest relative speed of truncated geodesics, None where there are none. beyond_reach: on some batch
    that is where they may be far from the exact ones. late_rise: the share of the rise that the climbs made in the last
    quarter of their steps, None where nothing climbs. rounded: the loss changes by so little that rounding may decide.
    """

    mean: float
    standard_error: float | None
    reach: float | None = None
    beyond_reach: bool = False
    late_rise: float | None = None
    rounded: bool = False


@final
@dataclass(frozen=True)
class ComparedModel:
    """Hold the scores of a checkpoint, and each measure by its label; None where a batch of it is missing."""

    checkpoint: str
    scores: Scores
    values: Mapping[str, MeanValue | None]


@final
@dataclass(frozen=True)
class Ranking:
    """Hold the correlation of a measure with a score over all checkpoints; given: hyperparameters held fixed."""

    measure: str
    against: str
    given: tuple[str, ...]
    correlation: Correlation


@final
@dataclass(frozen=True)
class Failure:
    """Say what could not be measured on a checkpoint (what is None: anything), and why."""

    checkpoint: str
    what: str | None
    message: str


@final
@dataclass(frozen=True)
class FailureGroup:
    """Say what failed for one reason, and on which checkpoints; where `what` is empty, they failed as a whole."""

    checkpoints: tuple[str, ...]
    what: tuple[str, ...]
    message: str

    def __str__(self) -> str:
        more = len(self.checkpoints) - 4
        names = [*self.checkpoints[:3], f"and {more + 1} more"] if more > 0 else self.checkpoints
        return f"{', '.join([*names, *(['; '.join(self.what)] if self.what else [])])}: {self.message}"


@final
@dataclass(frozen=True)
class Comparison:
    """Hold what a comparison has found; `save` and `load` are inverse to each other, `frame` makes tables.

    symmetries: the function that declares those of each model, None where they are found. notes: sentences that must
    stand beside the numbers, such as how many texts were cut. measured_now: how many units were measured by the call
    that made it; not saved.
    """

    spec: str
    version: str
    command: str
    measures: tuple[ComparedMeasure, ...]
    rows: tuple[ComparedModel, ...]
    rankings: tuple[Ranking, ...]
    agreement: Agreement | None
    failures: tuple[Failure, ...]
    symmetries: str | None = None
    notes: tuple[str, ...] = ()
    measured_now: int = field(default=0, compare=False)

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the labels of all measures."""
        return tuple(each.label for each in self.measures)

    @property
    def known(self) -> tuple[int, int]:
        """Return how many values (a measure of a checkpoint) are known, and how many there could be."""
        values = [value for row in self.rows for value in row.values.values()]
        return sum(value is not None for value in values), len(values)

    @property
    def beyond_reach(self) -> tuple[str, ...]:
        """Return a sentence for every measure some of whose values come from geodesics followed beyond their reach."""
        return self._sentences(
            lambda value: value.beyond_reach and value.reach is not None,
            lambda values: f", relative speed up to {max(each.reach or 0.0 for each in values):.3g}.",
        )

    @property
    def unconverged(self) -> tuple[str, ...]:
        """Return a sentence for every measure some of whose climbs still rose at their end."""
        return self._sentences(
            lambda value: value.late_rise is not None and value.late_rise > CONVERGED,
            lambda values: (
                f", up to {max(each.late_rise or 0.0 for each in values):.0%} of the rise came in the last quarter of "
                "the steps."
            ),
        )

    @property
    def rounded(self) -> tuple[str, ...]:
        """Return a sentence for every measure some of whose values are near the rounding of the loss."""
        return self._sentences(lambda value: value.rounded, lambda values: "; take larger radii, or dtype: float64.")

    def _sentences(
        self, flagged: Callable[[MeanValue], bool], says: Callable[[list[MeanValue]], str]
    ) -> tuple[str, ...]:
        """Return for every measure with flagged values how many they are, and what is to be said of them."""
        said: list[str] = []
        for label in self.labels:
            known = [value for row in self.rows if (value := row.values[label]) is not None]
            if some := [value for value in known if flagged(value)]:
                said.append(f"{label}: {len(some)} of {len(known)} values{says(some)}")
        return tuple(said)

    @property
    def failure_groups(self) -> tuple[FailureGroup, ...]:
        """Put together what failed for one reason on a checkpoint, or alike on several."""
        found: dict[tuple[str, str], list[str]] = {}
        for each in self.failures:
            found.setdefault((each.checkpoint, each.message), []).extend([] if each.what is None else [each.what])
        alike: dict[tuple[tuple[str, ...], str], list[str]] = {}
        for (checkpoint, message), what in found.items():
            alike.setdefault((tuple(what), message), []).append(checkpoint)
        return tuple(FailureGroup(tuple(checkpoints), what, message) for (what, message), checkpoints in alike.items())

    @property
    def few_models(self) -> str | None:
        """Return a sentence where correlations are of so few models that chance alone makes large ones; else None."""
        models = [each.correlation.models for each in self.rankings if each.correlation.value is not None]
        if not models or (fewest := min(models)) >= FEW_MODELS:
            return None
        counted = f"{fewest} models" if fewest == max(models) else f"{fewest} to {max(models)} models"
        return (
            f"Correlations over {counted}: among {fewest} models that have nothing to do with a score, tau strays from "
            f"0 by {tau_deviation(fewest):.2f} (one standard deviation) by chance alone."
        )

    def corrected(self, kind: Kind) -> dict[tuple[str, str], float | None]:
        """Return Holm's corrected p-values of the correlations of one kind, by measure and score."""
        found = [each for each in self.rankings if not each.given and each.correlation.kind == kind]
        p_values = holm([each.correlation.p_value for each in found])
        return {(each.measure, each.against): p for each, p in zip(found, p_values, strict=True)}

    @property
    def against(self) -> tuple[str, ...]:
        """Return the scores that measures are compared with."""
        return tuple(dict.fromkeys(each.against for each in self.rankings))

    def column(self, name: str) -> list[Any]:
        """Return a score, or the means of a measure, in the order of the rows; None where there is none."""
        if name in self.labels:
            values = [row.values[name] for row in self.rows]
            return [None if value is None else value.mean for value in values]
        return [row.scores.get(name) for row in self.rows]

    def frame(self, rows: Literal["checkpoints", "values"] = "checkpoints") -> pd.DataFrame:
        """Return a row for every checkpoint: its scores, then mean and standard error of each measure.

        rows="values": a row for every measure of every checkpoint instead, known or not, with the columns checkpoint,
        measure, label, radius, geometry (its name), its settings as geometry.NAME (kind, metric, geodesic, eps, eta,
        norm, symmetries, ...), settings.NAME, and mean, standard_error, reach, beyond_reach, late_rise and rounded. In
        comparisons that earlier versions wrote, which did not keep them, settings are missing.
        """
        if rows not in ("checkpoints", "values"):
            raise ValueError(f"rows must be 'checkpoints' or 'values'. Found {rows!r}")
        if rows == "values":
            return data_frame([_flat(row, each) for row in self.rows for each in self.measures], ["checkpoint"])
        scores = dict.fromkeys(name for row in self.rows for name in row.scores)
        columns = {name: self.column(name) for name in scores}
        for label in self.labels:
            columns |= {label: self.column(label), f"{label}, standard error": self.errors(label)}
        return pd.DataFrame(columns, index=pd.Index([row.checkpoint for row in self.rows], name="checkpoint"))

    def errors(self, name: str) -> list[float | None]:
        """Return the standard errors of a measure's means, in the order of the rows."""
        values = [row.values[name] for row in self.rows]
        return [None if value is None else value.standard_error for value in values]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON, of which `from_dict` makes the same again."""
        record = {"format": FORMAT, **asdict(self)}
        del record["measured_now"]
        return record

    def save(self, path: str | Path) -> None:
        """Write comparison.json, whole or not at all."""
        write_text(Path(path), json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Comparison:
        """Return what `to_dict` was called on. Raises ValueError for another format."""
        if record.get("format") != FORMAT:
            raise ValueError(f"Expected a comparison of format {FORMAT}. Found {record.get('format')!r}; compare again")
        agreement = record["agreement"]
        return cls(
            spec=record["spec"],
            version=record["version"],
            command=record["command"],
            measures=tuple(ComparedMeasure(**each) for each in record["measures"]),
            rows=tuple(_row(each) for each in record["rows"]),
            rankings=tuple(_ranking(each) for each in record["rankings"]),
            agreement=None if agreement is None else _agreement(agreement),
            # Called troubles by versions before 0.2.
            failures=tuple(Failure(**each) for each in record.get("failures", record.get("troubles"))),
            symmetries=record.get("symmetries"),
            notes=tuple(record.get("notes", ())),
        )

    @classmethod
    def load(cls, path: str | Path) -> Comparison:
        """Read comparison.json, or that of a directory. Raises ValueError for anything else."""
        path = Path(path)
        file = path / "comparison.json" if path.is_dir() else path
        try:
            return cls.from_dict(json.loads(file.read_text(encoding="utf-8")))
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"{file} holds no comparison ({type(error).__name__}: {error})") from error


def _flat(row: ComparedModel, named: ComparedMeasure) -> dict[str, Any]:
    value = row.values[named.label]
    numbers = dict.fromkeys(each.name for each in fields(MeanValue)) if value is None else asdict(value)
    settings = {key: each for key, each in (named.settings or {}).items() if key != "radius"}
    return {
        "checkpoint": row.checkpoint,
        "measure": named.measure,
        "label": named.label,
        "radius": named.radius,
        "geometry": named.geometry_name,
        **{f"geometry.{key}": each for key, each in (named.geometry or {}).items()},
        **{f"settings.{key}": each for key, each in settings.items()},
        **numbers,
    }


def default_targets(rows: Sequence[ComparedModel], given: Sequence[str]) -> tuple[str, ...]:
    """Return what measures are compared with by default: the gaps, else every score that is a number and varies."""
    columns = {name: [row.scores.get(name) for row in rows] for each in rows for name in each.scores}
    if gaps := tuple(gap for gap in GAPS if gap in columns):
        return gaps
    return tuple(
        name
        for name, values in columns.items()
        if name not in given
        and len({value for value in values if value is not None}) > 1
        and all(isinstance(value, float) for value in values if value is not None)
    )


def _row(record: Mapping[str, Any]) -> ComparedModel:
    values = {label: None if value is None else MeanValue(**value) for label, value in record["values"].items()}
    return ComparedModel(record["checkpoint"], record["scores"], values)


def _ranking(record: Mapping[str, Any]) -> Ranking:
    correlation = Correlation(**record["correlation"])
    return Ranking(record["measure"], record["against"], tuple(record["given"]), correlation)


def _agreement(record: Mapping[str, Any]) -> Agreement:
    tables = {key: tuple(map(tuple, record[key])) for key in ("values", "models")}
    return Agreement(**{**record, **tables, "names": tuple(record["names"])})
