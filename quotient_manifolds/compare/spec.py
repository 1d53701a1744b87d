"""What to compare: a YAML file, checked, with the line of whatever is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import final

from quotient_manifolds.compare.document import Document, Place, read_yaml
from quotient_manifolds.compare.measures import Measured, measures_of
from quotient_manifolds.compare.schema import DataSection, Schema, validated
from quotient_manifolds.compare.scores import Scores, check_named, measured_scores, read_scores
from quotient_manifolds.load import Checkpoint, DataSource, find_checkpoints


@final
@dataclass(frozen=True)
class Spec:
    """A comparison, ready to run.

    checkpoints: those that the patterns match. data: what the measures see. test: what the gaps are taken to. scores:
    by checkpoint, the rows of the CSV file. against: scores the measures are correlated with; if none is named, the
    gaps, or without test data every number that varies. given: hyperparameters held fixed in partial correlations.
    """

    path: Path
    checkpoints: tuple[Checkpoint, ...]
    data: DataSource
    test: DataSource | None
    scores: Mapping[str, Scores]
    measures: tuple[Measured, ...]
    against: tuple[str, ...]
    given: tuple[str, ...]
    dtype: str


def read_spec(path: str | Path) -> Spec:
    """The comparison that a YAML file describes; its paths are relative to the file.

    Raises ValueError, one sentence with the line, for unknown keys, values of a wrong kind, settings that do not belong
    together, patterns that match nothing, data and scores that are not there or not readable, and names of no score.
    """
    path = Path(path)
    if path.suffix == ".toml":
        raise ValueError(f"{path} is TOML by its name: a spec is YAML.")
    document = read_yaml(path)
    top = validated(document)
    base = path.resolve().parent
    with _at(document, "checkpoints"):
        checkpoints = find_checkpoints(top.checkpoints.paths, top.checkpoints.loader, base)
    measures = _measures(document, top)
    scores = _scores(document, top, base, checkpoints)
    return Spec(
        path=path,
        checkpoints=checkpoints,
        data=_source(document, "data", top.data, base),
        test=None if top.test is None else _source(document, "test", top.test, base),
        scores=scores,
        measures=measures,
        against=tuple(top.against),
        given=tuple(top.given),
        dtype=top.dtype,
    )


@contextmanager
def _at(document: Document, *place: str | int) -> Iterator[None]:
    """What is wrong inside is said with the line of `place`."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ValueError(f"{document.path}, line {document.line(place)}: {error}") from error


def _measures(document: Document, top: Schema) -> tuple[Measured, ...]:
    found: dict[str, Measured] = {}
    for index, section in enumerate(top.measures):
        place: Place = ("measures", index)
        with _at(document, *place):
            for each in measures_of(
                section.measure,
                section.geometry,
                section.radius,
                warm_start=section.warm_start,
                normalise_logits=section.normalise_logits,
                options=section.options,
            ):
                if each.label in found:
                    raise ValueError(f"{each.label} is asked for twice")
                found[each.label] = each
    return tuple(found.values())


def _scores(document: Document, top: Schema, base: Path, checkpoints: tuple[Checkpoint, ...]) -> Mapping[str, Scores]:
    """The file's rows, once all that the spec says of scores has been checked."""
    listed: Mapping[str, Scores] = {}
    measured = measured_scores(test=top.test is not None)
    if top.scores is not None:
        with _at(document, "scores"):
            names = [each.name for each in checkpoints]
            listed = read_scores(base / Path(top.scores).expanduser(), names, measured)
    known = (*measured, *dict.fromkeys(name for row in listed.values() for name in row))
    for key, names in (("against", top.against), ("given", top.given)):
        for index, name in enumerate(names):
            with _at(document, key, index):
                check_named(name, known, listed, number=key == "against")
    return listed


def _source(document: Document, key: str, section: DataSection, base: Path) -> DataSource:
    """The data, of which labels and files have been looked at: what fails on all checkpoints alike is said once."""
    settings = section.model_dump()
    settings["path"] = base / Path(section.path).expanduser()
    if section.tokenizer is not None:
        settings["tokenizer"] = base / Path(section.tokenizer).expanduser()
    with _at(document, key):
        source = DataSource(**settings)
        source.fingerprint()
        source.check(2**31)
    return source
