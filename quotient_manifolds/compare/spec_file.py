"""Read a comparison from a YAML file, and say in a sentence with the key what is wrong with it."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat, PositiveFloat, ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from quotient_manifolds.compare.measure_entries import MeasureEntry, measures_of
from quotient_manifolds.compare.scores import Scores, measured_scores, read_scores
from quotient_manifolds.compare.spec import BatchFunction, Data, Spec
from quotient_manifolds.files import expanded
from quotient_manifolds.load import DataSource, find_checkpoints, load_object
from quotient_manifolds.messages import brief, sentence

LARGEST = 10_000_000  # bytes; a spec of a thousand checkpoints has a hundredth of it
SIZES = ("radius", "sigma")


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


def _as_section(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


Seed = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(gt=0, lt=2**31)]  # more would never be done
AsList = BeforeValidator(_as_list)  # one or several
Names = Annotated[list[str], AsList]
Sizes = Annotated[list[PositiveFloat], AsList]


class _Section(BaseModel):
    """Refuse unknown keys, and take nothing for what it is not."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


@final
class CheckpointSection(_Section):
    """Say which checkpoints, by patterns of paths, and how they are loaded."""

    paths: Names = Field(default_factory=list)
    loader: str = "huggingface"


@final
class DataSection(_Section):
    """Hold the settings of a `DataSource`, which checks their values; or package.module:function as the path."""

    path: str
    batch_size: Count | None = None
    max_batches: Count | None = None
    max_examples: Count | None = None
    seed: Seed | None = None
    labels: dict[str | int, int] | None = None
    max_length: Count | None = None
    tokenizer: str | None = None
    columns: dict[str, str] | None = None
    mean: list[FiniteFloat] | str | None = None
    std: list[FiniteFloat] | None = None
    task: str | None = None


@final
class MeasureSection(_Section):
    """Ask for a kind of measure, in one or several geometries, at one or several sizes, with the options of both."""

    measure: Literal[
        "worst-case", "average-case", "legacy-worst-case", "gradient-norm", "hessian-trace", "top-eigenvalue"
    ]
    geometry: Annotated[list[str | float], AsList] = Field(default_factory=list)
    radius: Sizes = Field(default_factory=list)
    sigma: Sizes = Field(default_factory=list)
    warm_start: bool = False
    normalise_logits: bool = False
    norm: str | None = None
    eta: float | None = None
    geodesic: str | None = None
    eps: float | None = None
    symmetries: str | None = None
    steps: Count | None = None
    restarts: Annotated[int, Field(lt=2**31)] | None = None
    tolerance: float | None = None
    samples: Count | None = None
    products: str | None = None
    method: str | None = None
    seed: Seed | None = None


Source = Annotated[DataSection, BeforeValidator(_as_section)]


@final
class Schema(_Section):
    """Describe a whole spec."""

    checkpoints: CheckpointSection
    data: Source
    test: Source | None = None
    scores: str | None = None
    measures: list[MeasureSection] = Field(min_length=1)
    loss: str | None = None
    against: Names = Field(default_factory=list)
    given: Names = Field(default_factory=list)
    dtype: Literal["float32", "float64"] = "float32"


def read_spec(path: str | Path) -> Spec:
    """Read the comparison that a YAML file describes; its paths are relative to the file.

    Raises ValueError, one sentence with the key, for unknown keys, values of a wrong kind, settings that do not belong
    together, patterns that match nothing, data and scores that are not there or not readable, and names of no score.
    """
    path = Path(path)
    top = _validated(path, _content(path))
    base = path.resolve().parent
    if str(base) not in sys.path:
        sys.path.insert(0, str(base))  # modules beside a spec are found wherever the command is given
    with _about(path, "loss"):
        if top.loss is not None:
            load_object(top.loss, "a function loss(model, batch) that returns a scalar")
    with _about(path, "checkpoints"):
        if ":" in top.checkpoints.loader:  # found now, not once for every checkpoint
            load_object(top.checkpoints.loader, "a function that returns an nn.Module")
        checkpoints = find_checkpoints(top.checkpoints.paths, top.checkpoints.loader, base)
    with _about(path, "data"):
        data = _source(top.data, base)
    with _about(path, "test"):
        test = None if top.test is None else _source(top.test, base)
    measures: list[MeasureEntry] = []
    for index, section in enumerate(top.measures):
        with _about(path, f"measures.{index}"):
            measures += _measures(section)
    scores: Mapping[str, Scores] = {}
    with _about(path, "scores"):
        if top.scores is not None:
            taken = [
                *measured_scores(test=test is not None, error=top.loss is None),
                *(each.label for each in measures),
            ]
            scores = read_scores(base / expanded(top.scores), [each.name for each in checkpoints], taken)
    with _about(path):
        return Spec(
            checkpoints,
            data,
            measures,
            test,
            scores,
            top.against,
            top.given,
            loss=top.loss,
            dtype=top.dtype,
            name=path.name,
            path=path,
        )


