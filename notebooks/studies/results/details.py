"""The tables behind the table: the orders of geodesics, the family of metrics, the radius."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from studies.markdown import table
from studies.results.claims import ZOOS, said
from studies.results.paper_and_here import NOT_RUN, table_one
from studies.results.records import Records
from studies.results.zoos import DiagonalZoo, Zoo
from studies.wording import minus

ORDERS = ("adaptive", "inv first", "inv", "inv exact", "mix first", "mix", "mix exact")
REFERENCES = {"|beta (beta - nearest)|": "inv, closed form", "|beta - nearest|": "mix, closed form"}


def order_table(zoo: DiagonalZoo | None) -> str:
    """Compute tau by order and radius, and in how many settings its interval lies below, around and above 0."""
    if zoo is None:
        return NOT_RUN
    radii = zoo.study.plan.radii
    rows = [
        [said(name), *(f"{zoo.at(name, radius)}<br>{_counts(zoo.signs(name, radius))}" for radius in radii)]
        for name in ORDERS
    ]
    return table(["Sharpness", *(f"Radius {radius:g}" for radius in radii)], rows)


def reference_table(zoo: DiagonalZoo | None) -> str:
    """Compute tau of the paper's closed forms, with the solution of least norm in the place of X'y."""
    if zoo is None:
        return NOT_RUN
    return table(["Closed form", "tau"], [[words, str(zoo.reference(name))] for name, words in REFERENCES.items()])


def family_table(records: Records) -> str:
    """Compute tau by t, a column a zoo."""
    zoos = {key: zoo.family() if zoo is not None else None for key, zoo in records.zoos.items()}
    columns = {ZOOS[key]: taus for key, taus in zoos.items()}
    if isinstance(records.diagonal, DiagonalZoo):
        columns[f"{ZOOS['diagonal']}, exact"] = records.diagonal.family("exact")
    points = sorted({t for taus in columns.values() if taus for t in taus})
    rows = [
        [minus(f"{t:g}"), *(NOT_RUN if taus is None else str(taus.get(t, "")) for taus in columns.values())]
        for t in points
    ]
    return table(["t", *columns], rows)


def radius_table(records: Records) -> str:
    """Compute tau and the median sharpness at every radius, and the power of the radius that it grows with."""
    rows = [row for key, zoo in records.zoos.items() for row in _radii(key, zoo)]
    return table(["Zoo", "Measure", "Radius", "tau", "Median sharpness", "Grows with the power"], rows)


def _radii(key: str, zoo: Zoo | None) -> Iterator[list[str]]:
    if zoo is None:
        yield [ZOOS[key], NOT_RUN, "", "", "", ""]
        return
    for name in ("euclidean", "adaptive", "inv", "mix", *(("inv exact", "mix exact") if key == "diagonal" else ())):
        if zoo.tau(name) is None:
            continue
        found = zoo.radii(name)
        powers = [""]
        for (smaller, (_, before)), (larger, (_, after)) in pairwise(found.items()):
            known = before > 0 and after > 0
            powers.append(f"{math.log(after / before) / math.log(larger / smaller):.2f}" if known else "")
        for (radius, (tau, median)), power in zip(found.items(), powers, strict=True):
            shown = "undefined" if tau is None else str(tau)
            yield [ZOOS[key], said(name), f"{radius:g}", shown, f"{median:.3g}", power]


def short_table(records: Records) -> str:
    """Return the paper's Table 1 beside ours, for docs/benchmarks.md."""
    rows = [[row.what, row.paper[0], "<br>".join(row.here)] for row in table_one(records)]
    return table(["Kendall’s tau with the gap", "Paper", "Here"], rows)


def _counts(signs: tuple[int, int, int]) -> str:
    return " · ".join(map(str, signs))
