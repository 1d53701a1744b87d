"""Write the report of a comparison: how measures rank the models, figures, every number, and what failed."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from quotient_manifolds.compare.comparison import Comparison, MeanValue, Ranking
from quotient_manifolds.compare.inventory import Inventory
from quotient_manifolds.files import write_text
from quotient_manifolds.plots import Colour, Panel, agreement_figure, radius_figure, scatter_figure
from quotient_manifolds.report import Block, Code, Fact, Figure, Gallery, Note, Page, Section, Table, Text, render
from quotient_manifolds.statistics import COEFFICIENT_NAMES, COEFFICIENTS, FEW_MODELS, Correlation, Kind, holm


def write_comparison(comparison: Comparison, inventory: Inventory, folder: Path) -> None:
    """Write report.html, comparison.json, models.csv (a row for a checkpoint) and units.csv (a row for a unit)."""
    comparison.save(folder / "comparison.json")
    write_text(folder / "models.csv", comparison.frame().to_csv())
    write_report(comparison, folder)
    inventory.store.export(folder / "units.csv", [each.unit for each in inventory.all_tasks()])


def write_report(comparison: Comparison, folder: Path) -> None:
    """Write report.html."""
    write_text(folder / "report.html", render(comparison_page(comparison)))


def comparison_page(comparison: Comparison) -> Page:
    known, cells = comparison.known
    return Page(
        title=f"Comparison: {comparison.spec}",
        lead=(
            f"{len(comparison.rows)} checkpoints, {len(comparison.measures)} measures. A measure of sharpness is of "
            "use if it ranks models by how well they generalise: the correlations below say how far each does, and how "
            "far that can be trusted."
        ),
        facts=[
            Fact(f"{known} of {cells}", "values (a measure of a checkpoint) are known."),
            *([Fact(str(len(comparison.failure_groups)), "failures, listed below.")] if comparison.failures else []),
            *_best(comparison),
        ],
        sections=list(_sections(comparison)),
    )


def summary_tables(comparison: Comparison) -> list[Table]:
    """Return what a terminal shows: how values spread, and Kendall's tau-b where there is something to rank by."""
    spread = Table(
        "spread",
        "Measures over the checkpoints",
        ["Measure", "Known", "Smallest", "Median", "Largest"],
        [[label, *_spread(comparison.column(label))] for label in comparison.labels],
        [False, True, True, True, True],
    )
    return [spread, *([_tau_table(comparison)] if comparison.rankings else [])]


def _spread(values: list[float | None]) -> list[str]:
    known = sorted(value for value in values if value is not None)
    if not known:
        return ["0", "", "", ""]
    return [str(len(known)), *(f"{value:.4g}" for value in (known[0], statistics.median(known), known[-1]))]


def _sections(comparison: Comparison) -> Iterator[Section]:
    if comparison.failures:
        rows = [
            [", ".join(each.checkpoints), "; ".join(each.what) or "the whole checkpoint", each.message]
            for each in comparison.failure_groups
        ]
        caption = "What could not be measured; it is tried again when the comparison is run again"
        table = Table("failures", caption, ["Checkpoint", "What", "Why"], rows, [False] * 3)
        yield Section("failures", "Failures", [table])
    if comparison.notes:
        yield Section("notes", "Data and scores", [Note("To know beside the numbers", comparison.notes)])
    yield Section("reach", "Geodesics beyond their reach", list(_reach(comparison)))
    if comparison.rounded:
        yield Section(
            "rounding", "Near rounding", [Note("The digits of these values are noise in part", comparison.rounded)]
        )
    if comparison.unconverged:
        note = Note("The maxima are larger than these values", comparison.unconverged)
        why = Text(
            "An ascent that still rises by more than 5 % at its end has not converged. Take more steps (which measures "
            "anew), or smaller radii; models rank as they do only as far as all climbs are equally far from their end."
        )
        yield Section("convergence", "Climbs that have not converged", [note, why])
    yield Section("ranking", "How measures rank the models", list(_ranking(comparison)))
    yield Section("figures", "Models one by one", list(_scatter(comparison)))
    yield Section("radius", "Sharpness against radius", list(_radius(comparison)))
    yield Section("agreement", "Agreement between measures", list(_agreement(comparison)))
    yield Section("values", "All values", [_value_table(comparison)])
    yield Section("measures", "The measures in full", list(_settings(comparison)))
    yield Section("redo", "How to redo this", [Code(comparison.command), Text(_VERSION.format(comparison.version))])


