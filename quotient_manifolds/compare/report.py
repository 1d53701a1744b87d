"""Write the report of a comparison: how measures rank the models, figures, every number, and what failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pandas as pd

from quotient_manifolds.compare.comparison import Comparison
from quotient_manifolds.files import write_text
from quotient_manifolds.plots import Panel, scatter_figure
from quotient_manifolds.report import Table, render
from quotient_manifolds.statistics import FEWEST_MODELS, Correlation

RECORD, VALUES, PAGE = REPORTS = ("comparison.json", "values.csv", "report.html")


def write_comparison(comparison: Comparison, folder: Path) -> None:
    """Write `REPORTS`: the record, the values (a row for each measure of each checkpoint), and the page."""
    comparison.save(folder / RECORD)
    settled = comparison.values.join(comparison.measures, on="label")
    write_text(folder / VALUES, settled.to_csv(index=False))
    write_text(folder / PAGE, comparison_page(comparison))


def summary_tables(comparison: Comparison) -> list[Table]:
    """Return what a terminal shows: how values spread over the checkpoints, and how measures rank them."""
    values = comparison.frame()[comparison.labels]
    columns = {"Computed": values.count(), "Smallest": values.min(), "Median": values.median(), "Largest": values.max()}
    rows = [[label, *map(_number, row)] for label, row in pd.DataFrame(columns).iterrows()]
    table = Table("spread", "Measures over the checkpoints", ["Measure", *columns], rows)
    return [table, *([_ranking_table(comparison.ranking())] if len(comparison.rankings) else [])]


def conclusion(comparison: Comparison) -> str:
    """Return what may be concluded on whether measures predict the first score they are correlated with."""
    models, ranking = len(comparison.scores), comparison.ranking()
    ranking = ranking[ranking["value"].notna()]
    if models < FEWEST_MODELS or not len(ranking):
        return (
            f"{models} models, {len(comparison.measures)} measures. There is no ranking: it takes five models with a "
            "score on which they differ (test data, or scores)."
        )
    target = ranking["against"].iloc[0]
    rows = ranking[ranking["against"] == target]
    sizes, score = rows["value"].abs().round(9), target.replace("_", " ")
    best = rows[sizes == sizes.max()]
    decided = rows[(rows["low"] > 0) | (rows["high"] < 0)]
    first = best.iloc[0]
    named, tau = (
        (f"{first['measure']} correlates", f"tau {_signed(first['value'])}")
        if len(best) == 1
        else (f"{len(best)} measures correlate", f"|tau| {sizes.max():.2f}")
    )
    said = f"Of {len(rows)} measures, {named} most strongly with the {score} ({tau}). "
    if decided.empty:
        return said + f"No 95 % interval excludes 0, so these {models} models do not show that any measure predicts it."
    return (
        said + f"{len(decided)} of the 95 % intervals exclude{'s' * (len(decided) == 1)} 0. This holds for models like "
        f"these {models} only."
    )


def comparison_page(
    comparison: Comparison, *, title: str | None = None, lead: str | None = None, chapters: Sequence[Any] = ()
) -> str:
    """Return the page of a comparison: what failed, the ranking and figures; all else is folded at the end.

    chapters: of the demonstration, shown first, under `lead`; without them the conclusion leads.
    """
    known, cells = comparison.known
    caption = "What could not be measured; the next run tries again"
    failures = [(names, what or "the whole checkpoint", why) for names, what, why in comparison.failure_groups()]
    rankings = comparison.rankings
    return render(
        "comparison.html.j2",
        title=title or f"Sharpness of the {len(comparison.scores)} models of {comparison.spec}",
        lead=lead or conclusion(comparison),
        conclusion=conclusion(comparison),
        computed=f"{len(comparison.scores)} checkpoints, {len(comparison.measures)} measures: "
        f"{known} of {cells} values (a measure of a checkpoint) are computed.",
        chapters=chapters,
        taus=_tau_table(comparison) if len(rankings) else None,
        failures=failures and Table("failed", caption, ["Checkpoint", "What", "Why"], failures, words=3),
        notes=comparison.notes,
        cautions=comparison.cautions,
        ranking=_ranking_table(rankings) if len(rankings) else None,
        resamples=rankings["resamples"].max(),  # one that is undefined has none
        confidence=f"{next(iter(rankings['confidence']), 0.0):.0%}",
        scatter={target: _scatter(comparison, target) for target in rankings["against"].unique()},
        all_values=_value_table(comparison),
        command=comparison.command,
        version=comparison.version,
    )


def _ranking_table(rankings: pd.DataFrame) -> Table:
    """Return value, bootstrap interval, p-value and the corrected one of each correlation."""
    rows: list[list[str]] = []
    for _, row in rankings.iterrows():
        p_values = [_number(row[name]) for name in ("p_value", "p_holm")]
        names = [row[name] for name in ("measure", "against", "given", "kind")]
        rows.append([*names, _signed(row["value"]), _interval(row), *p_values, str(row["models"])])
    columns = ["Measure", "Against", "Given", "Kind", "Value", "Interval", "p", "p, Holm", "Models"]
    return Table("rankings", "Correlations over models", columns, rows, words=4)


def _tau_table(comparison: Comparison) -> Table:
    """Return Kendall's tau of each measure with each score, and its interval."""
    ranking = comparison.ranking()
    cells = [f"{_signed(row['value'])} ({_interval(row)})".removesuffix(" ()") for _, row in ranking.iterrows()]
    table = ranking.assign(cell=cells).pivot(index="measure", columns="against", values="cell")
    table = table.reindex(index=comparison.labels, columns=ranking["against"].unique(), fill_value="").fillna("")
    rows = [[label, *row] for label, row in zip(table.index, table.to_numpy().tolist(), strict=True)]
    return Table("taus", "Kendall’s tau with each score, and its 95 % interval", ["Measure", *table], rows)


