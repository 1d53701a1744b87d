"""Tables of a zoo of transformers: how measures rank its models, over which pairs, and what each part of one adds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final, final

import numpy as np
import pandas as pd

from quotient_manifolds.compare import Comparison
from quotient_manifolds.sharpness.result import CONVERGED
from studies.zoos.measuring import MORE, Zoo
from studies.zoos.ranking import Design, Pairs

MAIN: Final = ("euclidean", "adaptive", "inv", "mix")
WORST: Final = (
    *("euclidean", "adaptive", "adaptive, linf", "adaptive, released ascent", "adaptive, released ascent, linf"),
    *("inv", "mix", "inv, pairs with biases as rows", "mix, pairs with biases as rows"),
)
"""Worst-case sharpness at three radii."""
PARTS: Final = {
    "inv": ("inv, first order", "inv, exact geodesics", "inv, eps 0.1", "inv, adaptive norm"),
    "mix": ("mix, first order", "mix, exact geodesics", "mix, adaptive norm"),
}
"""By metric, what is measured with one part changed, on the models of the first seed."""
COMPETITORS: Final = {
    "norm of the weights": "weight_norm",
    "training loss": "train_loss",
    "margin": "margin",
    "steps of training": "steps",
}
"""What is known of models without measuring sharpness, and its column."""
INCREASE: Final = "Median increase (nats)"


def words(measure: pd.Series) -> str:
    """Return what a measure is, without its radius: its geometry first, and only what is not as usual."""
    settings = {name.removeprefix("geometry."): value for name, value in measure.dropna().items()}
    short = {"worst-case sharpness": "", "legacy worst-case sharpness": "released ascent"}
    kind, what = settings["kind"], short.get(measure["measure"], measure["measure"])
    if what == "relative flatness":
        return what
    if kind != "quotient":
        return ", ".join(filter(None, (kind, what, "linf" if settings.get("norm") == "linf" else "")))
    parts = {"paper": "pairs with biases as rows", "pairs": "pairs alone"}.get(settings["symmetries"], "")
    order = {"first": "first order", "exact": "exact geodesics"}.get(settings["geodesic"], "")
    norm = "adaptive norm" if settings.get("norm") == "adaptive" else ""
    eps = f"eps {settings['eps']:g}" if settings["eps"] else ""
    return ", ".join(filter(None, (settings["metric"], what, parts, order, norm, eps)))


@final
@dataclass(frozen=True)
class Ranked:
    """Hold a zoo's models and its design, see `Design`."""

    comparison: Comparison
    factors: tuple[str, ...]
    along: tuple[str, ...]
    cells: tuple[str, ...]

    @cached_property
    def labels(self) -> dict[str, dict[float, str]]:
        """Return by words, and radius in ascending order, the label of a measure; no radius: 0."""
        found: dict[str, dict[float, str]] = {}
        measures = self.comparison.measures.sort_values("radius", kind="stable", na_position="first")
        for label, each in measures.iterrows():
            found.setdefault(words(each), {})[float(np.nan_to_num(each["radius"]))] = str(label)
        return found

    @cached_property
    def measures(self) -> dict[str, str]:
        """Return by words the columns that rank models: measures at the middle of three radii, and scores."""
        parts = {part for parts in PARTS.values() for part in parts}
        found = {name: list(radii.values())[:3] for name, radii in self.labels.items() if name not in parts}
        middle = {name: labels[len(labels) // 2] for name, labels in found.items()}
        scores = self.comparison.scores
        middle |= {
            name: column for name, column in COMPETITORS.items() if column in scores and scores[column].nunique() > 1
        }
        return {name: middle[name] for name in (*WORST, *middle) if name in middle}

    @property
    def shown(self) -> list[str]:
        """Return the measures that pages show: worst cases, and what costs nothing."""
        return [name for name in self.measures if name in WORST or name in COMPETITORS]

    @cached_property
    def design(self) -> Design:
        """Return the design, whose frame has a column for each label and one for each name in `measures`."""
        frame = self.comparison.frame()
        named = pd.DataFrame({name: frame[label] for name, label in self.measures.items() if name not in frame})
        return Design(frame.join(named), self.factors, self.along, self.cells)

    def flagged(self, label: str) -> list[str]:
        """Return the shares of values beyond reach, and of those whose ascent had not converged."""
        values = self.comparison.values.query("label == @label")
        shares = values["beyond_reach"].mean(), (values["late_rise"] > CONVERGED).mean()
        return [f"{100 * share:.0f}\N{NO-BREAK SPACE}%" for share in shares]


def tau_table(zoo: Ranked, columns: Mapping[str, tuple[Pairs, str]], names: Iterable[str]) -> pd.DataFrame:
    """Return tau of measures, a column for each set of pairs and gap."""
    return pd.DataFrame(
        {"Measure": name} | {head: zoo.design.tau(name, *column) for head, column in columns.items()} for name in names
    )


def ranking_table(zoo: Ranked, names: Iterable[str]) -> pd.DataFrame:
    """Return tau of measures at their middle radii: pooled, within cells, granulated."""
    design = zoo.design
    return pd.DataFrame(
        {
            "Measure": name,
            "Pooled": design.tau(name, design.same()),
            "Within cells": design.tau(name, design.within),
            "Granulated": design.psi(name),
            "Within cells, gap in loss": design.tau(name, design.within, "loss_gap"),
        }
        for name in names
    )


def radius_table(zoo: Ranked) -> pd.DataFrame:
    """Return tau by radius, the median increase in loss, and the shares of values that are in doubt."""
    design, rows = zoo.design, []
    for name in MAIN:
        for radius, label in list(zoo.labels[name].items())[:3]:
            row = {"Measure": name, "Radius": f"{radius:g}", INCREASE: f"{design.frame[label].median():.4g}"}
            row["tau"] = design.tau(label, design.within)
            rows.append(row | dict(zip(("Beyond reach", "Still increasing"), zoo.flagged(label), strict=True)))
    return pd.DataFrame(rows)


def parts_table(zoo: Ranked) -> pd.DataFrame:
    """Return what the order of geodesics, the relaxation and the norm change in value and in tau within cells.

    Parts that the zoo does not have are left out; those of Appendix G are measured by a command of their own.
    """
    design, rows = zoo.design, []
    for metric, parts in PARTS.items():
        at = {name: next(iter(zoo.labels[name].items())) for name in parts if name in zoo.labels}
        radius = at[parts[0]][0]
        for name, (own, label) in {metric: (radius, zoo.labels[metric][radius]), **at}.items():
            found = design.frame[label]
            known = found.notna().to_numpy()
            pairs = design.within & np.logical_and.outer(known, known)
            row = {"Measure": name, "Radius": f"{own:g}", INCREASE: f"{found.median():.4g}", "Difference": ""}
            row |= {"Beyond reach": zoo.flagged(label)[0], "tau": design.tau(label, pairs), "Difference of tau": ""}
            if name != metric and (same := zoo.labels[metric].get(own)) and "norm" not in name:
                row["Difference"] = f"{100 * (found / design.frame[same] - 1).abs().median():.2g} %"
                row["Difference of tau"] = design.tau_difference(label, same, pairs, absolute=False)
            rows.append(row)
    return pd.DataFrame(rows)


def convergence_table(found: Zoo) -> pd.DataFrame:
    """Return what the zoo's ascents found over what longer ones found: the median over models, and the least."""
    rows = []
    for label, chosen in pd.DataFrame(found.record["climbs"]).groupby("measure", sort=False):
        measure = found.comparison.measures.loc[label]
        shares = chosen["value"].to_numpy()[:, None] / np.array([*chosen["more"]])
        cells = [f"{np.median(column):.3f} ({column.min():.3f})" for column in shares.T]
        longer = {f"over {times}": cell for times, cell in zip(MORE, cells, strict=True)}
        rows.append({"Measure": words(measure), "Radius": f"{measure['radius']:g}", **longer})
    return pd.DataFrame(rows)