def _settings(comparison: Comparison) -> Iterator[Block]:
    if comparison.symmetries is not None:
        yield Text(
            f"Symmetries were declared by {comparison.symmetries} for each model, not found; before each is measured, "
            "its loss is asked whether they are any."
        )
    rows = [
        [
            each.label,
            ", ".join(f"{key} {value}" for key, value in (each.geometry or {}).items()),
            ", ".join(f"{key} {value}" for key, value in (each.settings or {}).items()),
        ]
        for each in comparison.measures
        if each.geometry is not None
    ]
    if rows:
        yield Table(
            "settings", "Every setting of every measure", ["Measure", "Geometry", "Settings"], rows, [False] * 3
        )


_VERSION = "Written by quotient-manifolds {}. The numbers of every batch are in units.csv and store.sqlite beside it."


def _reach(comparison: Comparison) -> Iterator[Block]:
    if comparison.beyond_reach:
        yield Note("These values are not to be trusted as they are", comparison.beyond_reach)
        yield Text(
            "A quotient measure follows Taylor polynomials of geodesics, which stay near them while no point changes "
            "much relative to itself: up to relative speed 0.2 for first order, 0.5 for second. Beyond, a value may "
            "be that of the truncation, which can turn the sign of a correlation. Take smaller radii or exact "
            "geodesics."
        )


def _ranking(comparison: Comparison) -> Iterator[Block]:
    if not comparison.rankings:
        one = len(comparison.rows) < 2
        yield Text("One model is no ranking." if one else "No score tells the models apart: give test data or scores.")
        return
    first = comparison.rankings[0].correlation
    yield Text(
        f"Intervals are percentile bootstraps over models ({first.resamples} resamples, "
        f"{100 * first.confidence:g} %); p-values are of a two-sided permutation test, one by one and, in the column "
        "after, corrected by Holm for the number of correlations in the table: the largest of many is large by chance."
    )
    if comparison.few_models:
        yield Note("Few models", [comparison.few_models])
    yield _tau_table(comparison)
    for kind in COEFFICIENTS:
        if kind != "kendall-b":
            yield _kind_table(comparison, kind)
    if partial := [each for each in comparison.rankings if each.given]:
        yield _partial_table(partial)
    if any(each.correlation.left_out for each in comparison.rankings):
        yield Text(
            "Checkpoints that lack a value are left out of its correlations; the column of models counts the rest."
        )


def _tau_table(comparison: Comparison) -> Table:
    return _kind_table(comparison, "kendall-b")


def _kind_table(comparison: Comparison, kind: Kind) -> Table:
    corrected = comparison.corrected(kind)
    rows = [
        [each.measure, each.against, *_cells(each.correlation, corrected[each.measure, each.against])]
        for each in comparison.rankings
        if not each.given and each.correlation.kind == kind
    ]
    columns = ["Measure", "Against", "Value", "Interval", "p", "p, Holm", "Models"]
    return Table(f"table-{kind}", COEFFICIENT_NAMES[kind], columns, rows, [False] * 2 + [True] * 5)


def _partial_table(partial: list[Ranking]) -> Table:
    rows = [[each.measure, each.against, ", ".join(each.given), *_cells(each.correlation)] for each in partial]
    columns = ["Measure", "Against", "Given", "Value", "Interval", "p", "Models"]
    caption = "Kendall’s partial tau-b: what is left of the correlation when a hyperparameter is held fixed"
    return Table("partial", caption, columns, rows, [False] * 3 + [True] * 4)


def _cells(found: Correlation, *corrected: float | None) -> list[str]:
    """Return value, interval, p-value, corrected ones where there are any, and the number of models."""
    value = "undefined" if found.value is None else _signed(found.value)
    interval = "none" if found.low is None or found.high is None else f"{_signed(found.low)} to {_signed(found.high)}"
    return [value, interval, *map(_p, (found.p_value, *corrected)), str(found.models)]


def _p(value: float | None) -> str:
    return "none" if value is None else f"{value:.2g}"


