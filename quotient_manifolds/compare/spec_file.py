"""Read a comparison from a YAML file, and say in a sentence with the key what is wrong with it."""

from __future__ import annotations

import difflib
import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, final

import pandas as pd
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat, PositiveFloat, ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from quotient_manifolds.compare.spec import BatchFunction, MeasureEntry, Scores, Spec, measures_of
from quotient_manifolds.files import expanded
from quotient_manifolds.load import DataSource, find_checkpoints, load_object
from quotient_manifolds.messages import brief, sentence

LARGEST = 10_000_000  # bytes; a spec of a thousand checkpoints has a hundredth of it
SIZES = ("radius", "sigma")
NAME = "checkpoint"
MISSING = ("", "NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "-nan", "NULL", "null", "None")  # no score

Made = TypeVar("Made")
Seed = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(gt=0, lt=2**31)]  # more would never be done
AsList = BeforeValidator(lambda value: value if isinstance(value, list) else [value])  # one or several
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
    radius: Sizes | None = None
    sigma: Sizes | None = None
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


Source = Annotated[DataSection, BeforeValidator(lambda value: {"path": value} if isinstance(value, str) else value)]


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
    base = path.resolve().parent
    if str(base) not in sys.path:
        sys.path.insert(0, str(base))  # modules beside a spec are found wherever the command is given

    def about(key: str, make: Callable[..., Made], *arguments: Any) -> Made:
        try:
            return make(*arguments)
        except (ValueError, TypeError, SystemExit) as error:  # which a module may raise while it is imported
            said = sentence(error) if isinstance(error, SystemExit) else error
            raise ValueError(": ".join(filter(None, (str(path), key, str(said))))) from error

    top = _validated(path)
    for key, reference in (("loss", top.loss), ("checkpoints", top.checkpoints.loader)):
        if reference is not None and ":" in reference:  # found now, not once for every checkpoint
            about(key, load_object, reference, "a function")
    checkpoints = about("checkpoints", find_checkpoints, top.checkpoints.paths, top.checkpoints.loader, base)
    data = about("data", _source, top.data, base)
    test = None if top.test is None else about("test", _source, top.test, base)
    measures = [each for k, asked in enumerate(top.measures) for each in about(f"measures.{k}", _measures, asked)]
    names = [each.name for each in checkpoints]
    scores = {} if top.scores is None else about("scores", read_scores, base / expanded(top.scores), names)
    settings = {"against": top.against, "given": top.given, "loss": top.loss, "dtype": top.dtype, "path": path}
    spec = about("", lambda: Spec(checkpoints, data, measures, test, scores, name=path.name, **settings))
    listed = {name for row in scores.values() for name in row}
    if taken := sorted(listed & {*spec.measured_scores, *spec.labels}):
        raise ValueError(f"{path}: scores: a column must not have a name that is measured. Found {taken[0]}; rename it")
    return spec


def _validated(path: Path) -> Schema:
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST + 1)  # of a pipe or a device, which may have no end, too
        if len(text) > LARGEST:
            raise ValueError(f"{path} must be a spec, below {LARGEST} bytes. Found more")
        content = YAML(typ="safe", pure=True).load(text.decode("utf-8"))
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} must be readable YAML: {error}") from error
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        why = "a tab, where YAML indents with spaces" if "'\\t'" in str(error.problem) else error.problem
        raise ValueError(f"{path}, line {mark.line + 1 if mark else 1}, must be valid YAML. Found: {why}") from error
    except YAMLError as error:
        raise ValueError(f"{path} must be valid YAML: {' '.join(str(error).split())}") from error
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
        keys = (Schema if place == key else sections.get(str(error["loc"][0]), DataSection)).model_fields
        near = difflib.get_close_matches(key, keys, n=1)
        return (
            f"unknown key {place!r}{f'; did you mean {near[0]!r}?' if near else '.'} The keys here: {', '.join(keys)}"
        )
    if error["type"] == "missing":
        return f"{place} is missing"
    return f"{place}: {error['msg'][0].lower()}{error['msg'][1:]}. Found {brief(error['input'], 80)}"


def _measures(section: MeasureSection) -> list[MeasureEntry]:
    given = {key: value for key, value in section if value is not None}
    kind, geometries, sizes = given.pop("measure"), given.pop("geometry"), {}
    flags = {name: given.pop(name) for name in ("warm_start", "normalise_logits")}
    for name in SIZES:
        if name in given:
            sizes[name] = given.pop(name)
    return list(measures_of(kind, geometries, sizes, options=given, **flags))


def _source(section: DataSection, base: Path) -> DataSource | BatchFunction:
    """Return the data, once its files and labels have been looked at: what fails for all checkpoints is said once."""
    settings = {key: value for key, value in section if value is not None}
    if ":" in section.path and not (base / section.path).exists():
        if unused := sorted(set(settings) - {"path", "task"}):
            raise ValueError(f"{unused[0]} means nothing for batches that {section.path} makes; leave it out")
        load_object(section.path, "a function that returns batches")
        return BatchFunction(section.path, section.task)
    settings |= {key: base / expanded(settings[key]) for key in ("path", "tokenizer") if key in settings}
    if section.labels is not None:
        settings["labels"] = {str(label): number for label, number in section.labels.items()}
    source = DataSource(**settings)
    source.fingerprint()
    source.check()
    return source


def read_scores(path: Path, checkpoints: Sequence[str]) -> Mapping[str, Scores]:
    """Read the rows of a CSV file by its column `checkpoint`; empty cells, NA, null and the like are None in others.

    Raises ValueError for a file that cannot be read so, lacks a name or has it twice, names none of the checkpoints,
    or has an infinite number.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # a row with more cells than there are columns
            missing: Any = {each: list(MISSING) for each in pd.read_csv(path, nrows=0).columns if each != NAME}
            # A checkpoint may be called NA, null or 007.
            frame = pd.read_csv(path, dtype={NAME: str}, index_col=False, keep_default_na=False, na_values=missing)
    except (OSError, ValueError, OverflowError, pd.errors.ParserWarning) as error:
        raise ValueError(f"{path} must be readable as CSV: {' '.join(str(error).split())}") from error
    if NAME not in frame:
        raise ValueError(f"{path} must have a column {NAME}. Found {', '.join(frame.columns)}")
    names = frame.pop(NAME)
    if not names.all() or names.duplicated().any():
        twice = names[names.duplicated()]
        raise ValueError(
            f"{path} must name each checkpoint once. Found {f'{twice.iloc[0]} twice' if len(twice) else ''!r}"
        )
    if not set(checkpoints) & set(names):
        raise ValueError(
            f"{path} must name checkpoints, such as {checkpoints[0]}. Found {', '.join(names[:1]) or 'none'}"
        )
    for name in frame.select_dtypes("number"):
        if frame[name].abs().eq(math.inf).any():
            raise ValueError(f"{path} must hold finite numbers. Found an infinite one in {name}")
    rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    plain = [{key: float(x) if isinstance(x, (bool, int)) else x for key, x in row.items()} for row in rows]
    return {str(name): row for name, row in zip(names, plain, strict=True)}
