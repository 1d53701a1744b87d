"""Show what a reader sees in a terminal: sentences and tables on standard output, progress on standard error."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import rich.table
from rich import progress
from rich.console import Console

from quotient_manifolds.progress import Progress
from quotient_manifolds.report import Table


class Terminal(Console):
    """Print to standard output, text as it is; wide enough for a table of parameter names where it is no terminal."""

    def __init__(self) -> None:
        super().__init__(markup=False, highlight=False, emoji=False)
        if not self.is_terminal:
            self.width = 140

    def show(self, *blocks: str | Table) -> None:
        """Print sentences, and tables as a page would render them, without breaking names off."""
        for block in blocks:
            self.print(block if isinstance(block, str) else _drawn(block))

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would end the program here, with exit code 1


def _drawn(table: Table) -> rich.table.Table:
    drawn = rich.table.Table(title=table.caption, title_justify="left")
    for name, numeric in zip(table.columns, table.numeric, strict=True):
        drawn.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*row)
    return drawn


@contextmanager
def progress_bars(*, quiet: bool) -> Iterator[Progress]:
    """Yield a function that shows one bar for each thing it is told about."""
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), disable=quiet) as bars:
        tasks: dict[str, Any] = {}

        def report(what: str, finished: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=finished, total=total)

        yield report


def command_line() -> str | None:
    """Return the command that is being run, to be run again; None where this is no command."""
    program = Path(sys.argv[0]).name
    if program not in ("quotient-manifolds", "__main__.py"):
        return None
    return shlex.join(["quotient-manifolds", *sys.argv[1:]])
