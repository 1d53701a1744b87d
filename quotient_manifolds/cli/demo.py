"""Show the whole path on real transformers, from training to the report."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quotient_manifolds.cli.compare import print_comparison
from quotient_manifolds.cli.exits import NEGATIVE_FINDING
from quotient_manifolds.cli.options import command, device_option, out_option, quiet_option, seed_option
from quotient_manifolds.cli.orbit import orbit
from quotient_manifolds.cli.terminal import command_line, progress_bars

if TYPE_CHECKING:
    import torch


@command
@out_option("results/demo")
# The more models, the narrower the interval of tau.
@click.option("--models", type=click.IntRange(min=2), default=16, show_default=True, help="Size of the zoo.")
@click.option("--workers", type=click.IntRange(min=1), help="Processes that train.  [default: one for each core]")
@seed_option
@device_option
@quiet_option
def demo(out: Path, models: int, workers: int | None, seed: int, device: torch.device, quiet: bool) -> None:
    """Train, measure and rank a zoo of small vision transformers.

    They are trained on scikit-learn's digits, once: the directory OUT keeps them. One is moved along its symmetry
    orbit, where the function stays the same, and its sharpness is compared before and after, as `orbit` does; that is
    OUT/orbit.html. Then all are ranked by sharpness and by generalisation gap, as `compare` does with OUT/zoo.yaml; OUT
    receives its files, of which report.html is to be read. Change OUT/zoo.yaml and run `compare` on it to see more.

    The exit code is 1 if a measurement failed, such as one in a quotient whose symmetries are not proved.
    """
    import torch

    from quotient_manifolds.compare import run_comparison
    from quotient_manifolds.demo import one_thread, prepare

    with progress_bars(quiet=quiet) as progress:
        spec = prepare(out, models=models, seed=seed, workers=workers or os.cpu_count() or 1, progress=progress)
    model, page = out / "models" / "vit-00", out / "orbit.html"
    settings = {"radius": 0.2, "steps": 20, "seed": seed, "device": device, "dtype": torch.float32}
    with one_thread():
        click.get_current_context().invoke(orbit, model=str(model), report=page, quiet=quiet, **settings)
    if not quiet:
        click.echo(f"First figures, while all models are measured: {page}")
    with one_thread(), progress_bars(quiet=quiet) as progress:
        found = run_comparison(spec, out, device=device, progress=progress, command=command_line())
    if not quiet:
        print_comparison(found, out)
    if len(found.failures):
        click.echo(f"Failed: {len(found.failure_groups())} measurements, see {out / 'report.html'}", err=True)
        raise click.exceptions.Exit(NEGATIVE_FINDING)
