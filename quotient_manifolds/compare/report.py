"""Write the report of a comparison: how measures rank the models, figures, every number, and what failed."""

from __future__ import annotations

import math
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

SIGNIFICANT = 0.05
"""A p-value below this level, after correction by Holm's method, counts as a finding."""


def write_comparison(comparison: Comparison, folder: Path) -> None:
    """Write `REPORTS`: the record, the values (a row for each measure of each checkpoint), and the page."""
    comparison.save(folder / RECORD)
    settled = comparison.values.join(comparison.measures, on="label")
    write_text(folder / VALUES, settled.to_csv(index=False))
    write_text(folder / PAGE, comparison_page(comparison))


def summary_tables(comparison: Comparison) -> list[Table]:
    """Return the tables for a terminal: the spread of values over the checkpoints, and the correlations with scores."""
    values = comparison.frame()[comparison.labels]
    columns = {"Computed": values.count(), "Smallest": values.min(), "Median": values.median(), "Largest": values.max()}
    rows = [[label, *map(_number, row)] for label, row in pd.DataFrame(columns).iterrows()]
    table = Table("spread", "Measures over the checkpoints", ["Measure", *columns], rows)
    return [table, *([_ranking_table(comparison.ranking())] if len(comparison.rankings) else [])]


def conclusion(comparison: Comparison) -> str:
    """Return the conclusion, in words, on whether measures predict the first score that they are correlated with.

    It uses p-values corrected by Holm's method, of the partial coefficients if the spec holds hyperparameters fixed. A
    measure correlates if all its coefficients are significant; the weakest is quoted. One model yields its values.
    """
    models, rows = len(comparison.scores), comparison.asked
    if models == 1:
        return _values_in_words(comparison)
    if models < FEWEST_MODELS or rows.empty or not (rows["given"].any() or rows["value"].notna().any()):
        return (
            f"{models} models, {_count(len(comparison.measures), 'measure')}. There is no ranking: it takes five "
            "models with a score on which they differ (test data, or scores)."
        )
    rows = rows[rows["against"] == rows["against"].iloc[0]]
    score, fixed, weakest = rows["against"].iloc[0].replace("_", " "), rows["given"].unique(), _weakest(rows)
    if not math.isfinite(weakest["level"].min()):
        return (
            f"Inconclusive: no {'partial ' * bool(fixed[0])}tau with the {score} is defined over these {models} "
            f"models{_held(', '.join(fixed))}: that decides the measures or the score, or too few models have it."
        )
    found = weakest[weakest["level"] < SIGNIFICANT]
    if found.empty:
        first = weakest.iloc[0]
        return (
            f"Inconclusive: over these {models} models, none of {_count(len(weakest), 'measure')} correlates "
            f"significantly with the {score}. The smallest p-value corrected by Holm’s method is {first['level']:.2g} "
            f"({first['measure']}, {_coefficient(first)})."
        )
    best = found[found["size"] == found["size"].max()]
    best = best[best["value"] * best["value"].iloc[0] > 0]
    first, larger = best.iloc[0], ", or larger ".join(best["measure"][:3]) + "," * (len(best) > 1)
    more = f" or {len(best) - 3} more," if len(best) > 3 else ""
    tau = _coefficient(first) if len(best) == 1 else f"|tau| {first['size']:.2f}{_held(first['given'])}"
    correlate = "correlates" if len(found) == 1 else "correlate"
    return (
        f"{len(found)} of {_count(len(weakest), 'measure')} {correlate} significantly with the {score} "
        f"(p < {SIGNIFICANT:g}, corrected by Holm’s method). Most strongly, models with larger {larger}{more} have a "
        f"{'larger' if first['value'] > 0 else 'smaller'} {score}: {tau}, corrected p {first['level']:.2g}. "
        f"This holds for models like these {models} only."
    )


