"""The tables of the study, from its record alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from quotient_manifolds.report import Table
from studies.diagonal.measuring import MEASURES
from studies.diagonal.networks import Setting
from studies.diagonal.records import FAMILY_GEODESICS, DiagonalStudy, Mean
from studies.diagonal.study import LARGE
from studies.wording import minus, signed

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
MECHANISM = {
    "Far share, mix second": ("far", "mix second"),
    "Far share, mix exact": ("far", "mix exact"),
    "Truncation, mix": ("truncation", "mix"),
    "Truncation, inv": ("truncation", "inv"),
    "Networks above 10 %, mix": ("truncated", "mix"),
    "Networks above 10 %, inv": ("truncated", "inv"),
    "Second with exact, mix": ("agreement", "mix"),
    "Second with exact, inv": ("agreement", "inv"),
    "mix second with 1 / min |beta|": ("matches", "mix second, 1 / min |beta|"),
    "mix exact with |beta|_1": ("matches", "mix exact, |beta|_1"),
    "Rise, mix second": ("rises", "mix second"),
    "Rise, mix exact": ("rises", "mix exact"),
}


def with_interval(mean: Mean | None) -> str:
    """Write mean [low, high]."""
    return "undefined" if mean is None else f"{signed(mean.value)} [{signed(mean.low)}, {signed(mean.high)}]"


def counts(mean: Mean | None) -> str:
    """Count in how many seeds it is negative / positive."""
    return "undefined" if mean is None else f"{mean.negative} / {mean.positive}"


def in_short(mean: Mean | None) -> str:
    """Return the mean, and the seeds by sign, for a narrow page."""
    return "undefined" if mean is None else f"{signed(mean.value)} ({mean.negative}/{mean.positive})"


def where(setting: Setting) -> list[str]:
    """Return the cells of a row that say which setting it is."""
    return [str(setting.points), *(f"{low:g} to {high:g}" for low, high in (setting.scales, setting.rates))]


def tau_table(study: DiagonalStudy, radius: float) -> Table:
    """Compute tau of every measure as the library's ascent finds it, a row a setting."""
    return _tau_table(study, radius, "tau", "mean and interval", with_interval)


def sign_table(study: DiagonalStudy, radius: float) -> Table:
    """Count in how many seeds tau of every measure is negative / positive, a row a setting."""
    return _tau_table(study, radius, "signs", "seeds with a negative / positive tau", counts)


def short_table(study: DiagonalStudy, radius: float) -> Table:
    """Put both in one, for a terminal, and say where the rise is truncation error: a tau would be no evidence there."""

    def cell(setting: Setting, measure: str) -> str:
        truncated = study.truncated_part(setting, measure, radius) > LARGE
        return "truncation error" if truncated else in_short(study.tau(setting, measure, radius))

    caption = f"{_caption(study, radius)}: mean (negative/positive seeds)"
    columns = ["Points", "Scales", "Rates", *MEASURES]
    rows = [[*where(each), *(cell(each, measure) for measure in MEASURES)] for each in study.plan.settings]
    return Table(f"short-{study.plan.radii.index(radius)}", caption, columns, rows, [False] * len(columns))


def _tau_table(study: DiagonalStudy, radius: float, name: str, what: str, write: Callable[[Mean | None], str]) -> Table:
    measures = (*MEASURES, "mix endless")
    rows = {setting: [study.tau(setting, measure, radius) for measure in measures] for setting in study.plan.settings}
    caption = f"{_caption(study, radius)}: {what}"
    return _by_setting(f"{name}-{study.plan.radii.index(radius)}", caption, measures, rows, write)


def _caption(study: DiagonalStudy, radius: float) -> str:
    return f"Kendall’s tau-b with the test loss at radius {radius:g}, over {study.plan.seeds} seeds"


def thorough_table(study: DiagonalStudy, radius: float) -> Table:
    """Compute tau of every measure by the thorough ascent, a row a setting."""
    rows = {
        setting: [Mean.of(check.tau for _, check in study.checked(setting, measure, radius)) for measure in MEASURES]
        for setting in study.plan.settings
    }
    caption = f"The same by the thorough ascent, at radius {radius:g}, over {study.plan.thorough} seeds"
    return _by_setting(f"thorough-{study.plan.radii.index(radius)}", caption, MEASURES, rows, with_interval)


def family_table(study: DiagonalStudy, radius: float) -> Table:
    """Compute tau along the family of metrics, a row for each order of geodesics and profiled setting."""
    return Table(
        f"family-{study.plan.family_radii.index(radius)}",
        f"Kendall’s tau-b with the test loss at radius {radius:g}, over {study.plan.seeds} seeds, by metric t",
        ["Points", "Geodesics", *(minus(f"t = {t:g}") for t in study.plan.family)],
        [
            [
                *(str(setting.points), geodesic),
                *(with_interval(study.of_family(setting, t, geodesic, radius)) for t in study.plan.family),
            ]
            for setting in study.profiled
            for geodesic in FAMILY_GEODESICS
        ],
        [True, False, *[True] * len(study.plan.family)],
    )


