"""Show what each measure says of the same function elsewhere on its symmetry orbit."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quotient_manifolds.cli.errors import BadInput
from quotient_manifolds.cli.options import (
    check_outputs,
    command,
    common_options,
    inputs_option,
    report_option,
    symmetries_option,
)
from quotient_manifolds.cli.terminal import Terminal, command_line, progress_bars

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn

    from quotient_manifolds.cli.record import SharpnessRecord
    from quotient_manifolds.geometry import Geometry
    from quotient_manifolds.progress import Progress
    from quotient_manifolds.symmetries import Symmetries

SCALES = (0.01, 0.1, 1.0, 10.0, 100.0)
FIGURES = (".svg", ".pdf", ".png")


@command
@click.argument("model")
@click.option("--radius", type=float, default=0.3, show_default=True, help="Of the ball, in the metric's norm.")
@click.option("--steps", type=click.IntRange(min=1), default=10, show_default=True, help="Of ascent.")
@click.option("--scale", "scales", type=float, multiple=True, default=SCALES, show_default=True, help="Of the move.")
@click.option("--length", type=click.IntRange(min=1), default=16, show_default=True, help="Tokens of an example text.")
@inputs_option
@symmetries_option
@click.option("--out", type=click.Path(path_type=Path), help="Write the measurements to this JSON file.")
@click.option("--figure", type=click.Path(path_type=Path), help="Draw the ratios into this .svg, .pdf or .png.")
@report_option
@common_options
def orbit(
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
    """Measure the sharpness of MODEL before and after moving it along its symmetry orbit.

    MODEL is a Hugging Face directory, an adapter of peft, or package.module:function. Each head's pairs are moved by
    A = SCALE times a Gaussian matrix, biases, gains and all else that is free by random numbers, which changes no
    output. The loss is the mean squared distance of the output, on
    example inputs, from fixed Gaussian targets; it is measured in float32 and in float64, whatever --dtype says of
    loading. Inputs are made from the model's configuration; a model without one needs --inputs.

    The file OUT is JSON, written atomically.
    """
    check_outputs([model], quiet=quiet, out=out, figure=figure, report=report)
    if figure is not None and figure.suffix not in FIGURES:
        raise BadInput(f"A figure is written as {', '.join(FIGURES)}. Found {figure.name!r}.")
    from quotient_manifolds.cli import pages
    from quotient_manifolds.cli.batches import distance_batch, like
    from quotient_manifolds.cli.record import SharpnessRecord
    from quotient_manifolds.cli.subject import described, inputs_for, model_named, symmetries_of
    from quotient_manifolds.geometry import Adaptive, Quotient
    from quotient_manifolds.sharpness import SharpnessWarning

    network = model_named(model).to(device=device, dtype=dtype)
    with inputs_for(network, inputs, seed=seed, length=length) as given:
        found = symmetries_of(network, given, symmetries)
        if not found.moved:
            raise BadInput(f"{model} has no symmetry, so there is no orbit to move along (see `inspect`).")
        batch = distance_batch(network, like(given, next(network.parameters())), seed)
    found = found.beside([name for name, w in network.named_parameters() if not w.requires_grad])
    divided: Any = found if symmetries else "all"
    geometries = (Adaptive(), Quotient("inv", symmetries=divided), Quotient("mix", symmetries=divided))
    settings = {"length": length, "inputs": inputs, "seed": seed, "symmetries": symmetries}
    record = SharpnessRecord((), model, settings=settings, command=command_line())
    ascent = {"radius": radius, "steps": steps, "seed": seed}
    with warnings.catch_warnings(), progress_bars(quiet=quiet) as progress:
        if quiet:
            warnings.simplefilter("ignore", SharpnessWarning)  # they are in the file and on the page
        record = along_orbit(network, found, geometries, batch, scales, record, ascent=ascent, progress=progress)
    if out is not None:
        record.save(out)
    if figure is not None:
        pages.figure_of_ratios(record).save(figure)
    if report is not None:
        pages.write_page(pages.orbit_page(record), report)
    if not quiet:
        title = f"{model}: sharpness after / before, radius {radius:g}"
        Terminal().show(*described(network, model), pages.table_of_ratios(title, record))


def along_orbit(
    model: nn.Module,
    symmetries: Symmetries,
    geometries: Sequence[Geometry],
    batch: Any,
    scales: Sequence[float],
    record: SharpnessRecord,
    *,
    ascent: dict[str, Any],
    progress: Progress,
) -> SharpnessRecord:
    """Add to the record the sharpness of a model and of its moves by A = scale x Gaussian per head.

    In float32 and in float64, on copies; A is drawn anew for every scale. [paper, ICML version, Sec. 6.2]
    Raises ValueError if a sharpness to compare with is not positive.
    """
    from quotient_manifolds.cli.batches import distance, like
    from quotient_manifolds.sharpness import worst_case_sharpness
    from quotient_manifolds.symmetries import random_move

    what, total, done = "moving along the orbit", 2 * len(geometries) * (1 + len(scales)), 0
    for dtype, start in (("float32", copy.deepcopy(model).float()), ("float64", copy.deepcopy(model).double())):
        before: dict[str, float] = {}
        for index, scale in enumerate((None, *scales)):
            moved = copy.deepcopy(start)
            if scale is not None:
                there = random_move(start, symmetries, scale=scale, seed=ascent["seed"] + index - 1)
                moved.load_state_dict(there, strict=False)  # buffers stay
            here = [like(batch, next(moved.parameters()))]
            for geometry in geometries:
                progress(what, done, total)
                result = worst_case_sharpness(moved, distance, here, geometry=geometry, **ascent)
                done += 1
                if scale is None and not result.mean > 0:
                    raise ValueError(
                        f"The loss of the model does not rise within radius {ascent['radius']:g} of {geometry.name} in "
                        f"{dtype}, so there is no ratio of sharpness to speak of; choose a larger radius."
                    )
                ratio = result.mean / before.setdefault(geometry.name, result.mean)
                record = record.with_result(result, dtype=dtype, scale=scale, ratio=ratio)
    progress(what, total, total)
    return record
