"""Find the measures of a comparison by what they are: measure, geometry and radius."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

from quotient_manifolds.compare import ComparedMeasure, Comparison
from quotient_manifolds.geometry import Adaptive, Euclidean, Geometry, Quotient, geometry_from_dict
from quotient_manifolds.statistics import Correlation

PLAIN: dict[str, Geometry] = {
    "euclidean": Euclidean(),
    "adaptive": Adaptive(),
    "inv": Quotient("inv"),
    "mix": Quotient("mix"),
}
METRICS = ("inv", "mix")
NAMED = {"inv": 0.0, "mix": 1.0}  # members of the family of metrics, and their t
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

    @cached_property
    def relaxations(self) -> dict[float, str]:
        """Return, by eps, the label of inv with a relaxed metric."""
        return {
            its.eps: each.label
            for each, its in self._known
            if isinstance(its, Quotient) and its.eps and its == Quotient("inv", eps=its.eps)
        }

    @cached_property
    def family(self) -> dict[float, str]:
        """Return, by t, the label of each member of the family of metrics, all at the middle radius of inv."""
        radius = self.middle("inv")
        found = {}
        for each, its in self._known:
            if isinstance(its, Quotient) and its == Quotient(its.metric):
                t = NAMED.get(str(its.metric), its.metric)
                if (each.label == self.label(its, radius)) and isinstance(t, float):
                    found[t] = each.label
        return dict(sorted(found.items()))

    @cached_property
    def places(self) -> dict[str, str]:
        """Return the labels of worst-case sharpness at the middle radii by short names, of those that were measured.

        inv, inv first (geodesics of first order), inv exact, inv adaptive norm (the ball is that of adaptive
        sharpness), inv eps 0.01, and so on.
        """
        return {name: label for name, label in self._places() if label is not None}

    def _places(self) -> Iterator[tuple[str, str | None]]:
        for name, geometry in PLAIN.items():
            yield name, self.label(geometry, self.middle(name))
        for metric in METRICS:
            yield f"{metric} first", self.label(Quotient(metric, "first"), self.middle(metric))
            yield f"{metric} exact", self.label(Quotient(metric, "exact"), self.middle(metric))
            norm = self.label(Quotient(metric, norm="adaptive"), self.middle("adaptive"))
            yield f"{metric} adaptive norm", norm
        yield from ((f"inv eps {eps:g}", label) for eps, label in self.relaxations.items())

    def tau(self, label: str | None, against: str, given: Sequence[str] = ()) -> Correlation | None:
        """Return Kendall's tau-b of a measure with a score, or the partial one; None if it is not known."""
        for each in self.comparison.rankings:
            alike = (each.measure, each.against, each.given) == (label, against, tuple(given))
            if alike and each.correlation.kind == "kendall-b" and each.correlation.value is not None:
                return each.correlation
        return None
