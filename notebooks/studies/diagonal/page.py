"""The study's page: what was found, in words, tables and figures."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from quotient_manifolds.files import write_text
from quotient_manifolds.report import Code, Fact, Figure, Gallery, Listing, Page, Section, Table, Text, render
from studies.diagonal.networks import DIMENSION
from studies.diagonal.pictures import family_figure, mechanism_figure, tau_figure
from studies.diagonal.records import DiagonalStudy
from studies.diagonal.tables import (
    LABELS,
    ascent_table,
    family_table,
    mechanism_table,
    middle,
    network_table,
    reference_table,
    sign_table,
    tau_table,
    thorough_table,
    where,
)
from studies.paper import TAU
from studies.wording import minus, signed

CAVEATS = """\
All networks of a cell share one X and one beta*; intervals are over seeds, which change both, and hold for this grid.
The training loss is 1e-5 for every network, so the test loss is the generalisation gap, up to that constant.
Networks that diverge or do not arrive are drawn again: the rates of those that count are a little lower than drawn.
The ascent finds a lower bound of the maximum, and so does the thorough one; only for mix, exact, is there an upper \
bound beside it.
The paper states neither n nor scales, rates or radii: no row here is claimed to be its setting.
The settings with the same number of points and seed share X and beta*, so their rows are not independent.
""".splitlines()


def write_page(study: DiagonalStudy, path: Path) -> None:
    write_text(path, render(diagonal_page(study)))


def diagonal_page(study: DiagonalStudy) -> Page:
    """Return headline figures, the ranking, the radius, the mechanism, the ascent, the networks, how to redo it."""
    return Page(
        title="Diagonal networks: what decides the sign",
        lead=(
            f"Diagonal networks of dimension {DIMENSION} are trained to the same loss from {study.plan.networks} "
            "initialisations, and ranked by sharpness. Does a sharper network do better or worse on new data? This "
            "page shows how the answer depends on the metric, the radius, and how far its geodesics are followed."
        ),
        facts=_facts(study),
        sections=(
            _ranking(study),
            _radius(study),
            _mechanism(study),
            _family(study),
            _ascent(study),
            _references(study),
            Section("networks", "The networks", (network_table(study),)),
            Section("caveats", "What to keep in mind", (Listing(CAVEATS),)),
            _method(study),
        ),
    )


def _facts(study: DiagonalStudy) -> list[Fact]:
    radius, total = study.plan.radii[len(study.plan.radii) // 2], len(study.plan.settings)
    facts = []
    for measure in ("mix exact", "inv exact", "adaptive"):
        below, neither, above = study.signs(measure, radius)
        words = (
            f"{LABELS[measure]}: of {total} settings, how many have an interval of tau below 0, around 0, above 0, at "
            f"radius {radius:g}."
        )
        facts.append(Fact(f"{below} · {neither} · {above}", words))
    return facts


def _ranking(study: DiagonalStudy) -> Section:
    paper = ", ".join(f"{name} {signed(tau)}" for name, tau in TAU["diagonal"].items())
    words = (
        f"Kendall’s tau-b between sharpness, as {study.plan.steps} steps of the ascent find it, and the test loss "
        "|beta − beta*|²; the mean over seeds, with a bootstrap interval over seeds (95 %). Above 0: sharper networks "
        f"do worse. The paper’s Table 1 has {paper}, for a setting it does not state in full. Where the rise of mix "
        "to first or second order is truncation error, as it is at the larger radii, its column is no evidence (why: "
        "below). The last column is no measure of the library: it is mix, exact, without the ends of its geodesics, in "
        "closed form."
    )
    radii = study.plan.radii
    tables = [table for radius in radii for table in (tau_table(study, radius), sign_table(study, radius))]
    return Section("ranking", "Does sharpness rank the networks?", (Text(words), *tables))


def _radius(study: DiagonalStudy) -> Section:
    caption = (
        "Mean over seeds of Kendall’s tau with the test loss; shaded: from the 10th to the 90th percentile of seeds. "
        f"Scales {where(study.plan.settings[0])[1]}, rates {where(study.plan.settings[0])[2]}."
    )
    words = (
        "As the radius goes to 0 every geodesic is a straight line, sharpness over radius is the norm of the "
        "Riemannian gradient, and all orders must agree. That gradient comes from what is left of the training loss, "
        "1e-5, so what tau says there is said of the residual."
    )
    figure = Figure(tau_figure(study).html(), caption, wide=True)
    return Section("radius", "Is there a radius at which all orders agree?", (Text(words), Gallery((figure,))))


def _mechanism(study: DiagonalStudy) -> Section:
    radius = study.plan.radii[len(study.plan.radii) // 2]
    smallest = np.median([cell.smallest for cell in study.cells if cell.setting in study.profiled])
    words = (
        "In mix a unit vector in coordinate i has b = 1 / (√2 |beta_i|), and the smallest |beta_i| of a network is "
        f"{minus(f'{smallest:.1e}')} (median). There b is far outside the Taylor series’ reach: to second order the "
        "loss grows like b⁸ beta_i², so that one tiny coordinate takes the whole ball, and sharpness ranks networks by "
        f"1 / min |beta_i| (tau {middle(study, 'matches', 'mix second, 1 / min |beta|', radius)} between the two at "
        f"radius {radius:g}). Followed exactly, beta moves on a straight line, and the loss is the same quadratic for "
        "all networks, up to the residual; but a line ends where its beta_i is 0. Networks with many coordinates near "
        "0 have more of their ball cut off, and tau between mix, exact, and |beta|_1 is "
        f"{middle(study, 'matches', 'mix exact, |beta|_1', radius)}."
    )
    caption = (
        "Medians over the networks of a cell: the line is their median over seeds and numbers of points, the band "
        "from the 10th to the 90th percentile. Truncation error: |L(second) − L(exact)| over the rise, at the point "
        "that the ascent along second-order geodesics found; 1 means that all of the rise is error."
    )
    figure = Figure(mechanism_figure(study).html(), caption, wide=True)
    title = "Why truncated mix measures something else"
    return Section("mechanism", title, (Text(words), Gallery((figure,)), mechanism_table(study)))


def _family(study: DiagonalStudy) -> Section:
    words = (
        "inv and mix are two of a family of metrics: with t, coordinate i weighs |beta_i|^2t. The paper asks whether "
        "the choice matters. Radii are not comparable from one t to another, so every radius has its own figure."
    )
    figures = [
        Figure(
            family_figure(study, radius).html(),
            f"Radius {radius:g}: mean over seeds of Kendall’s tau with the test loss, and from the 10th to the 90th "
            "percentile of seeds.",
            wide=True,
        )
        for place, radius in enumerate(study.plan.family_radii)
    ]
    tables = [family_table(study, radius) for radius in study.plan.family_radii]
    return Section("family", "The family of metrics", (Text(words), Gallery(tuple(figures)), *tables))


def _ascent(study: DiagonalStudy) -> Section:
    plan = study.plan
    words = (
        f"In {plan.thorough} seeds of each setting every measure was climbed again: {plan.thorough_steps} steps, "
        f"{plan.thorough_restarts} random restarts, and a start from the best corner, which has one coordinate only. "
        f"Found: what the ascent of {plan.steps} steps reaches of that rise (median over networks, then over seeds; "
        "the least of all). With corner: tau where the best corner counts if it is above what the ascent found. Of the "
        "bound: what the thorough ascent reaches of the largest rise on lines that do not end, as the secular equation "
        "gives it; a part below 1 is shortfall or cut off."
    )
    tables = [thorough_table(study, radius) for radius in plan.radii]
    return Section("ascent", "Does the sign hang on a poor ascent?", (Text(words), *tables, ascent_table(study)))


def _references(study: DiagonalStudy) -> Section:
    def ends(name: str) -> str:
        found = [study.reference(setting, name) for setting in study.plan.settings]
        values = [mean.value for mean in found if mean is not None]
        return f"from {signed(min(values))} to {signed(max(values))}" if values else "undefined"

    words = (
        "The same correlations for quantities without a radius: the smallest coordinate, the l1 norm, the Riemannian "
        "gradient norms (the limit of small radii), and two closed forms. Where X′X = I the paper has, to first order, "
        "|beta (beta − X′y)| for inv and |beta − X′y| for mix, up to constants. Here X′X is not I and several beta fit "
        f"the data; with the one of least norm in the place of X′y, tau goes {ends('|beta (beta - nearest)|')} over "
        f"the settings (inv form) and {ends('|beta - nearest|')} (mix form)."
    )
    return Section("references", "What needs no ascent", (Text(words), reference_table(study)))


def _method(study: DiagonalStudy) -> Section:
    plan = study.plan
    minutes = sum(cell.seconds for cell in study.cells) / 60
    rows = [
        ["Data", f"X (n × {DIMENSION}) with entries N(0, 1/n); beta* 90 % zeros, else N(0, 1); y = X beta*"],
        ["Training", "gradient descent on u and v until |X (u v) − y|² is at most 1e-5"],
        ["Networks", f"{plan.networks} a cell; scale and rate log-uniform in their ranges, u and v scale × N(0, I)"],
        ["Seeds", f"{plan.seeds}, each with its own X, beta* and networks"],
        ["Ascent", f"Auto-PGD, {plan.steps} steps from the network itself"],
        ["Time", f"{minutes:.0f} minutes for {len(study.cells)} cells on one thread"],
        ["Version", study.version],
    ]
    table = Table("method-table", "Settings of this run", ["What", "Value"], rows, [False, False])
    note = Text("Beside this page: diagonal.json holds every number (DiagonalStudy.load reads it).")
    return Section("method", "How this page was made", (Code(study.command), table, note))
