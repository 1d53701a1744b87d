"""Figures of a comparison that its own report does not have: tau by the parts of a measure, and along a family."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from quotient_manifolds.compare import Comparison
from quotient_manifolds.plots import Interval, Plot, interval_figure, radius_figure, style_of
from quotient_manifolds.plots.canvas import canvas, numbers
from quotient_manifolds.report import Figure
from studies.wording import GAPS
from studies.zoos.measures import ZooMeasures

Labels = Mapping[str, str]  # words for readers: the label of a measure


def known(measures: ZooMeasures, labels: Mapping[str, str | None]) -> dict[str, str]:
    """Return those that the comparison can rank models by."""
    return {words: label for words, label in labels.items() if label and measures.tau(label, "error_gap")}


def tau_intervals(measures: ZooMeasures, labels: Labels, name: str, caption: str) -> Iterator[Figure]:
    """Yield tau of every measure with its interval, for both gaps; no figure if none is known."""
    groups = {
        gap_words: [
            Interval(words, found.value or 0.0, found.low, found.high, style_of(place))
            for place, (words, label) in enumerate(labels.items())
            if (found := measures.tau(label, gap)) is not None
        ]
        for gap, gap_words in GAPS.items()
    }
    if any(groups.values()):
        plot = interval_figure(groups, x_label="Kendall’s tau-b", alt=_said(measures, labels))
        yield Figure(plot.svg(name), caption)


def tau_line(measures: ZooMeasures, points: Mapping[float, str], *, x_label: str, name: str) -> Iterator[Figure]:
    """Yield tau against a number, with its bootstrap interval as a band, for both gaps; no figure below two points."""
    there = {x: label for x, label in sorted(points.items()) if measures.tau(label, "error_gap")}
    if len(there) < 2:
        return
    with canvas(x_label, "Kendall’s tau-b") as (figure, (axes,)):
        axes.axhline(0, color="#808080", linewidth=0.8)
        for place, (gap, words) in enumerate(GAPS.items()):
            taus = [measures.tau(label, gap) for label in there.values()]
            value, low, high = (
                numbers([None if tau is None else getattr(tau, part) for tau in taus])
                for part in ("value", "low", "high")
            )
            style = style_of(2 * place + 1)
            axes.fill_between(list(there), low, high, color=style.colour, alpha=0.2, linewidth=0)
            axes.plot(list(there), value, color=style.colour, marker=style.marker, linestyle=style.line, label=words)
        axes.set(ylim=(-1.02, 1.02))
        figure.legend(loc="outside upper center", ncols=2, frameon=False)
        plot = Plot(figure, _said(measures, {f"{x:g}": label for x, label in there.items()}))
    yield Figure(plot.svg(name), f"{x_label}: tau (line) and its 95 % bootstrap interval over models (band).")


def growth(comparison: Comparison, families: Mapping[str, Mapping[float, str]], name: str) -> Iterator[Figure]:
    """Yield sharpness against radius, a figure for each geometry: the median over models and the quartiles."""
    for words, labels in families.items():
        if len(labels) > 1:
            values = list(zip(*(comparison.column(label) for label in labels.values()), strict=True))
            plot = radius_figure(list(labels), {words: values}, show="band")
            yield Figure(plot.svg(f"{name}-{words}"), f"{words}: median rise of the loss (nats), quartiles shaded.")


def _said(measures: ZooMeasures, labels: Labels) -> str:
    """Say all estimates in words."""
    said = [
        f"{words}, {GAPS[gap]}: {found}"
        for gap in GAPS
        for words, label in labels.items()
        if (found := measures.tau(label, gap)) is not None
    ]
    return f"Kendall’s tau with intervals. {'; '.join(said)}."
