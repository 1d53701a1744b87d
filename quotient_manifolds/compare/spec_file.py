"""Read the file of a spec: YAML, the keys it may have, and a sentence with the line for what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, final, get_type_hints

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    PositiveFloat,
    ValidationError,
    create_model,
)
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode

from quotient_manifolds.load import DataSource
from quotient_manifolds.messages import brief
from quotient_manifolds.sharpness.result import SIZES

LARGEST = 10_000_000  # bytes; a spec of a thousand checkpoints has a hundredth of it
KeyPath = tuple[str | int, ...]  # keys and indices from the top of the file

MeasureKind = Literal[
    "worst-case",
    "average-case",
    "legacy-worst-case",
    "gradient-norm",
    "hessian-trace",
    "top-eigenvalue",
]


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


Seed = Annotated[int, Field(ge=0, lt=2**31)]
PositiveInt = Annotated[int, Field(gt=0, lt=2**31)]  # more would never be done
AsList = BeforeValidator(_as_list)  # one or several
Names = Annotated[list[str], AsList]


class _Section(BaseModel):
    """Refuse unknown keys, and take nothing for what it is not."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


@final
class CheckpointSection(_Section):
    """Say which checkpoints, by patterns of paths, and how they are loaded."""

    paths: Names = Field(default_factory=list)
    loader: str = "huggingface"


def _data_section() -> type[_Section]:
    """Make a section of the fields of `DataSource`, which checks their values, but for the size of whole numbers."""
    sized: dict[Any, Any] = {int: PositiveInt, int | None: PositiveInt | None}
    hints = get_type_hints(DataSource)
    fields: dict[str, Any] = {
        each.name: (sized.get(hints[each.name], hints[each.name]), ... if each.default is MISSING else each.default)
        for each in dataclass_fields(DataSource)
    }
    fields["path"] = str, ...
    fields["seed"] = Seed | None, None
    fields["mean"] = list[FiniteFloat] | str | None, None
    fields["std"] = list[FiniteFloat] | None, None
    return create_model("DataSection", __base__=_Section, **fields)


if TYPE_CHECKING:
    DataSection = DataSource
else:
    DataSection = _data_section()


