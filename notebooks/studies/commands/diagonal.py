"""Redo study `diagonal`: what decides the sign of the correlation on diagonal networks."""

from __future__ import annotations

from pathlib import Path

import click

from quotient_manifolds.cli.options import (
    EXIT_CODES,
    console,
    one_sentence_errors,
    out_option,
    progress_bars,
    quiet_option,
    table,
)


@click.command(epilog=EXIT_CODES)
@out_option("results/diagonal")
@click.option("--fast", is_flag=True, help="Six small cells, seconds: to try the command.")
@quiet_option
@one_sentence_errors
def diagonal(out: Path, fast: bool, quiet: bool) -> None:
    """How sharpness ranks diagonal networks, along geodesics of each order.

    OUT receives diagonal.json, which DiagonalStudy.load reads, report.html, and cells/, by which an interrupted run
    goes on. About half an hour on one thread.
    """
    from studies.diagonal import Plan, run_diagonal
    from studies.diagonal.page import write_page
    from studies.diagonal.tables import short_table

    command = f"make study NAME=diagonal{' ARGS=--fast' if fast else ''}"
    with progress_bars(quiet=quiet) as report:
        found = run_diagonal(out, Plan.fast() if fast else Plan(), command=command, progress=report)
    found.save(out / "diagonal.json")
    write_page(found, out / "report.html")
    if not quiet:
        terminal = console(quiet=False)
        for radius in found.plan.radii:
            shown = short_table(found, radius)
            terminal.print(table(shown.caption, shown.columns, shown.rows, shown.numeric))
        terminal.print(f"Record: {out / 'diagonal.json'}\nReport: {out / 'report.html'}")
