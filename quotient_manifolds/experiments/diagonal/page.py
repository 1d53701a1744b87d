"""The study's page: what was found, in words, tables and figures."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from quotient_manifolds.experiments.diagonal.measuring import MEASURES
from quotient_manifolds.experiments.diagonal.networks import DIMENSION, Setting
from quotient_manifolds.experiments.diagonal.pictures import LABELS, mechanism_figure, tau_figure
from quotient_manifolds.experiments.diagonal.records import Check, DiagonalStudy, Mean
from quotient_manifolds.experiments.wording import minus, signed
from quotient_manifolds.files import write_text
from quotient_manifolds.report import Code, Fact, Figure, Gallery, Listing, Page, Section, Table, Text, render

PAPER = {"adaptive": -0.68, "inv second": -0.83, "mix second": -0.86}  # [paper, Table 1]
SHOWN = (*MEASURES, "mix endless")
WHERE = ("Points", "Scales", "Rates")

CAVEATS = """\
All networks of a cell share one X and one beta*; intervals are over seeds, which change both, and hold for this grid.
The training loss is 1e-5 for every network, so the test loss is the generalisation gap, up to that constant.
Networks that diverge or do not arrive are drawn again: the learning rates of those that count lie lower than drawn.
The ascent finds a lower bound of the maximum. Where it was climbed again thoroughly, that is a lower bound too; only \
for mix, exact, is there an upper bound beside it.
The paper states neither n nor scales, rates or radii: no row here is claimed to be its setting.
""".splitlines()


def write_page(study: DiagonalStudy, path: Path) -> None:
    write_text(path, render(diagonal_page(study)))


def diagonal_page(study: DiagonalStudy) -> Page:
    """Headline figures, the ranking, the radius, the mechanism, the ascent, the networks, how to redo it."""
    plan = study.plan
    return Page(
        title="Diagonal networks: what decides the sign",
        lead=(
            f"Diagonal networks of dimension {DIMENSION} are trained to the same loss from {plan.networks} "
            "initialisations, and ranked by sharpness. Does a sharper network do better or worse on new data? Here the "
            "answer depends on how far the geodesics of the metric are followed, and this page shows why."
        ),
        facts=_facts(study),
        sections=(
            _ranking(study),
            _radius(study),
            _mechanism(study),
            _ascent(study),
            _references(study),
            _networks(study),
            Section("caveats", "What to keep in mind", (Listing(CAVEATS),)),
            _method(study),
        ),
    )


def with_interval(mean: Mean | None) -> str:
    """mean [low, high]."""
    return "undefined" if mean is None else f"{signed(mean.value)} [{signed(mean.low)}, {signed(mean.high)}]"


def where(setting: Setting) -> list[str]:
    """The cells of a row that say which setting it is."""
    ends = (setting.scales, setting.rates)
    return [str(setting.points), *(f"{low:g} to {high:g}" for low, high in ends)]


def tau_table(study: DiagonalStudy, radius: float) -> Table:
    """tau of every measure with its interval, a row a setting."""
    rows = [
        [*where(setting), *(with_interval(study.tau(setting, measure, radius)) for measure in SHOWN)]
        for setting in study.plan.settings
    ]
    return Table(
        f"tau-{study.plan.radii.index(radius)}",
        f"Kendall’s tau-b with the test loss at radius {radius:g}: mean over {study.plan.seeds} seeds and its interval",
        [*WHERE, *(LABELS[measure] for measure in SHOWN)],
        rows,
        [True, False, False, *[True] * len(SHOWN)],
    )


def sign_table(study: DiagonalStudy, radius: float) -> Table:
    """In how many seeds tau is negative and positive, a row a setting."""

    def counts(mean: Mean | None) -> str:
        return "undefined" if mean is None else f"{mean.negative} / {mean.positive}"

    rows = [
        [*where(setting), *(counts(study.tau(setting, measure, radius)) for measure in SHOWN)]
        for setting in study.plan.settings
    ]
    return Table(
        f"signs-{study.plan.radii.index(radius)}",
        f"In how many of {study.plan.seeds} seeds tau is negative / positive at radius {radius:g}",
        [*WHERE, *(LABELS[measure] for measure in SHOWN)],
        rows,
        [True, False, False, *[True] * len(SHOWN)],
    )


def _facts(study: DiagonalStudy) -> list[Fact]:
    radius, total = _middle_radius(study), len(study.plan.settings)
    facts = []
    for measure in ("mix second", "mix exact", "inv exact", "adaptive"):
        below, neither, above = study.signs(measure, radius)
        facts.append(
            Fact(
                f"{below} − · {neither} ± · {above} +",
                f"{LABELS[measure]}: of {total} settings, those whose interval of tau at radius {radius:g} lies below "
                "0, holds 0, lies above 0.",
            )
        )
    return facts


def _ranking(study: DiagonalStudy) -> Section:
    paper = ", ".join(f"{LABELS[measure]} {signed(value)}" for measure, value in PAPER.items())
    words = (
        "Kendall’s tau-b between sharpness (20 steps of the ascent, as the library takes by default) and the test loss "
        "|beta − beta*|²; the mean over seeds, with a bootstrap interval over seeds (95 %). Above 0: sharper networks "
        f"do worse. The paper’s Table 1 has {paper}, for a setting it does not state in full."
    ).replace("20 steps", f"{study.plan.steps} steps")
    tables = [table(study, radius) for radius in study.plan.radii for table in (tau_table, sign_table)]
    return Section("ranking", "Does sharpness rank the networks?", (Text(words), *tables))


def _radius(study: DiagonalStudy) -> Section:
    caption = (
        "Mean over seeds of Kendall’s tau with the test loss; shaded: from the 10th to the 90th percentile of seeds. "
        f"Scales {where(study.plan.settings[0])[1]}, rates {where(study.plan.settings[0])[2]}."
    )
    return Section(
        "radius",
        "Is there a radius at which all orders agree?",
        (
            Text(
                "As the radius goes to 0 every geodesic is a straight line, sharpness over radius is the norm of the "
                "Riemannian gradient, and all orders must agree. That gradient is what 1e-5 of loss has left, so the "
                "sign found there is one of the residual, not of the network."
            ),
            Gallery((Figure(tau_figure(study).svg("tau-radius"), caption, wide=True),)),
        ),
    )


def _mechanism(study: DiagonalStudy) -> Section:
    settings = study.plan.settings[: study.plan.profiled]

    def middle(column: str, key: str, radius: float) -> str:
        return minus(f"{np.median(study.column(column, key, radius, settings)):.2g}")

    columns = {
        "Far share, mix second": ("far", "mix second"),
        "Far share, mix exact": ("far", "mix exact"),
        "Truncation, mix": ("truncation", "mix"),
        "Truncation, inv": ("truncation", "inv"),
        "Networks above 10 %, mix": ("truncated", "mix"),
        "Second with exact, mix": ("agreement", "mix"),
        "Second with exact, inv": ("agreement", "inv"),
        "mix second with 1 / min |beta|": ("matches", "mix second, 1 / min |beta|"),
        "mix exact with |beta|_1": ("matches", "mix exact, |beta|_1"),
        "Rise, mix second": ("rises", "mix second"),
        "Rise, mix exact": ("rises", "mix exact"),
    }
    rows = [[f"{radius:g}", *(middle(*place, radius) for place in columns.values())] for radius in study.plan.profile]
    smallest = np.median([cell.smallest for cell in study.cells if cell.setting in settings])
    text = (
        "In mix a unit vector in coordinate i has b = 1 / (√2 |beta_i|), and the median over networks of the smallest "
        f"|beta_i| is {smallest:.1e}. There b is far outside the Taylor series’ reach at any radius of use: to second "
        "order the loss grows like b⁸ beta_i², so that sharpness is, in rank, 1 / min |beta_i|. Exactly followed, "
        "beta_i moves on a straight line and the loss is a quadratic, the same for all networks up to the residual: "
        "were it not that each line ends where beta_i is 0. The more coordinates are near 0, the more of the ball is "
        "cut off; that is what exact sharpness of mix measures here."
    )
    caption = (
        "Medians over the networks of a cell: the line is their median over seeds and numbers of points, the band "
        "their 10th to 90th percentile. Truncation error: |L(second) − L(exact)| over the rise, at the point that the "
        "ascent along second-order geodesics found; 1 means that all of the rise is error."
    )
    table = Table(
        "mechanism-table",
        "Medians over seeds and numbers of points, by radius; “with” is Kendall’s tau-b over the networks of a cell",
        ["Radius", *columns],
        rows,
        [True] * (1 + len(columns)),
    )
    gallery = Gallery((Figure(mechanism_figure(study).svg("mechanism"), caption, wide=True),))
    return Section("mechanism", "Why truncation decides the sign", (Text(text), gallery, table))


def _ascent(study: DiagonalStudy) -> Section:
    plan = study.plan
    rows = []
    for setting in plan.settings:
        for radius in plan.radii:
            for measure in MEASURES:
                found = study.checked(setting, measure, radius)
                if found:
                    place = found[0][0].radii.index(radius)
                    plain = Mean.of(cell.taus[measure][place] for cell, _ in found)
                    corner = Mean.of(cell.cornered[measure][place] for cell, _ in found)
                    rows.append(_check_row(setting, radius, measure, plain, corner, [check for _, check in found]))
    text = (
        f"In {plan.thorough} seeds of each setting every measure was climbed again: {plan.thorough_steps} "
        f"steps, {plan.thorough_restarts} random restarts, a start from the best single coordinate. Found: what the "
        f"ascent of {plan.steps} steps reaches of that rise (median over networks, then over seeds; the least of all). "
        "Of the bound: what the thorough ascent reaches of the largest rise on straight lines that do not end, as the "
        "secular equation gives it."
    )
    columns = ["Points", "Radius", "Measure", "tau, ascent", "with corner", "tau, thorough", "Seeds − / +"]
    return Section(
        "ascent",
        "Does the sign hang on a poor ascent?",
        (
            Text(text),
            Table(
                "ascent-table",
                "The ascent against a thorough one: tau (means over the same seeds) and parts of the rise found",
                [*columns, "Found", "Least", "Of the bound", "Least of the bound"],
                rows,
                [True, True, False, *[True] * 8],
            ),
        ),
    )


def _check_row(
    setting: Setting, radius: float, measure: str, plain: Mean | None, corner: Mean | None, checks: list[Check]
) -> list[str]:
    thorough = Mean.of(check.tau for check in checks)
    bounds = [check.bound for check in checks if check.bound is not None]
    return [
        str(setting.points),
        f"{radius:g}",
        LABELS[measure],
        *(signed(None if mean is None else mean.value) for mean in (plain, corner, thorough)),
        "" if thorough is None else f"{thorough.negative} / {thorough.positive}",
        f"{np.median([check.found[0] for check in checks]):.3f}",
        f"{min(check.found[1] for check in checks):.3f}",
        f"{np.median([bound[0] for bound in bounds]):.3f}" if bounds else "",
        f"{min(bound[1] for bound in bounds):.3f}" if bounds else "",
    ]


def _references(study: DiagonalStudy) -> Section:
    names = tuple(study.cells[0].references)
    rows = [
        [*where(setting), *(with_interval(study.reference(setting, name)) for name in names)]
        for setting in study.plan.settings
    ]
    return Section(
        "references",
        "What needs no ascent",
        (
            Text(
                "The same correlations for quantities without a radius: the smallest coordinate, the l1 norm, the "
                "Riemannian gradient norms (the limit of small radii), and the paper’s closed forms for X′X = I, with "
                "the solution of least norm in the place of X′y."
            ),
            Table(
                "reference-table",
                f"Kendall’s tau-b with the test loss: mean over {study.plan.seeds} seeds and its interval",
                [*WHERE, *names],
                rows,
                [True, False, False, *[True] * len(names)],
            ),
        ),
    )


def _networks(study: DiagonalStudy) -> Section:
    rows = []
    for setting in study.plan.settings:
        cells = study.of(setting)
        low, middle, high = (f"{np.median([cell.test_loss[k] for cell in cells]):.3g}" for k in range(3))
        rows.append(
            [
                *where(setting),
                *(f"{sum(getattr(cell.drawing, name) for cell in cells):,}" for name in _COUNTS),
                f"{np.median([cell.drawing.steps for cell in cells]):,.0f}",
                f"{min(cell.train_loss[0] for cell in cells):.2g}",
                *(low, middle, high),
                f"{np.median([cell.smallest for cell in cells]):.1e}",
            ]
        )
    columns = [*("Drawn", "Diverged", "Not arrived", "Steps", "Least train loss"), *("Least", "Median", "Largest")]
    return Section(
        "networks",
        "The networks",
        (
            Table(
                "network-table",
                "How many were drawn over all seeds; steps of gradient descent, test losses and the smallest "
                "coordinate (medians over seeds)",
                [*WHERE, *columns, "min |beta|"],
                [[minus(cell) for cell in row] for row in rows],
                [True, False, False, *[True] * 9],
            ),
        ),
    )


_COUNTS = ("drawn", "diverged", "unfinished")


def _method(study: DiagonalStudy) -> Section:
    plan = study.plan
    seconds = sum(cell.seconds for cell in study.cells)
    rows = [
        ["Data", f"X (n × {DIMENSION}) with entries N(0, 1/n); beta* 90 % zeros, else N(0, 1); y = X beta*"],
        ["Training", "gradient descent on u and v until |X (u v) − y|² is at most 1e-5"],
        ["Networks", f"{plan.networks} a cell; scale and rate log-uniform in their ranges, u and v scale × N(0, I)"],
        ["Seeds", f"{plan.seeds}, each with its own X, beta* and networks"],
        ["Ascent", f"Auto-PGD, {plan.steps} steps from the network itself"],
        ["Time", f"{seconds / 60:.0f} minutes for {len(study.cells)} cells on one thread"],
        ["Version", study.version],
    ]
    note = Text("Beside this page: diagonal.json holds every number (DiagonalStudy.load reads it).")
    table = Table("method-table", "Settings of this run", ["What", "Value"], rows, [False, False], sortable=False)
    return Section("method", "How this page was made", (Code(study.command), table, note))


def _middle_radius(study: DiagonalStudy) -> float:
    return study.plan.radii[len(study.plan.radii) // 2]
