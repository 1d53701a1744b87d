"""Make measures of the plain settings of a spec."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, final

from quotient_manifolds.geometry import GEOMETRY_OPTIONS, Quotient, geometry_of
from quotient_manifolds.load.language import CAUSAL
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
    normalised_logits,
)
from quotient_manifolds.sharpness.result import Setting

MEASURES: dict[str, type[Measure]] = {
    "worst-case": WorstCase,
    "average-case": AverageCase,
    "legacy-worst-case": LegacyWorstCase,
    "gradient-norm": GradientNorm,
    "hessian-trace": HessianTrace,
    "top-eigenvalue": TopEigenvalue,
}

# One object each, so that what was found for it is known again.
_PLAIN: dict[bool, Loss] = {False: cross_entropy, True: next_token_cross_entropy}
_NORMALISED = {shifted: normalised_logits(loss) for shifted, loss in _PLAIN.items()}
_OF_THE_RUN = ("geometry", "radius", "after", "progress")  # fields of a measure that are not its options


@final
@dataclass(frozen=True)
class MeasureEntry:
    """Pair a measure with the loss it is computed on, and say how tables call it."""

    measure: Measure
    normalise_logits: bool = False
    warm_start: bool = False

    def loss(self, task: str | None = None) -> Loss:
        """Return the loss of models with such a task, see `DataSource`."""
        return (_NORMALISED if self.normalise_logits else _PLAIN)[task == CAUSAL]

    @property
    def label(self) -> str:
        """Return name, geometry, radius, and every option that is not as it is by default."""
        return self.family if self.radius is None else f"{self.family}, radius {_shortest(self.radius)}"

    @property
    def family(self) -> str:
        """Return the label without the radius."""
        chosen = {
            each.name: getattr(self.measure, each.name)
            for each in fields(self.measure)
            if each.name not in _OF_THE_RUN and getattr(self.measure, each.name) != each.default
        }
        return ", ".join(
            [
                f"{self.measure.geometry.name} {self.measure.name}",
                *([f"eps {_shortest(self.eps)}"] if self.eps else []),
                *(["warm start"] if self.warm_start else []),
                *(f"{name} {_shortest(value)}" for name, value in chosen.items()),
                *(["normalised logits"] if self.normalise_logits else []),
            ]
        )

    @property
    def radius(self) -> float | None:
        radius: float | None = getattr(self.measure, "radius", None)
        return radius

    @property
    def eps(self) -> float:
        """Return the one option of a geometry that its name does not tell."""
        return self.measure.geometry.eps if isinstance(self.measure.geometry, Quotient) else 0.0

    @property
    def settings(self) -> dict[str, Setting]:
        """Return all that the names of measure and geometry do not tell."""
        return {**self.measure.settings, "eps": self.eps, "normalise_logits": self.normalise_logits}


def _shortest(value: Setting) -> str:
    """Return 0.1 as such, and all digits where six do not tell a number from its neighbours."""
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def measures_of(
    kind: str,
    geometries: list[str | float],
    sizes: Mapping[str, list[float]],
    *,
    warm_start: bool,
    normalise_logits: bool,
    options: Mapping[str, Any],
) -> Iterator[MeasureEntry]:
    """Yield a measure for each geometry and each of the sizes, by their name (radius or sigma).

    Raises ValueError or TypeError for what does not go together.
    """
    made = MEASURES[kind]
    names = {each.name for each in fields(made) if each.name != "progress"}
    needed = {each.name for each in fields(made) if each.default is MISSING}
    own = {key: value for key, value in options.items() if key not in GEOMETRY_OPTIONS}
    shared = {key: value for key, value in options.items() if key not in own}
    if foreign := sorted(set(own) - names):
        allowed = ", ".join(sorted(names - set(_OF_THE_RUN))) or "none"
        raise ValueError(f"{foreign[0]} is no option of {kind}; it has {allowed}")
    given = {**own, **sizes, **({"geometry": geometries} if geometries else {})}
    lacking, unused = sorted(needed - set(given)), sorted(set(given) - names)
    if lacking or unused:
        wrong = [f"takes no {unused[0]}"] if unused else []
        raise ValueError(f"{kind} {'; it '.join([*wrong, *(f'needs a {each}' for each in lacking[:1])])}")
    if warm_start and "after" not in names:
        raise ValueError(f"{kind} has no warm_start")
    for geometry in [geometry_of(name, shared) for name in geometries]:
        for name, ascending in ((name, sorted(values)) for name, values in sizes.items()):
            for k, size in enumerate(ascending):
                ball: dict[str, Any] = {name: size, **({"after": tuple(ascending[:k])} if warm_start else {})}
                yield MeasureEntry(made(geometry, **ball, **own), normalise_logits, warm_start)
        if not sizes:
            yield MeasureEntry(made(geometry, **own), normalise_logits)
