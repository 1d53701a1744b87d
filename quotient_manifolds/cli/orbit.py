"""Show what each measure says of the same function elsewhere on its symmetry orbit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quotient_manifolds.cli import common
from quotient_manifolds.files import write_text
from quotient_manifolds.report import Table
from quotient_manifolds.version import VERSION

if TYPE_CHECKING:
    import torch

SCALES = (0.01, 0.1, 1.0, 10.0, 100.0)
FIGURES = (".svg", ".pdf", ".png")


@common.command
@click.argument("model")
@click.option("--radius", type=float, default=0.3, show_default=True, help="Of the ball, in the metric's norm.")
@click.option("--steps", type=click.IntRange(min=1), default=10, show_default=True, help="Of ascent.")
@click.option("--scale", "scales", type=float, multiple=True, default=SCALES, show_default=True, help="Of the move.")
@common.inputs_option
@common.symmetries_option
@click.option("--out", type=click.Path(path_type=Path), help="Write the measurements to this JSON file.")
@click.option("--figure", type=click.Path(path_type=Path), help="Draw the ratios into this .svg, .pdf or .png.")
@common.run_options
def orbit(
    model: str,
    radius: float,
    steps: int,
    scales: tuple[float, ...],
    inputs: str | None,
    symmetries: str | None,
    out: Path | None,
    figure: Path | None,
    seed: int,
    device: torch.device,
    quiet: bool,
) -> None:
    """Measure the sharpness of MODEL before and after moving it along its symmetry orbit.

    MODEL is a Hugging Face directory, an adapter of peft, or package.module:function. Each head's pairs are acted on by
    A = SCALE times a Gaussian matrix, biases, gains and all other symmetries by random numbers, which changes no
    output. The loss is the mean squared distance of the output, on example inputs, from fixed Gaussian targets; it is
    measured in float32 and in float64. Inputs are made from the model's configuration; a model without one needs
    --inputs.

    The file of --out is JSON with `rows`: precision, measure, scale (null: the model itself), value, and its ratio to
    that of the model itself.
    """
    for file in (out, figure):
        common.check_output(file, model)
    if figure is not None and figure.suffix not in FIGURES:
        raise common.BadInput(f"A figure must be {', '.join(FIGURES)}. Found {figure.name!r}.")
    from quotient_manifolds.cli.subject import along_orbit, distance_batch, inputs_for, symmetries_of
    from quotient_manifolds.geometry import Adaptive, Quotient
    from quotient_manifolds.load import load_model

    network = load_model(model).to(device=device)
    with inputs_for(network, inputs, seed=seed) as given:
        found = symmetries_of(network, given, symmetries)
        if not found.moved:
            raise common.BadInput(f"{model} has no symmetry, so there is no orbit to move along (see `inspect`).")
        batch = distance_batch(network, given, seed)
    found = found.beside([name for name, w in network.named_parameters() if not w.requires_grad])
    quotiented: Any = found if symmetries else "all"
    geometries = (Adaptive(), Quotient("inv", symmetries=quotiented), Quotient("mix", symmetries=quotiented))
    ascent = {"radius": radius, "steps": steps, "seed": seed}
    with common.progress_bars(quiet=quiet) as progress:
        rows = list(along_orbit(network, found, geometries, batch, scales, ascent=ascent, progress=progress))
    moved = [row for row in rows if row["scale"] is not None]
    if out is not None:
        record = {"model": model, "version": VERSION, "command": common.command_line(), **ascent, "rows": rows}
        write_text(out, json.dumps(record, indent=1) + "\n")
    if figure is not None:
        from quotient_manifolds.plots import orbit_figure

        lines: dict[str, list[float | None]] = {}
        for row in moved:
            lines.setdefault(f"{row['measure']}, {row['precision']}", []).append(row["ratio"])
        orbit_figure(scales, lines).save(figure)
    if not quiet:
        common.Terminal().show(_table(f"{model}: sharpness after / before, radius {radius:g}", moved))


def _table(caption: str, moved: Sequence[dict[str, Any]]) -> Table:
    """Return a row for every precision and measure, a column for every scale of the move."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for each in moved:
        key = {"precision": each["precision"], "measure": each["measure"]}
        # Near 1 the distance from it tells invariance from rounding; 4 digits would hide it.
        away = each["ratio"] - 1
        near_one = f"1 {'-' if away < 0 else '+'} {abs(away):.1e}"
        row = rows.setdefault((each["precision"], each["measure"]), key)
        row[f"a = {each['scale']:g}"] = near_one if abs(away) <= 0.01 else f"{each['ratio']:.4g}"
    return Table.of("ratios", caption, list(rows.values()), words={"precision", "measure"})
