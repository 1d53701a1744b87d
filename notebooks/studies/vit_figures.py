"""Figures of a comparison that its own report does not have: tau by the parts of a measure, and along a family."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from quotient_manifolds.plots import Interval, Plot, interval_figure, radius_figure, style_of
from quotient_manifolds.plots.canvas import canvas, numbers
from quotient_manifolds.report import Figure
from quotient_manifolds.statistics import Correlation
from studies.wording import GAPS

if TYPE_CHECKING:
    from quotient_manifolds.compare import Comparison

Labels = Mapping[str, str]  # words for readers: the label of a measure


def tau_of(comparison: Comparison, measure: str, against: str, given: Sequence[str] = ()) -> Correlation | None:
    """Kendall's tau-b of a measure with a score, or the partial one; None if it was not measured or is not defined."""
    for each in comparison.rankings:
        alike = (each.measure, each.against, each.given) == (measure, against, tuple(given))
        if alike and each.correlation.kind == "kendall-b" and each.correlation.value is not None:
            return each.correlation
    return None


def known(comparison: Comparison, labels: Labels) -> dict[str, str]:
    """Those that the comparison can rank models by."""
    return {words: label for words, label in labels.items() if tau_of(comparison, label, "error_gap")}


def tau_intervals(comparison: Comparison, labels: Labels, name: str, caption: str) -> Iterator[Figure]:
    """tau of every measure with its interval, for both gaps; no figure if none is known."""
    groups = {
        gap_words: [
            Interval(words, found.value or 0.0, found.low, found.high, style_of(place))
            for place, (words, label) in enumerate(labels.items())
            if (found := tau_of(comparison, label, gap)) is not None
        ]
        for gap, gap_words in GAPS.items()
    }
    if any(groups.values()):
        plot = interval_figure(groups, x_label="Kendall’s tau-b", alt=_said(comparison, labels))
        yield Figure(plot.svg(name), caption)


def tau_line(comparison: Comparison, points: Mapping[float, str], *, x_label: str, name: str) -> Iterator[Figure]:
    """tau against a number, with its bootstrap interval as a band, for both gaps; no figure below two points."""
    there = {x: label for x, label in sorted(points.items()) if tau_of(comparison, label, "error_gap")}
    if len(there) < 2:
        return
    with canvas(x_label, "Kendall’s tau-b") as (figure, (axes,)):
        axes.axhline(0, color="#808080", linewidth=0.8)
        for place, (gap, words) in enumerate(GAPS.items()):
            taus = [tau_of(comparison, label, gap) for label in there.values()]
            value, low, high = (
                numbers([None if tau is None else getattr(tau, part) for tau in taus])
                for part in ("value", "low", "high")
            )
            style = style_of(2 * place + 1)
            axes.fill_between(list(there), low, high, color=style.colour, alpha=0.2, linewidth=0)
            axes.plot(list(there), value, color=style.colour, marker=style.marker, linestyle=style.line, label=words)
        axes.set(ylim=(-1.02, 1.02))
        figure.legend(loc="outside upper center", ncols=2, frameon=False)
        plot = Plot(figure, _said(comparison, {f"{x:g}": label for x, label in there.items()}))
    yield Figure(plot.svg(name), f"{x_label}: tau (line) and its 95 % bootstrap interval over models (band).")


def growth(comparison: Comparison, families: Mapping[str, Mapping[float, str]], name: str) -> Iterator[Figure]:
    """Sharpness against radius, a figure a geometry: the median over models and the quartiles."""
    for words, points in families.items():
        there = {radius: label for radius, label in sorted(points.items()) if label in comparison.labels}
        if len(there) > 1:
            values = list(zip(*(comparison.column(label) for label in there.values()), strict=True))
            plot = radius_figure(list(there), {words: values}, show="band")
            yield Figure(plot.svg(f"{name}-{words}"), f"{words}: median rise of the loss (nats), quartiles shaded.")


def _said(comparison: Comparison, labels: Labels) -> str:
    """All estimates in words."""
    said = [
        f"{words}, {GAPS[gap]}: {found}"
        for gap in GAPS
        for words, label in labels.items()
        if (found := tau_of(comparison, label, gap)) is not None
    ]
    return f"Kendall’s tau with intervals. {'; '.join(said)}."
