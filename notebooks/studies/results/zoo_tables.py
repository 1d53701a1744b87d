"""Tables of a zoo of transformers: how measures rank its models, over which pairs, and what each part of one adds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, final

import numpy as np

from quotient_manifolds.compare import Comparison
from studies.markdown import table
from studies.results.estimates import Estimate
from studies.wording import figure, percent, signed
from studies.zoos.catalogue import COMPETITORS, Catalogue
from studies.zoos.convergence import MORE, Convergence
from studies.zoos.ranking import Design, Pairs, Term, masked_tau

GAP: Final = "error_gap"
LOSS_GAP: Final = "loss_gap"
WORST: Final = (
    "euclidean",
    "adaptive",
    "adaptive, linf",
    "adaptive, released ascent",
    "adaptive, released ascent, linf",
    "inv",
    "mix",
    "inv, pairs with biases as rows",
    "mix, pairs with biases as rows",
)
"""Worst-case sharpness at three radii."""
MAIN: Final = ("euclidean", "adaptive", "inv", "mix")
PARTS: Final = {
    "inv": ("inv", "inv, first order", "inv, exact geodesics"),
    "mix": ("mix", "mix, first order", "mix, exact geodesics"),
}


@final
@dataclass(frozen=True)
class Zoo:
    """Hold a zoo's models and its design.

    factors: the columns of the design; along: those that the granulated coefficient is the mean over. cells: what
    decides the task; within a cell, models differ in how they were trained alone.
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

    @property
    def measures(self) -> dict[str, str]:
        """Return by words the columns that models are ranked by, measures at their middle radii."""
        names = [*self.catalogue.labels, *(said for column, said in COMPETITORS.items() if self._varies(column))]
        first = [name for name in WORST if name in names]
        return {name: self.catalogue.middle(name) for name in (*first, *(name for name in names if name not in first))}

    def _varies(self, column: str) -> bool:
        return len(set(self.comparison.column(column)) - {None}) > 1

    def difference(self, first: str, second: str, gap: str = GAP) -> Estimate | None:
        """Return |Psi| of the first minus |Psi| of the second, Psi the granulated coefficient, at middle radii."""
        count = len(self.along)
        terms = [
            term for name in (first, second) for term in self.design.terms(self.catalogue.middle(name), gap, self.along)
        ]
        return self.design.estimate(
            terms, lambda *taus: np.abs(np.mean(taus[:count], axis=0)) - np.abs(np.mean(taus[count:], axis=0))
        )

    def plain_difference(self, first: str, second: str, gap: str, pairs: Pairs) -> Estimate | None:
        """Return |tau| of the first minus |tau| of the second over some pairs, at middle radii."""
        terms = [Term(self.catalogue.middle(name), gap, pairs) for name in (first, second)]
        return self.design.estimate(terms, lambda a, b: np.abs(a) - np.abs(b))


def ranking_table(zoo: Zoo) -> str:
    """Tabulate tau of every measure at its middle radius: pooled, within cells, granulated, partial."""
    design = zoo.design
    rows = [
        [
            name,
            str(design.tau(column, GAP, design.everywhere)),
            str(design.tau(column, GAP, zoo.within)),
            str(design.granulated(column, GAP, zoo.along)),
            str(design.partial(column, GAP, zoo.along)) if name in PARTIAL else "",
            str(design.tau(column, LOSS_GAP, zoo.within)),
        ]
        for name, column in zoo.measures.items()
        if name.partition(",")[0] not in PARTS or not _is_part(name)
    ]
    return table(["Measure, at its middle radius", *COLUMNS], rows)


COLUMNS: Final = ("Pooled", "Within cells", "Granulated", "Partial", "Within cells, gap in loss")
PARTIAL: Final = (*WORST, *COMPETITORS.values())


def _is_part(name: str) -> bool:
    return (
        any(name == part for parts in PARTS.values() for part in parts[1:]) or "adaptive norm" in name or "eps" in name
    )


def radius_table(zoo: Zoo) -> str:
    """Tabulate tau by radius, with what is known of the ascents; within cells and granulated where there are cells."""
    designed = bool(zoo.cells)
    rows = []
    for name in WORST:
        for radius, label in list(zoo.catalogue.labels.get(name, {}).items())[:3]:
            beyond, late = zoo.catalogue.flagged(label)
            rows.append(
                [
                    name,
                    f"{radius:g}",
                    figure(statistics.median(zoo.catalogue.values(label))),
                    str(zoo.design.tau(label, GAP, zoo.within)),
                    *([str(zoo.design.granulated(label, GAP, zoo.along))] if designed else []),
                    percent(beyond),
                    percent(late),
                ]
            )
    taus = ["Within cells", "Granulated"] if designed else ["tau-b"]
    return table(["Measure", "Radius", "Median rise (nats)", *taus, "Beyond reach", "Still rising"], rows)


