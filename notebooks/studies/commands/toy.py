"""Redo study `toy`: the scalar network, its level sets, its closed forms, and the paper's claims."""

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
from quotient_manifolds.files import write_text
from quotient_manifolds.report import render
from studies.toy import claim_table, spread_table, study_toy, toy_page


@click.command(epilog=EXIT_CODES)
@out_option("results/toy")
@click.option("--fast", is_flag=True, help="Two orbits and few balls: to try the command.")
@quiet_option
@one_sentence_errors
def toy(out: Path, fast: bool, quiet: bool) -> None:
    """What is constant along the orbit of the scalar network f(x) = G H x, and which claims about it hold.

    OUT receives toy.json, which Toy.load reads, and report.html. About half a minute.
    """
    out.mkdir(parents=True, exist_ok=True)
    command = f"make study NAME=toy{' ARGS=--fast' if fast else ''}"
    with progress_bars(quiet=quiet) as report:
        found = study_toy(fast=fast, command=command, progress=report)
    found.save(out / "toy.json")
    write_text(out / "report.html", render(toy_page(found)))
    if not quiet:
        terminal = console(quiet=False)
        for shown in (spread_table(found), claim_table(found)):
            terminal.print(table(shown.caption, shown.columns, shown.rows, shown.numeric))
        terminal.print(f"Report: {out / 'report.html'}")
        terminal.print(f"Record: {out / 'toy.json'}")
