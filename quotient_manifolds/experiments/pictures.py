"""The demonstration's figures, each with the words that say what it shows."""

from __future__ import annotations

from quotient_manifolds.experiments.records import DemoResult
from quotient_manifolds.experiments.wording import GAPS, NBSP, change, interval, largest_change, largest_factor, signed
from quotient_manifolds.plots import STYLES, Interval, Series, Style, interval_figure, line_figure, scatter_figure
from quotient_manifolds.report import Figure, Gallery

SMALLEST = 1e-17  # what a change of exactly 0 is drawn as


def _style(result: DemoResult, key: str) -> Style:
    """The same colour and marker for a measure in every figure."""
    return STYLES[[measure.key for measure in result.measures].index(key)]


def orbit_gallery(result: DemoResult) -> Gallery:
    """Two figures: the ratio itself, and its distance from 1 (where the invariant measures can be told apart)."""
    keys = list(dict.fromkeys(row.measure for row in result.orbit))
    ratios, distances = [], []
    for key in keys:
        rows = [row for row in result.orbit if (row.measure, row.dtype) == (key, "float64")]
        label, scales = result.measure(key).label, [row.scale for row in rows]
        ratios.append(Series(label, scales, [row.ratio for row in rows], _style(result, key)))
        away = [max(abs(row.ratio - 1), SMALLEST) for row in rows]
        distances.append(Series(label, scales, away, _style(result, key)))
    factor = largest_factor(result, "adaptive")
    words = "; ".join(f"{result.measure(key).label} {change(largest_change(result, key, 'float64'))}" for key in keys)
    return Gallery(
        (
            Figure(
                line_figure(
                    ratios,
                    x_label="a (size of the group element)",
                    y_label="sharpness after / before",
                    log=(True, True),
                    name="orbit-ratio",
                    alt=f"Sharpness after the move divided by before, against a. Adaptive changes by up to a factor "
                    f"{factor:.3g}; Quotient inv and mix lie on 1 throughout.",
                ),
                f"Along the orbit adaptive sharpness changes by up to a factor {factor:.3g}; both geodesic measures "
                "stay at 1 (their lines lie on each other). Float64, both axes logarithmic.",
            ),
            Figure(
                line_figure(
                    distances,
                    x_label="a (size of the group element)",
                    y_label="|ratio − 1|",
                    log=(True, True),
                    name="orbit-distance",
                    alt=f"Distance of the ratio from 1 against a. Largest values: {words}.",
                ),
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
    svg = interval_figure(groups, x_label="Kendall’s tau", name="tau", alt=f"Kendall’s tau with intervals. {alt}.")
    words = f"Kendall’s tau of every measure (marker) and its 95{NBSP}% bootstrap interval (bar), for both gaps."
    return Gallery((Figure(svg, words),))


def _scatter(result: DemoResult, key: str) -> Figure:
    label = result.measure(key).label
    (row,) = (row for row in result.correlations if (row.measure, row.gap) == (key, "error_gap"))
    values = [model.sharpness[key] for model in result.models]
    errors = [value.standard_error for value in values if value.standard_error is not None]
    points = Series(
        label,
        [value.mean for value in values],
        [100 * model.scores.error_gap for model in result.models],
        _style(result, key),
        errors if len(errors) == len(values) else None,
    )
    tau = signed(row.correlation.value)
    svg = scatter_figure(
        points,
        x_label=f"{label} sharpness, radius {result.measure(key).radius:g}",
        y_label="test error − train error, %",
        title=f"tau = {interval(row.correlation)}",
        name=f"scatter-{key}",
        alt=f"{label} sharpness against the gap in error, {len(values)} models, Kendall’s tau {tau}.",
    )
    return Figure(svg, f"{label}: a point a model, with the standard error over batches.")


def ascent_gallery(result: DemoResult) -> Gallery:
    """How the loss rises step by step, for every measure."""
    series = [
        Series(result.measure(key).label, range(len(losses)), losses, _style(result, key))
        for key, losses in result.curves.items()
    ]
    ends = "; ".join(f"{one.label} {one.y[0]:.3g} to {max(one.y):.3g}" for one in series)
    svg = line_figure(
        series,
        x_label="step of the ascent",
        y_label="loss (nats)",
        log=(False, True),
        name="ascent",
        alt=f"Loss of model 0 on the first batch at every step of the ascent. From start to best: {ends}.",
    )
    words = "The ascent on model 0, first batch: loss after every step. Its highest point counts."
    return Gallery((Figure(svg, words),))
