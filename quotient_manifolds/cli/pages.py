"""Pages to read in a browser: what `measure`, `orbit` and `inspect` found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quotient_manifolds.cli.along_orbit import OrbitRow
from quotient_manifolds.plots import Series, line_figure, orbit_figure, radius_figure, style_of
from quotient_manifolds.report import Block, Code, Fact, Figure, Gallery, Listing, Note, Page, Section, Table, Text
from quotient_manifolds.sharpness import MeasureResult, SharpnessRecord

ROUND = 4  # figures of a number in a table


def measure_page(found: SharpnessRecord, notes: Sequence[str] = ()) -> Page:
    """Return the page of worst-case sharpness in several balls: bars as a table, ascents, radii, every batch."""
    examples = found.settings.get("examples")
    return Page(
        title=f"Sharpness of {found.model}",
        lead=(
            f"How far the loss on {f'{examples} examples of ' if examples else ''}{found.data} rises within balls "
            "around the model's parameters, as Auto-PGD found it. Balls of different geometries are of different sizes "
            "at one radius: compare models in one geometry, not geometries with each other."
        ),
        facts=[Fact(f"{each.mean:.{ROUND}g}", f"is the rise in {_ball(each)}.") for each in found[:4]],
        sections=[
            *_warnings(found.warnings),
            Section("results", "Sharpness in every ball", [_results(found), *([Listing(notes)] if notes else [])]),
            *_section("ascent", "The ascent", list(_ascents(found))),
            *_section("radius", "Sharpness against radius", list(_radii(found))),
            Section("batches", "Every batch", [_batches(found)]),
            Section("settings", "Settings", [_settings(found)]),
            *_section("redo", "How to redo this", [Code(found.command)] if found.command else []),
        ],
    )


def orbit_page(found: SharpnessRecord, rows: Sequence[OrbitRow]) -> Page:
    """Return the page of sharpness along an orbit: one function, many parameters."""
    ratios: dict[str, list[float | None]] = {}
    for row in rows:
        ratios.setdefault(f"{row.measure}, {row.dtype}", []).append(row.ratio)
    scales = list(dict.fromkeys(row.scale for row in rows))
    figure = orbit_figure(scales, ratios)
    cells = [
        [row.measure, row.dtype, f"{row.scale:g}", f"{row.before:.6g}", f"{row.after:.6g}", f"{row.ratio:.6g}"]
        for row in rows
    ]
    columns = ["Measure", "Precision", "Scale of the move", "Before", "After", "After / before"]
    worst = {row.measure: 0.0 for row in rows}
    for row in rows:
        worst[row.measure] = max(worst[row.measure], abs(row.ratio - 1))
    return Page(
        title=f"{found.model} along its symmetry orbit",
        lead=(
            "The model was moved by its symmetries: other weights, the same function. A measure of the function does "
            "not change; one that does measures where on the orbit the weights happen to lie."
        ),
        facts=[
            Fact(f"{change:.2g}", f"is the largest relative change of {name} sharpness.")
            for name, change in worst.items()
        ],
        sections=[
            *_warnings(tuple(dict.fromkeys(found.warnings))),
            Section(
                "orbit",
                "Sharpness after a move over sharpness before",
                [
                    Gallery(
                        [
                            Figure(
                                figure.svg("orbit"), "A line is a measure in one precision; 1 is no change.", wide=True
                            )
                        ]
                    )
                ],
            ),
            Section(
                "values",
                "Values",
                [Table("orbit-table", "Every measurement", columns, cells, [False, False, *[True] * 4])],
            ),
            Section("settings", "Settings", [_settings(found)]),
            *_section("redo", "How to redo this", [Code(found.command)] if found.command else []),
        ],
    )


def inspect_page(
    title: str, facts: Sequence[Fact], tables: Sequence[Table], notes: Sequence[str], command: str | None
) -> Page:
    """Return the page of a model's symmetries and their proof."""
    return Page(
        title=title,
        lead=(
            "Each symmetry below was moved by random group elements in float64, which must not change the output, and "
            "then on one side only, which must."
        ),
        facts=facts,
        sections=[
            *[Section(each.name, each.caption, [each]) for each in tables],
            *_section("notes", "What else there is", [Listing(notes)] if notes else []),
            *_section("redo", "How to redo this", [Code(command)] if command else []),
        ],
    )


