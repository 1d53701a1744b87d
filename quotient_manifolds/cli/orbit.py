"""quotient-manifolds orbit: what each measure says of the same function elsewhere on its symmetry orbit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click
import torch
from rich.table import Table
from torch import nn

from quotient_manifolds.cli.options import (
    EXIT_CODES,
    BadInput,
    check_writable,
    common_options,
    console,
    one_sentence_errors,
    progress_bars,
    table,
    write_json,
)
from quotient_manifolds.experiments.orbit import SCALES, along_orbit, distance, distance_batch, like
from quotient_manifolds.experiments.records import OrbitRow
from quotient_manifolds.geometry import Adaptive, Geometry, Quotient
from quotient_manifolds.load import example_inputs, load_model
from quotient_manifolds.plots import Plot, orbit_figure
from quotient_manifolds.sharpness import Measurement, worst_case_sharpness
from quotient_manifolds.symmetries import find_symmetries
from quotient_manifolds.version import VERSION

GEOMETRIES: dict[str, Geometry] = {"adaptive": Adaptive(), "inv": Quotient("inv"), "mix": Quotient("mix")}

FIGURES = (".svg", ".pdf", ".png")


@click.command(epilog=EXIT_CODES)
@click.argument("model")
@click.option("--radius", type=float, default=0.3, show_default=True, help="Of the ball, in the metric's norm.")
@click.option("--steps", type=click.IntRange(min=1), default=10, show_default=True, help="Of ascent.")
@click.option("--scale", "scales", type=float, multiple=True, default=SCALES, show_default=True, help="Of the move.")
@click.option("--length", type=click.IntRange(min=1), default=16, show_default=True, help="Tokens of an example text.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the rows to this JSON file.")
@click.option("--figure", type=click.Path(path_type=Path), help="Draw the ratios into this .svg, .pdf or .png.")
@common_options
@one_sentence_errors
def orbit(
    model: str,
    radius: float,
    steps: int,
    scales: tuple[float, ...],
    length: int,
    out: Path | None,
    figure: Path | None,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    quiet: bool,
) -> None:
    """Measure the sharpness of MODEL before and after moving it along its symmetry orbit.

    MODEL is a Hugging Face directory or package.module:function. Each head's pairs are moved by A = SCALE times a
    Gaussian matrix, which changes no output. The loss is the mean squared distance of the output, on example inputs,
    from fixed Gaussian targets; it is measured in float32 and in float64, whatever --dtype says of loading.
    """
    check_writable(out)
    check_writable(figure)
    if figure is not None and figure.suffix not in FIGURES:
        raise BadInput(f"A figure is written as {', '.join(FIGURES)}. Found {figure.name!r}.")
    network = load_model(model).to(device=device, dtype=dtype).eval()
    symmetries = find_symmetries(network)
    if not symmetries.pairs:
        raise BadInput(f"{model} has no symmetric pair, so there is no orbit to move along (see `inspect`).")
    batch = distance_batch(network, example_inputs(network, seed=seed, length=length), seed)

    def sharpness(at: nn.Module, key: str) -> Measurement:
        there = [like(batch, next(at.parameters()))]
        return worst_case_sharpness(
            at, distance, there, geometry=GEOMETRIES[key], radius=radius, steps=steps, seed=seed
        )

    with progress_bars(quiet=quiet) as report:
        rows = along_orbit(network, symmetries, tuple(GEOMETRIES), sharpness, scales=scales, seed=seed, progress=report)
    if not quiet:
        console(quiet=False).print(table_of_ratios(f"{model}: sharpness after / before, radius {radius:g}", rows))
    if figure is not None:
        _figure(rows).save(figure)
    if out is not None:
        settings = {"model": model, "radius": radius, "steps": steps, "length": length, "seed": seed}
        write_json(out, {"version": VERSION, **settings, "rows": [asdict(row) for row in rows]})


def _figure(rows: Sequence[OrbitRow]) -> Plot:
    """A line a measure and precision, against the scale of the move [paper, ICML version, Fig. 7]."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        ratios.setdefault(f"{row.measure}, {row.dtype}", []).append(row.ratio)
    return orbit_figure(list(dict.fromkeys(row.scale for row in rows)), ratios)


def table_of_ratios(title: str, rows: Sequence[OrbitRow]) -> Table:
    """A row for every precision and measure, a column for every scale of the move."""
    scales = list(dict.fromkeys(row.scale for row in rows))
    lines = {(row.dtype, row.measure): [row.dtype, row.measure] for row in rows}
    for row in rows:
        lines[row.dtype, row.measure].append(f"{row.ratio:.4g}" if abs(row.ratio - 1) > 0.01 else _near_one(row.ratio))
    header = ["precision", "measure", *(f"a = {scale:g}" for scale in scales)]
    return table(title, header, list(lines.values()), [False, False, *(True for _ in scales)])


def _near_one(ratio: float) -> str:
    return f"1 {'-' if ratio < 1 else '+'} {abs(ratio - 1):.1e}"
