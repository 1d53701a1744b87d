"""The page of all results, as Markdown, and the short table of docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from quotient_manifolds.files import write_text
from quotient_manifolds.plots import Plot
from studies.markdown import lines, table
from studies.results import prose
from studies.results.claims import Claim, claims
from studies.results.details import (
    family_table,
    order_table,
    radius_table,
    reference_table,
    short_table,
)
from studies.results.estimates import RULES
from studies.results.paper_and_here import NOTEBOOKS, RECORDS, Row, beyond, figures, table_one
from studies.results.pictures import pictures, write_pictures
from studies.results.records import Records

PAGE = "results.md"
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
    found = claims(records)
    parts = [
        "# The paper’s results, redone",
        prose.LEAD,
        "## What is different here",
        prose.different(records),
        "## Paper and here",
        prose.READING,
        "### Table 1",
        _rows(table_one(records)),
        "### Figures",
        _rows(figures(records)),
        "### Questions the paper leaves open",
        _rows(beyond(records)),
        "## The paper’s claims",
        prose.rules(),
        _claims(found),
        *_toy(records),
        "## The sign on diagonal networks",
        prose.ORDERS,
        _picture(plots, "orders"),
        order_table(records.diagonal),
        prose.REFERENCES,
        reference_table(records.diagonal),
        "## The family of metrics",
        prose.FAMILY,
        _picture(plots, "family"),
        family_table(records),
        "## The radius",
        prose.RADIUS,
        radius_table(records),
        "## Redo it",
        prose.REDO,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _rows(rows: Iterable[Row]) -> str:
    shown = [[row.what, lines(row.paper), lines(row.here), _source(row)] for row in rows]
    return table(["What", "Paper", "Here", "From"], shown)


def _source(row: Row) -> str:
    found = [f"`make study NAME={row.study}`", f"[record](records/{RECORDS[row.study]})"] if row.study else []
    return lines([*found, f"[notebook {row.notebook}]({NOTEBOOKS[row.notebook]})"] if row.notebook else found)


def _claims(found: Sequence[Claim]) -> str:
    parts = []
    for (place, words), group in groupby(found, key=lambda claim: (claim.place, claim.words)):
        rows = [
            [
                claim.about,
                RULES[claim.rule].words,
                "" if claim.found is None else str(claim.found),
                f"**{claim.verdict}**",
            ]
            for claim in group
        ]
        parts += [f"{words} [{place}]", table(["Number", "Claim", "Here", "Verdict"], rows)]
    return "\n\n".join(parts)


def _toy(records: Records) -> list[str]:
    """Return what the study of the toy model says of the paper's sentences about it."""
    if records.toy is None:
        return []
    rows = [[f"{claim.claim} [{claim.place}]", f"**{claim.verdict}**"] for claim in records.toy.claims]
    return [prose.TOY, table(["Claim", "Verdict"], rows)]


def _picture(plots: dict[str, Plot], name: str) -> str:
    """Return the numbers that its own text alternative lists stand in the table under it."""
    return f"![{plots[name].alt.partition('.')[0]}.](results/{name}.svg)" if name in plots else ""
