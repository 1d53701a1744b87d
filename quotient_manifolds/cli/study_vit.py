"""quotient-manifolds study vit: a zoo of vision transformers, compared."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from quotient_manifolds.cli.options import (
    EXIT_CODES,
    NEGATIVE_FINDING,
    console,
    one_sentence_errors,
    progress_bars,
    quiet_option,
    table,
)


@click.command(epilog=EXIT_CODES)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("results/vit"),
    show_default=True,
    help="Directory.",
)
@click.option("--fast", is_flag=True, help="Four models, hardly trained, and two measures: to try the command.")
@quiet_option
@one_sentence_errors
def vit(out: Path, fast: bool, quiet: bool) -> None:
    """How measures rank 48 vision transformers fine-tuned on few digits.

    With it: what each part of a measure adds, the family of metrics, the relaxation of the metric, larger radii.

    Trains once, then does what `compare` does with OUT/zoo.yaml, and goes on after an interruption. OUT receives
    study.html, the files of `compare`, and record/ in a compact form. About 35 minutes of one processor core.
    """
    from quotient_manifolds.experiments.vit_page import main_labels, tau_table
    from quotient_manifolds.experiments.vit_study import run_vit_study

    command = shlex.join(["quotient-manifolds", "study", "vit", *(["--fast"] if fast else [])])
    with progress_bars(quiet=quiet) as report:
        found = run_vit_study(out, fast=fast, command=command, progress=report)
    if not quiet:
        shown = tau_table(found, "ranking", "Kendall’s tau-b", main_labels())
        terminal = console(quiet=False)
        terminal.print(table(shown.caption, shown.columns, shown.rows, shown.numeric))
        terminal.print(f"Report: {out / 'study.html'}")
    if found.troubles:
        click.echo(f"Failed: {len(found.troubles)} measurements, see {out / 'report.html'}", err=True)
        raise click.exceptions.Exit(NEGATIVE_FINDING)
