"""Tables of a zoo of transformers: how measures rank its models, over which pairs, and what each part of one adds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final, final

import numpy as np

from quotient_manifolds.compare import Comparison
from quotient_manifolds.plots import STYLES, Interval, Plot, interval_figure
from quotient_manifolds.report import Table
from studies.common import Estimate, figure, numbers, percent
from studies.zoos.catalogue import COMPETITORS, Catalogue
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
        return Design(self.comparison, self.factors)

    @cached_property
    def catalogue(self) -> Catalogue:
        return Catalogue(self.comparison)

    @property
    def within(self) -> Pairs:
        """Return the pairs of models of one task."""
        return self.design.within(*self.cells)

    @cached_property
    def measures(self) -> dict[str, str]:
        """Return by words the columns that rank models: measures at their middle radii, and what costs nothing."""
        scores = self.comparison.scores
        varying = (words for column, words in COMPETITORS.items() if column in scores and scores[column].nunique() > 1)
        parts = {part for parts in PARTS.values() for part in parts}
        known = [*self.catalogue.labels, *varying]
        names = [*(name for name in WORST if name in known), *(name for name in known if name not in WORST)]
        return {name: self.catalogue.middle(name) for name in names if name not in parts}

    def tau(self, name: str, pairs: Pairs, gap: str = GAP) -> Estimate | None:
        """Return tau of a measure over some pairs of models."""
        return self.design.tau(self.measures[name], gap, pairs)

    def psi(self, name: str) -> Estimate | None:
        """Return the granulated coefficient of a measure [Jiang et al., 2020]."""
        return self.design.granulated(self.measures[name], GAP, self.along)

    def psi_difference(self, first: str, second: str) -> Estimate | None:
        """Return |Psi| of the first minus |Psi| of the second."""
        count = len(self.along)
        terms = [term for name in (first, second) for term in self.design.terms(self.measures[name], GAP, self.along)]
        return self.design.estimate(
            terms, lambda *taus: np.abs(np.mean(taus[:count], axis=0)) - np.abs(np.mean(taus[count:], axis=0))
        )

    def tau_difference(self, first: str, second: str, pairs: Pairs, gap: str = GAP) -> Estimate | None:
        """Return |tau| of the first minus |tau| of the second over some pairs."""
        terms = [Term(self.measures[name], gap, pairs) for name in (first, second)]
        return self.design.estimate(terms, lambda a, b: np.abs(a) - np.abs(b))


def pairs_table(name: str, caption: str, zoo: Ranked, columns: Mapping[str, Pairs], names: Iterable[str]) -> Table:
    """Return tau of measures with the gap in error, a column for each set of pairs."""
    rows = [[each, *(str(zoo.tau(each, pairs)) for pairs in columns.values())] for each in names]
    return numbers(name, caption, ["Measure", *columns], rows)


def gaps_table(name: str, caption: str, zoo: Ranked, gaps: Mapping[str, str], names: Iterable[str]) -> Table:
    """Return tau of measures over all pairs, a column for each gap."""
    everywhere = zoo.design.everywhere
    rows = [[each, *(str(zoo.tau(each, everywhere, gap)) for gap in gaps.values())] for each in names]
    return numbers(name, caption, ["Measure", *gaps], rows)


def ranking_table(zoo: Ranked) -> Table:
    """Return tau of every measure at its middle radius: pooled, within cells, granulated, partial."""
    partial = (*WORST, *COMPETITORS.values())
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
    columns = ["Measure", "Pooled", "Within cells", "Granulated", "Partial", "Within cells, gap in loss"]
    return numbers("ranking", "", columns, rows)


def radius_table(zoo: Ranked) -> Table:
    """Return tau by radius, the median increase in loss, and the shares of values that are in doubt."""
    rows = []
    for name in MAIN:
        for radius, label in list(zoo.catalogue.labels[name].items())[:3]:
            beyond, rising = zoo.catalogue.flagged(label)
            tau = zoo.design.tau(label, GAP, zoo.within)
            median = figure(statistics.median(zoo.catalogue.values(label)))
            rows.append([name, f"{radius:g}", median, str(tau), percent(beyond), percent(rising)])
    columns = ["Measure", "Radius", "Median increase (nats)", "tau", "Beyond reach", "Still increasing"]
    return numbers("radius", "", columns, rows)


def parts_table(zoo: Ranked) -> Table:
    """Return what the order of geodesics, the relaxation and the norm change in value and in tau within cells."""
    rows = []
    for metric, parts in PARTS.items():
        at = {name: next(iter(zoo.catalogue.labels[name].items())) for name in parts}
        radius = at[parts[0]][0]
        whole = zoo.catalogue.labels[metric][radius]
        rows.append([metric, f"{radius:g}", *_against(zoo, whole, None)])
        for name, (own, label) in at.items():
            same = zoo.catalogue.labels[metric].get(own)
            rows.append([name, f"{own:g}", *_against(zoo, label, same if "norm" not in name else None)])
    columns = ["Measure", "Radius", "Median increase (nats)", "Difference", "Beyond reach", "tau", "Difference of tau"]
    return numbers("parts", "", columns, rows)


def _against(zoo: Ranked, label: str, whole: str | None) -> list[str]:
    """Return value, its relative difference from another measure, share beyond reach, tau, and its difference."""
    design = zoo.design
    found = design.column(label)
    known = ~np.isnan(found)
    pairs = zoo.within & np.logical_and.outer(known, known)
    median, beyond = figure(float(np.nanmedian(found))), percent(zoo.catalogue.flagged(label)[0])
    tau = str(design.tau(label, GAP, pairs))
    if whole is None:
        return [median, "", beyond, tau, ""]
    apart = 100 * float(np.nanmedian(np.abs(found / design.column(whole) - 1)))
    minus = design.estimate([Term(label, GAP, pairs), Term(whole, GAP, pairs)], lambda a, b: a - b)
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
    words = "; ".join(
        f"{group}: " + ", ".join(f"{name} {tau}" for name, tau in taus.items()) for group, taus in columns.items()
    )
    label = "Kendall’s tau-b with the gap in error"
    return interval_figure(groups, x_label=label, alt=f"{label}, {models}. {words}.")
