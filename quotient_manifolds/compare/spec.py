"""What to compare: a YAML file, checked, with the line of whatever is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from quotient_manifolds.compare.document import Document, Place, read_yaml
from quotient_manifolds.compare.measures import Measured, measures_of
from quotient_manifolds.load import Checkpoint, DataSource, find_checkpoints

Kind = Literal[
    "worst-case",
    "average-case",
    "legacy-worst-case",
    "gradient-norm",
    "hessian-trace",
    "top-eigenvalue",
    "relative-flatness",
]


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


Paths = Annotated[list[str], BeforeValidator(_as_list), Field(min_length=1)]


class _Section(BaseModel):
    """Keys that are not known are errors, and nothing is taken for what it is not."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@final
class CheckpointSection(_Section):
    """Which checkpoints, by patterns of paths, and how they are loaded."""

    paths: Paths
    loader: str = "huggingface"


@final
class DataSection(_Section):
    """Labelled examples, read in order, cut into batches."""

    path: str
    format: str = "auto"
    batch_size: PositiveInt = 32
    max_batches: PositiveInt | None = None
    seed: int | None = None
    labels: dict[str, int] | list[int] | None = None
    max_length: PositiveInt | None = None
    tokenizer: str | None = None
    columns: dict[str, str] | None = None
    size: PositiveInt | None = None
    channels: int | None = None
    mean: list[float] | str | None = None
    std: list[PositiveFloat] | None = None


@final
class MeasureSection(_Section):
    """One kind of measure, in one or several geometries, at one or several radii."""

    measure: Kind
    geometry: Annotated[list[str | float], BeforeValidator(_as_list)] = Field(default_factory=list)
    radius: Annotated[list[PositiveFloat], BeforeValidator(_as_list)] = Field(default_factory=list)
    warm_start: bool = False
    normalise_logits: bool = False
    norm: str | None = None
    eta: float | None = None
    geodesic: str | None = None
    eps: float | None = None
    biases: str | None = None
    steps: PositiveInt | None = None
    restarts: int | None = None
    tolerance: float | None = None
    samples: PositiveInt | None = None
    products: str | None = None
    layer: str | None = None
    method: str | None = None
    seed: int | None = None

    def made(self) -> list[Measured]:
        """Raises ValueError for settings that do not belong together."""
        taken = {"measure", "geometry", "radius", "warm_start", "normalise_logits"}
        options = {key: value for key, value in self if key not in taken and value is not None}
        return list(
            measures_of(
                self.measure,
                self.geometry,
                self.radius,
                warm_start=self.warm_start,
                normalise_logits=self.normalise_logits,
                options=options,
            )
        )


@final
class _Top(_Section):
    checkpoints: CheckpointSection
    data: DataSection
    test: DataSection | None = None
    scores: str | None = None
    measures: list[MeasureSection] = Field(min_length=1)
    against: list[str] = Field(default_factory=list)
    given: list[str] = Field(default_factory=list)
    dtype: Literal["float32", "float64"] = "float32"


@final
@dataclass(frozen=True)
class Spec:
    """A comparison, ready to run.

    checkpoints: those that the patterns match. data: what the measures see. test: what the gaps are taken to. scores: a
    CSV file with a column `checkpoint` and numbers. against: columns the measures are correlated with, all if none is
    named; given: hyperparameters held fixed in partial correlations.
    """

    path: Path
    checkpoints: tuple[Checkpoint, ...]
    data: DataSource
    test: DataSource | None
    scores: Path | None
    measures: tuple[Measured, ...]
    against: tuple[str, ...]
    given: tuple[str, ...]
    dtype: str


def read_spec(path: str | Path) -> Spec:
    """The comparison that a YAML file describes; its paths are relative to the file.

    Raises ValueError, one sentence with the line, for unknown keys, values of a wrong kind, settings that do not belong
    together, and patterns that match nothing.
    """
    document = read_yaml(Path(path))
    top = _validated(document)
    base = Path(path).resolve().parent
    with _at(document, ("checkpoints",)):
        checkpoints = find_checkpoints(top.checkpoints.paths, top.checkpoints.loader, base)
    measures: list[Measured] = []
    for index, section in enumerate(top.measures):
        with _at(document, ("measures", index)):
            measures += section.made()
    _check_distinct(document, measures)
    return Spec(
        path=Path(path),
        checkpoints=checkpoints,
        data=_source(document, "data", top.data, base),
        test=None if top.test is None else _source(document, "test", top.test, base),
        scores=None if top.scores is None else base / top.scores,
        measures=tuple(measures),
        against=tuple(top.against),
        given=tuple(top.given),
        dtype=top.dtype,
    )


def _validated(document: Document) -> _Top:
    if not isinstance(document.content, dict):
        raise ValueError(f"{document.path} must hold the keys {', '.join(_Top.model_fields)}. Found no mapping.")
    try:
        return _Top.model_validate(document.content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = tuple(first["loc"])
        where = ".".join(map(str, place))
        if first["type"] == "extra_forbidden":
            known = ", ".join(_keys_beside(place))
            said = f"unknown key {place[-1]!r}; the keys here are {known}"
        elif first["type"] == "missing":
            said = f"{where} is missing"
        else:
            said = f"{where}: {first['msg'][0].lower()}{first['msg'][1:]}. Found {first['input']!r}"
        raise ValueError(f"{document.path}, line {document.line(place)}: {said}") from None


def _keys_beside(place: Place) -> list[str]:
    sections: dict[str, type[BaseModel]] = {
        "checkpoints": CheckpointSection,
        "data": DataSection,
        "test": DataSection,
        "measures": MeasureSection,
    }
    section: type[BaseModel] = sections[str(place[0])] if len(place) > 1 else _Top
    return list(section.model_fields)


@contextmanager
def _at(document: Document, place: Place) -> Iterator[None]:
    """What is wrong inside is said with the line of `place`."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ValueError(f"{document.path}, line {document.line(place)}: {error}") from error


def _check_distinct(document: Document, measures: list[Measured]) -> None:
    seen: set[str] = set()
    for each in measures:
        if each.label in seen:
            raise ValueError(f"{document.path}: {each.label} is asked for twice")
        seen.add(each.label)


def _source(document: Document, key: str, section: DataSection, base: Path) -> DataSource:
    settings = section.model_dump()
    settings["path"] = base / section.path
    if section.tokenizer is not None:
        settings["tokenizer"] = base / section.tokenizer
    with _at(document, (key,)):
        return DataSource(**settings)
