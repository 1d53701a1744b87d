"""What the commands of studies of zoos print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from quotient_manifolds.cli.options import NEGATIVE_FINDING, console, table

if TYPE_CHECKING:
    from quotient_manifolds.compare import Comparison
    from studies.zoo_page import ZooPage


def print_ranking(page: ZooPage, found: Comparison, out: Path) -> None:
    """tau of the measures one by one, and where the page is."""
    shown = page.tau_table(found, "ranking", "Kendall’s tau-b", page.main_labels())
    terminal = console(quiet=False)
    terminal.print(table(shown.caption, shown.columns, shown.rows, shown.numeric))
    terminal.print(f"Report: {out / 'study.html'}")


def fail_if_troubled(found: Comparison, out: Path) -> None:
    """Ends with the exit code of a negative finding if a measurement failed."""
    if found.troubles:
        click.echo(f"Failed: {len(found.troubles)} measurements, see {out / 'report.html'}", err=True)
        raise click.exceptions.Exit(NEGATIVE_FINDING)
