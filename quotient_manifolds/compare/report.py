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
from quotient_manifolds.statistics import Correlation

RANKING = (
    "Intervals are percentile bootstraps over models ({resamples} resamples, {confidence:.0%}); p-values are of a "
    "two-sided permutation test, one by one and corrected by Holm for the number of correlations of one kind: the "
    "largest of many is large by chance. Given: the hyperparameter held fixed in Kendall’s partial tau-b."
)


def write_comparison(comparison: Comparison, folder: Path) -> None:
    """Write report.html, comparison.json and values.csv (a row for each measure of each checkpoint)."""
    comparison.save(folder / "comparison.json")
    settled = comparison.values.join(comparison.measures, on="label")
    write_text(folder / "values.csv", settled.to_csv(index=False))
    write_text(folder / "report.html", render(comparison_page(comparison)))


def summary_tables(comparison: Comparison) -> list[Table]:
    """Return what a terminal shows: how values spread over the checkpoints, and how measures rank them."""
    values = comparison.frame()[comparison.labels]
    columns = {"Known": values.count(), "Smallest": values.min(), "Median": values.median(), "Largest": values.max()}
    rows = [[label, *map(_number, row)] for label, row in pd.DataFrame(columns).iterrows()]
    table = _table("spread", "Measures over the checkpoints", ["Measure", *columns], rows)
    return [table, *([_ranking_table(comparison.ranking())] if len(comparison.rankings) else [])]


def comparison_page(comparison: Comparison) -> Page:
    """Return the page of a comparison."""
    known, cells = comparison.known
    lead = f"{len(comparison.scores)} checkpoints, {len(comparison.measures)} measures."
    facts = [Fact(f"{known} of {cells}", "values (a measure of a checkpoint) are known.")]
    found = comparison.ranking()
    found = found[found["value"].notna() & (found["against"] == next(iter(comparison.against), ""))]
    if len(found):
        best = found.loc[found["value"].abs().idxmax()]
        p = f"p = {_number(best['p_value'])}, {_number(best['p_holm'])} corrected (Holm) for all in the table"
        what = f"the largest tau-b in size of {len(found)}: {best['measure']} with {best['against']}"
        facts.append(Fact(str(_correlation(best)), f"is {what}, {best['models']} models; {p}."))
    return Page(f"Comparison: {comparison.spec}", lead, facts, list(_sections(comparison)))


def _sections(comparison: Comparison) -> Iterator[Section]:
    """Yield what went wrong first, then rankings, figures and numbers."""
    if failures := comparison.failure_groups():
        caption = "What could not be measured; it is tried again when the comparison is run again"
        table = _table("failures", caption, ["Checkpoint", "What", "Why"], failures, words=3)
        yield Section("failures", "Failures", [table])
    for title, sentences in (("Data and scores", comparison.notes), ("To read with care", comparison.cautions)):
        if sentences:
            yield Section(title.split()[-1], title, [Note("To know beside the numbers", sentences)])
    yield Section("ranking", "How measures rank the models", list(_ranking(comparison)))
    yield Section("figures", "Models one by one", list(_scatter(comparison)))
    yield Section("radius", "Sharpness against radius", list(_radius(comparison)))
    yield Section("values", "All values", [_value_table(comparison)])
    version = f"Written by quotient-manifolds {comparison.version}. All settings are in values.csv."
    yield Section("redo", "How to redo this", [Code(comparison.command), Text(version)])


def _ranking(comparison: Comparison) -> Iterator[Block]:
    """Yield correlations over models, and agreement between measures over the checkpoints that have both."""
    if not len(comparison.rankings):
        yield Text("No ranking: it takes five models with a score that tells them apart (test data, or scores).")
        return
    yield Text(RANKING.format(**comparison.rankings.iloc[0]))
    yield _ranking_table(comparison.rankings)
    tau = comparison.frame()[comparison.labels].corr(method="kendall")
    rows = [[f"{place}. {label}", *map(_signed, tau[label])] for place, label in enumerate(tau, 1)]
    numbers = [f"{place}." for place in range(1, len(rows) + 1)]  # labels are longer than a column
    yield _table("agreement", "Agreement between measures, Kendall’s tau-b", ["Measure", *numbers], rows)


