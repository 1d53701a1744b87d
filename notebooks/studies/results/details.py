"""The tables behind the table: the orders of geodesics, the family of metrics, the radius."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from studies.diagonal.records import MIDDLE
from studies.diagonal.tables import where
from studies.markdown import table
from studies.results.claims import said
from studies.results.paper_and_here import NOT_RUN, table_one
from studies.results.records import Records
from studies.results.settings import DiagonalZoo
from studies.wording import minus, signed

ORDERS = ("adaptive", "inv first", "inv second", "inv exact", "mix first", "mix second", "mix exact")
SETTING = (
    *("adaptive", "inv exact", "mix exact", "inv closed", "mix closed", "inv gradient", "mix gradient"),
    "|beta|_1",
)


def setting_table(zoo: DiagonalZoo | None) -> str:
    """Tabulate tau with its interval over seeds, a row a setting."""
    if zoo is None:
        return NOT_RUN
    rows = [
        [
            *where(setting),
            *(str(zoo.tau(setting, name)) for name in SETTING),
            "yes" if zoo.ordered(setting, "closed") else "no",
        ]
        for setting in zoo.settings
    ]
    return table(["Points", "Scales", "Rates", *map(said, SETTING), "Order of Table 1 by closed forms"], rows)


def order_table(zoo: DiagonalZoo | None) -> str:
    """Tabulate the range of tau over the settings by order and radius, where truncation leaves something to see."""
    if zoo is None:
        return NOT_RUN
    radii = zoo.study.plan.radii
    rows = [[said(name), *(_spread(zoo.plain, name, radius) for radius in radii)] for name in ORDERS]
    return table(["Sharpness", *(f"Radius {radius:g}" for radius in radii)], rows)


def _spread(zoo: DiagonalZoo, name: str, radius: float) -> str:
    found, counting, total = zoo.spread(name, radius), len(zoo.counting(name, radius)), len(zoo.settings)
    if found is None:
        return "truncation error in all settings"
    return str(found) if counting == total else f"{found}<br>truncation error in {total - counting} settings"


def setting_family_table(zoo: DiagonalZoo | None) -> str:
    """Tabulate tau by t along exact geodesics, a row a setting."""
    if zoo is None:
        return NOT_RUN
    points = zoo.study.plan.family
    rows = [[*where(each), *(str(zoo.family(each, t) or "") for t in points)] for each in zoo.settings]
    return table(["Points", "Scales", "Rates", *(minus(f"t = {t:g}") for t in points)], rows)


def radius_table(zoo: DiagonalZoo | None) -> str:
    """Tabulate tau and the median sharpness at every radius, and the power of the radius that it grows with."""
    if zoo is None:
        return NOT_RUN
    return table(["Measure", "Radius", "tau", "Median sharpness", "Grows with the power"], list(_radii(zoo)))


def _radii(zoo: DiagonalZoo) -> Iterator[list[str]]:
    radii = zoo.study.plan.radii
    for name in ("adaptive", "inv second", "mix second", "inv exact", "mix exact"):
        medians = {radius: float(np.median(zoo.study.column("rises", name, radius))) for radius in radii}
        for (radius, median), power in zip(medians.items(), _powers(medians), strict=True):
            yield [said(name), f"{radius:g}", _spread(zoo.plain, name, radius), f"{median:.3g}", power]


def thorough_table(zoo: DiagonalZoo | None) -> str:
    """Tabulate what plain ascents found at the middle radius over what thorough ones found, and tau by both."""
    if zoo is None:
        return NOT_RUN
    rows = []
    for name in MIDDLE:
        cells = zoo.study.cells
        checks = [cell.middle[name] for cell in cells]
        plain = [cell.taus[name][cell.radii.index(zoo.middle)] for cell in cells]
        changes = [
            abs(before - check.tau)
            for before, check in zip(plain, checks, strict=True)
            if before is not None and check.tau is not None
        ]
        before = [zoo.study.tau(setting, name, zoo.middle) for setting in zoo.settings]
        ends = [tau.value for tau in before if tau is not None]
        rows.append(
            [
                said(name),
                f"{np.median([check.found[0] for check in checks]):.3f}",
                f"{min(check.found[1] for check in checks):.3f}",
                f"{signed(min(ends))} to {signed(max(ends))}",
                str(zoo.spread(name)),
                f"{max(changes):.2f}",
            ]
        )
    columns = ["Measure", "Found, median", "Found, least", "tau, plain", "tau, thorough", "Largest change of tau"]
    return table(columns, rows)


def _powers(medians: dict[float, float]) -> list[str]:
    """Return the power of the radius that sharpness grows with from the last radius, "" where that is not known."""
    powers = [""]
    for (smaller, before), (larger, after) in pairwise(medians.items()):
        known = before > 0 and after > 0
        powers.append(f"{math.log(after / before) / math.log(larger / smaller):.2f}" if known else "")
    return powers


def short_table(records: Records) -> str:
    """Return the paper's Table 1 beside ours, and diagonal networks by setting, for docs/benchmarks.md."""
    rows = [[row.what, row.paper[0], "<br>".join(row.here)] for row in table_one(records)]
    first = table(["Kendall’s tau with the gap", "Paper", "Here"], rows)
    return f"{first}\n\n{setting_table(records.diagonal)}"
