"""Write the report of a comparison: how measures rank the models, figures, every number, and what failed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pandas as pd

from quotient_manifolds.compare.comparison import Comparison
from quotient_manifolds.files import write_text
from quotient_manifolds.plots import Panel, radius_figure, scatter_figure
from quotient_manifolds.report import Block, Code, Fact, Figure, Gallery, Note, Page, Section, Table, Text, render
from quotient_manifolds.statistics import COEFFICIENT_NAMES, COEFFICIENTS, Correlation, Kind

RANKING = (
    "Intervals are percentile bootstraps over models ({resamples} resamples, {confidence:.0%}); p-values are of a "
    "two-sided permutation test, one by one and, in the column after, corrected by Holm for the number of correlations "
    "in the table: the largest of many is large by chance. The column of models counts those that have both values."
)


def write_comparison(comparison: Comparison, folder: Path) -> None:
    """Write report.html, comparison.json and values.csv (a row for each measure of each checkpoint)."""
    comparison.save(folder / "comparison.json")
    write_text(folder / "values.csv", comparison.settled_values().to_csv(index=False))
    write_text(folder / "report.html", render(comparison_page(comparison)))


def summary_tables(comparison: Comparison) -> list[Table]:
    """Return what a terminal shows: the values of one checkpoint, or how those of several spread, and how they rank."""
    if len(comparison.scores) == 1:
        return [_value_table(comparison)]
    values = comparison.frame()[comparison.labels]
    spread = pd.DataFrame(
        {"Known": values.count(), "Smallest": values.min(), "Median": values.median(), "Largest": values.max()}
    )
    rows = [[label, *map(_number, row)] for label, row in zip(spread.index, spread.to_numpy(), strict=True)]
    table = _table("spread", "Measures over the checkpoints", ["Measure", *spread.columns], rows)
    return [table, *([_kind_table(comparison, "kendall-b")] if len(comparison.rankings) else [])]


def comparison_page(comparison: Comparison) -> Page:
    """Return the page of a comparison."""
    known, cells = comparison.known
    failures = len(comparison.failure_groups())
    return Page(
        title=f"Comparison: {comparison.spec}",
        lead=(
            f"{len(comparison.scores)} checkpoints, {len(comparison.measures)} measures. A measure of sharpness is "
            "useful if it ranks models by how well they generalise: the correlations below say how far each does, and "
            "how far that can be trusted."
        ),
        facts=[
            Fact(f"{known} of {cells}", "values (a measure of a checkpoint) are known."),
            *([Fact(str(failures), "failures, listed below.")] if failures else []),
            *_best(comparison),
        ],
        sections=list(_sections(comparison)),
    )


def _sections(comparison: Comparison) -> Iterator[Section]:
    failures = comparison.failure_groups()
    if failures:
        caption = "What could not be measured; it is tried again when the comparison is run again"
        table = _table("failures", caption, ["Checkpoint", "What", "Why"], failures, words=3)
        yield Section("failures", "Failures", [table])
    if comparison.notes:
        yield Section("notes", "Data and scores", [Note("To know beside the numbers", comparison.notes)])
    if comparison.cautions:
        note = Note("These values need to be read with care", comparison.cautions)
        yield Section("cautions", "Values to read with care", [note])
    yield Section("ranking", "How measures rank the models", list(_ranking(comparison)))
    yield Section("figures", "Models one by one", list(_scatter(comparison)))
    yield Section("radius", "Sharpness against radius", list(_radius(comparison)))
    yield Section("agreement", "Agreement between measures", list(_agreement(comparison)))
    yield Section("values", "All values", [_value_table(comparison)])
    yield Section("measures", "The measures in full", [_settings(comparison)])
    version = f"Written by quotient-manifolds {comparison.version}. The numbers of every batch are in store.sqlite."
    yield Section("redo", "How to redo this", [Code(comparison.command), Text(version)])


def _best(comparison: Comparison) -> Iterator[Fact]:
    """Yield the measure whose tau-b with the first target is largest in size, and of how many it is the largest."""
    found = comparison.ranking()
    if not len(found) or found["value"].isna().all():
        return
    found = found[found["against"] == comparison.against[0]]
    best = found.loc[found["value"].abs().idxmax()]
    meaning = (
        f"is the largest tau-b in size of {len(found)}: {best['measure']} with {best['against']}, {best['models']} "
        f"models; p = {_number(best['p_value'])}, {_number(best['p_holm'])} corrected (Holm) for all in the table."
    )
    yield Fact(str(_correlation(best)), meaning)


def _ranking(comparison: Comparison) -> Iterator[Block]:
    if not len(comparison.rankings):
        yield Text(
            "No ranking: it takes at least five models with a score that tells them apart (test data, or scores)."
        )
        return
    first = comparison.rankings.iloc[0]
    yield Text(RANKING.format(**first))
    if comparison.few_models:
        yield Note("Few models", [comparison.few_models])
    for kind in COEFFICIENTS:
        yield _kind_table(comparison, kind)
    partial = comparison.rankings[comparison.rankings["given"] != ""]
    if len(partial):
        caption = "Kendall’s partial tau-b: what is left of the correlation when a hyperparameter is held fixed"
        rows = [
            [each["measure"], each["against"], each["given"], *_cells(each)[:3], str(each["models"])]
            for _, each in partial.iterrows()
        ]
        columns = ["Measure", "Against", "Given", "Value", "Interval", "p", "Models"]
        yield _table("partial", caption, columns, rows, words=3)


def _kind_table(comparison: Comparison, kind: Kind) -> Table:
    rows = [
        [each["measure"], each["against"], *_cells(each), str(each["models"])]
        for _, each in comparison.ranking(kind).iterrows()
    ]
    columns = ["Measure", "Against", "Value", "Interval", "p", "p, Holm", "Models"]
    return _table(f"table-{kind}", COEFFICIENT_NAMES[kind], columns, rows, words=2)


def _cells(row: Any) -> list[str]:
    """Return value, interval, p-value and the corrected one."""
    value = "undefined" if pd.isna(row["value"]) else _signed(row["value"])
    interval = "none" if pd.isna(row["low"]) else f"{_signed(row['low'])} to {_signed(row['high'])}"
    return [value, interval, *("none" if pd.isna(row[p]) else f"{row[p]:.2g}" for p in ("p_value", "p_holm"))]


def _correlation(row: Any) -> Correlation:
    values = {each.name: row[each.name] for each in fields(Correlation)}
    return Correlation(**{name: None if pd.isna(value) else value for name, value in values.items()})


def _scatter(comparison: Comparison) -> Iterator[Block]:
    means, errors = comparison.frame(), comparison.frame("standard_error")
    tau = {(each["measure"], each["against"]): _correlation(each) for _, each in comparison.ranking().iterrows()}
    for target in comparison.against:
        figures: list[Figure] = []
        for label in comparison.labels:
            if means[label].notna().any():
                columns = _list(means[label]), _list(means[target]), tau.get((label, target)), _list(errors[label])
                plot = scatter_figure([Panel(label, *columns)], y_label=target)
                figures.append(Figure(plot.html(), label))
        yield Text(f"{target} against each measure; a point is a checkpoint, with its standard error.")
        yield Gallery(figures)


def _radius(comparison: Comparison) -> Iterator[Block]:
    means = comparison.frame()
    figures: list[Figure] = []
    for family, measures in comparison.measures.dropna(subset="radius").sort_values("radius").groupby("family"):
        known = measures[[means[label].notna().any() for label in measures.index]]
        if len(known) > 1:
            values = [_list(row) for _, row in means[known.index].iterrows()]
            plot = radius_figure(known["radius"].tolist(), {str(family): values})
            figures.append(Figure(plot.html(), f"{family}: a line is a checkpoint."))
    if figures:
        yield Gallery(figures)


def _agreement(comparison: Comparison) -> Iterator[Block]:
    if len(comparison.measures) < 2 or not len(comparison.rankings):
        return
    found = comparison.agreement()
    numbers = tuple(str(number) for number in range(1, len(found.names) + 1))  # names are longer than a figure
    rows = [
        [number, name, *("undefined" if value is None else _signed(value) for value in values)]
        for number, name, values in zip(numbers, found.names, found.values, strict=True)
    ]
    caption = "Kendall’s tau-b between every two measures, over the checkpoints that have both"
    yield _table("agreement-table", caption, ["Number", "Measure", *numbers], rows, words=2)


def _value_table(comparison: Comparison) -> Table:
    means, errors = comparison.frame(), comparison.frame("standard_error")
    rows: list[list[str]] = []
    for name in means.index:
        cells = [_number(means.loc[name, column]) for column in means]
        for place, column in enumerate(means):
            if column in comparison.labels and not pd.isna(errors.loc[name, column]):
                cells[place] += f" ± {errors.loc[name, column]:.2g}"
        rows.append([name, *cells])
    caption = "Scores and measures of every checkpoint: mean over batches ± its standard error"
    return _table("values-table", caption, ["Checkpoint", *means.columns], rows)


def _settings(comparison: Comparison) -> Table:
    rows: list[list[str]] = []
    for label, each in comparison.measures.iterrows():
        cells = [str(label)]
        for prefix in ("geometry.", "settings."):
            own = {name.removeprefix(prefix): value for name, value in each.items() if str(name).startswith(prefix)}
            cells.append(", ".join(f"{name} {value}" for name, value in own.items() if not pd.isna(value)))
        rows.append(cells)
    columns = ["Measure", "Geometry", "Settings"]
    return _table("settings", "Every setting of every measure", columns, rows, words=3)


def _table(name: str, caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> Table:
    """Return a table whose first columns, so many as `words`, are text and the others numbers."""
    return Table(name, caption, columns, rows, [place >= words for place in range(len(columns))])


def _list(column: Any) -> list[Any]:
    """Return the values of a column, None for NaN."""
    return [None if pd.isna(value) else value for value in column]


def _number(value: Any) -> str:
    return value if isinstance(value, str) else "" if pd.isna(value) else f"{value:.4g}".replace("-", "−")


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")
