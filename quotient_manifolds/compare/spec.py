"""Describe a comparison with Python objects: checkpoints, data, measures, scores."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from quotient_manifolds.check import check_one_of, meant
from quotient_manifolds.data_options import CAUSAL
from quotient_manifolds.geometry import GEOMETRY_OPTIONS, Quotient, as_geometry
from quotient_manifolds.load import BatchFunction, Checkpoint, DataSource, load_object
from quotient_manifolds.load.models import HUGGING_FACE
from quotient_manifolds.sharpness import (
    AverageCase,
    GradientNorm,
    HessianTrace,
    LegacyWorstCase,
    Loss,
    Measure,
    TopEigenvalue,
    WorstCase,
    cross_entropy,
    next_token_cross_entropy,
)
from quotient_manifolds.sharpness.ball import check_radius
from quotient_manifolds.sharpness.worst_case import ASCENTS

MEASURES: dict[str, type[Measure]] = {
    "worst-case": WorstCase,
    "average-case": AverageCase,
    "legacy-worst-case": LegacyWorstCase,
    "gradient-norm": GradientNorm,
    "hessian-trace": HessianTrace,
    "top-eigenvalue": TopEigenvalue,
}
LIBRARIES = ("torch", "transformers", "peft")  # their versions may change values
GAPS = ("error_gap", "loss_gap")
_OF_THE_RUN = ("geometry", "radius", "progress")  # fields of a measure that are not its options
Scores = dict[str, float | str | None]


@dataclass(frozen=True)
class MeasureEntry:
    """Hold a measure, and derive the label that tables use for it.

    suggested: the radius of `measure` is a placeholder. `run_comparison` suggests one on the first checkpoint, by the
    rule of `suggest_radius`, and uses it for all checkpoints.
    """

    measure: Measure
    suggested: bool = False

    @property
    def label(self) -> str:
        """Return the name, geometry and radius, and every option that differs from its default."""
        return self.family if self.radius is None else f"{self.family}, radius {self.radius}".removesuffix(".0")

    @property
    def family(self) -> str:
        """Return the label without the radius."""
        geometry = self.measure.geometry
        eps = geometry.eps if isinstance(geometry, Quotient) else 0.0  # the only option that the geometry's name omits
        own = {each.name: each for each in fields(self.measure) if each.name not in _OF_THE_RUN}
        changed = [name for name, each in own.items() if getattr(self.measure, name) != each.default]
        chosen = [("eps", eps, 0.0), *((name, self.measure.settings[name], None) for name in changed)]
        options = [f"{name} {value}".removesuffix(".0") for name, value, usual in chosen if value != usual]
        return ", ".join([f"{geometry.name} {self.measure.name}", *options])

    @property
    def radius(self) -> float | None:
        """Return the radius of the ball; None if the measure has none or it is to be suggested."""
        return None if self.suggested else getattr(self.measure, "radius", None)

    @property
    def setting(self) -> str:
        """Return a key; measures with equal keys are computed on one `PreparedModel`."""
        return repr(self.measure.geometry)

    @property
    def columns(self) -> dict[str, Any]:
        """Return all settings by column: `geometry.NAME` for settings of the geometry, `settings.NAME` for others."""
        geometry = self.measure.geometry
        return {
            "measure": self.measure.name,
            "geometry": geometry.name,
            "radius": self.radius,
            "family": self.family,
            **{f"geometry.{key}": value for key, value in geometry.to_dict().items()},
            **{f"settings.{key}": value for key, value in self.measure.settings.items() if key != "radius"},
        }


def measures_of(
    kind: str,
    geometries: Sequence[str | float],
    sizes: Mapping[str, Sequence[float]],
    *,
    options: Mapping[str, Any],
) -> Iterator[MeasureEntry]:
    """Yield a measure for each geometry and each size.

    kind: a key of `MEASURES`. sizes: values by name, radius or sigma. options: of the measure and of its geometries.
    Raises ValueError or TypeError for incompatible arguments. A worst case without a radius gets a suggested one.
    """
    made = MEASURES[kind]
    names = {each.name for each in fields(made)} - {"progress"}
    own = {key: value for key, value in options.items() if key not in GEOMETRY_OPTIONS}
    if made is WorstCase and "ascent" in own:
        check_one_of("ascent", own["ascent"], ASCENTS)
        own["ascent"] = ASCENTS[own["ascent"]]
    given = {*own, *sizes, *(["geometry"] if geometries else [])}
    if foreign := sorted(given - names):
        allowed = ", ".join(sorted(names))
        near = meant(foreign[0], [*names, *GEOMETRY_OPTIONS], cutoff=0.8)
        raise ValueError(f"{kind} must have options among {allowed}. Found {foreign[0]}{near}")
    suggested = made is WorstCase and "radius" not in given
    sizes = {"radius": [1.0]} if suggested else sizes
    given |= set(sizes)
    if lacking := sorted({each.name for each in fields(made) if each.default is MISSING} - given):
        raise ValueError(f"{kind} needs a {lacking[0]}")
    for size, values in sizes.items():
        for value in values:
            check_radius(value, size)
    balls: list[dict[str, Any]] = [{size: value} for size, values in sizes.items() for value in sorted(values)]
    for name in geometries:
        geometry = as_geometry(name, **{key: value for key, value in options.items() if key not in own})
        for ball in balls or [{}]:
            yield MeasureEntry(made(geometry, **ball, **own), suggested)


def check_scores(scores: Mapping[str, Scores], where: str = "scores") -> None:
    """Raise ValueError for an infinite number, which no report can hold."""
    for checkpoint, row in scores.items():
        for name, value in row.items():
            if isinstance(value, float) and math.isinf(value):
                raise ValueError(
                    f"{where} must have finite numbers. Found {value} for the {name} of {checkpoint}; leave it empty"
                )


@dataclass(frozen=True)
class Spec:
    """Describe a comparison, from Python objects or, by `read_spec`, from a file.

    checkpoints: as `find_checkpoints` returns them, or a single `Checkpoint` in a list.
    data: the data that measures are computed on.
    measures: such as `MeasureEntry(WorstCase(Quotient("inv"), 0.1))`.
    test: data for the gaps, test minus `data`, in loss and error.
    scores: by checkpoint name, numbers or text by score name.
    against: the scores that measures are correlated with; by default the gaps, or without test data every number that
    varies.
    given: hyperparameters held fixed in partial correlations.
    loss: package.module:function, a function loss(model, batch); None: cross-entropy, of the next token for a causal
    language model.
    dtype: "float32" or "float64".
    name: its name in the report. path: the file that it was read from.

    Raises ValueError or TypeError for duplicate or unknown names, and for invalid settings.
    """

    checkpoints: Sequence[Checkpoint]
    data: DataSource | BatchFunction
    measures: Sequence[MeasureEntry]
    test: DataSource | BatchFunction | None = None
    scores: Mapping[str, Scores] = field(default_factory=dict)
    against: Sequence[str] = ()
    given: Sequence[str] = ()
    loss: str | None = None
    dtype: str = "float32"
    name: str = "comparison"
    path: Path | None = None

    def __post_init__(self) -> None:
        if other := [each for each in self.measures if not isinstance(each, MeasureEntry)]:
            raise TypeError(f"measures must be MeasureEntry(...). Found {other[0]!r}")
        for name in ("checkpoints", "measures", "against", "given"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for what, names in (("measures", self.labels), ("checkpoints", [each.name for each in self.checkpoints])):
            if not names:
                raise ValueError(f"{what} must not be empty")
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise ValueError(f"{what} must have names of their own. Found {twice} twice")
        check_one_of("dtype", self.dtype, ("float32", "float64"))
        check_scores(self.scores)
        listed = dict.fromkeys(name for row in self.scores.values() for name in row)
        measured = ["loss", "error", *(() if self.test is None else ("test_loss", "test_error", *GAPS))]
        if self.loss is not None:  # only cross-entropy has labels, and so an error rate
            measured = [name for name in measured if "error" not in name]
        if taken := [name for name in listed if name in (*measured, *self.labels)]:
            raise ValueError(f"scores must not have names that are measured. Found {taken[0]}; rename it")
        known = [*measured, *listed]
        for key, wanted in (("against", self.against), ("given", self.given)):
            for name in wanted:
                if name not in known:
                    raise ValueError(f"{key} must name scores: {', '.join(known)}. Found {name!r}")
                if key == "against" and any(isinstance(row.get(name), str) for row in self.scores.values()):
                    raise ValueError(f"{key} must name scores that are numbers. Found {name!r}, which is text")

    @property
    def labels(self) -> list[str]:
        """Return the labels of the measures in tables."""
        return [each.label for each in self.measures]

    @property
    def calls_functions(self) -> bool:
        """Return whether values depend on a function of the user's, which may read files that are not tracked."""
        return self.loss is not None or any(":" in each.loader for each in self.checkpoints)

    def loss_of(self) -> Loss:
        """Return the loss function; the same object on each call, unless its module is imported again."""
        if self.loss is None:
            return next_token_cross_entropy if self.data.task == CAUSAL else cross_entropy
        loss: Loss = load_object(self.loss, "a function loss(model, batch) that returns a scalar")
        return loss

    def code_of(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        """Return the functions and packages that compute the values of a checkpoint.

        Functions that make batches are not included, because batches are hashed by content.
        """
        loader = () if checkpoint.loader == HUGGING_FACE else (checkpoint.loader,)
        return (*loader, *filter(None, [self.loss]), *LIBRARIES)
