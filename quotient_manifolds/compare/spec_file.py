"""Read a comparison from a YAML file; errors are one sentence that names the key."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from quotient_manifolds.check import check_one_of, meant
from quotient_manifolds.compare.spec import MEASURES, MeasureEntry, Scores, Spec, check_scores, measures_of
from quotient_manifolds.files import expanded
from quotient_manifolds.load import BatchFunction, DataSource, data_of, find_checkpoints, load_object
from quotient_manifolds.messages import brief, sentence
from quotient_manifolds.sharpness.result import SIZES

KEYS = [each.name for each in fields(Spec) if each.name not in ("name", "path")]
DATA_KEYS = [each.name for each in fields(DataSource)]
NAME = "checkpoint"

Made = TypeVar("Made")


def read_spec(path: str | Path) -> Spec:
    """Read the comparison that a YAML file describes; paths in it are relative to the file.

    Raises ValueError, one sentence with the key, for unknown keys, values of the wrong type, incompatible settings,
    patterns that match nothing, missing or unreadable data and scores, and unknown names of scores.
    """
    path = Path(path)
    base = path.resolve().parent
    if str(base) not in sys.path:
        sys.path.insert(0, str(base))  # modules beside a spec are found from any working directory

    def about(key: str, make: Callable[..., Made], *arguments: Any) -> Made:
        try:
            return make(*arguments)
        except (ValueError, TypeError, SystemExit) as error:  # the import of a module may raise SystemExit
            said = sentence(error) if isinstance(error, SystemExit) else error
            raise ValueError(": ".join(filter(None, (str(path), key, str(said))))) from error

    top = about("", _checked, "", _content(path), KEYS, ("checkpoints", "data", "measures"))
    found = about("", _checked, "checkpoints", top["checkpoints"], ("paths", "loader"), ())
    patterns, loader = _listed(found.get("paths", [])), str(found.get("loader", "huggingface"))
    for key, reference in (("loss", top.get("loss")), ("checkpoints", loader if ":" in loader else None)):
        if reference is not None:  # fails here once, not for every checkpoint
            about(key, load_object, str(reference), "a function")
    checkpoints = about("checkpoints", find_checkpoints, patterns, loader, base)
    settings: dict[str, Any] = {key: about(key, _source, key, top[key], base) for key in ("data", "test") if key in top}
    asked = enumerate(_listed(top["measures"]))
    measures = [each for number, section in asked for each in about(f"measures.{number}", _measures, section)]
    scores = about("scores", lambda: read_scores(base / expanded(top["scores"]))) if "scores" in top else {}
    settings |= {key: top[key] for key in ("loss", "dtype") if key in top}
    settings |= {key: _listed(top[key]) for key in ("against", "given") if key in top}
    return about(
        "",
        lambda: Spec(checkpoints, measures=measures, scores=scores, path=path, name=path.name, **settings),
    )


def _content(path: Path) -> Any:
    """Return the mappings, lists and scalars of plain YAML 1.2."""
    try:
        return YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} must be readable YAML: {error}") from error
    except YAMLError as error:
        raise ValueError(f"{path} must be valid YAML. Found: {' '.join(str(error).split())}") from error


def _checked(place: str, section: Any, keys: Collection[str], needed: Collection[str]) -> Mapping[str, Any]:
    """Return the section. Raises ValueError for unknown or missing keys."""
    if not isinstance(section, dict):
        raise ValueError(f"{place or 'a spec'} must have the keys {', '.join(keys)}. Found {brief(section)}")
    above = f"{place}." if place else ""
    for key in section:  # checked before missing keys, because a misspelled key is missing, too
        if key not in keys:
            near = meant(key, keys) or "."
            raise ValueError(f"unknown key '{above}{key}'{near} The keys here: {', '.join(keys)}")
    if lacking := [key for key in needed if key not in section]:
        raise ValueError(f"{above}{lacking[0]} is missing")
    return section


def _listed(value: Any) -> list[Any]:
    """Return one or several values as a list."""
    return value if isinstance(value, list) else [value]


def _numbers(value: Any) -> list[Any]:
    """Return one or several values as a list, integers as floats: 1 and 1.0 are the same radius."""
    return [float(each) if type(each) is int else each for each in _listed(value)]


def _measures(section: Any) -> list[MeasureEntry]:
    """Return the measures of a section, one for each of its geometries and sizes."""
    if not isinstance(section, dict):
        raise ValueError(f"a measure must be a mapping with the keys measure and geometry. Found {brief(section)}")
    given = dict(section)
    kind, geometries = given.pop("measure", None), _numbers(given.pop("geometry", []))
    check_one_of("measure", kind, MEASURES)
    sizes = {name: _numbers(given.pop(name)) for name in SIZES if name in given}
    return list(measures_of(kind, geometries, sizes, options=given))


def _source(key: str, section: Any, base: Path) -> DataSource | BatchFunction:
    """Return the data of a section. Its files and labels are checked here, so that their errors are reported once."""
    settings = dict(_checked(key, {"path": section} if isinstance(section, str) else section, DATA_KEYS, ("path",)))
    if "tokenizer" in settings:
        settings["tokenizer"] = base / expanded(settings["tokenizer"])
    if isinstance(labels := settings.get("labels"), dict):
        settings["labels"] = {str(label): number for label, number in labels.items()}
    source = data_of(str(settings.pop("path")), settings, base)
    if isinstance(source, DataSource):
        source.fingerprint()
        source.check()
    return source


def read_scores(path: Path) -> Mapping[str, Scores]:
    """Read the rows of a CSV file, by its column `checkpoint`; in other columns, empty cells, NA and null become None.

    Raises ValueError for an unreadable file, a missing or duplicate name, and infinite numbers.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # a row with more cells than there are columns
            header = pd.read_csv(path, header=None, nrows=1, dtype=str).iloc[0].dropna()
            frame = pd.read_csv(path, dtype={NAME: str}, index_col=False)
            # Names are read as text, because a checkpoint may be called 007, or nan.
            text = pd.read_csv(path, dtype=str, index_col=False, keep_default_na=False)
    except (OSError, ValueError, OverflowError, pd.errors.ParserWarning) as error:
        raise ValueError(f"{path} must be readable as CSV: {' '.join(str(error).split())}") from error
    if len(twice := header[header.duplicated()]):
        raise ValueError(f"{path} must have each column once. Found {twice.iloc[0]} twice")
    if NAME not in frame:
        raise ValueError(f"{path} must have a column {NAME}. Found {', '.join(frame.columns)}")
    frame, names = frame.drop(columns=NAME), text[NAME]
    if again := [*names[names.duplicated()], *names[names == ""]]:
        raise ValueError(f"{path} must name each checkpoint once. Found {again[0]!r}")
    flags = frame.select_dtypes(["bool", "int"]).columns
    rows = frame.astype(dict.fromkeys(flags, float)).astype(object).where(frame.notna(), None).to_dict("records")
    scores = dict(zip(names, rows, strict=True))
    check_scores(scores, str(path))
    return scores
