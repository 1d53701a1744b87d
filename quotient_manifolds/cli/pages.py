"""Tables, figures and pages of what `measure`, `orbit` and `inspect` found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from quotient_manifolds.cli.terminal import command_line
from quotient_manifolds.files import write_text
from quotient_manifolds.plots import Plot, Series, line_figure, orbit_figure, radius_figure, style_of
from quotient_manifolds.report import (
    Block,
    Code,
    Fact,
    Figure,
    Gallery,
    Listing,
    Note,
    Page,
    Section,
    Table,
    Text,
    render,
)
from quotient_manifolds.sharpness import MeasureResult, SharpnessRecord


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
        sections=_sections(
            _warnings(record.warnings),
            ("results", "Sharpness in every ball", [table_of_results(record), *([Listing(notes)] if notes else [])]),
            ("ascent", "The ascent", list(_ascents(record))),
            ("radius", "Sharpness against radius", list(_radii(record))),
            ("batches", "Every batch", [_batches(record)]),
            ("settings", "Settings", [_settings(record)]),
            _redo(record.command),
        ),
    )


def orbit_page(record: SharpnessRecord) -> Page:
    """Return the page of sharpness along an orbit: one function, many parameters."""
    worst: dict[str, float] = {}
    for _, _, each, ratio in _moves(record):
        worst[each.geometry] = max(worst.get(each.geometry, 0.0), abs(ratio - 1))
    figure = Figure(
        figure_of_ratios(record).svg("orbit"), "A line is a measure in one precision; 1 is no change.", wide=True
    )
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
        sections=_sections(
            _warnings(tuple(dict.fromkeys(record.warnings))),
            ("orbit", "Sharpness after a move over sharpness before", [Gallery([figure]), ratios]),
            ("values", "Values", [_values(record)]),
            ("settings", "Settings", [_settings(record)]),
            _redo(record.command),
        ),
    )


def inspect_page(title: str, facts: Sequence[Fact], tables: Sequence[Table], notes: Sequence[str]) -> Page:
    """Return the page of a model's symmetries and their proof."""
    return Page(
        title=title,
        lead=(
            "Each symmetry below was moved by random group elements in float64, which must not change the output, and "
            "then on one side only, which must."
        ),
        facts=facts,
        sections=_sections(
            *((f"{each.name}-section", each.name.capitalize(), [each]) for each in tables),
            ("notes", "What else there is", [Listing(notes)]),
            _redo(command_line()),
        ),
    )


def _sections(*parts: tuple[str, str, Sequence[Block]]) -> list[Section]:
    """Return those sections that have something in them."""
    return [Section(name, title, blocks) for name, title, blocks in parts if blocks]


def _redo(command: str | None) -> tuple[str, str, Sequence[Block]]:
    return "redo", "How to redo this", [Code(command)] if command else []


def _warnings(said: Sequence[str]) -> tuple[str, str, Sequence[Block]]:
    note = Note("These values are not to be trusted as they are", said)
    return "warnings", "Warnings", [note] if said else []


def _ball(each: MeasureResult) -> str:
    return f"{each.geometry}, radius {each.settings['radius']:g}"


def table_of_results(record: SharpnessRecord, caption: str = "Mean rise of the loss over batches") -> Table:
    """Return a row for every geometry and radius: the mean rise of the loss over batches, and how it came about."""
    columns = [
        "geometry",
        "radius",
        "sharpness",
        "standard error",
        "batches",
        "loss",
        "norm reached",
        "reach",
        "passes",
    ]
    rows = [
        [
            each.geometry,
            f"{each.settings['radius']:g}",
            f"{each.mean:.6g}",
            "-" if each.standard_error is None else f"{each.standard_error:.2g}",
            str(len(each.values)),
            f"{sum(each.base_losses) / len(each.base_losses):.6g}",
            f"{max(norm or 0.0 for norm in each.norms):.4g}",
            "-" if each.reach is None else f"{each.reach:.3g}",
            f"{each.forward_passes} + {each.backward_passes}",
        ]
        for each in record
    ]
    return Table("results-table", caption, columns, rows, [False, *[True] * 8])


def _ascents(record: SharpnessRecord) -> Iterator[Block]:
    """Yield the rise of the loss at every step, the mean over batches: whether the climb had ended."""
    figures: list[Figure] = []
    for place, each in enumerate(record):
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


def _radii(record: SharpnessRecord) -> Iterator[Block]:
    values: dict[str, dict[float, float]] = {}
    for each in record:
        values.setdefault(each.geometry, {})[float(each.settings["radius"])] = each.mean
    figures = []
    for place, (name, own) in enumerate(values.items()):
        if len(own) > 1:
            plot = radius_figure(sorted(own), {name: [[own[radius] for radius in sorted(own)]]})
            figures.append(Figure(plot.svg(f"radius-{place}"), name))
    if figures:
        yield Gallery(figures)


def _batches(record: SharpnessRecord) -> Table:
    rows = [
        [each.geometry, f"{each.settings['radius']:g}", str(index), f"{value:.4g}", f"{base:.4g}"]
        for each in record
        for index, (value, base) in enumerate(zip(each.values, each.base_losses, strict=True))
    ]
    columns = ["geometry", "radius", "batch", "sharpness", "loss"]
    return Table("batches-table", "The rise of the loss on each batch", columns, rows, [False, *[True] * 4])


def _moves(record: SharpnessRecord) -> Iterator[tuple[str, float, MeasureResult, float]]:
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
    rows: dict[tuple[str, str], list[str]] = {}
    for dtype, _, each, ratio in _moves(record):
        # Near 1 the distance from it tells invariance from rounding; 4 digits would hide it.
        near_one = f"1 {'-' if ratio < 1 else '+'} {abs(ratio - 1):.1e}"
        row = rows.setdefault((dtype, each.geometry), [dtype, each.geometry])
        row.append(f"{ratio:.4g}" if abs(ratio - 1) > 0.01 else near_one)
    scales = dict.fromkeys(f"a = {scale:g}" for _, scale, _, _ in _moves(record))
    numeric = [False, False, *(True for _ in scales)]
    return Table("ratios-table", caption, ["precision", "measure", *scales], list(rows.values()), numeric)


def _values(record: SharpnessRecord) -> Table:
    rows = [
        [each.geometry, dtype, f"{scale:g}", f"{each.mean / ratio:.6g}", f"{each.mean:.6g}", f"{ratio:.6g}"]
        for dtype, scale, each, ratio in _moves(record)
    ]
    columns = ["measure", "precision", "scale of the move", "before", "after", "after / before"]
    return Table("orbit-table", "Every measurement", columns, rows, [False, False, *[True] * 4])


def _settings(record: SharpnessRecord) -> Table:
    ascent = record[0].settings if len(record) else {}
    stated = {"model": record.model, "data": record.data, **record.settings, **ascent, "version": record.version}
    rows = [[key, str(value)] for key, value in stated.items() if value is not None and key != "radius"]
    return Table("settings-table", "How it was measured", ["setting", "value"], rows, [False, False], sortable=False)