def _weakest(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the least significant coefficient of each measure, the most significant of these first.

    Adds columns `size` (its absolute value) and `level` (the corrected p-value, infinite if it is undefined).
    """
    rows = rows.assign(size=rows["value"].abs().round(9), level=rows["p_holm"].fillna(math.inf))
    ordered = rows.sort_values(["level", "size"], ascending=[False, True], kind="stable")
    weakest = ordered.groupby("measure", sort=False).head(1)
    return weakest.sort_values(["level", "size"], ascending=[True, False], kind="stable")


def _values_in_words(comparison: Comparison) -> str:
    """Return the first values of the only model."""
    values = comparison.values
    if values.empty:
        return "No value is computed."
    said = "; ".join(
        f"{row['label']}: {_value(row['mean'], row['standard_error'])}" for _, row in values[:3].iterrows()
    )
    batches = _count(int(values["batches"].max()), "batch", "batches")
    below = f"; all {len(values)} values are below" if len(values) > 3 else ""
    return f"{said}{'; ...' if below else ''}. Means over {batches} ± standard errors{below}."


def _coefficient(row: pd.Series) -> str:
    """Return a coefficient in words, with its interval and the hyperparameter held fixed."""
    interval = "" if pd.isna(row["low"]) else f" [{_signed(row['low'])}, {_signed(row['high'])}]"
    return f"{'partial ' * bool(row['given'])}tau {_signed(row['value'])}{interval}{_held(row['given'])}"


def _held(given: str) -> str:
    return f", {given} held fixed" if given else ""


def _count(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def comparison_page(
    comparison: Comparison, *, title: str | None = None, lead: str | None = None, chapters: Sequence[Any] = ()
) -> str:
    """Return the page of a comparison: failures, ranking and figures; all else is folded at the end.

    chapters: of the demonstration, shown first, under `lead`; by default, the conclusion is shown first.
    """
    known, cells = comparison.known
    caption = "What could not be measured; the next run tries again"
    only = comparison.scores.index[0] if len(comparison.scores) == 1 else None
    failures = [(names, what or "the whole checkpoint", why) for names, what, why in comparison.failure_groups()]
    rankings = comparison.rankings
    return render(
        "comparison.html.j2",
        title=title or f"Sharpness of {only or f'the {len(comparison.scores)} models of {comparison.spec}'}",
        lead=lead or conclusion(comparison),
        conclusion=conclusion(comparison),
        computed=f"{_count(len(comparison.scores), 'checkpoint')}, {_count(len(comparison.measures), 'measure')}: "
        f"{known} of {cells} values (a measure of a checkpoint) are computed.",
        chapters=chapters,
        taus=_tau_table(comparison) if len(rankings) else None,
        failures=failures and Table("failed", caption, ["Checkpoint", "What", "Why"], failures, words=3),
        notes=comparison.notes,
        cautions=comparison.cautions,
        ranking=_ranking_table(rankings) if len(rankings) else None,
        resamples=rankings["resamples"].max(),  # an undefined correlation has no resamples
        confidence=f"{next(iter(rankings['confidence']), 0.0):.0%}",
        scatter={target: _scatter(comparison, target) for target in rankings["against"].unique()},
        all_values=_value_table(comparison),
        command=comparison.command,
        version=comparison.version,
    )


def _ranking_table(rankings: pd.DataFrame) -> Table:
    """Return value, bootstrap interval, p-value and corrected p-value of each correlation."""
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
    """Return figures of the score against each measure with a known value, as <img> elements."""
    means, errors = comparison.frame(), comparison.frame("standard_error")
    ranking = comparison.ranking().query("against == @target")
    rows = ranking.astype(object).where(ranking.notna(), None).to_dict("records")
    tau = {row["measure"]: Correlation(**{each.name: row[each.name] for each in fields(Correlation)}) for row in rows}
    known = [label for label in comparison.labels if means[label].notna().any()]
    names = [str(name) for name in means.index]
    panels = [Panel(each, means[each], means[target], tau.get(each), errors[each], names=names) for each in known]
    return "\n".join(scatter_figure([panel], y_label=target).html() for panel in panels)


def _value_table(comparison: Comparison) -> Table:
    """Return scores and measures, a row for each checkpoint."""
    means, errors = comparison.frame(), comparison.frame("standard_error")
    text = means.map(_number)
    for label in comparison.labels:
        text[label] = [*map(_value, means[label], errors[label])]
    rows = [[str(name), *row] for name, row in zip(text.index, text.to_numpy().tolist(), strict=True)]
    caption = "Scores and measures of every checkpoint: mean over batches ± its standard error"
    return Table("values-table", caption, ["Checkpoint", *means.columns], rows)


def _number(value: Any) -> str:
    """Return a number with four digits, a text unchanged, and "" for NaN."""
    return value if isinstance(value, str) else "" if pd.isna(value) else f"{value:.4g}".replace("-", "−")


def _value(mean: float, error: float) -> str:
    """Return a mean and its standard error, if it has one."""
    return _number(mean) + ("" if pd.isna(error) else f" ± {error:.2g}")


def _interval(row: Mapping[str, Any] | pd.Series) -> str:
    """Return the interval of a correlation; "" if it has none."""
    return "" if pd.isna(row["low"]) else f"{_signed(row['low'])} to {_signed(row['high'])}"


def _signed(value: float) -> str:
    """Return a coefficient with its sign."""
    return "undefined" if pd.isna(value) else f"{value:+.2f}".replace("-", "−")