def reference_table(study: DiagonalStudy) -> Table:
    """Compute tau of what has no radius, a row a setting."""
    names = tuple(study.cells[0].references)
    rows = {setting: [study.reference(setting, name) for name in names] for setting in study.plan.settings}
    caption = f"Kendall’s tau-b with the test loss, over {study.plan.seeds} seeds: mean and interval"
    return _by_setting("references-table", caption, names, rows, with_interval)


def _by_setting(
    name: str,
    caption: str,
    columns: Sequence[str],
    rows: dict[Setting, list[Mean | None]],
    write: Callable[[Mean | None], str],
) -> Table:
    return Table(
        name,
        caption,
        ["Points", "Scales", "Rates", *(LABELS.get(column, column) for column in columns)],
        [[*where(setting), *map(write, means)] for setting, means in rows.items()],
        [True, False, False, *[True] * len(columns)],
    )


def mechanism_table(study: DiagonalStudy) -> Table:
    """Tabulate medians over the cells of the profiled settings, a row a radius."""
    rows = [
        [f"{radius:g}", *(middle(study, *at, radius) for at in MECHANISM.values())] for radius in study.plan.profile
    ]
    return Table(
        "mechanism-table",
        "Medians over seeds and numbers of points, by radius; “with” is Kendall’s tau-b over the networks of a cell",
        ["Radius", *MECHANISM],
        rows,
        [True] * (1 + len(MECHANISM)),
    )


def middle(study: DiagonalStudy, column: str, key: str, radius: float) -> str:
    """Return the median of a column over the cells of the profiled settings."""
    return minus(f"{np.median(study.column(column, key, radius, study.profiled)):.2g}")


def ascent_table(study: DiagonalStudy) -> Table:
    """Tell how much of the thorough ascent's rise the plain one finds, and that one of the bound, where profiled."""
    rows = [
        _ascent_row(setting, measure, radius, study)
        for setting in study.profiled
        for radius in study.plan.radii
        for measure in MEASURES
    ]
    return Table(
        "ascent-table",
        "The ascent against a thorough one: tau (means over the same seeds) and parts of the rise found",
        [
            *("Points", "Radius", "Measure", "tau, ascent", "with corner", "thorough", "Seeds − / +"),
            *("Found", "Least", "Of the bound", "Least of the bound"),
        ],
        rows,
        [True, True, False, *[True] * 8],
    )


def _ascent_row(setting: Setting, measure: str, radius: float, study: DiagonalStudy) -> list[str]:
    found = study.checked(setting, measure, radius)
    checks = [check for _, check in found]
    plain, corner = (
        Mean.of(getattr(cell, column)[measure][cell.radii.index(radius)] for cell, _ in found)
        for column in ("taus", "cornered")
    )
    thorough = Mean.of(check.tau for check in checks)
    bounds = [check.bound for check in checks if check.bound is not None]
    return [
        *(str(setting.points), f"{radius:g}", LABELS[measure]),
        *(signed(None if mean is None else mean.value) for mean in (plain, corner, thorough)),
        counts(thorough),
        *_middle_and_least([check.found for check in checks]),
        *(_middle_and_least(bounds) if bounds else ("", "")),
    ]


def _middle_and_least(ratios: Sequence[tuple[float, float]]) -> tuple[str, str]:
    return f"{np.median([ratio[0] for ratio in ratios]):.3f}", f"{min(ratio[1] for ratio in ratios):.3f}"


def network_table(study: DiagonalStudy) -> Table:
    """Return how the networks came to be and how good they are, a row a setting."""
    return Table(
        "network-table",
        "How many networks were drawn over all seeds; steps of gradient descent, test losses and the smallest "
        "coordinate (medians over seeds)",
        [
            *("Points", "Scales", "Rates", "Drawn", "Diverged", "Not arrived", "Steps", "Least train loss"),
            *("Least test loss", "Median", "Largest", "min |beta|"),
        ],
        [_network_row(setting, study) for setting in study.plan.settings],
        [True, False, False, *[True] * 9],
    )


def _network_row(setting: Setting, study: DiagonalStudy) -> list[str]:
    cells = study.of(setting)
    drawings = [cell.drawing for cell in cells]
    return [
        *where(setting),
        f"{sum(drawing.drawn for drawing in drawings):,}",
        f"{sum(drawing.diverged for drawing in drawings):,}",
        f"{sum(drawing.unfinished for drawing in drawings):,}",
        f"{np.median([drawing.steps for drawing in drawings]):,.0f}",
        minus(f"{min(cell.train_loss[0] for cell in cells):.2g}"),
        *(minus(f"{np.median([cell.test_loss[k] for cell in cells]):.3g}") for k in range(3)),
        minus(f"{np.median([cell.smallest for cell in cells]):.1e}"),
    ]
