"""The tables of the study, from its record alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from studies.common import Tables, by_name, minus, numbers, signed
from studies.diagonal.networks import Setting
from studies.diagonal.records import MIDDLE, DiagonalStudy, Mean
from studies.diagonal.summary import Grid, claims, said

LABELS = {
    "adaptive": "adaptive",
    "inv first": "inv, first order",
    "inv second": "inv, second order",
    "inv exact": "inv, exact",
    "mix first": "mix, first order",
    "mix second": "mix, second order",
    "mix exact": "mix, exact",
    "mix endless": "mix, as if no geodesic ended",
}
ORDERS = ("adaptive", "inv first", "inv second", "inv exact", "mix first", "mix second", "mix exact")
SHOWN = (
    *("adaptive", "inv exact", "mix exact", "inv closed", "mix closed", "inv gradient", "mix gradient"),
    "|beta|_1",
)
WHERE = ("Points", "Scales", "Rates")


def tables(study: DiagonalStudy) -> Tables:
    """Return tau by setting, by order of geodesics, metric and radius, its convergence, and the claims."""
    grid, plan = Grid(study), study.plan
    settings = [
        [*where(each), *(str(grid.tau(each, name)) for name in SHOWN), "yes" if grid.ordered(each, "closed") else "no"]
        for each in grid.settings
    ]
    orders = [[said(name), *(_spread(grid.plain, name, radius) for radius in plan.radii)] for name in ORDERS]
    family = [[*where(each), *(str(grid.family(each, t) or "") for t in plan.family)] for each in grid.settings]
    verdicts = [
        [
            *(claim.words, claim.about, claim.rule),
            f"{signed(min(claim.found))} to {signed(max(claim.found))}" if claim.found else "",
            *(str(claim.verdicts.count(verdict)) for verdict in (1, -1, 0)),
        ]
        for claim in claims(grid)
    ]
    ordered = "Order of Table 1 by closed forms"
    made = [
        numbers("settings", "", [*WHERE, *map(said, SHOWN), ordered], settings, words=3),
        numbers("thorough", "", CONVERGENCE, [_thorough(grid, name) for name in MIDDLE]),
        numbers("orders", "", ["Sharpness", *(f"Radius {radius:g}" for radius in plan.radii)], orders),
        numbers("family", "", [*WHERE, *(minus(f"t = {t:g}") for t in plan.family)], family, words=3),
        numbers("radius", "", ["Measure", "Radius", "tau", "Median", "Grows with the power"], list(_radii(grid))),
        numbers("claims", "", ["Claim", "Number", "Rule", "Range", "For", "Against", "Open"], verdicts, words=3),
    ]
    return by_name(made)


def _spread(zoo: Grid, name: str, radius: float) -> str:
    found, counting, total = zoo.spread(name, radius), len(zoo.counting(name, radius)), len(zoo.settings)
    if found is None:
        return "truncation error in all settings"
    return str(found) if counting == total else f"{found}<br>truncation error in {total - counting} settings"


def _radii(zoo: Grid) -> Iterator[list[str]]:
    radii = zoo.study.plan.radii
    for name in ("adaptive", "inv second", "mix second", "inv exact", "mix exact"):
        medians = {radius: float(np.median(zoo.study.column("rises", name, radius))) for radius in radii}
        for (radius, median), power in zip(medians.items(), _powers(medians), strict=True):
            yield [said(name), f"{radius:g}", _spread(zoo.plain, name, radius), f"{median:.3g}", power]


def _powers(medians: dict[float, float]) -> list[str]:
    """Return the power of the radius that sharpness grows with from the last radius, "" where that is not known."""
    powers = [""]
    for (smaller, before), (larger, after) in pairwise(medians.items()):
        known = before > 0 and after > 0
        powers.append(f"{math.log(after / before) / math.log(larger / smaller):.2f}" if known else "")
    return powers


CONVERGENCE = ("Measure", "Found, median", "Found, least", "tau, plain", "tau, thorough", "Largest change of tau")


def _thorough(grid: Grid, name: str) -> list[str]:
    """Return what plain ascents found at the middle radius over what thorough ones found, and tau by both."""
    cells = grid.study.cells
    checks = [cell.middle[name] for cell in cells]
    plain = [cell.taus[name][cell.radii.index(grid.middle)] for cell in cells]
    changes = [
        abs(before - check.tau)
        for before, check in zip(plain, checks, strict=True)
        if before is not None and check.tau is not None
    ]
    ends = [tau.value for tau in grid.plain.taus(name)]
    return [
        said(name),
        f"{np.median([check.found[0] for check in checks]):.3f}",
        f"{min(check.found[1] for check in checks):.3f}",
        f"{signed(min(ends))} to {signed(max(ends))}" if ends else "",
        str(grid.spread(name)),
        f"{max(changes, default=0.0):.2f}",
    ]


def with_interval(mean: Mean | None) -> str:
    """Write mean [low, high]."""
    return "undefined" if mean is None else f"{signed(mean.value)} [{signed(mean.low)}, {signed(mean.high)}]"


def where(setting: Setting) -> list[str]:
    """Return the cells of a row that say which setting it is."""
    return [str(setting.points), *(f"{low:g} to {high:g}" for low, high in (setting.scales, setting.rates))]


def middle(study: DiagonalStudy, column: str, key: str, radius: float) -> str:
    """Return the median of a column over the cells of the profiled settings."""
    return minus(f"{np.median(study.column(column, key, radius, study.profiled)):.2g}")
