"""Make tables, figures and pages of what `measure`, `orbit` and `inspect` found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from quotient_manifolds.cli.record import SharpnessRecord
from quotient_manifolds.cli.terminal import command_line
from quotient_manifolds.files import write_text
from quotient_manifolds.plots import Plot, Series, line_figure, orbit_figure, radius_figure, style_of
from quotient_manifolds.report import (
    Block,
    Code,
    Fact,
    Figure,
    Gallery,
    Note,
    Page,
    Section,
    Table,
    Text,
    render,
)
from quotient_manifolds.sharpness import Result


def write_page(page: Page, file: Path) -> None:
    """Write the page as one HTML file, whole or not at all."""
    write_text(file, render(page))


def measure_page(record: SharpnessRecord, notes: Sequence[str] = ()) -> Page:
    """Return the page of worst-case sharpness in several balls: bars as a table, ascents, radii, every batch."""
    examples = record.settings.get("examples")
    return Page(
        title=f"Sharpness of {record.model}",
        lead=(
            f"How far the loss on {f'{examples} examples of ' if examples else ''}{record.data} rises within balls "
            "around the model's parameters, as Auto-PGD found it. Balls of different geometries are of different sizes "
            "at one radius: compare models in one geometry, not geometries with each other."
        ),
        facts=[Fact(f"{each.mean:.4g}", f"is the rise in {_ball(each)}.") for each in record[:4]],
        sections=[
            _warnings(record.warnings),
            Section("results", "Sharpness in every ball", [table_of_results(record), *map(Text, notes)]),
            Section("ascent", "The ascent", list(_ascents(record))),
            Section("radius", "Sharpness against radius", list(_radii(record))),
            Section("batches", "Every batch", [_batches(record)]),
            Section("settings", "Settings", [_settings(record)]),
            _redo(record.command),
        ],
    )


def orbit_page(record: SharpnessRecord) -> Page:
    """Return the page of sharpness along an orbit: one function, many parameters."""
    worst: dict[str, float] = {}
    for _, _, each, ratio in _moves(record):
        worst[each.geometry] = max(worst.get(each.geometry, 0.0), abs(ratio - 1))
    figure = Figure(figure_of_ratios(record).html(), "A line is a measure in one precision; 1 is no change.")
    ratios = table_of_ratios("Sharpness after a move over sharpness before", record)
    return Page(
        title=f"{record.model} along its symmetry orbit",
        lead=(
            "The model was moved by its symmetries: other weights, the same function. A measure of the function does "
            "not change; one that does measures where on the orbit the weights happen to lie."
        ),
        facts=[
            Fact(f"{most:.2g}", f"is the largest relative change of {name} sharpness.") for name, most in worst.items()
        ],
        sections=[
            _warnings(record.warnings),
            Section("orbit", "Sharpness after a move over sharpness before", [Gallery([figure]), ratios]),
            Section("values", "Values", [_values(record)]),
            Section("settings", "Settings", [_settings(record)]),
            _redo(record.command),
        ],
    )


def inspect_page(
    title: str, facts: Sequence[Fact], tables: Sequence[Table], notes: Sequence[str], doubts: Sequence[str] = ()
) -> Page:
    """Return the page of a model's symmetries and their proof; doubts: why its certificate is inconclusive."""
    return Page(
        title=title,
        lead=(
            "Each symmetry below was moved by random group elements in float64, which must not change the output, and "
            "then on one side only, which must."
        ),
        facts=facts,
        sections=[
            _warnings([f"inconclusive: {doubt}" for doubt in doubts]),
            *(Section(f"{each.name}-section", each.name.capitalize(), [each]) for each in tables),
            Section("notes", "What else there is", list(map(Text, notes))),
            _redo(command_line()),
        ],
    )


def _redo(command: str | None) -> Section:
    return Section("redo", "How to redo this", [Code(command)] if command else [])


def _warnings(said: Sequence[str]) -> Section:
    note = Note("These values are not to be trusted as they are", list(dict.fromkeys(said)))
    return Section("warnings", "Warnings", [note] if said else [])


def _ball(each: Result) -> str:
    return f"{each.geometry}, radius {each.settings['radius']:g}"


def table_of_results(record: SharpnessRecord, caption: str = "Mean rise of the loss over batches") -> Table:
    """Return a row for every geometry and radius: the mean rise of the loss over batches, and how it came about."""
    rows = [
        {
            "geometry": each.geometry,
            "radius": f"{each.settings['radius']:g}",
            "sharpness": f"{each.mean:.6g}",
            "standard error": "-" if each.standard_error is None else f"{each.standard_error:.2g}",
            "batches": str(len(each.values)),
            "loss": f"{sum(each.base_losses) / len(each.base_losses):.6g}",
            "norm reached": f"{max(norm or 0.0 for norm in each.norms):.4g}",
            "reach": "-" if each.reach is None else f"{each.reach:.3g}",
            "passes": f"{each.forward_passes} + {each.backward_passes}",
        }
        for each in record
    ]
    return Table.of("results-table", caption, rows, words={"geometry"})