def _section(name: str, title: str, blocks: Sequence[Block]) -> Iterator[Section]:
    if blocks:
        yield Section(name, title, blocks)


def _warnings(said: Sequence[str]) -> Iterator[Section]:
    if said:
        yield Section("warnings", "Warnings", [Note("These values are not to be trusted as they are", list(said))])


def _ball(each: MeasureResult) -> str:
    return f"{each.geometry}, radius {each.settings['radius']:g}"


def _results(found: SharpnessRecord) -> Table:
    rows = [
        [
            each.geometry,
            f"{each.settings['radius']:g}",
            f"{each.mean:.{ROUND}g}",
            "" if each.standard_error is None else f"{each.standard_error:.2g}",
            f"{sum(each.base_losses) / len(each.batches):.{ROUND}g}",
            "" if each.reach is None else f"{each.reach:.3g}",
            f"{each.forward_passes} + {each.backward_passes}",
        ]
        for each in found
    ]
    columns = ["Geometry", "Radius", "Sharpness", "Standard error", "Loss", "Reach", "Passes"]
    caption = "Mean rise of the loss over batches, with its standard error"
    return Table("results-table", caption, columns, rows, [False, *[True] * 6])


def _ascents(found: SharpnessRecord) -> Iterator[Block]:
    """The rise of the loss at every step, the mean over batches: whether the climb had ended."""
    figures: list[Figure] = []
    for place, each in enumerate(found):
        climbs = [[loss - steps[0] for loss in steps] for steps in each.loss_steps if steps]
        if not climbs:
            continue
        length = max(map(len, climbs))
        padded = [climb + [climb[-1]] * (length - len(climb)) for climb in climbs]  # an early stop stays where it is
        rise = [sum(column) / len(column) for column in zip(*padded, strict=True)]
        best = [max(rise[: step + 1]) for step in range(length)]
        steps = list(range(length))
        series = [Series("at the step", steps, rise, style_of(2)), Series("best so far", steps, best, style_of(1))]
        alt = f"Rise of the loss in {length - 1} steps in {_ball(each)}: {rise[0]:.3g} to {best[-1]:.3g}."
        plot = line_figure(series, x_label="step", y_label="rise of the loss", log=(False, False), alt=alt)
        figures.append(Figure(plot.svg(f"ascent-{place}"), f"{_ball(each)}; mean over batches."))
    if figures:
        yield Text("A curve that still rises at its end means that more steps would find more: raise --steps.")
        yield Gallery(figures)


def _radii(found: SharpnessRecord) -> Iterator[Block]:
    values: dict[str, dict[float, float]] = {}
    for each in found:
        values.setdefault(each.geometry, {})[float(each.settings["radius"])] = each.mean
    figures = [
        Figure(
            radius_figure(sorted(own), {name: [[own[radius] for radius in sorted(own)]]}).svg(f"radius-{place}"), name
        )
        for place, (name, own) in enumerate(values.items())
        if len(own) > 1
    ]
    if figures:
        yield Gallery(figures)


def _batches(found: SharpnessRecord) -> Table:
    rows = [
        [each.geometry, f"{each.settings['radius']:g}", str(index), f"{value:.{ROUND}g}", f"{base:.{ROUND}g}"]
        for each in found
        for index, (value, base) in enumerate(zip(each.values, each.base_losses, strict=True))
    ]
    columns = ["Geometry", "Radius", "Batch", "Sharpness", "Loss"]
    return Table("batches-table", "The rise of the loss on each batch", columns, rows, [False, *[True] * 4])


def _settings(found: SharpnessRecord) -> Table:
    ascent: Mapping[str, Any] = found[0].settings if len(found) else {}
    stated = {"model": found.model, "data": found.data, **found.settings, **ascent, "version": found.version}
    rows = [[str(key), str(value)] for key, value in stated.items() if value is not None and key != "radius"]
    return Table("settings-table", "How it was measured", ["Setting", "Value"], rows, [False, False], sortable=False)
