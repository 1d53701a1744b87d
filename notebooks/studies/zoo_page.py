"""The page of a study of a zoo: what was found, part by part, beside what the paper found."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, final

from quotient_manifolds.geometry import Geometry, Quotient
from quotient_manifolds.report import Block, Code, Fact, Figure, Gallery, Page, Section, Table, Text
from quotient_manifolds.statistics import Correlation
from studies.vit_figures import growth, known, tau_intervals, tau_line, tau_of
from studies.wording import GAPS
from studies.zoo_spec import PLAIN, Plan, of_family
from studies.zoo_study import Cost

if TYPE_CHECKING:
    from quotient_manifolds.compare import Comparison

_FAST = "A trial with models hardly trained, far smaller than those described below: its numbers mean nothing. "


@final
@dataclass(frozen=True)
class ZooPage:
    """What is said of one study.

    zoo: how the models were made. given: hyperparameters of partial correlations. paper: by geometry, tau with the gap
    in error that the paper reports, and of what.
    """

    title: str
    zoo: str
    plan: Plan
    given: Mapping[str, str]
    paper: Mapping[str, str]
    paper_models: str

    def page(self, comparison: Comparison, costs: tuple[Cost, ...], *, fast: bool = False) -> Page:
        """All that the study says; of a study that measured less, only that. fast: its numbers mean nothing."""
        sections = [
            Section("zoo", "The zoo", [Text(self.zoo), spread(comparison)]),
            Section("ranking", "How measures rank the models", list(self._ranking(comparison))),
            Section("ablation", "What each part of a measure adds", list(self._ablation(comparison))),
            Section("family", "The family of metrics", list(self._family(comparison))),
            Section("relaxation", "The relaxation of the metric", list(self._relaxation(comparison))),
            Section("radius", "Beyond small radii", list(self._radius(comparison))),
            Section("cost", "What it cost", [_cost_table(costs)] if costs else []),
            Section("redo", "How to redo this", [Code(comparison.command)]),
        ]
        return Page(
            title=self.title,
            lead=(
                f"{_FAST if fast else ''}{len(comparison.rows)} models, {len(comparison.measures)} measures. Data, "
                "hyperparameters, measures and radii were fixed before any correlation was looked at."
            ),
            facts=list(self._facts(comparison)),
            sections=[section for section in sections if section.blocks],
        )

    def tau_table(self, comparison: Comparison, name: str, caption: str, labels: Mapping[str, str]) -> Table:
        """tau-b with both gaps, and with the gap in error given each of some hyperparameters in turn."""
        rows = [
            [
                words,
                *(_shown(tau_of(comparison, label, gap)) for gap in GAPS),
                *(_shown(tau_of(comparison, label, "error_gap", [given])) for given in self.given),
            ]
            for words, label in known(comparison, labels).items()
        ]
        columns = ["Measure", *(f"With the {words}" for words in GAPS.values())]
        columns += [f"Gap in error, given {words}" for words in self.given.values()]
        return Table(name, caption, columns, rows, [False, *[True] * (len(columns) - 1)])

    def main_labels(self) -> dict[str, str]:
        """The measures one by one, in words: at the middle radius where there are several."""
        plan, plain = self.plan, self.plan.plain
        found = self._labels({f"{name}, radius {at[1]:g}": at for name, at in plain.items()})
        found["inv, exact geodesics"] = plan.label(Quotient("inv", geodesic="exact"), plan.middle["inv"])
        for name in ("adaptive", "inv"):
            found[f"{name}, normalised logits"] = plan.label(*plain[name], normalise_logits=True)
        for name, radius in plan.average.items():
            found[f"{name}, average case"] = f"{PLAIN[name].name} average-case sharpness, radius {radius:g}"
        for name in ("euclidean", "adaptive", "inv"):
            found[f"{name}, gradient norm"] = f"{PLAIN[name].name} gradient norm"
        return found

    def _labels(self, places: Mapping[str, tuple[Geometry, float]]) -> dict[str, str]:
        return {words: self.plan.label(geometry, radius) for words, (geometry, radius) in places.items()}

    def _facts(self, comparison: Comparison) -> Iterator[Fact]:
        for name, (geometry, radius) in self.plan.plain.items():
            found = tau_of(comparison, self.plan.label(geometry, radius), "error_gap")
            if found is not None and name in self.paper:
                there = f"in the paper {self.paper[name]} ({self.paper_models})"
                yield Fact(str(found), f"tau of {name} sharpness with the gap in error; {there}.")

    def _ranking(self, comparison: Comparison) -> Iterator[Block]:
        labels = self.main_labels()
        if known(comparison, labels):
            yield Text(
                "A negative tau says that sharper models have smaller gaps. Intervals are 95 % percentile bootstraps "
                "over models; they stand side by side without a correction for their number."
            )
            yield self.tau_table(comparison, "ranking-table", "Kendall’s tau-b", labels)
            caption = "Kendall’s tau-b of every measure (marker) and its 95 % interval (bar), for both gaps."
            yield Gallery(list(tau_intervals(comparison, labels, "tau", caption)))

    def _ablation(self, comparison: Comparison) -> Iterator[Block]:
        figures: list[Figure] = []
        parts = {f"{metric}, {part}": at for metric, each in self.plan.ablation.items() for part, at in each.items()}
        caption = (
            "Without curvature geodesics are straight lines; with the adaptive norm the ball is that of adaptive "
            f"sharpness (radius {self.plan.middle['adaptive']:g}), and curvature is all that is left of the metric. "
            "Without both it is adaptive sharpness but for vertical directions."
        )
        labels = self._labels(parts)
        every = {**labels, "adaptive sharpness": self.plan.label(*self.plan.plain["adaptive"])}
        if len(known(comparison, labels)) > 2:
            figures += tau_intervals(comparison, every, "ablation", caption)
            yield self.tau_table(comparison, "ablation-table", "Kendall’s tau-b with parts turned off", every)
            yield Gallery(figures)

    def _family(self, comparison: Comparison) -> Iterator[Block]:
        radius = self.plan.middle["inv"]
        points = {t: self.plan.label(of_family(t), radius) for t in self.plan.family}
        if figures := list(tau_line(comparison, points, x_label="t (0 is inv, 1 is mix)", name="family")):
            labels = {f"t = {t:g}": at for t, at in points.items()}
            yield Gallery(figures)
            caption = f"Kendall’s tau-b along the family, radius {radius:g}"
            yield self.tau_table(comparison, "family-table", caption, labels)

    def _relaxation(self, comparison: Comparison) -> Iterator[Block]:
        radius = self.plan.middle["inv"]
        labels = self._labels({f"eps = {eps:g}": (Quotient("inv", eps=eps), radius) for eps in (0.0, *self.plan.eps)})
        if len(known(comparison, labels)) > 1:
            caption = "inv with eps added to the diagonal of its Gram matrices: with eps above 0 no longer invariant."
            yield Gallery(list(tau_intervals(comparison, labels, "relaxation", caption)))
            yield self.tau_table(comparison, "relaxation-table", "Kendall’s tau-b by relaxation", labels)

    def _radius(self, comparison: Comparison) -> Iterator[Block]:
        plan = self.plan
        families = {name: {radius: plan.label(PLAIN[name], radius) for radius in plan.radii(name)} for name in PLAIN}
        families = {
            name: {radius: label for radius, label in points.items() if label in comparison.labels}
            for name, points in families.items()
        }
        if figures := list(growth(comparison, families, "growth")):
            flat = {f"{name}, radius {radius:g}": at for name, each in families.items() for radius, at in each.items()}
            yield Text(_slopes(comparison, families))
            yield self.tau_table(comparison, "radius-table", "Kendall’s tau-b at every radius", flat)
            yield Gallery(figures)


def spread(comparison: Comparison) -> Table:
    """Of loss and error, and of the gaps, over the models."""
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
    """0 if no model has a value."""
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