def _ascents(record: SharpnessRecord) -> Iterator[Block]:
    """Yield the rise of the loss at every step, the mean over batches: whether the climb had ended."""
    figures: list[Figure] = []
    for each in record:
        climbs = [[loss - steps[0] for loss in steps] for steps in each.loss_steps if steps]
        if not climbs:
            continue
        length = max(map(len, climbs))
        # A climb that stopped early stays where it is.
        rise = np.mean([np.pad(climb, (0, length - len(climb)), mode="edge") for climb in climbs], axis=0)
        best, steps = np.maximum.accumulate(rise), range(length)
        series = [Series("at the step", steps, rise, style_of(2)), Series("best so far", steps, best, style_of(1))]
        alt = f"Rise of the loss in {length - 1} steps in {_ball(each)}: {rise[0]:.3g} to {best[-1]:.3g}."
        plot = line_figure(series, x_label="step", y_label="rise of the loss", log=(False, False), alt=alt)
        figures.append(Figure(plot.html(), f"{_ball(each)}; mean over batches."))
    if figures:
        yield Text("A curve that still rises at its end means that more steps would find more: raise --steps.")
        yield Gallery(figures)


def _radii(record: SharpnessRecord) -> Iterator[Block]:
    values: dict[str, dict[float, float]] = {}
    for each in record:
        values.setdefault(each.geometry, {})[float(each.settings["radius"])] = each.mean
    figures = []
    for name, own in values.items():
        if len(own) > 1:
            plot = radius_figure(sorted(own), {name: [[own[radius] for radius in sorted(own)]]})
            figures.append(Figure(plot.html(), name))
    if figures:
        yield Gallery(figures)


def _batches(record: SharpnessRecord) -> Table:
    rows = [
        {
            "geometry": each.geometry,
            "radius": f"{each.settings['radius']:g}",
            "batch": str(index),
            "sharpness": f"{value:.4g}",
            "loss": f"{base:.4g}",
        }
        for each in record
        for index, (value, base) in enumerate(zip(each.values, each.base_losses, strict=True))
    ]
    return Table.of("batches-table", "The rise of the loss on each batch", rows, words={"geometry"})


def _moves(record: SharpnessRecord) -> Iterator[tuple[str, float, Result, float]]:
    """Yield precision, scale, measurement and ratio to the model itself, for every measurement of a moved model."""
    for at, each in zip(record.at, record, strict=True):
        dtype, scale, ratio = str(at["dtype"]), at["scale"], at["ratio"]
        if isinstance(scale, float) and isinstance(ratio, float):
            yield dtype, scale, each, ratio


def figure_of_ratios(record: SharpnessRecord) -> Plot:
    """Draw a line a measure and precision, against the scale of the move [paper, ICML version, Fig. 7]."""
    ratios: dict[str, list[float | None]] = {}
    for dtype, _, each, ratio in _moves(record):
        ratios.setdefault(f"{each.geometry}, {dtype}", []).append(ratio)
    return orbit_figure(list(dict.fromkeys(scale for _, scale, _, _ in _moves(record))), ratios)


def table_of_ratios(caption: str, record: SharpnessRecord) -> Table:
    """Return a row for every precision and measure, a column for every scale of the move."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for dtype, scale, each, ratio in _moves(record):
        row = rows.setdefault((dtype, each.geometry), {"precision": dtype, "measure": each.geometry})
        # Near 1 the distance from it tells invariance from rounding; 4 digits would hide it.
        near_one = f"1 {'-' if ratio < 1 else '+'} {abs(ratio - 1):.1e}"
        row[f"a = {scale:g}"] = f"{ratio:.4g}" if abs(ratio - 1) > 0.01 else near_one
    return Table.of("ratios-table", caption, list(rows.values()), words={"precision", "measure"})


def _values(record: SharpnessRecord) -> Table:
    rows = [
        {
            "measure": each.geometry,
            "precision": dtype,
            "scale of the move": f"{scale:g}",
            "before": f"{each.mean / ratio:.6g}",
            "after": f"{each.mean:.6g}",
            "after / before": f"{ratio:.6g}",
        }
        for dtype, scale, each, ratio in _moves(record)
    ]
    return Table.of("orbit-table", "Every measurement", rows, words={"measure", "precision"})


def _settings(record: SharpnessRecord) -> Table:
    ascent = record[0].settings if len(record) else {}
    stated = {"model": record.model, "data": record.data, **record.settings, **ascent, "version": record.version}
    rows = [[key, str(value)] for key, value in stated.items() if value is not None and key != "radius"]
    return Table("settings-table", "How it was measured", ["setting", "value"], rows, [False, False])
