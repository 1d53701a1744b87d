"""Make measures of the plain settings of a spec."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, final

from quotient_manifolds.geometry import GEOMETRY_OPTIONS, Quotient, geometry_of
from quotient_manifolds.sharpness import (
    AverageCase,
    GradientNorm,
    HessianTrace,
    LegacyWorstCase,
    Measure,
    TopEigenvalue,
    WorstCase,
)

MEASURES: dict[str, type[Measure]] = {
    "worst-case": WorstCase,
    "average-case": AverageCase,
    "legacy-worst-case": LegacyWorstCase,
    "gradient-norm": GradientNorm,
    "hessian-trace": HessianTrace,
    "top-eigenvalue": TopEigenvalue,
}
_OF_THE_RUN = ("geometry", "radius", "after", "progress")  # fields of a measure that are not its options


@final
@dataclass(frozen=True)
class MeasureEntry:
    """Pair a measure with how its loss is computed, and say how tables call it.

    normalise_logits: the loss is that of centred logits of length 1. warm_start: the ascent begins where that at the
    next smaller radius ended.
    """

    measure: Measure
    normalise_logits: bool = False
    warm_start: bool = False

    @property
    def label(self) -> str:
        """Return name, geometry, radius, and every option that is not as it is by default."""
        return self.family if self.radius is None else f"{self.family}, radius {_shortest(self.radius)}"

    @property
    def family(self) -> str:
        """Return the label without the radius."""
        geometry = self.measure.geometry
        eps = geometry.eps if isinstance(geometry, Quotient) else 0.0  # the one option that its name does not tell
        chosen = {
            each.name: getattr(self.measure, each.name)
            for each in fields(self.measure)
            if each.name not in _OF_THE_RUN and getattr(self.measure, each.name) != each.default
        }
        return ", ".join(
            [
                f"{geometry.name} {self.measure.name}",
                *([f"eps {_shortest(eps)}"] if eps else []),
                *(["warm start"] if self.warm_start else []),
                *(f"{name} {_shortest(value)}" for name, value in chosen.items()),
                *(["normalised logits"] if self.normalise_logits else []),
            ]
        )

    @property
    def radius(self) -> float | None:
        """Return the radius of the ball; None where the measure has none."""
        radius: float | None = getattr(self.measure, "radius", None)
        return radius

    @property
    def setting(self) -> tuple[str, bool]:
        """Return what two measures must agree in to be measured on one `PreparedModel`."""
        return repr(self.measure.geometry), self.normalise_logits

    @property
    def columns(self) -> dict[str, Any]:
        """Return all settings by column: `geometry.NAME` for those of the geometry, `settings.NAME` for the others."""
        settings = {**self.measure.settings, "normalise_logits": self.normalise_logits, "warm_start": self.warm_start}
        return {
            "measure": self.measure.name,
            "geometry": self.measure.geometry.name,
            "radius": self.radius,
            "family": self.family,
            **{f"geometry.{key}": value for key, value in self.measure.geometry.to_dict().items()},
            **{f"settings.{key}": value for key, value in settings.items() if key != "radius"},
        }


def _shortest(value: Any) -> str:
    """Return 0.1 as such, and all digits where six do not tell a number from its neighbours."""
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def measures_of(
    kind: str,
    geometries: list[str | float],
    sizes: Mapping[str, list[float]],
    *,
    warm_start: bool = False,
    normalise_logits: bool = False,
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
