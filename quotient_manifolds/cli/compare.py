"""Compare checkpoints: run every measure on every one, into a store that survives a crash, and rank the measures."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quotient_manifolds.cli import common
from quotient_manifolds.cli.orbit import orbit

if TYPE_CHECKING:
    import torch

    from quotient_manifolds.compare import Comparison, Forecast, Spec


@common.command
@click.argument("spec", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory of the results.  [default: results/NAME beside NAME.yaml]",
)
@click.option(
    "--check", is_flag=True, help="Measure nothing: say what there is to measure, and about how long it takes."
)
@click.option(
    "--workers", type=click.IntRange(min=1), help="Measure in so many processes on this machine; on CUDA one a device."
)
@click.option("--scheduler", metavar="ADDRESS", help="Measure on the workers of the running Dask cluster there.")
@common.device_option
@common.quiet_option
def compare(
    spec: Path,
    out: Path | None,
    check: bool,
    workers: int | None,
    scheduler: str | None,
    device: torch.device,
    quiet: bool,
) -> None:
    """Measure every checkpoint that the YAML file SPEC names, and rank the measures.

    \b
      checkpoints:
        paths: models/*
        loader: huggingface     # or package.module:function
      data: {path: train.jsonl, batch_size: 32, max_batches: 8}
      test: {path: test.jsonl}  # for the gaps between its error and loss and those of data
      scores: scores.csv        # more to rank by: a column checkpoint, and any others
      measures:
        - {measure: worst-case, geometry: [inv, mix], radius: [0.1, 0.2]}
        - {measure: worst-case, geometry: adaptive, radius: 0.5, steps: 40}
        - {measure: gradient-norm, geometry: euclidean, normalise_logits: true}
      loss: package.module:function        # loss(model, batch); cross-entropy if not given
      against: [error_gap]      # what to rank by
      given: [learning_rate]    # hyperparameters held fixed in partial correlations
      dtype: float32

    Only checkpoints, data and measures are needed; paths are relative to SPEC. Measures: worst-case, average-case,
    legacy-worst-case, gradient-norm, hessian-trace, top-eigenvalue. Geometries:
    euclidean, adaptive, inv, mix, or a number t. The options of a measure and of its geometry stand beside them: a key
    that does not belong there is answered with those that do.

    Every value is written to OUT/store.sqlite as soon as it is computed. Run again after an interruption, a crash or a
    change of SPEC, and only what is missing is measured. Without --workers or --scheduler all is done in this process;
    values are the same bit for bit wherever they are measured with the same number of threads, which is one in a worker
    unless OMP_NUM_THREADS says otherwise.

    OUT receives report.html, comparison.json (which Comparison.load reads) and values.csv.

    The exit code is 1 if a checkpoint or a measure of one failed; the rest is done all the same.
    """
    from quotient_manifolds.compare import forecast, read_spec, run_comparison

    folder = spec.resolve().parent / "results" / spec.stem if out is None else out
    wanted = read_spec(spec)
    if check:
        found = forecast(wanted, folder, device)
        if not quiet:
            _print_forecast(found, wanted, folder)
        _say_failures(found.failures)
        return
    redo = shlex.join(["quotient-manifolds", "compare", str(spec)])
    how = {"device": device, "workers": workers, "scheduler": scheduler, "command": redo}
    try:
        with common.progress_bars(quiet=quiet) as progress:
            comparison = run_comparison(wanted, folder, progress=progress, **how)  # type: ignore[arg-type]
    except KeyboardInterrupt:
        raise common.BadInput("Interrupted: what was measured is kept. The same command resumes from there.") from None
    if not quiet:
        print_comparison(comparison, folder)
    _say_failures(failures_of(comparison))


@common.command
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default="results/demo",
    show_default=True,
    help="Directory.",
)
# The more models, the narrower the interval of tau.
@click.option("--models", type=click.IntRange(min=2), default=16, show_default=True, help="Size of the zoo.")
@click.option("--workers", type=click.IntRange(min=1), help="Processes that train.  [default: one for each core]")
@common.run_options
def demo(out: Path, models: int, workers: int | None, seed: int, device: torch.device, quiet: bool) -> None:
    """Train, measure and rank a zoo of small vision transformers.

    They are trained on scikit-learn's digits, once: the directory OUT keeps them. One is moved along its symmetry
    orbit, where the function stays the same, and its sharpness is compared before and after, as `orbit` does; that is
    OUT/orbit.svg. Then all are ranked by sharpness and by generalisation gap, as `compare` does with OUT/zoo.yaml; OUT
    receives its files, of which report.html is to be read. Change OUT/zoo.yaml and run `compare` on it to see more.

    The exit code is 1 if a measurement failed, such as one in a quotient whose symmetries are not verified.
    """
    from quotient_manifolds.compare import run_comparison
    from quotient_manifolds.demo import one_thread, prepare

    with common.progress_bars(quiet=quiet) as progress:
        spec = prepare(out, models=models, seed=seed, workers=workers or os.cpu_count() or 1, progress=progress)
    moved = {
        "model": str(out / "models" / "vit-00"),
        "figure": out / "orbit.svg",
        "radius": 0.2,
        "scales": (0.1, 1.0, 10.0),
    }
    with one_thread():
        click.get_current_context().invoke(orbit, **moved, seed=seed, device=device, quiet=quiet)
    if not quiet:
        click.echo(f"The first figure, while all models are measured: {moved['figure']}")
    with one_thread(), common.progress_bars(quiet=quiet) as progress:
        found = run_comparison(spec, out, device=device, progress=progress, command=common.command_line())
    if not quiet:
        print_comparison(found, out)
    _say_failures(failures_of(found))


def failures_of(comparison: Comparison) -> list[str]:
    """Return a sentence for each failure."""
    return [f"{checkpoints}, {what}: {why}" for checkpoints, what, why in comparison.failure_groups()]


def _say_failures(failures: Sequence[str]) -> None:
    for failed in failures:
        click.echo(f"Failed: {failed}", err=True)
    if failures:
        raise click.exceptions.Exit(common.NEGATIVE_FINDING)


def _print_forecast(found: Forecast, wanted: Spec, folder: Path) -> None:
    terminal = common.Terminal()
    names = [each.name for each in wanted.checkpoints]
    shown = ", ".join(names if len(names) <= 8 else [*names[:6], "...", names[-1]])
    terminal.show(f"{len(names)} checkpoints: {shown}. A task is a measure on a checkpoint and a batch.")
    if found.timed is not None:
        terminal.show(
            found.measures.to_string(na_rep="unknown", float_format="{:.3g}".format),
            f"About {timedelta(seconds=round(found.seconds))} (h:mm:ss) in one process, with {found.loading:.3g} s to "
            f"load each of {found.to_load} checkpoints. Timed on {found.timed}: one pass in each geometry, in seconds. "
            "Checks of symmetries and correlations are not counted.",
        )
    terminal.show(*(f"Note: {note}" for note in found.notes), f"Nothing was measured. Results will be in {folder}")


def print_comparison(comparison: Comparison, folder: Path | None) -> None:
    """Print the summary of a comparison, what to know beside its numbers, and where its report is."""
    from quotient_manifolds.compare import summary_tables

    terminal = common.Terminal()
    if len(comparison.scores) == 1:
        columns = ["label", "mean", "standard_error", "batches", "seconds"]
        terminal.show(comparison.values[columns].to_string(index=False, na_rep="", float_format="{:.6g}".format))
    else:
        terminal.show(*summary_tables(comparison))
    known, values = comparison.known
    measured = comparison.measured_now
    now = f"Measured now: {measured}, counting each batch." if measured else "Nothing was left to measure."
    terminal.show(f"{now} Known: {known} of {values} values.", *(f"Note: {note}" for note in comparison.notes))
    terminal.show(*(f"Caution: {sentence}" for sentence in comparison.cautions))
    if folder is not None:
        terminal.show(f"Report: {folder / 'report.html'}")
