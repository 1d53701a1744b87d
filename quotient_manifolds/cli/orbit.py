"""quotient-manifolds orbit: what each measure says of the same function elsewhere on its symmetry orbit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from quotient_manifolds.cli.options import (
    EXIT_CODES,
    BadInput,
    check_different,
    check_writable,
    common_options,
    inputs_option,
    one_sentence_errors,
    report_option,
    symmetries_option,
)

SCALES = (0.01, 0.1, 1.0, 10.0, 100.0)
FIGURES = (".svg", ".pdf", ".png")


@click.command(epilog=EXIT_CODES)
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
@one_sentence_errors
def orbit(out: Path | None, figure: Path | None, report: Path | None, quiet: bool, **settings: Any) -> None:
    """Measure the sharpness of MODEL before and after moving it along its symmetry orbit.

    MODEL is a Hugging Face directory or package.module:function. Each head's pairs are moved by A = SCALE times a
    Gaussian matrix, which changes no output. The loss is the mean squared distance of the output, on example inputs,
    from fixed Gaussian targets; it is measured in float32 and in float64, whatever --dtype says of loading. Inputs are
    made from the model's configuration; a model without one needs --inputs.

    SharpnessRecord.load reads the file OUT, and its frame() makes a table.
    """
    for file in (out, figure, report):
        check_writable(file, settings["model"])
    check_different(out=out, figure=figure, report=report)
    if figure is not None and figure.suffix not in FIGURES:
        raise BadInput(f"A figure is written as {', '.join(FIGURES)}. Found {figure.name!r}.")
    if quiet and out is None and figure is None and report is None:
        raise BadInput(
            "With --quiet nothing is printed, so the results would be lost: give --out, --figure or --report."
        )
    from quotient_manifolds.cli.moving import measure_along_orbit

    measure_along_orbit(out=out, figure=figure, report=report, quiet=quiet, **settings)