def along_table(zoo: Zoo, names: Iterable[str]) -> str:
    """Tabulate tau over the pairs that differ in one factor alone."""
    return _pairs_table(zoo, names, {_said(factor): zoo.design.along(factor) for factor in zoo.along})


def values_table(zoo: Zoo, names: Iterable[str], factor: str, values: Sequence[float]) -> str:
    """Tabulate tau within cells by the value of a factor."""
    within = zoo.within
    return _pairs_table(
        zoo, names, {f"{_said(factor)} {value:g}": within & zoo.design.where(**{factor: value}) for value in values}
    )


def _pairs_table(zoo: Zoo, names: Iterable[str], pairs: Mapping[str, Pairs]) -> str:
    rows = [
        [name, *(str(zoo.design.tau(zoo.measures[name], GAP, each)) for each in pairs.values())]
        for name in names
        if name in zoo.measures
    ]
    return table(["Measure", *pairs], rows)


def gaps_table(zoo: Zoo, names: Iterable[str], gaps: Mapping[str, str], pairs: Pairs) -> str:
    """Tabulate tau with several gaps over the same pairs; gaps: by words, the column."""
    rows = [
        [name, *(str(zoo.design.tau(zoo.measures[name], gap, pairs)) for gap in gaps.values())]
        for name in names
        if name in zoo.measures
    ]
    return table(["Measure", *gaps], rows)


def parts_table(zoo: Zoo) -> str:
    """Tabulate what the order of geodesics changes, in value and in tau within cells, at the radii of some reach."""
    rows = []
    for metric, names in PARTS.items():
        if any(name not in zoo.catalogue.labels for name in names):
            continue
        radius = next(iter(zoo.catalogue.labels[names[1]]))
        whole = zoo.catalogue.labels[metric][radius]
        for name in names:
            label = zoo.catalogue.labels[name][radius]
            rows.append([name, f"{radius:g}", *_against(zoo, label, whole)])
    for name, label in _others(zoo):
        metric = name.partition(",")[0]
        whole = zoo.catalogue.middle(metric) if "eps" in name else ""
        radius = next(iter(zoo.catalogue.labels[name]))
        rows.append([name, f"{radius:g}", *_against(zoo, label, whole)])
    columns = ["Measure", "Radius", "Median rise (nats)", "Difference from second order", "Beyond reach"]
    return table([*columns, "tau within cells", "Minus that of second order"], rows)


def _others(zoo: Zoo) -> list[tuple[str, str]]:
    labels = zoo.catalogue.labels
    return [(name, next(iter(labels[name].values()))) for name in labels if "adaptive norm" in name or "eps" in name]


def _against(zoo: Zoo, label: str, whole: str) -> list[str]:
    """Return value, relative difference from another measure, share beyond reach, tau, and its difference."""
    within, design = zoo.within, zoo.design
    found = design.column(label)
    known = [figure(float(np.nanmedian(found)))]
    beyond, _ = zoo.catalogue.flagged(label)
    tau = str(design.tau(label, GAP, within & _both(design, label)))
    if whole in ("", label):
        return [*known, "", percent(beyond), tau, ""]
    apart = float(np.nanmedian(np.abs(found / design.column(whole) - 1)))
    pairs = within & _both(design, label)
    minus = design.estimate([Term(label, GAP, pairs), Term(whole, GAP, pairs)], lambda a, b: a - b)
    return [*known, f"{100 * apart:.2g} %", percent(beyond), tau, str(minus)]


def _both(design: Design, label: str) -> Pairs:
    known = ~np.isnan(design.column(label))
    return np.logical_and.outer(known, known)


def agreement_table(zoo: Zoo, names: Sequence[str]) -> str:
    """Tabulate tau between measures within cells."""
    within = zoo.within
    columns = {name: zoo.design.column(zoo.measures[name]) for name in names if name in zoo.measures}
    once = np.ones(zoo.design.models)
    rows = [
        [name, *(signed(float(masked_tau(x, y, within, once))) for y in columns.values())]
        for name, x in columns.items()
    ]
    return table(["", *columns], rows)


def convergence_table(found: Convergence) -> str:
    """Tabulate what the zoo's ascents found over what ascents with more steps and starts found."""
    measures = dict.fromkeys(climb.measure for climb in found.climbs)
    rows = []
    for measure in measures:
        shares = list(zip(*found.shares(measure), strict=True))
        rows.append([measure, *(f"{statistics.median(column):.3f} ({min(column):.3f})" for column in shares)])
    return table(["Measure", *(f"over that of {words}" for words in MORE)], rows)


def _said(factor: str) -> str:
    return factor.replace("_", " ")
