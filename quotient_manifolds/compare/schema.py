"""The keys of a spec and what may stand under each, and a sentence with the line for what may not."""

from __future__ import annotations

from typing import Annotated, Any, Literal, final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat, PositiveFloat, ValidationError
from pydantic_core import ErrorDetails

from quotient_manifolds.compare.document import Document, Place

Kind = Literal[
    "worst-case",
    "average-case",
    "legacy-worst-case",
    "gradient-norm",
    "hessian-trace",
    "top-eigenvalue",
    "relative-flatness",
    "truncation-error",
]


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


Seed = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(gt=0, lt=2**31)]  # more would never be done
AsList = BeforeValidator(_as_list)  # one or several
Names = Annotated[list[str], AsList]


class _Section(BaseModel):
    """Keys that are not known are errors, and nothing is taken for what it is not."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


@final
class CheckpointSection(_Section):
    """Which checkpoints, by patterns of paths, and how they are loaded."""

    paths: Names = Field(default_factory=list)
    loader: str = "huggingface"


@final
class DataSection(_Section):
    """Labelled examples, cut into batches: the fields of `DataSource`."""

    path: str
    format: str = "auto"
    batch_size: Count = 32
    max_batches: Count | None = None
    max_examples: Count | None = None
    seed: Seed | None = None
    labels: dict[str, int] | list[int] | None = None
    max_length: Count | None = None
    tokenizer: str | None = None
    columns: dict[str, str] | None = None
    size: Count | None = None
    channels: int | None = None
    mean: list[FiniteFloat] | str | None = None
    std: list[Annotated[FiniteFloat, Field(gt=0)]] | None = None


@final
class MeasureSection(_Section):
    """One kind of measure, in one or several geometries, at one or several radii, with the options of both."""

    measure: Kind
    geometry: Annotated[list[str | float], AsList] = Field(default_factory=list)
    radius: Annotated[list[PositiveFloat], AsList] = Field(default_factory=list)
    warm_start: bool = False
    normalise_logits: bool = False
    norm: str | None = None
    eta: float | None = None
    geodesic: str | None = None
    eps: float | None = None
    biases: str | None = None
    steps: Count | None = None
    restarts: Annotated[int, Field(lt=2**31)] | None = None
    tolerance: float | None = None
    samples: Count | None = None
    products: str | None = None
    layer: str | None = None
    method: str | None = None
    seed: Seed | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Those of the measure and of its geometries that are given."""
        apart = {"measure", "geometry", "radius", "warm_start", "normalise_logits"}
        return {key: value for key, value in self if key not in apart and value is not None}


@final
class Schema(_Section):
    """A whole spec."""

    checkpoints: CheckpointSection
    data: DataSection
    test: DataSection | None = None
    scores: str | None = None
    measures: list[MeasureSection] = Field(min_length=1)
    symmetries: str | None = None
    against: Names = Field(default_factory=list)
    given: Names = Field(default_factory=list)
    dtype: Literal["float32", "float64"] = "float32"


SECTIONS: dict[str, type[_Section]] = {
    "checkpoints": CheckpointSection,
    "data": DataSection,
    "test": DataSection,
    "measures": MeasureSection,
}


def validated(document: Document) -> Schema:
    """Raises ValueError, one sentence with the line, for what is not as it should be."""
    if not isinstance(document.content, dict):
        raise ValueError(f"{document.path} must be YAML with the keys {', '.join(Schema.model_fields)}. Found none.")
    try:
        return Schema.model_validate(document.content)
    except ValidationError as error:
        # A key that is misspelt is missing too: what is there says more than what is not.
        found = sorted(error.errors(include_url=False), key=lambda each: each["type"] == "missing")
        place = _place(document, found[0])
        raise ValueError(f"{document.path}, line {document.line(place)}: {_said(found[0], place)}.") from None


def _place(document: Document, error: ErrorDetails) -> Place:
    """Keys and indices alone: pydantic adds which of several kinds it tried."""
    place: Place = ()
    for step in error["loc"]:
        if (*place, step) in document.lines:
            place = (*place, step)
    return (*place, error["loc"][-1]) if error["type"] == "missing" else place


def _said(error: ErrorDetails, place: Place) -> str:
    where = ".".join(map(str, place))
    if error["type"] == "extra_forbidden":
        section = SECTIONS[str(place[0])] if len(place) > 1 else Schema
        return f"unknown key {place[-1]!r}; the keys here are {', '.join(section.model_fields)}"
    if error["type"] == "missing":
        return f"{where} is missing"
    found = repr(error["input"])
    shown = found if len(found) <= 80 else f"{found[:77]}..."
    return f"{where}: {error['msg'][0].lower()}{error['msg'][1:]}. Found {shown}"
