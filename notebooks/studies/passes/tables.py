"""The study of passes as tables: passes to the maximum, rises at equal passes, and what a tolerance keeps."""

from __future__ import annotations

from typing import Final

import numpy as np

from quotient_manifolds.report import Table
from studies.passes.study import BUDGETS, NEVER, TOLERANCE, Case, Passes

METHODS: Final = {
    "quasi_newton": "quasi-Newton",
    "20": "Auto-PGD, 20 steps",
    "40": "Auto-PGD, 40 steps",
    "released": "released ascent, 20 iterations",
}
STOPPED: Final = {"quasi_newton": "quasi-Newton", "auto_pgd": "Auto-PGD"}


def passes_rows(found: Passes) -> list[list[str]]:
    """Return a row for each ascent: median and 90th percentile of the passes, and where it does not arrive."""
    rows = []
    for method, name in METHODS.items():
        kept = [case for case in found.cases if method != "released" or case.released is not None]
        if not kept:
            continue
        never = sum(case.passes(method) == NEVER for case in kept)
        spread = [_interval(*found.quantile(method, share)) for share in (0.5, 0.9)]
        rows.append([name, *spread, f"{never} of {len(kept)}"])
    return rows


def budgets_rows(found: Passes) -> list[list[str]]:
    """Return a row for each budget: quasi-Newton over Auto-PGD at equal passes."""
    rows = []
    for steps in BUDGETS:
        ratios = np.array([case.ratio(steps) for case in found.cases])
        less, more = int((ratios < 0.99).sum()), int((ratios > 1.01).sum())
        numbers = [f"{ratios.min():.3f}", f"{np.median(ratios):.3f}", f"{ratios.max():.3f}"]
        rows.append([str(steps), *numbers, f"{less} of {len(ratios)}", str(more)])
    return rows


def stops_rows(found: Passes) -> list[list[str]]:
    """Return a row for each method: passes until the tolerance ends the climb, and how often that is too early."""
    rows = []
    for method, name in STOPPED.items():
        passes = np.array([len(case.stopped[method].rises) for case in found.cases])
        count, low, high = found.missed(method)
        share = f"{count} of {len(found.cases)} [{100 * low:.0f} %, {100 * high:.0f} %]"
        early = [case for case in found.cases if case.misses(method)]
        within = sum(case.stopped[method].rises[-1] >= (1 - TOLERANCE) * _attained(case, method) for case in early)
        rows.append(
            [name, f"{np.median(passes):.0f}", f"{np.quantile(passes, 0.9, method='higher'):.0f}", share, str(within)]
        )
    return rows


def _attained(case: Case, method: str) -> float:
    """Return what the method finds in 40 steps without a tolerance."""
    climbed = case.quasi_newton if method == "quasi_newton" else case.auto_pgd["40"]
    return float(climbed.rises[-1])


def _interval(value: float, low: float, high: float) -> str:
    shown = ["never" if each == NEVER else f"{each:g}" for each in (value, low, high)]
    return f"{shown[0]} [{shown[1]}, {shown[2]}]"


def passes_table(found: Passes) -> Table:
    """Return `passes_rows` as a table."""
    columns = ["ascent", "median", "90th percentile", "never"]
    title = f"Passes to 99 % of the maximum, {len(found.cases)} cases"
    return Table("passes", title, columns, passes_rows(found), [False, True, True, True])


def budgets_table(found: Passes) -> Table:
    """Return `budgets_rows` as a table."""
    columns = ["steps", "smallest", "median", "largest", "over 1 % less", "over 1 % more"]
    return Table("budgets", "Quasi-Newton over Auto-PGD at equal passes", columns, budgets_rows(found), [True] * 6)


def stops_table(found: Passes) -> Table:
    """Return `stops_rows` as a table."""
    columns = [
        "ascent",
        "median of passes",
        "90th percentile",
        "more than 1 % below the maximum",
        "of them as 40 steps",
    ]
    title = f"Climbs of at most 40 steps with tolerance {TOLERANCE:g}"
    return Table("stops", title, columns, stops_rows(found), [False, True, True, True, True])