def _scatter(comparison: Comparison) -> Iterator[Block]:
    colour = None
    if given := sorted({name for each in comparison.rankings for name in each.given}):
        colour = Colour(given[0], comparison.column(given[0]))
    for target in comparison.against:
        figures: list[Figure] = []
        for label in comparison.labels:
            if all(value is None for value in comparison.column(label)):
                continue
            tau = _tau(comparison, label, target)
            panel = Panel(label, comparison.column(label), comparison.column(target), tau, comparison.errors(label))
            plot = scatter_figure([panel], y_label=target, colour=colour)
            figures.append(Figure(plot.html(), label))
        yield Text(f"{target} against each measure; a point is a checkpoint, with its standard error.")
        yield Gallery(figures)


def _tau(comparison: Comparison, measure: str, target: str) -> Correlation | None:
    found = (each for each in comparison.rankings if (each.measure, each.against) == (measure, target))
    return next((each.correlation for each in found if not each.given and each.correlation.kind == "kendall-b"), None)


def _radius(comparison: Comparison) -> Iterator[Block]:
    families: dict[str, dict[float, str]] = {}
    for each in comparison.measures:
        if each.radius is not None:
            families.setdefault(each.family, {})[each.radius] = each.label
    figures: list[Figure] = []
    for family, labels in families.items():
        radii = sorted(radius for radius, label in labels.items() if set(comparison.column(label)) != {None})
        if len(radii) > 1:
            values = list(zip(*(comparison.column(labels[radius]) for radius in radii), strict=True))
            plot = radius_figure(radii, {family: values})
            figures.append(Figure(plot.html(), f"{family}: a line is a checkpoint."))
    if figures:
        yield Gallery(figures)


def _agreement(comparison: Comparison) -> Iterator[Block]:
    agreement = comparison.agreement
    if agreement is None or len(comparison.rows) < 2:
        return
    numbers = tuple(str(number) for number in range(1, len(agreement.names) + 1))  # names are longer than a figure
    figure = agreement_figure(replace(agreement, names=numbers)).html()
    yield Gallery([Figure(figure, "Kendall’s tau-b between every two measures, numbered as in the table.")])
    rows = [
        [number, name, *("undefined" if value is None else _signed(value) for value in values)]
        for number, name, values in zip(numbers, agreement.names, agreement.values, strict=True)
    ]
    caption = "Kendall’s tau-b between every two measures, over the checkpoints that have both"
    numeric = [True, False, *(True for _ in numbers)]
    yield Table("agreement-table", caption, ["Number", "Measure", *numbers], rows, numeric)


def _value_table(comparison: Comparison) -> Table:
    scores = list(dict.fromkeys(name for row in comparison.rows for name in row.scores))
    rows = [
        [
            row.checkpoint,
            *(_score(row.scores.get(name)) for name in scores),
            *(_value(row.values[label]) for label in comparison.labels),
        ]
        for row in comparison.rows
    ]
    text = {name for name in scores if any(isinstance(row.scores.get(name), str) for row in comparison.rows)}
    numeric = [False, *(name not in text for name in scores), *(True for _ in comparison.labels)]
    caption = "Scores and measures of every checkpoint: mean over batches ± its standard error"
    return Table("values-table", caption, ["Checkpoint", *scores, *comparison.labels], rows, numeric)


def _best(comparison: Comparison) -> Iterator[Fact]:
    """Yield the measure whose tau-b with the first target is largest in size, and of how many it is the largest."""
    found = [
        each
        for each in comparison.rankings
        if each.against == comparison.against[0] and not each.given and each.correlation.kind == "kendall-b"
    ]
    defined = [each for each in found if each.correlation.value is not None]
    if defined:
        best = max(defined, key=lambda each: abs(each.correlation.value or 0.0))
        one = best.correlation
        p = holm([each.correlation.p_value for each in defined])[defined.index(best)]
        chosen = "is tau-b" if len(defined) == 1 else f"is the largest in size of {len(defined)} values of tau-b:"
        many = "" if len(defined) == 1 else f", {_p(p)} corrected (Holm) for being the largest of {len(defined)}"
        few = f" {one.models} models are few." if one.models < FEW_MODELS else ""
        yield Fact(
            str(one),
            f"{chosen} {best.measure} with {best.against}, {one.models} models; p = {_p(one.p_value)}{many}.{few}",
        )


def _value(value: MeanValue | None) -> str:
    if value is None:
        return ""
    error = "" if value.standard_error is None else f" ± {value.standard_error:.2g}"
    return f"{value.mean:.4g}{error}".replace("-", "−")


def _score(score: float | str | None) -> str:
    return "" if score is None else score if isinstance(score, str) else f"{score:.4g}".replace("-", "−")


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")
