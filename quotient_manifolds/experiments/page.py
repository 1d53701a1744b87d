"""The demonstration's page: what was found, in words, tables and figures."""

from __future__ import annotations

from collections.abc import Iterator

from quotient_manifolds.experiments.pictures import ascent_gallery, orbit_gallery, scatter_gallery, tau_gallery
from quotient_manifolds.experiments.records import DemoResult
from quotient_manifolds.experiments.wording import (
    GAPS,
    NBSP,
    change,
    excludes_zero,
    figure,
    interval,
    largest_change,
    largest_factor,
    minus,
    ratio,
    signed,
    with_error,
)
from quotient_manifolds.report import Code, Fact, Listing, Note, Page, Section, Table, Text

CAVEATS = """\
{models} models are few: the intervals of tau are wide, and differences between measures may lie inside them. \
Several intervals stand side by side, without correction for their number.
All models share one small architecture, one training set and one task. Which sign tau has, and how large it is, \
differs from task to task.
Sharpness is measured on {points} of the {train_points} training images, and the ascent takes {steps} steps: it finds \
a lower bound of the maximum.
A radius means something else in each geometry, so sharpness can be compared between models, not between measures; tau \
depends on the radius too.
The quotient geometries use geodesics to second order. The symmetries divided out are those of the attention heads; \
others (such as the key bias, which no output depends on) are not.
""".splitlines()


def demo_page(result: DemoResult) -> Page:
    """Headline figures, the orbit, the ranking, the symmetries, the models, what to keep in mind, how to redo it."""
    settings = result.settings
    return Page(
        title="Geodesic sharpness of small vision transformers",
        lead=(
            "The sharpness of a network is how much its loss can rise within a ball around its weights. Attention "
            "has continuous symmetries: weights can be moved along an orbit without changing the function at all. "
            "This page shows, on vision transformers trained here on handwritten digits, which measures of sharpness "
            f"change along such an orbit, and how each ranks a zoo of {settings.models} models by their "
            "generalisation gap."
        ),
        facts=_facts(result),
        sections=(
            _orbit(result),
            _ranking(result),
            _symmetries(result),
            _models(result),
            _caveats(result),
            _method(result),
        ),
    )


def _facts(result: DemoResult) -> list[Fact]:
    proved = sum(pair.verdict == "proved" for pair in result.pairs)
    facts = [
        Fact(
            f"× {largest_factor(result, 'adaptive'):.3g}",
            "is the largest factor by which adaptive sharpness changes along the orbit (float64), "
            "though the function is the same.",
        ),
        Fact(
            change(max(largest_change(result, key, "float64") for key in ("inv", "mix"))),
            "is the largest relative change of geodesic sharpness there, inv and mix, in float64 (in float32: "
            f"{change(max(largest_change(result, key, 'float32') for key in ('inv', 'mix')))}).",
        ),
        Fact(f"{proved} of {len(result.pairs)}", "symmetric pairs of the network proved numerically."),
    ]
    ranked = [row for row in result.correlations if row.gap == "error_gap"]
    ranks = ", ".join(f"{result.measure(row.measure).label} {signed(row.correlation.value)}" for row in ranked)
    clear = sum(excludes_zero(row.correlation) for row in ranked)
    facts.append(
        Fact(
            f"{result.settings.models} models",
            f"ranked by sharpness. Kendall’s tau with the gap in error: {ranks}; "
            f"{clear or 'none'} of the {len(ranked)} intervals (95{NBSP}%) {'exclude' if clear > 1 else 'excludes'} 0.",
        )
    )
    return facts


