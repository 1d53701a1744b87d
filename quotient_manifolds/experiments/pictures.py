"""The demonstration's figures, each with the words that say what it shows."""

from __future__ import annotations

from quotient_manifolds.experiments.records import DemoResult
from quotient_manifolds.experiments.wording import GAPS, NBSP, change, interval, largest_change, largest_factor
from quotient_manifolds.plots import (
    STYLES,
    Interval,
    Panel,
    Series,
    Style,
    interval_figure,
    line_figure,
    orbit_figure,
    scatter_figure,
)
from quotient_manifolds.report import Figure, Gallery

SMALLEST = 1e-17  # what a change of exactly 0 is drawn as


def _style(result: DemoResult, key: str) -> Style:
    """The same colour and marker for a measure in every figure."""
    return STYLES[[measure.key for measure in result.measures].index(key)]


def orbit_gallery(result: DemoResult) -> Gallery:
    """Two figures: the ratio itself, and its distance from 1 (where the invariant measures can be told apart)."""
    keys = list(dict.fromkeys(row.measure for row in result.orbit))
    scales = result.settings.scales
    ratios, distances = {}, []
    for key in keys:
        label = result.measure(key).label
        found = [row.ratio for row in result.orbit if (row.measure, row.dtype) == (key, "float64")]
        ratios[label] = found
        away = [max(abs(ratio - 1), SMALLEST) for ratio in found]
        distances.append(Series(label, scales, away, _style(result, key)))
    styles = {result.measure(key).label: _style(result, key) for key in keys}
    factor = largest_factor(result, "adaptive")
    words = "; ".join(f"{result.measure(key).label} {change(largest_change(result, key, 'float64'))}" for key in keys)
    distance = line_figure(
        distances,
        x_label="a (size of the group element)",
        y_label="|ratio − 1|",
        log=(True, True),
        alt=f"Distance of the ratio from 1 against a. Largest values: {words}.",
    )
    return Gallery(
        (
            Figure(
                orbit_figure(scales, ratios, styles=styles).svg("orbit-ratio"),
                f"Along the orbit adaptive sharpness changes by up to a factor {factor:.3g}; both geodesic measures "
                "stay at 1 (their lines lie on each other). Float64, both axes logarithmic.",
            ),
            Figure(
                distance.svg("orbit-distance"),
                f"The same as a distance from 1. Largest: {words}. What remains for the geodesic measures is rounding"
                f"; a change of exactly 0 is drawn at {SMALLEST:g}.",
            ),
        )
    )


def scatter_gallery(result: DemoResult) -> Gallery:
    """Sharpness against the gap in error, one figure a measure."""
    return Gallery([_scatter(result, measure.key) for measure in result.measures])


def tau_gallery(result: DemoResult) -> Gallery:
    """One figure: tau of every measure with its interval; none if no tau is defined."""
    if all(row.correlation.value is None for row in result.correlations):
        return Gallery(())
    groups = {
        words: [
            Interval(
                result.measure(row.measure).label,
                row.correlation.value,
                row.correlation.low,
                row.correlation.high,
                _style(result, row.measure),
            )
            for row in result.correlations
            if row.gap == gap and row.correlation.value is not None
        ]
        for gap, words in GAPS.items()
    }
    alt = "; ".join(
        f"{result.measure(row.measure).label}, {GAPS[row.gap]}: {interval(row.correlation)}"
        for row in result.correlations
    )
    plot = interval_figure(groups, x_label="Kendall’s tau", alt=f"Kendall’s tau with intervals. {alt}.")
    words = f"Kendall’s tau of every measure (marker) and its 95{NBSP}% bootstrap interval (bar), for both gaps."
    return Gallery((Figure(plot.svg("tau"), words),))


def _scatter(result: DemoResult, key: str) -> Figure:
    label = result.measure(key).label
    (row,) = (row for row in result.correlations if (row.measure, row.gap) == (key, "error_gap"))
    values = [model.sharpness[key] for model in result.models]
    panel = Panel(
        f"{label} sharpness, radius {result.measure(key).radius:g}",
        [value.mean for value in values],
        [100 * model.scores.error_gap for model in result.models],
        row.correlation,
        x_errors=[value.standard_error for value in values],
        style=_style(result, key),
    )
    plot = scatter_figure([panel], y_label="test error − train error, %")
    return Figure(plot.svg(f"scatter-{key}"), f"{label}: a point a model, with the standard error over batches.")


def ascent_gallery(result: DemoResult) -> Gallery:
    """How the loss rises step by step, for every measure."""
    series = [
        Series(result.measure(key).label, range(len(losses)), losses, _style(result, key))
        for key, losses in result.curves.items()
    ]
    ends = "; ".join(f"{one.label} {one.y[0]:.3g} to {max(one.y):.3g}" for one in series)
    plot = line_figure(
        series,
        x_label="step of the ascent",
        y_label="loss (nats)",
        log=(False, True),
        alt=f"Loss of model 0 on the first batch at every step of the ascent. From start to best: {ends}.",
    )
    words = "The ascent on model 0, first batch: loss after every step. Its highest point counts."
    return Gallery((Figure(plot.svg("ascent"), words),))
