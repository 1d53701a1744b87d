"""Tables of a zoo of transformers: how measures rank its models, over which pairs, and what each part of one adds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final, final

import numpy as np
import pandas as pd

from quotient_manifolds.compare import Comparison
from quotient_manifolds.plots import STYLES, Interval, Plot, interval_figure
from quotient_manifolds.sharpness.result import CONVERGED
from studies.common import Estimate, figure, percent, table
from studies.zoos.ranking import Design, Pairs, Term

GAP: Final = "error_gap"
LOSS_GAP: Final = "loss_gap"
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


def words(measure: pd.Series) -> str:
    """Return what a measure is, without its radius: its geometry first, and only what is not as usual."""
    settings = {name.removeprefix("geometry."): value for name, value in measure.dropna().items()}
    name = {"worst-case sharpness": "", "legacy worst-case sharpness": "released ascent"}
    kind, what = settings["kind"], name.get(measure["measure"], measure["measure"])
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
    """Hold a zoo's models and its design.

    factors: the columns of the design; along: those that the granulated coefficient is the mean over. cells: the
    factors that define the task; within a cell, models differ only in how they were trained.
    """

    comparison: Comparison
    factors: tuple[str, ...]
    along: tuple[str, ...]
    cells: tuple[str, ...]

    @cached_property
    def design(self) -> Design:
        return Design(self.comparison.frame(), self.factors)

    @cached_property
    def labels(self) -> dict[str, dict[float, str]]:
        """Return by words, and radius in ascending order, the label of a measure; no radius: 0."""
        found: dict[str, dict[float, str]] = {}
        for label, each in self.comparison.measures.sort_values(
            "radius", kind="stable", na_position="first"
        ).iterrows():
            found.setdefault(words(each), {})[float(np.nan_to_num(each["radius"]))] = str(label)
        return found

    @cached_property
    def measures(self) -> dict[str, str]:
        """Return by words the columns that rank models: measures at the middle of three radii, and scores."""
        parts = {part for parts in PARTS.values() for part in parts}
        found = {name: list(radii.values())[:3] for name, radii in self.labels.items() if name not in parts}
        middle = {name: labels[len(labels) // 2] for name, labels in found.items()}
        frame = self.design.frame
        middle |= {
            name: column for name, column in COMPETITORS.items() if frame.get(column, frame[GAP][:1]).nunique() > 1
        }
        return {name: middle[name] for name in (*WORST, *middle) if name in middle}

    @property
    def within(self) -> Pairs:
        """Return the pairs of models of one task."""
        return self.design.within(*self.cells)

    def tau(self, name: str, pairs: Pairs, gap: str = GAP) -> Estimate | None:
        """Return tau of a measure over some pairs of models."""
        return self.design.tau(self.measures[name], gap, pairs)

    def psi(self, name: str) -> Estimate | None:
        """Return the granulated coefficient of a measure [Jiang et al., 2020]."""
        return self.design.granulated(self.measures[name], GAP, self.along)

    def psi_difference(self, first: str, second: str) -> Estimate | None:
        """Return |Psi| of the first minus |Psi| of the second."""
        terms = [
            [(self.measures[name], GAP, self.design.along(each)) for each in self.along] for name in (first, second)
        ]
        return self.design.difference(*terms)

    def tau_difference(self, first: str, second: str, pairs: Pairs) -> Estimate | None:
        """Return |tau| of the first minus |tau| of the second over some pairs."""
        one, other = ([(self.measures[name], GAP, pairs)] for name in (first, second))
        return self.design.difference(one, other)

    def flagged(self, label: str) -> tuple[float, float]:
        """Return the shares of values beyond reach, and of those whose ascent had not converged."""
        values = self.comparison.values.query("label == @label")
        return values["beyond_reach"].mean(), (values["late_rise"] > CONVERGED).mean()


def pairs_table(zoo: Ranked, columns: Mapping[str, Pairs], names: Iterable[str]) -> pd.DataFrame:
    """Return tau of measures with the gap in error, a column for each set of pairs."""
    rows = [[name, *(str(zoo.tau(name, pairs)) for pairs in columns.values())] for name in names]
    return table(["Measure", *columns], rows)


def gaps_table(zoo: Ranked, gaps: Mapping[str, str], names: Iterable[str]) -> pd.DataFrame:
    """Return tau of measures over all pairs, a column for each gap."""
    rows = [[name, *(str(zoo.tau(name, zoo.design.everywhere, gap)) for gap in gaps.values())] for name in names]
    return table(["Measure", *gaps], rows)


def ranking_table(zoo: Ranked) -> pd.DataFrame:
    """Return tau of every measure at its middle radius: pooled, within cells, granulated, partial."""
    partial = (*WORST, *COMPETITORS)
    rows = [
        [
            name,
            str(zoo.tau(name, zoo.design.everywhere)),
            str(zoo.tau(name, zoo.within)),
            str(zoo.psi(name)),
            str(zoo.design.partial(column, GAP, zoo.along)) if name in partial else "",
            str(zoo.tau(name, zoo.within, LOSS_GAP)),
        ]
        for name, column in zoo.measures.items()
    ]
    return table(["Measure", "Pooled", "Within cells", "Granulated", "Partial", "Within cells, gap in loss"], rows)


def radius_table(zoo: Ranked) -> pd.DataFrame:
    """Return tau by radius, the median increase in loss, and the shares of values that are in doubt."""
    rows = []
    for name in MAIN:
        for radius, label in list(zoo.labels[name].items())[:3]:
            tau, median = zoo.design.tau(label, GAP, zoo.within), zoo.design.frame[label].median()
            rows.append([name, f"{radius:g}", figure(median), str(tau), *map(percent, zoo.flagged(label))])
    return table(["Measure", "Radius", "Median increase (nats)", "tau", "Beyond reach", "Still increasing"], rows)


def parts_table(zoo: Ranked) -> pd.DataFrame:
    """Return what the order of geodesics, the relaxation and the norm change in value and in tau within cells.

    Parts that the zoo does not have are left out; those of Appendix G are measured by a command of their own.
    """
    rows = []
    for metric, parts in PARTS.items():
        at = {name: next(iter(zoo.labels[name].items())) for name in parts if name in zoo.labels}
        radius = at[parts[0]][0]
        rows.append([metric, f"{radius:g}", *_against(zoo, zoo.labels[metric][radius], None)])
        for name, (own, label) in at.items():
            same = None if "norm" in name else zoo.labels[metric].get(own)
            rows.append([name, f"{own:g}", *_against(zoo, label, same)])
    columns = ["Measure", "Radius", "Median increase (nats)", "Difference", "Beyond reach", "tau", "Difference of tau"]
    return table(columns, rows)


def _against(zoo: Ranked, label: str, whole: str | None) -> list[str]:
    """Return value, its relative difference from another measure, share beyond reach, tau, and its difference."""
    design, found = zoo.design, zoo.design.frame[label]
    known = found.notna().to_numpy()
    pairs = zoo.within & np.logical_and.outer(known, known)
    here: Term = (label, GAP, pairs)
    median, beyond, tau = figure(found.median()), percent(zoo.flagged(label)[0]), str(design.tau(*here))
    if whole is None:
        return [median, "", beyond, tau, ""]
    apart = 100 * (found / design.frame[whole] - 1).abs().median()
    minus = design.estimate([here, (whole, GAP, pairs)], lambda a, b: a - b)
    return [median, f"{apart:.2g} %", beyond, tau, str(minus)]


def intervals_figure(columns: Mapping[str, Mapping[str, Estimate | None]], models: str) -> Plot:
    """Draw estimates with their intervals, a panel for each column."""
    groups = {
        group: [
            Interval(name, tau.value, tau.low, tau.high, STYLES[place % len(STYLES)])
            for place, (name, tau) in enumerate(taus.items())
            if tau is not None
        ]
        for group, taus in columns.items()
    }
    said = "; ".join(
        f"{group}: " + ", ".join(f"{name} {tau}" for name, tau in taus.items()) for group, taus in columns.items()
    )
    label = "Kendall’s tau-b with the gap in error"
    return interval_figure(groups, x_label=label, alt=f"{label}, {models}. {said}.")
