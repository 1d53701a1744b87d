"""Compare checkpoints: run every measure on every one, into a store that survives a crash, and rank the measures."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quotient_manifolds.cli.exits import INTERRUPTED, NEGATIVE_FINDING
from quotient_manifolds.cli.options import command, device_option, quiet_option
from quotient_manifolds.cli.terminal import Terminal, progress_bars
from quotient_manifolds.report import Table

if TYPE_CHECKING:
    import torch

    from quotient_manifolds.compare import Comparison, Forecast, Spec


@command
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
@device_option
@quiet_option
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

    Every value is written to OUT/store.sqlite as soon as it is known. Run again after an interruption, a crash or a
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
    try:
        with progress_bars(quiet=quiet) as progress:
            comparison = run_comparison(
                wanted,
                folder,
                device=device,
                workers=workers,
                scheduler=scheduler,
                progress=progress,
                command=shlex.join(["quotient-manifolds", "compare", str(spec)]),
            )
    except KeyboardInterrupt:
        click.echo("Interrupted: what was measured is kept. The same command goes on from here.", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None
    if not quiet:
        print_comparison(comparison, folder)
    _say_failures([f"{names}, {what}: {why}" for names, what, why in comparison.failure_groups()])


def _say_failures(failures: Sequence[str]) -> None:
    for failed in failures:
        click.echo(f"Failed: {failed}", err=True)
    if failures:
        raise click.exceptions.Exit(NEGATIVE_FINDING)


def _print_forecast(found: Forecast, wanted: Spec, folder: Path) -> None:
    terminal = Terminal()
    rows = [
        [label, *(str(row[name]) for name in ("tasks", "left")), f"{row['passes']:g}", duration(row["time"])]
        for label, row in found.measures.astype(object).iterrows()
    ]
    if found.timed is not None:
        columns = ["Measure", "Tasks", "Left", "Passes each", "Time left"]
        terminal.show(Table("plan", "What there is to measure", columns, rows, [False] + [True] * 4))
    names = [each.name for each in wanted.checkpoints]
    shown = ", ".join(names if len(names) <= 8 else [*names[:6], "...", names[-1]])
    terminal.print(f"{len(names)} checkpoints: {shown}. A task is a measure on a checkpoint and a batch.")
    for note in found.notes:
        terminal.print(f"Note: {note}")
    if found.timed is not None:
        terminal.print(
            f"About {duration(found.seconds)} in one process, with {duration(found.loading)} to load each of "
            f"{found.to_load} checkpoints. Timed on {found.timed}: one pass in each geometry. Checks of symmetries and "
            "correlations are not counted."
        )
    terminal.print(f"Nothing was measured. Results will be in {folder}")


def duration(seconds: float) -> str:
    """Return the time in the unit that suits it."""
    if seconds != seconds:  # NaN
        return "unknown"
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.3g} s"


def print_comparison(comparison: Comparison, folder: Path) -> None:
    """Print the summary of a comparison, what to know beside its numbers, and where its report is."""
    from quotient_manifolds.compare import summary_tables

    terminal = Terminal()
    for block in summary_tables(comparison):
        terminal.show(block)
    known, values = comparison.known
    measured = comparison.measured_now
    now = f"Measured now: {measured}, counting each batch." if measured else "Nothing was left to measure."
    terminal.print(f"{now} Known: {known} of {values} values.")
    for note in comparison.notes:
        terminal.print(f"Note: {note}")
    for sentence in comparison.cautions:
        terminal.print(f"Caution: {sentence}")
    terminal.print(f"Report: {folder / 'report.html'}")
