"""The tables behind the table: the orders of geodesics, the family of metrics, the radius."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from studies.diagonal.tables import where
from studies.markdown import table
from studies.results.claims import ZOOS, said
from studies.results.paper_and_here import NOT_RUN, table_one
from studies.results.records import Records
from studies.results.settings import DiagonalZoo
from studies.results.zoos import ModelZoo
from studies.wording import minus

ORDERS = ("adaptive", "inv first", "inv second", "inv exact", "mix first", "mix second", "mix exact")
SETTING = ("adaptive", "inv exact", "mix exact", "inv closed", "mix closed", "inv gradient", "mix gradient")


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
    rows = [[said(name), *(_spread(zoo, name, radius) for radius in radii)] for name in ORDERS]
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


def family_table(records: Records) -> str:
    """Compute tau by t, a column a zoo of transformers."""
    zoos = {key: zoo.family() if zoo is not None else None for key, zoo in records.zoos.items()}
    columns = {ZOOS[key]: taus for key, taus in zoos.items()}
    points = sorted({t for taus in columns.values() if taus for t in taus})
    rows = [
        [minus(f"{t:g}"), *(NOT_RUN if taus is None else str(taus.get(t, "")) for taus in columns.values())]
        for t in points
    ]
    return table(["t", *columns], rows)


def radius_table(records: Records) -> str:
    """Compute tau and the median sharpness at every radius, and the power of the radius that it grows with."""
    rows = [*_setting_radii(records.diagonal), *(row for key, zoo in records.zoos.items() for row in _radii(key, zoo))]
    return table(["Zoo", "Measure", "Radius", "tau", "Median sharpness", "Grows with the power"], rows)


def _setting_radii(zoo: DiagonalZoo | None) -> Iterator[list[str]]:
    if zoo is None:
        yield ["diagonal networks", NOT_RUN, "", "", "", ""]
        return
    radii = zoo.study.plan.radii
    for name in ("adaptive", "inv second", "mix second", "inv exact", "mix exact"):
        medians = {radius: float(np.median(zoo.study.column("rises", name, radius))) for radius in radii}
        for (radius, median), power in zip(medians.items(), _powers(medians), strict=True):
            yield ["diagonal networks", said(name), f"{radius:g}", _spread(zoo, name, radius), f"{median:.3g}", power]


def _radii(key: str, zoo: ModelZoo | None) -> Iterator[list[str]]:
    if zoo is None:
        yield [ZOOS[key], NOT_RUN, "", "", "", ""]
        return
    for name in ("euclidean", "adaptive", "inv", "mix"):
        if zoo.tau(name) is None:
            continue
        found = zoo.radii(name)
        powers = _powers({radius: median for radius, (_, median) in found.items()})
        for (radius, (tau, median)), power in zip(found.items(), powers, strict=True):
            shown = "undefined" if tau is None else str(tau)
            yield [ZOOS[key], said(name), f"{radius:g}", shown, f"{median:.3g}", power]


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
