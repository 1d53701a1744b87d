"""What to compare: a YAML file, checked, with the line of whatever is wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from quotient_manifolds.compare.document import Document, Place, read_yaml
from quotient_manifolds.compare.failing import printable, sentence
from quotient_manifolds.compare.measures import Measured, measures_of
from quotient_manifolds.compare.schema import DataSection, Schema, validated
from quotient_manifolds.compare.scores import Scores, check_named, measured_scores, read_scores
from quotient_manifolds.geometry import Quotient
from quotient_manifolds.load import Checkpoint, DataSource, find_checkpoints
from quotient_manifolds.load.messages import expanded
from quotient_manifolds.load.models import load_object


@final
@dataclass(frozen=True)
class Spec:
    """A comparison, ready to run.

    checkpoints: those that the patterns match. data: what the measures see. test: what the gaps are taken to. scores:
    by checkpoint, the rows of the CSV file. against: scores the measures are correlated with; if none is named, the
    gaps, or without test data every number that varies. given: hyperparameters held fixed in partial correlations.
    symmetries: package.module:function, which declares those of each model; None: they are found.
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
    symmetries: str | None = None


def read_spec(path: str | Path) -> Spec:
    """Read the comparison that a YAML file describes; its paths are relative to the file.

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
        if ":" in top.checkpoints.loader:  # found now, not once for every checkpoint
            _importable(base)
            load_object(top.checkpoints.loader, "a function that returns an nn.Module")
        checkpoints = _named(find_checkpoints(top.checkpoints.paths, top.checkpoints.loader, base))
    measures = _measures(document, top)
    if top.symmetries is not None:
        with _at(document, "symmetries"):
            _importable(base)
            load_object(top.symmetries, "a function of the model that returns its Symmetries")
            if not any(isinstance(each.measure.geometry, Quotient) for each in measures):
                raise ValueError("symmetries mean nothing here: no measure has a quotient geometry")
    scores = _scores(document, top, base, checkpoints, [each.label for each in measures])
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
        symmetries=top.symmetries,
    )


def _importable(base: Path) -> None:
    """Modules beside a spec are found wherever the command is given."""
    if str(base) not in sys.path:
        sys.path.insert(0, str(base))


@contextmanager
def _at(document: Document, *place: str | int) -> Iterator[None]:
    """What is wrong inside is said with the line of `place`."""
    try:
        yield
    except SystemExit as error:  # of a module of the user's, while it is imported
        raise ValueError(f"{document.path}, line {document.line(place)}: {sentence(error)}") from error
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


def _named(checkpoints: tuple[Checkpoint, ...]) -> tuple[Checkpoint, ...]:
    """Checkpoints with names that can be printed: bytes that are no text and control characters as escapes."""
    names: dict[str, Checkpoint] = {}
    for each in checkpoints:
        name = printable(each.name)
        while name in names:
            name += "*"
        names[name] = replace(each, name=name)
    return tuple(names.values())


def _scores(
    document: Document, top: Schema, base: Path, checkpoints: tuple[Checkpoint, ...], measures: Sequence[str]
) -> Mapping[str, Scores]:
    """The file's rows, once all that the spec says of scores has been checked."""
    listed: Mapping[str, Scores] = {}
    measured = measured_scores(test=top.test is not None)
    if top.scores is not None:
        with _at(document, "scores"):
            names = [each.name for each in checkpoints]
            listed = read_scores(base / expanded(top.scores), names, measured, measures)
    known = (*measured, *dict.fromkeys(name for row in listed.values() for name in row))
    for key, names in (("against", top.against), ("given", top.given)):
        for index, name in enumerate(names):
            with _at(document, key, index):
                check_named(name, known, listed, number=key == "against")
    return listed


def _source(document: Document, key: str, section: DataSection, base: Path) -> DataSource:
    """The data, of which labels and files have been looked at: what fails on all checkpoints alike is said once."""
    settings = section.model_dump()
    settings["path"] = base / expanded(section.path)
    if section.tokenizer is not None:
        settings["tokenizer"] = base / expanded(section.tokenizer)
    with _at(document, key):
        source = DataSource(**settings)
        source.fingerprint()
        source.check(2**31)
    return source
