"""What `measure` does, once its options are read."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn

from quotient_manifolds.cli.along_orbit import like
from quotient_manifolds.cli.balls import balls
from quotient_manifolds.cli.options import (
    INTERRUPTED,
    command_line,
    console,
    progress_bars,
    table,
)
from quotient_manifolds.cli.subject import batches_from, described, loss_named, model_named, try_loss
from quotient_manifolds.files import is_special, write_text
from quotient_manifolds.geometry import Geometry
from quotient_manifolds.load import load_symmetries
from quotient_manifolds.progress import Progress
from quotient_manifolds.sharpness import Loss, MeasureResult, SharpnessRecord, SharpnessWarning, worst_case_sharpness


@dataclass(frozen=True)
class Asked:
    """The options of `measure`."""

    model: str
    data: str
    geometries: tuple[str, ...]
    radii: tuple[float, ...]
    steps: int
    restarts: int
    geodesic: str | None
    eps: float | None
    biases: str | None
    eta: float | None
    norm: str | None
    symmetries: str | None
    loss: str | None
    batch_size: int | None
    examples: int | None
    draw: int | None
    max_length: int | None
    tokenizer: str | None
    columns: dict[str, str] | None
    labels: dict[str, int] | None
    size: int | None
    channels: int | None
    mean: Any
    std: Any
    seed: int
    device: torch.device
    dtype: torch.dtype

    @property
    def of_geometries(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in ("geodesic", "eps", "biases", "eta", "norm")}

    @property
    def of_data(self) -> dict[str, Any]:
        """The options of data that are given, as the fields of `DataSource`."""
        names = ("batch_size", "max_length", "tokenizer", "columns", "labels", "size", "channels", "mean", "std")
        given = {name: getattr(self, name) for name in names} | {"seed": self.draw, "max_examples": self.examples}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def ascent(self) -> dict[str, Any]:
        return {"steps": self.steps, "restarts": self.restarts, "seed": self.seed}


def measure_all(asked: Asked, *, out: Path | None, report: Path | None, quiet: bool) -> None:
    """Measure in every ball; a file holds each result as soon as it is there, a pipe or device gets all at the end."""
    wanted = balls(asked.geometries, asked.radii, asked.of_geometries, None)  # what is wrong is said before loading
    network = model_named(asked.model)
    if asked.symmetries is not None:
        declared = load_symmetries(asked.symmetries, network)
        wanted = balls(asked.geometries, asked.radii, asked.of_geometries, declared)
    loss = loss_named(asked.loss)
    found = batches_from(asked.data, asked.of_data, network, asked.model, own_loss=asked.loss is not None)
    network.to(device=asked.device, dtype=asked.dtype)
    batches = [like(batch, next(network.parameters())) for batch in found.batches]
    try_loss(network, loss, batches, asked.data)
    source = SharpnessRecord(
        (),
        model=asked.model,
        data=asked.data,
        settings={"dtype": str(asked.dtype).removeprefix("torch."), "device": str(asked.device), **found.settings},
        command=command_line(),
        asked=len(wanted),
    )
    results = source
    with _told_what_is_kept(out, len(wanted)) as kept, progress_bars(quiet=quiet) as bar:
        for geometry, radius in wanted:
            try:
                result = _measured(network, loss, batches, geometry, radius, asked.ascent, bar)
            except Exception:
                if len(results) and not quiet:  # what is there is not lost to the one that fails
                    _print(results, asked.model, network, found.notes, None)
                raise
            results = results.with_result(result)
            if out is not None and (len(results) == len(wanted) or not is_special(out)):
                results.save(out)
                kept.count = len(results)
    if report is not None:
        _write_page(results, [*described(network, asked.model), *found.notes], report)
    if not quiet:
        _print(results, asked.model, network, found.notes, report)


class _told_what_is_kept:
    """Ctrl-C inside ends with exit code 130, and says what is in the file."""

    def __init__(self, out: Path | None, asked: int) -> None:
        self.out, self.asked, self.count = out, asked, 0

    def __enter__(self) -> _told_what_is_kept:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, KeyboardInterrupt) and self.out is not None and self.count:
            click.echo(f"Interrupted: {self.count} of {self.asked} results are in {self.out}.", err=True)
            raise click.exceptions.Exit(INTERRUPTED) from None


def _measured(
    network: nn.Module,
    loss: Loss,
    batches: list[Any],
    geometry: Geometry,
    radius: float,
    ascent: dict[str, Any],
    report: Progress,
) -> MeasureResult:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SharpnessWarning)  # they stand below the table
        return worst_case_sharpness(network, loss, batches, geometry=geometry, radius=radius, progress=report, **ascent)


def _write_page(results: SharpnessRecord, notes: Sequence[str], report: Path) -> None:
    from quotient_manifolds.cli.pages import measure_page
    from quotient_manifolds.report import render

    write_text(report, render(measure_page(results, notes)))


def _print(results: SharpnessRecord, model: str, network: nn.Module, notes: Sequence[str], report: Path | None) -> None:
    terminal = console(quiet=False)
    count = results.settings.get("examples")
    on = f"{count} examples of {results.data}" if count else str(results.data)
    for sentence in described(network, model):
        terminal.print(sentence)
    terminal.print(table_of_results(f"{model} on {on}", list(results)))
    for sentence in notes:
        terminal.print(sentence)
    if report is not None:
        terminal.print(f"Report: {report}")
    for sentence in results.warnings:
        click.echo(f"Warning: {sentence}", err=True)


def table_of_results(title: str, results: list[MeasureResult]) -> Any:
    """A row for every geometry and radius: the mean rise of the loss over batches, and how it came about."""
    header = ["geometry", "radius", "sharpness", "standard error", "batches", "loss", "norm reached", "reach", "passes"]
    rows = [
        [
            result.geometry,
            f"{result.settings['radius']:g}",
            f"{result.mean:.6g}",
            "-" if result.standard_error is None else f"{result.standard_error:.2g}",
            str(len(result.values)),
            f"{sum(result.base_losses) / len(result.base_losses):.6g}",
            f"{max(norm or 0.0 for norm in result.norms):.4g}",
            "-" if result.reach is None else f"{result.reach:.3g}",
            f"{result.forward_passes} + {result.backward_passes}",
        ]
        for result in results
    ]
    return table(title, header, rows, [name != "geometry" for name in header])
