"""What a study measures on a zoo, as a spec of `compare`, and how the comparison then calls it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from quotient_manifolds.geometry import Adaptive, Euclidean, Geometry, Quotient
from quotient_manifolds.sharpness import WorstCase

PLAIN: dict[str, Geometry] = {
    "euclidean": Euclidean(),
    "adaptive": Adaptive(),
    "inv": Quotient("inv"),
    "mix": Quotient("mix"),
}
STEPS = 20  # those of an ascent where nothing is said


@final
@dataclass(frozen=True)
class Plan:
    """Radii and settings of the measures.

    middle: by geometry of `PLAIN`, the radius of everything that is measured at one only. average: by geometry, the
    standard deviation per dimension of average-case sharpness. eps: relaxations of inv. family: t of the metrics.
    """

    middle: Mapping[str, float]
    eps: tuple[float, ...]
    family: tuple[float, ...]
    average: Mapping[str, float] = field(default_factory=dict)
    factor: float = 4.0  # from one radius to the next
    steps: int = STEPS

    def radii(self, name: str) -> tuple[float, float, float]:
        """Those of a geometry of `PLAIN`, ascending."""
        middle = self.middle[name]
        return middle / self.factor, middle, middle * self.factor

    def label(self, geometry: Geometry, radius: float, *, normalise_logits: bool = False) -> str:
        """How a comparison calls worst-case sharpness in a ball."""
        from quotient_manifolds.compare.measures import Measured

        return Measured(WorstCase(geometry, radius, steps=self.steps), normalise_logits).label

    @property
    def plain(self) -> dict[str, tuple[Geometry, float]]:
        """By name: the geometry and its middle radius."""
        return {name: (PLAIN[name], radius) for name, radius in self.middle.items()}

    @property
    def ablation(self) -> dict[str, dict[str, tuple[Geometry, float]]]:
        """By metric: the measure, and what is left when one of its parts is turned off [paper, App. G]."""
        return {
            metric: {
                "whole": (Quotient(metric), self.middle[metric]),
                "no curvature": (Quotient(metric, geodesic="first"), self.middle[metric]),
                # The ball is adaptive sharpness's, and so is its radius.
                "adaptive norm": (Quotient(metric, norm="adaptive"), self.middle["adaptive"]),
            }
            for metric in ("inv", "mix")
        }

    def worst(self, geometry: str | list[float] | list[str], **options: object) -> str:
        """A line of the spec."""
        steps = {} if self.steps == STEPS else {"steps": self.steps}
        return measure("worst-case", geometry, **options, **steps)

    def parts(self) -> list[str]:
        """Lines: without curvature, and with the norm of adaptive sharpness."""
        return [
            *(self.worst(metric, radius=self.middle[metric], geodesic="first") for metric in self.ablation),
            *(self.worst(metric, radius=self.middle["adaptive"], norm="adaptive") for metric in self.ablation),
        ]

    def relaxations(self) -> list[str]:
        return [self.worst("inv", radius=self.middle["inv"], eps=eps) for eps in self.eps]

    def members(self) -> str:
        """The line of the family of metrics, but for those with names."""
        return self.worst([t for t in self.family if t not in NAMED], radius=self.middle["inv"])


NAMED = {0.0: "inv", 1.0: "mix"}


def of_family(t: float) -> Geometry:
    """inv and mix by their names."""
    return Quotient(NAMED.get(t, t))


def measure(kind: str, geometry: str | list[float] | list[str], **options: object) -> str:
    """A line of the spec."""
    words = ", ".join(f"{key}: {_flow(value)}" for key, value in {"geometry": geometry, **options}.items())
    return f"  - {{measure: {kind}, {words}}}\n"


def _flow(value: object) -> str:
    """A scalar or a list as YAML."""
    return f"[{', '.join(map(_flow, value))}]" if isinstance(value, list) else f"{value}"