def _orbit(result: DemoResult) -> Section:
    scales = result.settings.scales
    rows = []
    for dtype in dict.fromkeys(row.dtype for row in result.orbit):
        for key in dict.fromkeys(row.measure for row in result.orbit):
            found = [row for row in result.orbit if (row.dtype, row.measure) == (dtype, key)]
            label = f"{result.measure(key).label}, {dtype}"
            cells = [figure(found[0].before), *(ratio(row.ratio) for row in found)]
            rows.append([label, *cells, change(largest_change(result, key, dtype))])
    moved = max(abs(row.loss_after / row.loss_before - 1) for row in result.orbit if row.dtype == "float64")
    return Section(
        "orbit",
        "The same function, elsewhere on its orbit",
        (
            Text(
                "Model 0 is moved along its orbit: in every head of every symmetric pair, (G, H) becomes "
                f"(G{NBSP}A⁻¹, H{NBSP}Aᵀ) with A = a × a Gaussian matrix, drawn anew for every a. The network computes "
                f"the same function (the largest relative change of its loss is {change(moved)}, in float64). "
                "A measure that belongs to the function must have ratio 1 for every a. Adaptive sharpness does not see "
                "the factor a, for it compares every weight with its own size; it does see the mixing of columns."
            ),
            orbit_gallery(result),
            Table(
                "orbit-table",
                "Sharpness after the move divided by sharpness before it, by measure, precision and scale a",
                ["Measure", "Before", *(f"a = {scale:g}" for scale in scales), "Largest |ratio − 1|"],
                rows,
                [False] + [True] * (len(scales) + 2),
            ),
        ),
    )


def _ranking(result: DemoResult) -> Section:
    rows = []
    for measure in result.measures:
        found = {row.gap: row.correlation for row in result.correlations if row.measure == measure.key}
        cells = [cell for gap in GAPS for cell in (signed(found[gap].value), interval(found[gap], tau=False))]
        rows.append([measure.label, f"{measure.radius:g}", *cells])
    return Section(
        "ranking",
        "Does sharpness rank the models by their generalisation gap?",
        (
            Text(
                "Kendall’s tau compares two rankings: 1 if the sharper of any two models always has the larger gap, "
                "−1 if always the smaller one, 0 for no relation. The interval is a bootstrap over models "
                f"({result.settings.resamples} resamples, percentile, 95{NBSP}%). {verdict(result)}"
            ),
            Table(
                "ranking-table",
                "Kendall’s tau between sharpness and generalisation gap",
                [
                    "Measure",
                    "Radius",
                    *(cell for words in GAPS.values() for cell in (f"tau, {words}", "95 % interval")),
                ],
                rows,
                [False, True, True, True, True, True],
            ),
            *_beyond_reach(result),
            tau_gallery(result),
            Text("Every model as a point, one figure a measure; the title repeats tau and its interval."),
            scatter_gallery(result),
        ),
    )


def _beyond_reach(result: DemoResult) -> Iterator[Note]:
    counts = {
        measure.label: sum(row.sharpness[measure.key].beyond_reach for row in result.models)
        for measure in result.measures
    }
    said = [
        f"{label}: {count} of {len(result.models)} models. Their geodesics were followed so far that their "
        "second-order form may be off, and part of the value may be that of the truncation."
        for label, count in counts.items()
        if count
    ]
    if said:
        yield Note("Beyond the reach of truncated geodesics", said)


def verdict(result: DemoResult) -> str:
    """Which measures rank the models, as far as the intervals say."""
    if all(row.correlation.low is None for row in result.correlations):
        return "Here no interval could be formed: there are too few models, or all have the same gap."
    clear = [row for row in result.correlations if excludes_zero(row.correlation)]
    if not clear:
        return "Here every interval contains 0: in this zoo no measure is shown to rank the models."
    named = ", ".join(
        f"{result.measure(row.measure).label} with the {GAPS[row.gap]} ({signed(row.correlation.value)})"
        for row in clear
        for row in clear
    )
    return f"Here the interval excludes 0 for: {named}. All others contain 0."


def _symmetries(result: DemoResult) -> Section:
    rows = [
        [
            pair.name,
            pair.group,
            f"{pair.n} × {pair.h}",
            f"{pair.m} × {pair.h}",
            change(pair.change),
            change(pair.control),
            pair.verdict,
        ]
        for pair in result.pairs
    ]
    return Section(
        "symmetries",
        "The symmetries found and proved",
        (
            Text(
                "A symmetric pair is two factors G and H that the network uses only through their product "
                f"G{NBSP}Hᵀ, head by head. Each was moved by random group elements in float64, which must leave the "
                "output as it is, and on one side only, which must change it. Changes are relative to the largest "
                f"output; the network’s own rounding noise is {change(result.noise)}. {len(result.unpaired)} further "
                "tensors belong to no pair and are treated as in adaptive sharpness."
            ),
            Table(
                "symmetry-table",
                f"Symmetric pairs of a model of {result.parameters:,} parameters",
                ["Symmetric pair", "Group", "G", "H", "Output change", "One side only", "Verdict"],
                rows,
                [False, False, False, False, True, True, False],
            ),
        ),
    )


