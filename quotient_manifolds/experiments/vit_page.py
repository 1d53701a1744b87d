"""The page of the study of vision transformers: what was found, beside what the paper found on CLIP."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, final

from quotient_manifolds.experiments.vit_figures import growth, known, tau_intervals, tau_line, tau_of
from quotient_manifolds.experiments.vit_spec import (
    ABLATION,
    AVERAGE,
    EPS,
    FAMILY,
    MIDDLE,
    PLAIN,
    label,
    of_family,
    radii,
)
from quotient_manifolds.experiments.wording import GAPS
from quotient_manifolds.geometry import Geometry, Quotient
from quotient_manifolds.report import Block, Code, Fact, Figure, Gallery, Page, Section, Table, Text
from quotient_manifolds.statistics import Correlation

if TYPE_CHECKING:
    from quotient_manifolds.compare import Comparison

PAPER = {"adaptive": "−0.41", "inv": "−0.71", "mix": "−0.70"}  # [paper, Table 1: CLIP fine-tuned on ImageNet]
GIVEN = ("learning_rate", "start")


@final
@dataclass(frozen=True)
class Cost:
    """What a measure took: seconds of wall time of all its units together."""

    measure: str
    units: int
    seconds: float


PLAIN_LABELS = {name: (PLAIN[name], MIDDLE[name]) for name in PLAIN}


def vit_page(comparison: Comparison, costs: tuple[Cost, ...], *, fast: bool = False) -> Page:
    """All that the study says; of a study that measured less, only that. fast: its numbers mean nothing."""
    sections = [
        Section("zoo", "The zoo", [Text(_ZOO), _spread(comparison)]),
        Section("ranking", "How measures rank the models", list(_ranking(comparison))),
        Section("ablation", "What each part of a measure adds", list(_ablation(comparison))),
        Section("family", "The family of metrics", list(_family(comparison))),
        Section("relaxation", "The relaxation of the metric", list(_relaxation(comparison))),
        Section("radius", "Beyond small radii", list(_radius(comparison))),
        Section("cost", "What it cost", [_cost_table(costs)] if costs else []),
        Section("redo", "How to redo this", [Code(comparison.command)]),
    ]
    return Page(
        title="Vision transformers fine-tuned on few digits",
        lead=(
            f"{_FAST if fast else ''}{len(comparison.rows)} models, {len(comparison.measures)} measures. Data, "
            "hyperparameters, measures and radii were fixed before any correlation was looked at."
        ),
        facts=list(_facts(comparison)),
        sections=[section for section in sections if section.blocks],
    )


_FAST = "A trial with models hardly trained, far smaller than those described below: its numbers mean nothing. "

_ZOO = (
    "Three vision transformers (3 layers, 4 heads of 12, 58,570 parameters) are pre-trained on 500 of scikit-learn’s "
    "digits: turned by 90°, inverted, or with two digits to a class. Each model begins from one of them with a new "
    "classifier and is fine-tuned on 256 other digits, shifted by up to a pixel and with noise of 0.3 standard "
    "deviations; 1041 more, disturbed alike, test it. At random: learning rate (6e-4 to 6e-3), weight decay (1e-4 to "
    "1), batch size (16, 32, 64), label smoothing (0, 0.1), augmentation by further shifts (with, without), steps "
    "(400, 600) and seed. Sharpness is measured on the 256 training images, in 2 batches of 128."
)


def _facts(comparison: Comparison) -> Iterator[Fact]:
    for name, (geometry, radius) in PLAIN_LABELS.items():
        found = tau_of(comparison, label(geometry, radius), "error_gap")
        if found is not None and name in PAPER:
            meaning = f"tau of {name} sharpness with the gap in error; in the paper {PAPER[name]} (72 CLIP models)."
            yield Fact(str(found), meaning)


def _spread(comparison: Comparison) -> Table:
    names = {"error": "training error", "test_error": "test error", **GAPS, "test_loss": "test loss"}
    rows = []
    for score, words in names.items():
        values = sorted(value for value in comparison.column(score) if isinstance(value, float))
        shown = (values[0], statistics.median(values), values[-1]) if values else ()
        rows.append([words, *([f"{value:.3f}" for value in shown] or [""] * 3)])
    columns = ["Score", "Smallest", "Median", "Largest"]
    return Table("spread", "How the models differ", columns, rows, [False, True, True, True])


def tau_table(comparison: Comparison, name: str, caption: str, labels: Mapping[str, str]) -> Table:
    """tau-b with both gaps, and with the gap in error given learning rate and starting point in turn."""
    rows = [
        [
            words,
            *(_shown(tau_of(comparison, label, gap)) for gap in GAPS),
            *(_shown(tau_of(comparison, label, "error_gap", [given])) for given in GIVEN),
        ]
        for words, label in known(comparison, labels).items()
    ]
    columns = ["Measure", *(f"With the {words}" for words in GAPS.values())]
    columns += [f"Gap in error, given {given.replace('_', ' ')}" for given in GIVEN]
    return Table(name, caption, columns, rows, [False, True, True, True, True])


def main_labels() -> dict[str, str]:
    """The measures one by one, in words: at the middle radius where there are several."""
    found = _labels({f"{name}, radius {radius:g}": at for name, at in PLAIN_LABELS.items() for radius in [at[1]]})
    found["inv, exact geodesics"] = label(Quotient("inv", geodesic="exact"), MIDDLE["inv"])
    for name in ("adaptive", "inv"):
        found[f"{name}, normalised logits"] = label(*PLAIN_LABELS[name], normalise_logits=True)
        found[f"{name}, average case"] = f"{PLAIN[name].name} average-case sharpness, radius {AVERAGE[name]:g}"
    for name in ("euclidean", "adaptive", "inv"):
        found[f"{name}, gradient norm"] = f"{PLAIN[name].name} gradient norm"
    return found


def _labels(places: Mapping[str, tuple[Geometry, float]]) -> dict[str, str]:
    return {words: label(geometry, radius) for words, (geometry, radius) in places.items()}


def _ranking(comparison: Comparison) -> Iterator[Block]:
    labels = main_labels()
    if known(comparison, labels):
        yield Text(
            "A negative tau says that sharper models have smaller gaps. Intervals are 95 % percentile bootstraps over "
            "models; they stand side by side without a correction for their number."
        )
        yield tau_table(comparison, "ranking-table", "Kendall’s tau-b", labels)
        caption = "Kendall’s tau-b of every measure (marker) and its 95 % interval (bar), for both gaps."
        yield Gallery(list(tau_intervals(comparison, labels, "tau", caption)))


def _ablation(comparison: Comparison) -> Iterator[Block]:
    figures: list[Figure] = []
    labels = {f"{metric}, {part}": at for metric, parts in ABLATION.items() for part, at in parts.items()}
    caption = (
        "Without curvature geodesics are straight lines; with the adaptive norm the ball is that of adaptive sharpness "
        "(radius 0.5), and curvature is all that is left of the metric. Without both it is adaptive sharpness but for "
        "vertical directions."
    )
    every = {**_labels(labels), "adaptive sharpness": label(*PLAIN_LABELS["adaptive"])}
    if len(known(comparison, _labels(labels))) > 2:
        figures += tau_intervals(comparison, every, "ablation", caption)
        yield tau_table(comparison, "ablation-table", "Kendall’s tau-b with parts turned off", every)
        yield Gallery(figures)


def _family(comparison: Comparison) -> Iterator[Block]:
    points = {t: label(of_family(t), MIDDLE["inv"]) for t in FAMILY}
    if figures := list(tau_line(comparison, points, x_label="t (0 is inv, 1 is mix)", name="family")):
        labels = {f"t = {t:g}": at for t, at in points.items()}
        yield Gallery(figures)
        yield tau_table(comparison, "family-table", "Kendall’s tau-b along the family, radius 0.1", labels)


def _relaxation(comparison: Comparison) -> Iterator[Block]:
    labels = _labels({f"eps = {eps:g}": (Quotient("inv", eps=eps), MIDDLE["inv"]) for eps in (0.0, *EPS)})
    if len(known(comparison, labels)) > 1:
        caption = "inv with eps added to the diagonal of its Gram matrices: with eps above 0 no longer invariant."
        yield Gallery(list(tau_intervals(comparison, labels, "relaxation", caption)))
        yield tau_table(comparison, "relaxation-table", "Kendall’s tau-b by relaxation", labels)


def _radius(comparison: Comparison) -> Iterator[Block]:
    families = {name: {radius: label(PLAIN[name], radius) for radius in radii(name)} for name in PLAIN}
    if figures := list(growth(comparison, families, "growth")):
        flat = {f"{name}, radius {radius:g}": at for name, points in families.items() for radius, at in points.items()}
        yield Text(_slopes(comparison, families))
        yield tau_table(comparison, "radius-table", "Kendall’s tau-b at every radius", flat)
        yield Gallery(figures)


def _slopes(comparison: Comparison, families: Mapping[str, Mapping[float, str]]) -> str:
    found: list[str] = []
    for name, points in families.items():
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
