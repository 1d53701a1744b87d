"""quotient-manifolds compare: every measure of every checkpoint of a zoo, into a store that survives a crash."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click
import torch

from quotient_manifolds.cli.options import (
    EXIT_CODES,
    INTERRUPTED,
    NEGATIVE_FINDING,
    console,
    device_option,
    one_sentence_errors,
    progress_bars,
    quiet_option,
    table,
)

if TYPE_CHECKING:
    from quotient_manifolds.compare import Comparison, Run, Spec, Store, Worker


@click.command(epilog=EXIT_CODES)
@click.argument("spec", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory of the results.  [default: results/NAME, for NAME.yaml]",
)
@device_option
@quiet_option
@one_sentence_errors
def compare(spec: Path, out: Path | None, device: torch.device, quiet: bool) -> None:
    """Measure every checkpoint that the YAML file SPEC names, and rank the measures.

    \b
      checkpoints: {paths: "models/*", loader: huggingface}
      data: {path: train.jsonl, batch_size: 32, batches: 8}
      test: {path: test.jsonl}
      measures:
        - {measure: worst-case, geometry: [inv, mix], radius: [0.1, 0.2]}
        - {measure: worst-case, geometry: adaptive, radius: 0.5}

    Every value is written to OUT/store.sqlite before the next begins. Run again after an interruption, a crash or a
    change of SPEC, and only what is missing is measured; several processes may run at once. Under torchrun the work is
    split over its processes: torchrun --nproc-per-node 8 -m quotient_manifolds compare SPEC --device cuda

    OUT receives report.html, comparison.json (which Comparison.load reads), models.csv and, by unit, units.csv.

    The exit code is 1 if a checkpoint or a measure of one failed; the rest is done all the same.
    """
    from quotient_manifolds.compare import Store, analyse, joined, read_spec, write_comparison

    wanted = read_spec(spec)
    folder = Path("results") / spec.stem if out is None else out
    with joined(device) as worker, Store(folder / "store.sqlite") as store:
        silent = quiet or not worker.leads
        run = _measured(wanted, store, worker, silent)
        worker.wait()
        if not worker.leads:
            return
        with progress_bars(quiet=silent) as report:
            command = shlex.join(["quotient-manifolds", "compare", str(spec)])
            comparison = analyse(run, command=command, report=report)
        write_comparison(comparison, run, folder)
        waiting = run.waiting()
    if not quiet:
        _print(comparison, run.done, waiting, folder)
    if comparison.troubles:
        raise click.exceptions.Exit(NEGATIVE_FINDING)


def _measured(wanted: Spec, store: Store, worker: Worker, silent: bool) -> Run:
    """All that this process can measure; when interrupted, says how to go on."""
    from quotient_manifolds.compare import Run

    with progress_bars(quiet=silent) as report:
        run = Run(wanted, store, worker, report)
        try:
            run.measure_all()
        except KeyboardInterrupt:
            click.echo(
                f"Interrupted: {run.done} values were measured and are kept. The same command goes on from here.",
                err=True,
            )
            raise click.exceptions.Exit(INTERRUPTED) from None
    return run


def _print(comparison: Comparison, measured: int, waiting: int, folder: Path) -> None:
    from quotient_manifolds.compare import summary_tables

    terminal = console(quiet=False)
    for block in summary_tables(comparison):
        terminal.print(table(block.caption, block.columns, block.rows, block.numeric))
    terminal.print(f"{measured} values measured now, {comparison.known[0]} of {comparison.known[1]} known.")
    if waiting:
        terminal.print(f"{waiting} values are being measured by other processes; run again when they are done.")
    for trouble in comparison.troubles:
        where = trouble.checkpoint if trouble.what is None else f"{trouble.checkpoint}, {trouble.what}"
        click.echo(f"Failed: {where}: {trouble.message}", err=True)
    terminal.print(f"Report: {folder / 'report.html'}")