@final
class MeasureSection(_Section):
    """Ask for a kind of measure, in one or several geometries, at one or several sizes, with the options of both."""

    measure: MeasureKind
    geometry: Annotated[list[str | float], AsList] = Field(default_factory=list)
    radius: Annotated[list[PositiveFloat], AsList] = Field(default_factory=list)
    sigma: Annotated[list[PositiveFloat], AsList] = Field(default_factory=list)
    warm_start: bool = False
    normalise_logits: bool = False
    norm: str | None = None
    eta: float | None = None
    geodesic: str | None = None
    eps: float | None = None
    symmetries: str | None = None
    steps: PositiveInt | None = None
    restarts: Annotated[int, Field(lt=2**31)] | None = None
    tolerance: float | None = None
    samples: PositiveInt | None = None
    products: str | None = None
    layer: str | None = None
    method: str | None = None
    seed: Seed | None = None

    @property
    def sizes(self) -> dict[str, list[float]]:
        """Return radii or sigmas, those that are given."""
        return {name: value for name in SIZES if (value := getattr(self, name))}

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of the measure and of its geometries that are given."""
        apart = {"measure", "geometry", *SIZES, "warm_start", "normalise_logits"}
        return {key: value for key, value in self if key not in apart and value is not None}


@final
class Schema(_Section):
    """Describe a whole spec."""

    checkpoints: CheckpointSection
    data: DataSection
    test: DataSection | None = None
    scores: str | None = None
    measures: list[MeasureSection] = Field(min_length=1)
    symmetries: str | None = None
    against: Names = Field(default_factory=list)
    given: Names = Field(default_factory=list)
    dtype: Literal["float32", "float64"] = "float32"


SECTIONS: dict[str, Any] = {
    "checkpoints": CheckpointSection,
    "data": DataSection,
    "test": DataSection,
    "measures": MeasureSection,
}


@final
@dataclass(frozen=True)
class SpecFile:
    """Hold what a file says (mappings with keys of text, lists, scalars), and the line of every key and item in it."""

    path: Path
    content: Any
    lines: dict[KeyPath, int]

    def line(self, place: Sequence[str | int]) -> int:
        """Return the line of a key or item; of what holds it if there is none."""
        places = (tuple(place[:length]) for length in range(len(place), 0, -1))
        return next((self.lines[each] for each in places if each in self.lines), 1)


def read_yaml(path: Path) -> SpecFile:
    """Read plain YAML 1.2. Raises ValueError, one sentence with the line, for other files and keys given twice."""
    lines: dict[KeyPath, int] = {}
    seen: set[int] = set()

    def value_of(node: Any, place: KeyPath) -> Any:
        if id(node) in seen:  # a few aliases can stand for billions of values
            raise ValueError(f"{path}, line {lines[place]}: this is an alias; write out what it stands for.")
        seen.add(id(node))
        if isinstance(node, SequenceNode):
            for index, each in enumerate(node.value):
                here: KeyPath = (*place, index)
                lines[here] = lines[place] if id(each) in seen else each.start_mark.line + 1
            return [value_of(each, (*place, index)) for index, each in enumerate(node.value)]
        if not isinstance(node, MappingNode):
            try:
                return constructor.construct_object(node)
            except ValueError as error:  # of Python: a number of thousands of digits
                raise ValueError(f"{path}, line {node.start_mark.line + 1}: {error}.") from error
        found: dict[str, Any] = {}
        for key, each in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, ScalarNode):
                raise ValueError(f"{path}, line {line}: a key must be text.")
            here = (*place, key.value)  # as it is written: no key here is a number
            if here in lines:
                raise ValueError(f"{path}, line {line}: {key.value} is given again (first in line {lines[here]}).")
            lines[here] = line
            found[key.value] = value_of(each, here)
        return found

    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)  # of a pipe or a device, which may have no end, too
        if len(content) > LARGEST:
            raise ValueError(f"{path} is no spec: it has more than {LARGEST} bytes.")
        constructor, _ = YAML(typ="safe", pure=True).get_constructor_parser(content.decode("utf-8"))
        top = constructor.composer.get_single_node()
        return SpecFile(path, None if top is None else value_of(top, ()), lines)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}.") from error
    except RecursionError as error:
        raise ValueError(f"{path} is no spec: it is nested too deeply.") from error
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        why = "a tab, where YAML indents with spaces" if "'\\t'" in str(error.problem) else error.problem
        raise ValueError(f"{path}, line {mark.line + 1 if mark else 1}: not valid YAML ({why}).") from error
    except YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from error


def validated(file: SpecFile) -> Schema:
    """Return the sections. Raises ValueError, one sentence with the line, for what is not as it should be."""
    if not isinstance(file.content, dict):
        raise ValueError(f"{file.path} must be YAML with the keys {', '.join(Schema.model_fields)}. Found none.")
    try:
        return Schema.model_validate(file.content)
    except ValidationError as error:
        # A key that is misspelt is missing too: what is there says more than what is not.
        found = sorted(error.errors(include_url=False), key=lambda each: each["type"] == "missing")
        place = _place(file, found[0])
        raise ValueError(f"{file.path}, line {file.line(place)}: {_said(found[0], place)}.") from None


def _place(file: SpecFile, error: ErrorDetails) -> KeyPath:
    """Return keys and indices alone: pydantic adds which of several kinds it tried."""
    place: KeyPath = ()
    for step in error["loc"]:
        if (*place, step) in file.lines:
            place = (*place, step)
    return (*place, error["loc"][-1]) if error["type"] == "missing" else place


def _said(error: ErrorDetails, place: KeyPath) -> str:
    where = ".".join(map(str, place))
    if error["type"] == "extra_forbidden":
        section = SECTIONS[str(place[0])] if len(place) > 1 else Schema
        return f"unknown key {place[-1]!r}; the keys here are {', '.join(section.model_fields)}"
    if error["type"] == "missing":
        return f"{where} is missing"
    return f"{where}: {error['msg'][0].lower()}{error['msg'][1:]}. Found {brief(error['input'], 80)}"
