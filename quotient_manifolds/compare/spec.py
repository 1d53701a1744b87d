"""Say what to compare: in Python, or in a YAML file, of which errors name the line."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

from quotient_manifolds.compare.measure_entries import MeasureEntry, measures_of
from quotient_manifolds.compare.scores import Scores, check_named, measured_scores, read_scores
from quotient_manifolds.compare.spec_file import KeyPath, Schema, SpecFile, read_yaml, validated
from quotient_manifolds.files import expanded
from quotient_manifolds.geometry import Quotient
from quotient_manifolds.load import Checkpoint, DataSource, find_checkpoints
from quotient_manifolds.load.models import load_object
from quotient_manifolds.messages import sentence, shown


@final
@dataclass(frozen=True)
class Spec:
    """Describe a comparison: made here from Python objects, or by `read_spec` from a file.

    checkpoints: as `find_checkpoints` returns them. data: what the measures see. measures: such as
    `MeasureEntry(WorstCase(Quotient("inv"), 0.1))`. test: what the gaps are taken to. scores: by name of checkpoint,
    numbers or text by name of score. against: scores the measures are correlated with; if none is named, the gaps, or
    without test data every number that varies. given: hyperparameters held fixed in partial correlations. dtype:
    "float32" or "float64". symmetries: package.module:function, which declares those of each model; None: they are
    found. name: what the report calls it; path: the file that it was read from.

    Raises ValueError or TypeError for names that are given twice or not known, and settings that mean nothing.
    """

    checkpoints: Sequence[Checkpoint]
    data: DataSource
    measures: Sequence[MeasureEntry]
    test: DataSource | None = None
    scores: Mapping[str, Scores] = field(default_factory=dict)
    against: Sequence[str] = ()
    given: Sequence[str] = ()
    dtype: str = "float32"
    symmetries: str | None = None
    name: str = "comparison"
    path: Path | None = None

    def __post_init__(self) -> None:
        for each in self.measures:
            if not isinstance(each, MeasureEntry):
                raise TypeError(f"measures must be MeasureEntry(...). Found {each!r}")
        for name in ("checkpoints", "measures", "against", "given"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for what, names in (("measures", self.labels), ("checkpoints", [each.name for each in self.checkpoints])):
            if not names:
                raise ValueError(f"{what} must not be empty")
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise ValueError(f"{twice} is asked for twice" if what == "measures" else f"two are called {twice}")
        if self.dtype not in ("float32", "float64"):
            raise ValueError(f"dtype must be 'float32' or 'float64'. Found {self.dtype!r}")
        if self.test is not None and self.test.task != self.data.task:
            raise ValueError(f"data and test must have one task. Found {self.data.task} and {self.test.task}")
        if self.symmetries is not None and not any(
            isinstance(each.measure.geometry, Quotient) for each in self.measures
        ):
            raise ValueError("symmetries mean nothing here: no measure has a quotient geometry")
        for key, wanted in (("against", self.against), ("given", self.given)):
            for name in wanted:
                check_named(name, self.known_scores, self.scores, number=key == "against")

    @property
    def labels(self) -> list[str]:
        """Return how tables call the measures."""
        return [each.label for each in self.measures]

    @property
    def known_scores(self) -> tuple[str, ...]:
        """Return the names of the scores that are measured, and of those that are listed."""
        listed = dict.fromkeys(name for row in self.scores.values() for name in row)
        return (*measured_scores(test=self.test is not None), *listed)

    @property
    def folders(self) -> tuple[str, ...]:
        """Return where functions of the user's are imported from, besides where Python looks."""
        return (os.getcwd(),) if self.path is None else (os.getcwd(), str(self.path.resolve().parent))