def _ranking_table(rankings: pd.DataFrame) -> Table:
    """Return value, bootstrap interval, p-value and the corrected one of each correlation."""
    rows: list[list[str]] = []
    for _, row in rankings.iterrows():
        interval = "" if pd.isna(row["low"]) else f"{_signed(row['low'])} to {_signed(row['high'])}"
        p_values = [_number(row[name]) for name in ("p_value", "p_holm")]
        names = [row[name] for name in ("measure", "against", "given", "kind")]
        rows.append([*names, _signed(row["value"]), interval, *p_values, str(row["models"])])
    columns = ["Measure", "Against", "Given", "Kind", "Value", "Interval", "p", "p, Holm", "Models"]
    return _table("rankings", "Correlations over models", columns, rows, words=4)


def _correlation(row: Any) -> Correlation:
    """Return the correlation that a row of rankings holds."""
    values = {each.name: row[each.name] for each in fields(Correlation)}
    known: dict[str, Any] = {name: None if pd.isna(value) else value for name, value in values.items()}
    return Correlation(**known)


def _scatter(comparison: Comparison) -> Iterator[Block]:
    """Yield for each score a figure for each measure of which any value is known."""
    errors = comparison.frame("standard_error")
    tau = {(each["measure"], each["against"]): _correlation(each) for _, each in comparison.ranking().iterrows()}
    for target in comparison.against:
        figures: list[Figure] = []
        for label in comparison.labels:
            means, spread = comparison.column(label), errors[label].astype(object).where(errors[label].notna(), None)
            if set(means) != {None}:
                panel = Panel(label, means, comparison.column(target), tau.get((label, target)), spread.tolist())
                figures.append(Figure(scatter_figure([panel], y_label=target).html(), label))
        yield Text(f"{target} against each measure; a point is a checkpoint, with its standard error.")
        yield Gallery(figures)


def _radius(comparison: Comparison) -> Iterator[Block]:
    """Yield a figure for each measure that was taken at several radii."""
    figures: list[Figure] = []
    for family, measures in comparison.measures.dropna(subset="radius").sort_values("radius").groupby("family"):
        columns = {radius: comparison.column(label) for label, radius in measures["radius"].items()}
        known = {radius: values for radius, values in columns.items() if set(values) != {None}}
        if len(known) > 1:
            plot = radius_figure(list(known), {str(family): list(zip(*known.values(), strict=True))})
            figures.append(Figure(plot.html(), f"{family}: a line is a checkpoint."))
    if figures:
        yield Gallery(figures)


def _value_table(comparison: Comparison) -> Table:
    """Return scores and measures, a row for each checkpoint."""
    means, errors = comparison.frame(), comparison.frame("standard_error")
    text = means.map(_number)
    for label in comparison.labels:
        text[label] += errors[label].map(lambda error: "" if pd.isna(error) else f" ± {error:.2g}")
    rows = [[str(name), *row] for name, row in zip(text.index, text.to_numpy().tolist(), strict=True)]
    caption = "Scores and measures of every checkpoint: mean over batches ± its standard error"
    return _table("values-table", caption, ["Checkpoint", *means.columns], rows)


def _table(name: str, caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> Table:
    """Return a table whose first columns, so many as `words`, are text and the others numbers."""
    return Table(name, caption, columns, rows, [place >= words for place in range(len(columns))])


def _number(value: Any) -> str:
    """Return four digits of a number, a text as it is, and nothing for NaN."""
    return value if isinstance(value, str) else "" if pd.isna(value) else f"{value:.4g}".replace("-", "−")


def _signed(value: float) -> str:
    """Return a coefficient with its sign."""
    return "undefined" if pd.isna(value) else f"{value:+.2f}".replace("-", "−")