def _models(result: DemoResult) -> Section:
    recipes, sharpness = [], []
    for model in result.models:
        recipe, scores = model.recipe, model.scores
        recipes.append(
            [
                model.name,
                *(f"{recipe.learning_rate:g}", f"{recipe.weight_decay:g}", str(recipe.batch_size)),
                *(f"{recipe.label_smoothing:g}", str(recipe.shift), str(recipe.steps)),
                *(f"{100 * scores.train_error:.1f}", f"{100 * scores.test_error:.1f}"),
                *(minus(f"{100 * scores.error_gap:.1f}"), f"{scores.train_loss:.3f}", f"{scores.test_loss:.3f}"),
            ]
        )
        values = [with_error(model.sharpness[measure.key]) for measure in result.measures]
        sharpness.append([model.name, *values, minus(f"{100 * scores.error_gap:.1f}"), minus(f"{scores.loss_gap:.3f}")])
    return Section(
        "models",
        "The models",
        (
            Table(
                "recipe-table",
                "How each model was trained and how it does (errors and gaps in per cent, losses in nats)",
                [
                    *("Model", "Learning rate", "Weight decay", "Batch", "Label smoothing", "Shift", "Steps"),
                    *("Train error", "Test error", "Gap", "Train loss", "Test loss"),
                ],
                recipes,
                [False] + [True] * 11,
            ),
            Table(
                "sharpness-table",
                "Sharpness of each model, mean over batches ± standard error",
                ["Model", *(measure.label for measure in result.measures), "Gap in error, %", "Gap in loss"],
                sharpness,
                [False] + [True] * (len(result.measures) + 2),
            ),
            ascent_gallery(result),
        ),
    )


def _caveats(result: DemoResult) -> Section:
    settings = result.settings
    points = settings.batches * settings.batch_size
    return Section(
        "caveats",
        "What to keep in mind",
        (Listing([sentence.format(points=points, **vars(settings)) for sentence in CAVEATS]),),
    )


def _method(result: DemoResult) -> Section:
    settings, provenance = result.settings, result.provenance
    kept = settings.models - provenance.trained
    total = sum(provenance.seconds.values())
    stages = ", ".join(f"{stage} {seconds:.0f} s" for stage, seconds in provenance.seconds.items())
    rows = [
        ["Models", f"{provenance.trained} trained in this run, {kept} kept from an earlier one"],
        ["Data", f"scikit-learn’s digits, {settings.train_points} images for training, all others for testing"],
        ["Measure", f"worst case over the ball, Auto-PGD with {settings.steps} steps, each batch on its own"],
        ["Batches", f"{settings.batches} of {settings.batch_size} training images (the orbit: the first only)"],
        ["Radius", f"{settings.euclidean_radius:g} Euclidean, {settings.radius:g} in the other metrics"],
        ["Seed", str(settings.seed)],
        ["Precision", f"{settings.dtype} (the orbit: float32 and float64)"],
        ["Machine", f"{settings.device}, {provenance.platform}, threads: {provenance.threads}"],
        ["Versions", f"{provenance.version}, torch {provenance.torch}, Python {provenance.python}"],
        ["Wall time", f"{total:.0f} s: {stages}"],
    ]
    return Section(
        "method",
        "How this page was made",
        (
            Code(provenance.command),
            Table(
                "method-table",
                "Settings, versions and time of this run",
                ["What", "Value"],
                rows,
                [False, False],
                sortable=False,
            ),
            Text(
                "Beside this page: records.json holds every number (DemoResult.load reads it), and models.csv, "
                "correlations.csv and orbit.csv hold the tables."
            ),
        ),
    )
