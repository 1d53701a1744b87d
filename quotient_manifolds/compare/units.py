"""What there is to measure on one checkpoint, unit by unit: a measure, a radius and a batch, and its hash."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, final

from quotient_manifolds.compare.measures import Measured
from quotient_manifolds.compare.unit import Unit, unit_key
from quotient_manifolds.geometry import Quotient
from quotient_manifolds.sharpness import TruncationError
from quotient_manifolds.version import VERSION

SCORE = "score"
PARTS = ("data", "test")


@final
@dataclass(frozen=True)
class Identity:
    """A checkpoint as the numbers see it: hashes of its model and of every batch it is given.

    symmetries: who declares them, and a hash of what was declared; None where they are found in the model. notes: what
    must be said beside its numbers, by part of the data.
    """

    model: str
    data: tuple[str, ...]
    test: tuple[str, ...]
    symmetries: str | None = None
    notes: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Identity:
        hashes = record["model"], tuple(record["data"]), tuple(record["test"])
        return cls(*hashes, record.get("symmetries"), record.get("notes", {}))


@final
@dataclass(frozen=True)
class MeasureUnit:
    """One measure on one batch of the data."""

    unit: Unit
    measured: Measured

    @property
    def setting(self) -> tuple[str, bool]:
        """Units that are alike in it are measured on one `PreparedModel`."""
        return repr(self.measured.measure.geometry), self.measured.normalise_logits


@final
@dataclass(frozen=True)
class ScoreUnit:
    """Loss and error of a checkpoint on one batch of the data or of the test data."""

    unit: Unit
    part: str


def score_units(checkpoint: str, identity: Identity) -> Iterator[ScoreUnit]:
    for part in PARTS:
        for index, batch in enumerate(getattr(identity, part)):
            key = unit_key({"what": SCORE, "model": identity.model, "batch": batch, "version": VERSION})
            yield ScoreUnit(Unit(key, checkpoint, SCORE, part, None, index, {}), part)


def measure_units(checkpoint: str, identity: Identity, measures: Sequence[Measured]) -> list[MeasureUnit]:
    """Ordered so that units on one subject follow each other, and the radii of a batch ascend.

    A truncation error stands beside the measure whose worst direction it needs, which then is still at hand.
    """
    settings: dict[tuple[str, bool], int] = {}
    climbs: dict[str, int] = {}
    found: list[tuple[tuple[float, ...], MeasureUnit]] = []
    for each in measures:
        climb = climbs.setdefault(_climb(each).family, len(climbs))
        for index, batch in enumerate(identity.data):
            made = MeasureUnit(_unit(checkpoint, identity, batch, index, each), each)
            place = settings.setdefault(made.setting, len(settings))
            found.append(((place, climb, index, each.radius or 0.0), made))
    return [made for _, made in sorted(found, key=lambda item: item[0])]


def _climb(measured: Measured) -> Measured:
    if isinstance(measured.measure, TruncationError):
        return replace(measured, measure=measured.measure.worst_case)
    return measured


def _unit(checkpoint: str, identity: Identity, batch: str, index: int, measured: Measured) -> Unit:
    measure = measured.measure
    # The index of the batch seeds what is random, so it decides the number too.
    decides = {
        "what": repr((measure, measured.normalise_logits)),
        "model": identity.model,
        "batch": batch,
        "index": index,
        "version": VERSION,
    }
    settings = measured.settings
    if identity.symmetries is not None and isinstance(measure.geometry, Quotient):
        decides["symmetries"] = identity.symmetries
        settings = {**settings, "symmetries": identity.symmetries}
    names = (checkpoint, measure.name, measure.geometry.name)
    return Unit(unit_key(decides), *names, measured.radius, index, settings)