def _content(path: Path) -> Any:
    """Return the mappings, lists and scalars of plain YAML 1.2."""
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST + 1)  # of a pipe or a device, which may have no end, too
        if len(text) > LARGEST:
            raise ValueError(f"{path} must be a spec, below {LARGEST} bytes. Found more")
        return YAML(typ="safe", pure=True).load(text.decode("utf-8"))
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} must be readable YAML: {error}") from error
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        why = "a tab, where YAML indents with spaces" if "'\\t'" in str(error.problem) else error.problem
        raise ValueError(f"{path}, line {mark.line + 1 if mark else 1}, must be valid YAML. Found: {why}") from error
    except (YAMLError, ValueError) as error:
        raise ValueError(f"{path} must be valid YAML: {' '.join(str(error).split())}") from error


def _validated(path: Path, content: Any) -> Schema:
    if not isinstance(content, dict):
        raise ValueError(f"{path} must be YAML with the keys {', '.join(Schema.model_fields)}. Found none")
    try:
        return Schema.model_validate(content)
    except ValidationError as error:
        # A key that is misspelt is missing too: what is there says more than what is not.
        found = sorted(error.errors(include_url=False), key=lambda each: each["type"] == "missing")
        raise ValueError(f"{path}: {_said(found[0])}") from None


def _said(error: ErrorDetails) -> str:
    """Return what is wrong with which key: pydantic's words, but for keys that are not there."""
    place, key = ".".join(map(str, error["loc"])), str(error["loc"][-1])
    if error["type"] == "extra_forbidden":
        sections = {"checkpoints": CheckpointSection, "measures": MeasureSection}
        top = str(error["loc"][0])
        section = Schema if len(error["loc"]) == 1 else sections.get(top, DataSection)
        near = difflib.get_close_matches(key, section.model_fields, n=1)
        meant = f"; did you mean {near[0]!r}?" if near else "."
        return f"unknown key {place!r}{meant} The keys here are {', '.join(section.model_fields)}"
    if error["type"] == "missing":
        return f"{place} is missing"
    return f"{place}: {error['msg'][0].lower()}{error['msg'][1:]}. Found {brief(error['input'], 80)}"


@contextmanager
def _about(path: Path, key: str = "") -> Iterator[None]:
    """Say what is wrong inside with the file and the key."""
    where = f"{path}: {key}: " if key else f"{path}: "
    try:
        yield
    except SystemExit as error:  # of a module of the user's, while it is imported
        raise ValueError(f"{where}{sentence(error)}") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}{error}") from error


def _measures(section: MeasureSection) -> Iterator[MeasureEntry]:
    given = {key: value for key, value in section if value is not None}
    apart = {"measure", "geometry", "warm_start", "normalise_logits", *SIZES}
    yield from measures_of(
        section.measure,
        section.geometry,
        {name: given[name] for name in SIZES if given[name]},
        warm_start=section.warm_start,
        normalise_logits=section.normalise_logits,
        options={key: value for key, value in given.items() if key not in apart},
    )


def _source(section: DataSection, base: Path) -> Data:
    """Return the data, once its files and labels have been looked at: what fails for all checkpoints is said once."""
    settings = {key: value for key, value in section if value is not None}
    if ":" in section.path and not (base / section.path).exists():
        unused = sorted(set(settings) - {"path", "task"})
        if unused:
            raise ValueError(f"{unused[0]} means nothing for batches that {section.path} makes; leave it out")
        load_object(section.path, "a function that returns batches")
        return BatchFunction(section.path, section.task)
    for key in ("path", "tokenizer"):
        if key in settings:
            settings[key] = base / expanded(settings[key])
    if section.labels is not None:
        settings["labels"] = {str(label): number for label, number in section.labels.items()}
    source = DataSource(**settings)
    source.fingerprint()
    source.check()
    return source
