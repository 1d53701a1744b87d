"""quotient-manifolds demo: the whole path on real transformers, from training to the report."""

from __future__ import annotations

from pathlib import Path

import click
import torch

from quotient_manifolds.cli.compare import print_comparison
from quotient_manifolds.cli.moving import measure_along_orbit
from quotient_manifolds.cli.options import (
    EXIT_CODES,
    NEGATIVE_FINDING,
    command_line,
    device_option,
    one_sentence_errors,
    out_option,
    progress_bars,
    quiet_option,
    seed_option,
)
from quotient_manifolds.cli.orbit import SCALES
from quotient_manifolds.demo import MODELS, cores, prepare


@click.command(epilog=EXIT_CODES)
@out_option("results/demo")
@click.option("--models", type=click.IntRange(min=2), default=MODELS, show_default=True, help="Size of the zoo.")
@click.option("--workers", type=click.IntRange(min=1), default=cores, help="Processes.  [default: one for each core]")
@seed_option
@device_option
@quiet_option
@one_sentence_errors
def demo(out: Path, models: int, workers: int, seed: int, device: torch.device, quiet: bool) -> None:
    """Train, measure and rank a zoo of small vision transformers.

    They are trained on scikit-learn's digits, once: the directory OUT keeps them. One is moved along its symmetry
    orbit, where the function stays the same, and its sharpness is compared before and after, as `orbit` does; that is
    OUT/orbit.html. Then all are ranked by sharpness and by generalisation gap, as `compare` does with OUT/zoo.yaml; OUT
    receives its files, of which report.html is to be read. Change OUT/zoo.yaml and run `compare` on it to see more.

    The exit code is 1 if a measurement failed, such as one in a quotient whose symmetries are not proved.
    """
    from quotient_manifolds.compare import run_comparison

    with progress_bars(quiet=quiet) as progress:
        spec = prepare(out, models=models, seed=seed, workers=workers, progress=progress)
    page = out / "orbit.html"
    measure_along_orbit(
        model=str(out / "models" / "vit-00"),
        radius=0.2,
        steps=20,
        scales=SCALES,
        length=16,
        inputs=None,
        symmetries=None,
        out=None,
        figure=None,
        report=page,
        seed=seed,
        device=device,
        dtype=torch.float32,
        quiet=quiet,
    )
    if not quiet:
        click.echo(f"First figures, while all models are measured: {page}")
    with progress_bars(quiet=quiet) as progress:
        found = run_comparison(spec, out, device=device, progress=progress, command=command_line())
    if not quiet:
        print_comparison(found, out)
    if found.troubles:
        click.echo(f"Failed: {len(found.failures)} measurements, see {out / 'report.html'}", err=True)
        raise click.exceptions.Exit(NEGATIVE_FINDING)
