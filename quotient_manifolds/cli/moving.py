"""What `orbit` does, once its options are read."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.table import Table
from torch import nn

from quotient_manifolds.cli.along_orbit import DTYPES, OrbitRow, along_orbit, distance, distance_batch, like
from quotient_manifolds.cli.options import BadInput, command_line, console, progress_bars, table
from quotient_manifolds.cli.subject import described, inputs_of, model_named, taking
from quotient_manifolds.files import write_text
from quotient_manifolds.geometry import Adaptive, Geometry, Quotient
from quotient_manifolds.load import load_symmetries
from quotient_manifolds.plots import Plot, orbit_figure
from quotient_manifolds.sharpness import MeasureResult, SharpnessRecord, SharpnessWarning, worst_case_sharpness
from quotient_manifolds.symmetries import Symmetries, find_symmetries


def measure_along_orbit(
    *,
    model: str,
    radius: float,
    steps: int,
    scales: tuple[float, ...],
    length: int,
    inputs: str | None,
    symmetries: str | None,
    out: Path | None,
    figure: Path | None,
    report: Path | None,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    quiet: bool,
) -> None:
    """Measure a model and its moves, and print and write what was found."""
    network = model_named(model).to(device=device, dtype=dtype)
    declared = None if symmetries is None else load_symmetries(symmetries, network)
    found = find_symmetries(network) if declared is None else declared
    if not found.pairs:
        raise BadInput(f"{model} has no symmetric pair, so there is no orbit to move along (see `inspect`).")
    given = inputs_of(network, inputs, seed=seed, length=length)
    with taking(network, inputs):
        batch = distance_batch(network, like(given, next(network.parameters())), seed)
    geometries = _geometries(declared)
    measured: list[MeasureResult] = []

    def sharpness(at: nn.Module, key: str) -> MeasureResult:
        there = [like(batch, next(at.parameters()))]
        measured.append(
            worst_case_sharpness(at, distance, there, geometry=geometries[key], radius=radius, steps=steps, seed=seed)
        )
        return measured[-1]

    with warnings.catch_warnings(), progress_bars(quiet=quiet) as bar:
        if quiet:
            warnings.simplefilter("ignore", SharpnessWarning)  # they are in the file and on the page
        rows = along_orbit(network, found, tuple(geometries), sharpness, scales=scales, seed=seed, progress=bar)
    settings = {"length": length, "inputs": inputs, "seed": seed, "symmetries": symmetries}
    results = _placed(SharpnessRecord((), model, settings=settings, command=command_line()), measured, scales)
    if out is not None:
        results.save(out)
    if figure is not None:
        _figure(rows).save(figure)
    if report is not None:
        from quotient_manifolds.cli.pages import orbit_page
        from quotient_manifolds.report import render

        write_text(report, render(orbit_page(results, rows)))
    if not quiet:
        terminal = console(quiet=False)
        for sentence in described(network, model):
            terminal.print(sentence)
        terminal.print(table_of_ratios(f"{model}: sharpness after / before, radius {radius:g}", rows))


def _geometries(symmetries: Symmetries | None) -> dict[str, Geometry]:
    return {
        "adaptive": Adaptive(),
        "inv": Quotient("inv", symmetries=symmetries),
        "mix": Quotient("mix", symmetries=symmetries),
    }


def _placed(results: SharpnessRecord, measured: Sequence[MeasureResult], scales: Sequence[float]) -> SharpnessRecord:
    """The measurements with where on the orbit each was made; scale None is the model itself."""
    places = [(dtype, scale) for dtype in DTYPES for scale in (None, *scales)]
    each = len(measured) // len(places)
    for index, (dtype, scale) in enumerate(places):
        start = index - index % (1 + len(scales))
        for key in range(each):
            here, before = measured[index * each + key], measured[start * each + key]
            results = results.with_result(here, dtype=dtype, scale=scale, ratio=here.mean / before.mean)
    return results


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
