"""Say in a few words what a measure of a comparison is, and find it by them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, final

import pandas as pd

from quotient_manifolds.compare import Comparison
from quotient_manifolds.sharpness.result import CONVERGED

SECOND: Final = "second"  # the order of geodesics that goes without saying
COMPETITORS: Final = {
    "weight_norm": "norm of the weights",
    "train_loss": "training loss",
    "margin": "margin",
    "steps": "steps of training",
}
"""What is known of models without measuring sharpness, by column."""


def words(each: Mapping[str, Any]) -> str:
    """Return what a measure (a row of `Comparison.measures`) is, without its radius: only what is not as usual."""
    measure = str(each["measure"])
    if measure == "relative flatness":
        return measure
    geometry = {
        name.removeprefix("geometry."): value
        for name, value in each.items()
        if name.startswith("geometry.") and not pd.isna(value)
    }
    said = [str(geometry.get("metric", geometry.get("kind")))]
    if measure == "legacy worst-case sharpness":
        said.append("released ascent")
    elif measure != "worst-case sharpness":
        said.append(measure)
    said += _unusual(geometry)
    if each["settings.normalise_logits"]:
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
        measures = self.comparison.measures
        for label in measures["radius"].fillna(0.0).sort_values(kind="stable").index:
            radius = float(measures.loc[label, "radius"])
            found.setdefault(words(measures.loc[label]), {})[None if math.isnan(radius) else radius] = label
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
        values = self.comparison.values
        known = values[values["label"] == label]
        return float(known["beyond_reach"].mean()), float((known["late_rise"] > CONVERGED).mean())
