"""What the demonstration found, as plain frozen records that survive a trip through JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quotient_manifolds.experiments.kept import Scores
from quotient_manifolds.experiments.zoo import Recipe
from quotient_manifolds.files import write_text
from quotient_manifolds.statistics import Correlation

FORMAT = 2  # of records.json; raise when a reader of the old form would misread the new one


@dataclass(frozen=True)
class Settings:
    """What decides the numbers of a run."""

    models: int
    seed: int
    device: str
    dtype: str
    steps: int
    radius: float
    euclidean_radius: float
    batches: int
    batch_size: int
    train_points: int
    training_steps: int | None  # None: as each recipe says
    scales: tuple[float, ...]
    resamples: int


@dataclass(frozen=True)
class Provenance:
    """How the numbers came to be; seconds of wall time by stage."""

    command: str
    version: str
    torch: str
    python: str
    platform: str
    threads: int
    trained: int  # models trained in this run; the others came from the cache
    seconds: dict[str, float]


@dataclass(frozen=True)
class Measure:
    """A sharpness measure of this run: its key in the records, its name for readers, the radius of its ball."""

    key: str
    label: str
    radius: float


@dataclass(frozen=True)
class PairRow:
    """A symmetric pair and its proof; changes relative to the largest output, in float64."""

    name: str
    kind: str
    group: str
    n: int
    m: int
    h: int
    change: float
    control: float
    verdict: str


@dataclass(frozen=True)
class OrbitRow:
    """One measure of model 0 before and after moving it along its orbit by A = scale x Gaussian, on one batch."""

    dtype: str
    measure: str
    scale: float
    before: float
    after: float
    loss_before: float
    loss_after: float

    @property
    def ratio(self) -> float:
        return self.after / self.before


@dataclass(frozen=True)
class Sharpness:
    """Mean over batches, its standard error (None for one batch), and whether truncated geodesics went too far."""

    mean: float
    standard_error: float | None
    beyond_reach: bool = False  # on some batch


@dataclass(frozen=True)
class ModelRow:
    """One model of the zoo: how it was trained, how it does, how sharp it is by each measure."""

    name: str
    recipe: Recipe
    scores: Scores
    sharpness: dict[str, Sharpness]


@dataclass(frozen=True)
class CorrelationRow:
    """How one measure ranks the zoo against one gap ("error_gap" or "loss_gap")."""

    measure: str
    gap: str
    correlation: Correlation


@dataclass(frozen=True)
class DemoResult:
    """Everything the demonstration measured; `save` and `load` are inverse to each other."""

    settings: Settings
    provenance: Provenance
    parameters: int
    measures: tuple[Measure, ...]
    pairs: tuple[PairRow, ...]
    unpaired: tuple[str, ...]
    noise: float  # relative rounding noise of the output that the proofs are judged against
    orbit: tuple[OrbitRow, ...]
    models: tuple[ModelRow, ...]
    correlations: tuple[CorrelationRow, ...]
    curves: dict[str, tuple[float, ...]]  # loss after every step of the ascent, model 0, first batch

    def measure(self, key: str) -> Measure:
        return next(measure for measure in self.measures if measure.key == key)

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> DemoResult:
        """Inverse of to_dict. Raises ValueError for another format."""
        if data.get("format") != FORMAT:
            raise ValueError(
                f"Expected records of format {FORMAT}, found {data.get('format')!r}: "
                "they were written by another version; run the demonstration again."
            )
        return DemoResult(
            settings=Settings(**{**data["settings"], "scales": tuple(data["settings"]["scales"])}),
            provenance=Provenance(**data["provenance"]),
            parameters=data["parameters"],
            measures=tuple(Measure(**row) for row in data["measures"]),
            pairs=tuple(PairRow(**row) for row in data["pairs"]),
            unpaired=tuple(data["unpaired"]),
            noise=data["noise"],
            orbit=tuple(OrbitRow(**row) for row in data["orbit"]),
            models=tuple(_model_row(row) for row in data["models"]),
            correlations=tuple(
                CorrelationRow(row["measure"], row["gap"], Correlation(**row["correlation"]))
                for row in data["correlations"]
            ),
            curves={key: tuple(losses) for key, losses in data["curves"].items()},
        )

    def save(self, path: Path) -> None:
        """Write JSON; a number that is not finite is an error, not a `NaN` that other readers refuse."""
        write_text(path, json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")

    @staticmethod
    def load(path: Path) -> DemoResult:
        """Read what `save` wrote; a directory stands for its records.json. Raises ValueError for anything else."""
        path = Path(path)
        file = path / "records.json" if path.is_dir() else path
        try:
            return DemoResult.from_dict(json.loads(file.read_text(encoding="utf-8")))
        except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{file} does not hold records of the demonstration ({type(error).__name__}: {error}); "
                "expected a records.json that it wrote."
            ) from error


def _model_row(row: Mapping[str, Any]) -> ModelRow:
    sharpness = {key: Sharpness(**value) for key, value in row["sharpness"].items()}
    return ModelRow(row["name"], Recipe(**row["recipe"]), Scores(**row["scores"]), sharpness)


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One line a row, columns as in the first row; undefined values are empty."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, buffer.getvalue())


def model_table(result: DemoResult) -> list[dict[str, Any]]:
    """A flat row a model: recipe, scores, gaps, and each measure with its standard error."""
    return [
        {"model": model.name}
        | asdict(model.recipe)
        | asdict(model.scores)
        | {"error_gap": model.scores.error_gap, "loss_gap": model.scores.loss_gap}
        | {f"{key}_sharpness": value.mean for key, value in model.sharpness.items()}
        | {f"{key}_standard_error": value.standard_error for key, value in model.sharpness.items()}
        for model in result.models
    ]


def correlation_table(result: DemoResult) -> list[dict[str, Any]]:
    """A flat row a measure and gap: tau and its interval."""
    return [
        {"measure": row.measure, "gap": row.gap, "radius": result.measure(row.measure).radius} | asdict(row.correlation)
        for row in result.correlations
    ]


def orbit_table(result: DemoResult) -> list[dict[str, Any]]:
    """A flat row a dtype, measure and scale: sharpness before and after the move."""
    return [asdict(row) | {"ratio": row.ratio} for row in result.orbit]
