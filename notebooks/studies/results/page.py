"""The page of all results, as Markdown, and the short table of docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from quotient_manifolds.files import write_text
from quotient_manifolds.plots import Plot
from studies.markdown import lines, table
from studies.results import prose
from studies.results.claims import Claim, setting_claims
from studies.results.details import (
    order_table,
    radius_table,
    setting_family_table,
    setting_table,
    short_table,
    thorough_table,
)
from studies.results.earlier import earlier
from studies.results.estimates import RULES, Verdict
from studies.results.paper_and_here import NOT_RUN, NOTEBOOKS, RECORDS, Row, beyond, figures, table_one
from studies.results.pictures import pictures, write_pictures
from studies.results.records import Records
from studies.results.transformers import in_short, mnist_section, sentiment_section
from studies.wording import signed

PAGE = "results.md"
VERDICTS: dict[str, Verdict] = {
    "For it in": "for it",
    "Against it in": "against it",
    "Not decided in": "not decided at this n",
}
BEGIN, END = "<!-- results -->", "<!-- /results -->"


def write_results(records: Records, folder: Path) -> None:
    """Write results.md, and its figures in results/."""
    folder.mkdir(parents=True, exist_ok=True)
    plots = pictures(records)
    write_pictures(folder / "results", plots)
    write_text(folder / PAGE, results_page(records, plots))


def into_page(page: Path, records: Records) -> None:
    """Write the short table between its marks on a page. Raises ValueError for a file without them."""
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(f"{END}\n")
    if not begin or not end:
        raise ValueError(f"{page} must have the lines {BEGIN} and {END}, between which the table goes. Found none")
    write_text(page, f"{before}{begin}{short_table(records)}\n{end}{after}")


def results_page(records: Records, plots: dict[str, Plot]) -> str:
    """Return differences first, then the table, the claims, and what is behind them."""
    parts = [
        "# The paper’s results, redone",
        prose.LEAD,
        "## In short",
        in_short(records.mnist, records.sentiment, records.diagonal),
        "## What is different here",
        prose.different(records),
        "## Paper and here",
        prose.READING,
        "### Table 1",
        _rows(table_one(records)),
        "### Diagonal networks, setting by setting",
        prose.by_setting(records.diagonal),
        _picture(plots, "settings"),
        setting_table(records.diagonal),
        prose.PLOTTED if records.diagonal is not None else "",
        prose.thorough(records.diagonal),
        thorough_table(records.diagonal),
        "### Figures",
        _rows(figures(records)),
        "### Questions the paper leaves open",
        _rows(beyond(records)),
        "## Vision transformers on MNIST",
        _picture(plots, "mnist"),
        *([NOT_RUN] if records.mnist is None else mnist_section(records.mnist, records.converged.get("mnist"))),
        "## BERTs on film reviews",
        _picture(plots, "sentiment"),
        *(
            [NOT_RUN]
            if records.sentiment is None
            else sentiment_section(*records.sentiment, records.converged.get("sentiment"))
        ),
        "## The paper’s claims",
        prose.rules(),
        "### On diagonal networks, setting by setting",
        prose.SETTING_CLAIMS,
        _setting_claims(setting_claims(records.diagonal)),
        "### On the toy model",
        *_toy(records),
        "## The sign on diagonal networks",
        prose.ORDERS,
        order_table(records.diagonal),
        "## The family of metrics",
        prose.FAMILY,
        setting_family_table(records.diagonal),
        "## The radius",
        prose.RADIUS,
        radius_table(records.diagonal),
        "## Two earlier zoos, and what was wrong with them",
        earlier(records.earlier),
        "## Redo it",
        prose.REDO,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _rows(rows: Iterable[Row]) -> str:
    shown = [[row.what, lines(row.paper), lines(row.here), _source(row)] for row in rows]
    return table(["What", "Paper", "Here", "From"], shown)


def _source(row: Row) -> str:
    command = [f"`make study NAME={row.study}`"] if row.study else []
    if NOT_RUN in row.here:
        return lines(command)
    found = [*command, f"[record](records/{RECORDS[row.study]})"] if row.study else []
    return lines([*found, f"[notebook {row.notebook}]({NOTEBOOKS[row.notebook]})"] if row.notebook else found)


def _setting_claims(found: Sequence[tuple[Claim, ...]]) -> str:
    """Count verdicts over the settings, a row a number; in each setting a claim is held to its own interval."""
    if not found:
        return NOT_RUN
    parts = []
    for (place, words), groups in groupby(found, key=lambda group: (group[0].place, group[0].words)):
        parts += [f"{words} [{place}]", table(["Number", "Claim", "By setting", *VERDICTS], _counted(groups))]
    return "\n\n".join(parts)


def _counted(groups: Iterable[tuple[Claim, ...]]) -> list[list[str]]:
    rows = []
    for group in groups:
        values = [claim.found.value for claim in group if claim.found is not None]
        ends = f"{signed(min(values))} to {signed(max(values))}" if values else ""
        rules = {RULES[claim.rule].words for claim in group}
        rule = rules.pop() if len(rules) == 1 else "the sign of adaptive"
        verdicts = [claim.verdict for claim in group]
        rows.append([group[0].about, rule, ends, *(str(verdicts.count(words)) for words in VERDICTS.values())])
    return rows


def _toy(records: Records) -> list[str]:
    """Return what the study of the toy model says of the paper's sentences about it."""
    if records.toy is None:
        return []
    rows = [[f"{claim.claim} [{claim.place}]", f"**{claim.verdict}**"] for claim in records.toy.claims]
    return [prose.TOY, table(["Claim", "Verdict"], rows)]


def _picture(plots: dict[str, Plot], name: str) -> str:
    """Return the numbers that its own text alternative lists stand in the table under it."""
    return f"![{plots[name].alt.partition('.')[0]}.](results/{name}.svg)" if name in plots else ""