def read_spec(path: str | Path) -> Spec:
    """Read the comparison that a YAML file describes; its paths are relative to the file.

    Raises ValueError, one sentence with the line, for unknown keys, values of a wrong kind, settings that do not belong
    together, patterns that match nothing, data and scores that are not there or not readable, and names of no score.
    """
    path = Path(path)
    if path.suffix == ".toml":
        raise ValueError(f"{path} is TOML by its name: a spec is YAML.")
    file = read_yaml(path)
    top = validated(file)
    base = path.resolve().parent
    with _at(file, "checkpoints"):
        if ":" in top.checkpoints.loader:  # found now, not once for every checkpoint
            _importable(base)
            load_object(top.checkpoints.loader, "a function that returns an nn.Module")
        checkpoints = _named(find_checkpoints(top.checkpoints.paths, top.checkpoints.loader, base))
    measures = _measures(file, top)
    if top.symmetries is not None:
        with _at(file, "symmetries"):
            _importable(base)
            load_object(top.symmetries, "a function of the model that returns its Symmetries")
            if not any(isinstance(each.measure.geometry, Quotient) for each in measures):
                raise ValueError("symmetries mean nothing here: no measure has a quotient geometry")
    scores = _scores(file, top, base, checkpoints, [each.label for each in measures])
    return Spec(
        name=path.name,
        path=path,
        checkpoints=checkpoints,
        data=_source(file, "data", top.data, base),
        test=None if top.test is None else _source(file, "test", top.test, base),
        scores=scores,
        measures=measures,
        against=top.against,
        given=top.given,
        dtype=top.dtype,
        symmetries=top.symmetries,
    )


def _importable(base: Path) -> None:
    """Let modules beside a spec be found wherever the command is given."""
    if str(base) not in sys.path:
        sys.path.insert(0, str(base))


@contextmanager
def _at(file: SpecFile, *place: str | int) -> Iterator[None]:
    """Say what is wrong inside with the line of `place`."""
    try:
        yield
    except SystemExit as error:  # of a module of the user's, while it is imported
        raise ValueError(f"{file.path}, line {file.line(place)}: {sentence(error)}") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file.path}, line {file.line(place)}: {error}") from error


def _measures(file: SpecFile, top: Schema) -> tuple[MeasureEntry, ...]:
    found: dict[str, MeasureEntry] = {}
    for index, section in enumerate(top.measures):
        place: KeyPath = ("measures", index)
        with _at(file, *place):
            for each in measures_of(
                section.measure,
                section.geometry,
                section.sizes,
                warm_start=section.warm_start,
                normalise_logits=section.normalise_logits,
                options=section.options,
            ):
                if each.label in found:
                    raise ValueError(f"{each.label} is asked for twice")
                found[each.label] = each
    return tuple(found.values())


def _named(checkpoints: tuple[Checkpoint, ...]) -> tuple[Checkpoint, ...]:
    """Return the checkpoints with names that can be printed: undecodable bytes and control characters as escapes."""
    names: dict[str, Checkpoint] = {}
    for each in checkpoints:
        name = shown(each.name)
        while name in names:
            name += "*"
        names[name] = replace(each, name=name)
    return tuple(names.values())


def _scores(
    file: SpecFile, top: Schema, base: Path, checkpoints: tuple[Checkpoint, ...], measures: Sequence[str]
) -> Mapping[str, Scores]:
    """Return the file's rows, once all that the spec says of scores has been checked."""
    listed: Mapping[str, Scores] = {}
    measured = measured_scores(test=top.test is not None)
    if top.scores is not None:
        with _at(file, "scores"):
            names = [each.name for each in checkpoints]
            listed = read_scores(base / expanded(top.scores), names, measured, measures)
    known = (*measured, *dict.fromkeys(name for row in listed.values() for name in row))
    for key, names in (("against", top.against), ("given", top.given)):
        for index, name in enumerate(names):
            with _at(file, key, index):
                check_named(name, known, listed, number=key == "against")
    return listed


def _source(file: SpecFile, key: str, section: Any, base: Path) -> DataSource:
    """Return the data, once its files and labels have been looked at: what fails for all checkpoints is said once."""
    settings = section.model_dump()
    settings["path"] = base / expanded(section.path)
    if section.tokenizer is not None:
        settings["tokenizer"] = base / expanded(section.tokenizer)
    with _at(file, key):
        source = DataSource(**settings)
        source.fingerprint()
        source.check()
    return source
