"""Write the report of a comparison: how measures rank the models, figures, every number, and what failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pandas as pd

from quotient_manifolds.compare.comparison import Comparison
from quotient_manifolds.files import write_text
from quotient_manifolds.plots import Panel, radius_figure, scatter_figure
from quotient_manifolds.report import Table, render
from quotient_manifolds.statistics import Correlation

Figures = list[tuple[str, str]]  # an <img> element, and the words under it


def write_comparison(comparison: Comparison, folder: Path) -> None:
    """Write report.html, comparison.json and values.csv (a row for each measure of each checkpoint)."""
    comparison.save(folder / "comparison.json")
    settled = comparison.values.join(comparison.measures, on="label")
    write_text(folder / "values.csv", settled.to_csv(index=False))
    write_text(folder / "report.html", comparison_page(comparison))


def summary_tables(comparison: Comparison) -> list[Table]:
    """Return what a terminal shows: how values spread over the checkpoints, and how measures rank them."""
    values = comparison.frame()[comparison.labels]
    columns = {"Known": values.count(), "Smallest": values.min(), "Median": values.median(), "Largest": values.max()}
    rows = [[label, *map(_number, row)] for label, row in pd.DataFrame(columns).iterrows()]
    table = _table("spread", "Measures over the checkpoints", ["Measure", *columns], rows)
    return [table, *([_ranking_table(comparison.ranking())] if len(comparison.rankings) else [])]


def comparison_page(comparison: Comparison) -> str:
    """Return the page of a comparison: what went wrong first, then rankings, figures and numbers."""
    known, cells = comparison.known
    facts = [(f"{known} of {cells}", "values (a measure of a checkpoint) are known.")]
    found = comparison.ranking()
    found = found[found["value"].notna() & (found["against"] == next(iter(comparison.against), ""))]
    if len(found):
        best = found.loc[found["value"].abs().idxmax()]
        p = f"p = {_number(best['p_value'])}, {_number(best['p_holm'])} corrected (Holm) for all in the table"
        what = f"the largest tau-b in size of {len(found)}: {best['measure']} with {best['against']}"
        facts.append((str(_correlation(best)), f"is {what}, {best['models']} models; {p}."))
    caption = "What could not be measured; it is tried again when the comparison is run again"
    failures = comparison.failure_groups()
    first = comparison.rankings.iloc[0] if len(comparison.rankings) else {"resamples": 0, "confidence": 0.0}
    return render(
        "comparison.html.j2",
        title=f"Comparison: {comparison.spec}",
        lead=f"{len(comparison.scores)} checkpoints, {len(comparison.measures)} measures.",
        facts=facts,
        failures=failures and _table("failed", caption, ["Checkpoint", "What", "Why"], failures, words=3),
        notes=comparison.notes,
        cautions=comparison.cautions,
        rankings=[_ranking_table(comparison.rankings), _agreement(comparison)] if len(comparison.rankings) else [],
        resamples=first["resamples"],
        confidence=f"{first['confidence']:.0%}",
        scatter={target: _scatter(comparison, target) for target in comparison.against},
        radius=_radius(comparison),
        all_values=_value_table(comparison),
        command=comparison.command,
        version=comparison.version,
    )


def _agreement(comparison: Comparison) -> Table:
    """Return the correlations between measures over the checkpoints that have both."""
    tau = comparison.frame()[comparison.labels].corr(method="kendall")
    rows = [[f"{place}. {label}", *map(_signed, tau[label])] for place, label in enumerate(tau, 1)]
    numbers = [f"{place}." for place in range(1, len(rows) + 1)]  # labels are longer than a column
    return _table("agreement", "Agreement between measures, Kendall’s tau-b", ["Measure", *numbers], rows)


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


def _scatter(comparison: Comparison, target: str) -> Figures:
    """Return the score against each measure of which any value is known."""
    errors = comparison.frame("standard_error")
    tau = {(each["measure"], each["against"]): _correlation(each) for _, each in comparison.ranking().iterrows()}
    figures: Figures = []
    for label in comparison.labels:
        means, spread = comparison.column(label), errors[label].astype(object).where(errors[label].notna(), None)
        if set(means) != {None}:
            panel = Panel(label, means, comparison.column(target), tau.get((label, target)), spread.tolist())
            figures.append((scatter_figure([panel], y_label=target).html(), label))
    return figures


def _radius(comparison: Comparison) -> Figures:
    """Return a figure for each measure that was taken at several radii."""
    figures: Figures = []
    for family, measures in comparison.measures.dropna(subset="radius").sort_values("radius").groupby("family"):
        columns = {radius: comparison.column(label) for label, radius in measures["radius"].items()}
        known = {radius: values for radius, values in columns.items() if set(values) != {None}}
        if len(known) > 1:
            plot = radius_figure(list(known), {str(family): list(zip(*known.values(), strict=True))})
            figures.append((plot.html(), f"{family}: a line is a checkpoint."))
    return figures


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