def _scatter(comparison: Comparison, target: str) -> str:
    """Return figures of the score against each measure of which any value is known, as <img> elements."""
    means, errors = comparison.frame(), comparison.frame("standard_error")
    ranking = comparison.ranking().query("against == @target")
    rows = ranking.astype(object).where(ranking.notna(), None).to_dict("records")
    tau = {row["measure"]: Correlation(**{each.name: row[each.name] for each in fields(Correlation)}) for row in rows}
    known = [label for label in comparison.labels if means[label].notna().any()]
    panels = [Panel(each, means[each], means[target], tau.get(each), errors[each]) for each in known]
    return "\n".join(scatter_figure([panel], y_label=target).html() for panel in panels)


def _value_table(comparison: Comparison) -> Table:
    """Return scores and measures, a row for each checkpoint."""
    means, errors = comparison.frame(), comparison.frame("standard_error")
    text = means.map(_number)
    for label in comparison.labels:
        text[label] += errors[label].map(lambda error: "" if pd.isna(error) else f" ± {error:.2g}")
    rows = [[str(name), *row] for name, row in zip(text.index, text.to_numpy().tolist(), strict=True)]
    caption = "Scores and measures of every checkpoint: mean over batches ± its standard error"
    return Table("values-table", caption, ["Checkpoint", *means.columns], rows)


def _number(value: Any) -> str:
    """Return four digits of a number, a text as it is, and nothing for NaN."""
    return value if isinstance(value, str) else "" if pd.isna(value) else f"{value:.4g}".replace("-", "−")


def _interval(row: Mapping[str, Any] | pd.Series) -> str:
    """Return the interval of a correlation; nothing where it has none."""
    return "" if pd.isna(row["low"]) else f"{_signed(row['low'])} to {_signed(row['high'])}"


def _signed(value: float) -> str:
    """Return a coefficient with its sign."""
    return "undefined" if pd.isna(value) else f"{value:+.2f}".replace("-", "−")
