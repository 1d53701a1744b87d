"""The page of a study of a zoo: what was found, part by part, beside what the paper found."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import final

from quotient_manifolds.compare import Comparison
from quotient_manifolds.geometry import Quotient
from quotient_manifolds.report import Block, Code, Fact, Gallery, Page, Section, Table, Text
from quotient_manifolds.statistics import Correlation
from studies.paper import MODELS, TAU
from studies.wording import GAPS, signed
from studies.zoos.figures import Labels, growth, known, tau_intervals, tau_line
from studies.zoos.measures import METRICS, PLAIN, ZooMeasures

_FAST = "A trial with models hardly trained, far smaller than those described below: its numbers mean nothing. "


@final
@dataclass(frozen=True)
class Cost:
    """Hold what a measure took: seconds of wall time of all its units together."""

    measure: str
    units: int
    seconds: float


@final
@dataclass(frozen=True)
class ZooPage:
    """Say what is to be said of one study.

    key: the study's name, by which the paper's numbers are found. zoo: how the models were made. given: hyperparameters
    of partial correlations, in words.
    """

    key: str
    title: str
    zoo: str
    given: Mapping[str, str]

    def page(self, comparison: Comparison, costs: tuple[Cost, ...], *, fast: bool = False) -> Page:
        """Return all that the study says; of a study that measured less, only that. fast: its numbers mean nothing."""
        measures = ZooMeasures(comparison)
        sections = [
            Section("zoo", "The zoo", [Text(self.zoo), spread(comparison)]),
            Section("ranking", "How measures rank the models", list(self._ranking(measures))),
            Section("ablation", "What each part of a measure adds", list(self._ablation(measures))),
            Section("family", "The family of metrics", list(self._family(measures))),
            Section("relaxation", "The relaxation of the metric", list(self._relaxation(measures))),
            Section("radius", "Beyond small radii", list(self._radius(measures))),
            Section("cost", "What it cost", [_cost_table(costs)] if costs else []),
            Section("redo", "How to redo this", [Code(comparison.command)]),
        ]
        return Page(
            title=self.title,
            lead=(
                f"{_FAST if fast else ''}{len(comparison.rows)} models, {len(comparison.measures)} measures. Data, "
                "hyperparameters, measures and radii were fixed before any correlation was looked at."
            ),
            facts=list(self._facts(measures)),
            sections=sections,
        )

    def tau_table(self, measures: ZooMeasures, name: str, caption: str, labels: Mapping[str, str | None]) -> Table:
        """Return tau-b with both gaps, and with the gap in error given each of some hyperparameters in turn."""
        rows = [
            [
                words,
                *(_shown(measures.tau(label, gap)) for gap in GAPS),
                *(_shown(measures.tau(label, "error_gap", [given])) for given in self.given),
            ]
            for words, label in known(measures, labels).items()
        ]
        columns = ["Measure", *(f"With the {words}" for words in GAPS.values())]
        columns += [f"Gap in error, given {words}" for words in self.given.values()]
        return Table(name, caption, columns, rows, [False, *[True] * (len(columns) - 1)])

    def main_labels(self, measures: ZooMeasures) -> Labels:
        """Return the measures one by one, in words: at the middle radius where there are several."""
        middle = {name: measures.middle(name) for name in PLAIN}
        found = {f"{name}, radius {radius:g}": measures.places.get(name) for name, radius in middle.items() if radius}
        found["inv, exact geodesics"] = measures.label(Quotient("inv", "exact"), middle["inv"])
        for name in ("adaptive", "inv"):
            label = measures.label(PLAIN[name], middle[name], normalise_logits=True)
            found[f"{name}, normalised logits"] = label
        for name, geometry in PLAIN.items():
            for radius in measures.radii(geometry, "average-case sharpness"):
                found[f"{name}, average case"] = measures.label(geometry, radius, "average-case sharpness")
        for name, geometry in PLAIN.items():
            found[f"{name}, gradient norm"] = measures.label(geometry, None, "gradient norm")
        return {words: label for words, label in found.items() if label is not None}

    def _facts(self, measures: ZooMeasures) -> Iterator[Fact]:
        for name, tau in TAU[self.key].items():
            found = measures.tau(measures.places.get(name), "error_gap")
            if found is not None:
                there = f"in the paper {signed(tau)} ({MODELS[self.key]})"
                yield Fact(str(found), f"tau of {name} sharpness with the gap in error; {there}.")

    def _ranking(self, measures: ZooMeasures) -> Iterator[Block]:
        labels = self.main_labels(measures)
        if known(measures, labels):
            yield Text(
                "A negative tau says that sharper models have smaller gaps. Intervals are 95 % percentile bootstraps "
                "over models; they stand side by side without a correction for their number."
            )
            yield self.tau_table(measures, "ranking-table", "Kendall’s tau-b", labels)
            caption = "Kendall’s tau-b of every measure (marker) and its 95 % interval (bar), for both gaps."
            yield Gallery(list(tau_intervals(measures, labels, "tau", caption)))

    def _ablation(self, measures: ZooMeasures) -> Iterator[Block]:
        parts = {"": "whole", " first": "no curvature", " adaptive norm": "adaptive norm"}
        places = {f"{metric}, {words}": f"{metric}{part}" for metric in METRICS for part, words in parts.items()}
        labels = known(measures, {words: measures.places.get(place) for words, place in places.items()})
        if len(labels) > 2:
            caption = (
                "Without curvature geodesics are straight lines; with the adaptive norm the ball is that of adaptive "
                f"sharpness (radius {measures.middle('adaptive') or 0:g}), and curvature is all that is left of the "
                "metric. Without both it is adaptive sharpness but for vertical directions."
            )
            every = {**labels, **known(measures, {"adaptive sharpness": measures.places.get("adaptive")})}
            yield self.tau_table(measures, "ablation-table", "Kendall’s tau-b with parts turned off", every)
            yield Gallery(list(tau_intervals(measures, every, "ablation", caption)))

    def _family(self, measures: ZooMeasures) -> Iterator[Block]:
        if figures := list(tau_line(measures, measures.family, x_label="t (0 is inv, 1 is mix)", name="family")):
            yield Gallery(figures)
            caption = f"Kendall’s tau-b along the family, radius {measures.middle('inv') or 0:g}"
            labels = {f"t = {t:g}": label for t, label in measures.family.items()}
            yield self.tau_table(measures, "family-table", caption, labels)

    def _relaxation(self, measures: ZooMeasures) -> Iterator[Block]:
        relaxed = {f"eps = {eps:g}": label for eps, label in measures.relaxations.items()}
        labels = known(measures, {"eps = 0": measures.places.get("inv"), **relaxed})
        if len(labels) > 1:
            caption = "inv with eps added to the diagonal of its Gram matrices: with eps above 0 no longer invariant."
            yield Gallery(list(tau_intervals(measures, labels, "relaxation", caption)))
            yield self.tau_table(measures, "relaxation-table", "Kendall’s tau-b by relaxation", labels)

    def _radius(self, measures: ZooMeasures) -> Iterator[Block]:
        families: dict[str, dict[float, str]] = {}
        for name, geometry in PLAIN.items():
            labels = {radius: measures.label(geometry, radius) for radius in measures.radii(geometry)}
            families[name] = {radius: label for radius, label in labels.items() if label is not None}
        if figures := list(growth(measures.comparison, families, "growth")):
            flat = {f"{name}, radius {radius:g}": at for name, each in families.items() for radius, at in each.items()}
            yield Text(_slopes(measures.comparison, families))
            yield self.tau_table(measures, "radius-table", "Kendall’s tau-b at every radius", flat)
            yield Gallery(figures)


def spread(comparison: Comparison) -> Table:
    """Tabulate the spread of losses, errors and gaps over the models."""
    known = {name for row in comparison.rows for name in row.scores}
    training = "train_error" if "train_error" in known else "error"  # on the measured data, which may be a part
    names = {training: "training error", "test_error": "test error", **GAPS, "test_loss": "test loss"}
    rows = []
    for score, words in names.items():
        values = sorted(value for value in comparison.column(score) if isinstance(value, float))
        shown = (values[0], statistics.median(values), values[-1]) if values else ()
        rows.append([words, *([f"{value:.3f}" for value in shown] or [""] * 3)])
    columns = ["Score", "Smallest", "Median", "Largest"]
    return Table("spread", "How the models differ", columns, rows, [False, True, True, True])


def _slopes(comparison: Comparison, families: Mapping[str, Mapping[float, str]]) -> str:
    found: list[str] = []
    for name, points in families.items():
        if len(points) < 2:
            continue
        medians = [(radius, _median(comparison, measure)) for radius, measure in points.items()]
        powers = [
            math.log(after / before) / math.log(larger / smaller)
            for (smaller, before), (larger, after) in pairwise(medians)
            if before > 0 and after > 0
        ]
        found.append(f"{name} {', '.join(f'{power:.2f}' for power in powers) or 'unknown'}")
    return (
        "The power of the radius that the median rises with from one radius to the next (1 where the gradient decides, "
        f"2 where the Hessian does, neither where the loss no longer follows them): {'; '.join(found)}."
    )


def _median(comparison: Comparison, measure: str) -> float:
    """Return 0 if no model has a value."""
    return statistics.median([value for value in comparison.column(measure) if value is not None] or [0.0])


def _cost_table(costs: tuple[Cost, ...]) -> Table:
    rows = [
        [each.measure, str(each.units), f"{each.seconds / each.units:.2f}", f"{each.seconds:.0f}"]
        for each in costs
        if each.units
    ]
    total = sum(each.seconds for each in costs)
    caption = f"Seconds of wall time on one thread of a shared machine; {total / 60:.0f} minutes in all"
    columns = ["Measure", "Values", "Seconds each", "Seconds"]
    return Table("cost-table", caption, columns, rows, [False, True, True, True])


def _shown(found: Correlation | None) -> str:
    return "" if found is None else str(found)
