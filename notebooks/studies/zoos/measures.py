"""Find the measures of a comparison by what they are: measure, geometry and radius."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import final

from quotient_manifolds.compare import ComparedMeasure, Comparison
from quotient_manifolds.geometry import Adaptive, Euclidean, Geometry, Quotient, geometry_from_dict

PLAIN: dict[str, Geometry] = {
    "euclidean": Euclidean(),
    "adaptive": Adaptive(),
    "inv": Quotient("inv"),
    "mix": Quotient("mix"),
}
METRICS = ("inv", "mix")
WORST = "worst-case sharpness"


@final
@dataclass(frozen=True)
class ZooMeasures:
    """Answer questions about a comparison whose spec is that of a study of a zoo.

    Labels are how the comparison calls its measures; they are found here and never made.
    """

    comparison: Comparison

    @cached_property
    def _known(self) -> list[tuple[ComparedMeasure, Geometry]]:
        return [
            (each, geometry_from_dict({key: value for key, value in each.geometry.items() if key != "symmetries"}))
            for each in self.comparison.measures
            if each.geometry is not None
            and (each.geometry["kind"] != "quotient" or each.geometry.get("norm") != "adaptive")
        ]

    def label(
        self,
        geometry: Geometry,
        radius: float | None = None,
        measure: str = WORST,
        *,
        normalise_logits: bool = False,
    ) -> str | None:
        """Return the label of a measure, or None if the comparison does not have it."""
        for each, its_geometry in self._known:
            normalised = bool((each.settings or {}).get("normalise_logits"))
            if (each.measure, its_geometry, each.radius, normalised) == (measure, geometry, radius, normalise_logits):
                return each.label
        return None

    def radii(self, geometry: Geometry, measure: str = WORST) -> list[float]:
        """Return those at which a measure was taken, ascending."""
        found = {each.radius for each, its in self._known if (each.measure, its) == (measure, geometry)}
        return sorted(radius for radius in found if radius is not None)

    def middle(self, name: str) -> float | None:
        """Return the radius of everything that is measured at one only; None if nothing was measured."""
        radii = self.radii(PLAIN[name])
        return radii[len(radii) // 2] if radii else None
