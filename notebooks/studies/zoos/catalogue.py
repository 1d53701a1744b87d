"""Say in a few words what a measure of a comparison is, and find it by them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, final

from quotient_manifolds.compare import ComparedMeasure, Comparison
from quotient_manifolds.sharpness.result import CONVERGED

SECOND: Final = "second"  # the order of geodesics that goes without saying
COMPETITORS: Final = {
    "weight_norm": "norm of the weights",
    "train_loss": "training loss",
    "margin": "margin",
    "steps": "steps of training",
}
"""What is known of models without measuring sharpness, by column."""


def words(each: ComparedMeasure) -> str:
    """Return what a measure is, without its radius: its geometry first, and only what is not as usual."""
    geometry, settings = each.geometry or {}, each.settings or {}
    said = [str(geometry.get("metric", geometry.get("kind")))]
    if each.measure == "relative flatness":
        return str(each.measure)
    if each.measure == "legacy worst-case sharpness":
        said.append("released ascent")
    elif each.measure != "worst-case sharpness":
        said.append(str(each.measure))
    said += _unusual(geometry)
    if settings.get("normalise_logits"):
        said.append("normalised logits")
    return ", ".join(said)


def _unusual(geometry: Mapping[str, Any]) -> list[str]:
    if geometry.get("kind") != "quotient":
        return [geometry["norm"]] if geometry.get("norm", "l2") != "l2" else []
    found = {"paper": "pairs with biases as rows", "pairs": "pairs alone"}.get(geometry["symmetries"])
    said = [found] if found else []
    if geometry["geodesic"] != SECOND:
        said.append({"first": "first order", "exact": "exact geodesics"}[geometry["geodesic"]])
    if geometry.get("norm", "metric") != "metric":
        said.append("adaptive norm")
    return [*said, f"eps {geometry['eps']:g}"] if geometry["eps"] else said


@final
@dataclass(frozen=True)
class Catalogue:
    """Find the labels of a comparison's measures by words and radius."""

    comparison: Comparison

    @cached_property
    def labels(self) -> dict[str, dict[float | None, str]]:
        """Return by words, and radius in ascending order, the label; no radius: None."""
        found: dict[str, dict[float | None, str]] = {}
        for each in sorted(self.comparison.measures, key=lambda each: each.radius or 0.0):
            found.setdefault(words(each), {})[each.radius] = each.label
        return found

    def middle(self, name: str) -> str:
        """Return the label of a measure at the middle one of its first three radii; of a score, its column."""
        columns = {said: column for column, said in COMPETITORS.items()}
        if name in columns:
            return columns[name]
        labels = list(self.labels[name].values())[:3]
        return labels[len(labels) // 2]

    def values(self, label: str) -> list[float]:
        """Return the values that were computed."""
        return [value for value in self.comparison.column(label) if value is not None]

    def flagged(self, label: str) -> tuple[float, float]:
        """Return the shares of values beyond reach, and of those whose ascent had not converged."""
        known = [value for row in self.comparison.rows if (value := row.values[label]) is not None]
        late = [value for value in known if value.late_rise is not None and value.late_rise > CONVERGED]
        return sum(value.beyond_reach for value in known) / len(known), len(late) / len(known)
