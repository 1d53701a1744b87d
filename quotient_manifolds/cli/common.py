"""What commands share: how they end, their options, and tables and progress in a terminal.

Nothing here or in a command's module imports torch before the command runs: help is to come at once.
"""

from __future__ import annotations

import os
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import rich.table
from rich import progress
from rich.console import Console

from quotient_manifolds.messages import Progress, sentence
from quotient_manifolds.report import Table

if TYPE_CHECKING:
    import torch

NEGATIVE_FINDING = 1
EXIT_CODES = """\b
Exit codes:
  0  done
  1  done, with a negative finding (such as a symmetry that is not verified); or a defect, with a traceback
  2  bad usage, bad input, or interrupted; one sentence on standard error says which
"""


class BadInput(click.ClickException):
    """Say one sentence on standard error, and leave with exit code 2."""

    exit_code = 2


class Commands(click.Group):
    """Run commands; what the package says of bad input becomes one sentence, and any other error stays a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: click.echo(f"Warning: {message}", err=True)
            try:
                return super().invoke(ctx)
            except (KeyboardInterrupt, click.Abort):
                raise BadInput("Interrupted.") from None
            except BrokenPipeError:  # whoever read the output has left, as in `| head -1`: click ends quietly, with 1
                raise
            except (ValueError, TypeError, ImportError, OSError, MemoryError) as error:
                raise BadInput(sentence(error)) from error


# ---- options


def command(function: Callable[..., Any]) -> click.Command:
    """Make a command of a function that click's options decorate, named like it."""
    return click.command(epilog=EXIT_CODES)(function)


def _usable_device(context: click.Context, parameter: click.Parameter, value: str) -> torch.device:
    import torch

    try:
        device = torch.device(value)
        float(torch.zeros(1, device=device))  # meta has no numbers
    except Exception as error:  # of torch and its backends: a dozen kinds
        raise click.BadParameter(f"{value!r} cannot be used here: {str(error).partition('. ')[0]}") from error
    return device


quiet_option = click.option("--quiet", is_flag=True, help="Print nothing but errors.")
device_option = click.option(
    "--device", default="cpu", show_default=True, callback=_usable_device, help="cpu, cuda, cuda:1, ..."
)
seed_option = click.option(
    "--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True, help="Seed of all draws."
)
symmetries_option = click.option(
    "--symmetries",
    metavar="all|pairs|paper|PACKAGE.MODULE:FUNCTION",
    help="Which of the model's symmetries: all, pairs (with redundant biases) or paper (pairs with biases as rows); or "
    "a function of the model that declares them.  [default: all]",
)
inputs_option = click.option(
    "--inputs",
    metavar="PACKAGE.MODULE:FUNCTION",
    help="A function that returns inputs of the model, instead of those made from its configuration.",
)


def run_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --seed, --device and --quiet."""
    return seed_option(device_option(quiet_option(function)))


def check_output(file: Path | None, *inputs: str) -> None:
    """Refuse, before anything is measured, a file that cannot be written, or that is one of the inputs or part of one.

    Raises BadInput.
    """
    if file is None:
        return
    target = Path(os.path.realpath(file))  # a link stays, and what it leads to is written
    if target.is_dir() or not target.parent.is_dir() or not os.access(target.parent, os.W_OK):
        raise BadInput(f"Cannot write {file}: it must be the name of a file in a directory that can be written.")
    places = {Path(os.path.realpath(os.path.expanduser(each))) for each in inputs}
    if target.exists() and places & {target, *target.parents}:
        raise BadInput(f"Cannot write {file}: it is part of an input.")


def check_new(target: Path, *models: str) -> None:
    """Refuse a directory to write that exists already, or whose parent does not, and models that are no directories.

    Raises BadInput.
    """
    parent = target.absolute().parent
    if target.exists() or not parent.is_dir():
        problem = "it exists already" if target.exists() else f"there is no directory {parent}"
        raise BadInput(f"{target} must be a new directory, but {problem}.")
    if absent := [model for model in models if not Path(model).is_dir()]:
        raise BadInput(
            f"No model at {absent[0]}: expected a Hugging Face directory. Nothing is downloaded; transform your own "
            "models in Python."
        )


# ---- the terminal


def show(*blocks: str | Table) -> None:
    """Print sentences as they are, and tables without breaking names off, to standard output."""
    width = None if sys.stdout.isatty() else 240  # wide enough for a table of parameter names
    terminal = Console(width=width, markup=False, highlight=False, emoji=False)
    for block in blocks:
        if isinstance(block, Table):
            drawn = rich.table.Table(title=block.caption, title_justify="left")
            for name, numeric in zip(block.columns, block.numeric, strict=True):
                drawn.add_column(name, justify="right" if numeric else "left", overflow="fold")
            for row in block.rows:
                drawn.add_row(*row)
            with terminal.capture() as printed:
                terminal.print(drawn)
            block = printed.get().rstrip("\n")
        click.echo(block)  # which an ASCII terminal takes, too


@contextmanager
def progress_bars(*, quiet: bool) -> Iterator[Progress]:
    """Yield a function that shows one bar for each thing it is told about."""
    with progress.Progress(console=Console(stderr=True), disable=quiet) as bars:
        tasks: dict[str, Any] = {}

        def report(what: str, finished: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=finished, total=total)

        yield report


def command_line() -> str:
    """Return the command that is being run, to be run again."""
    return shlex.join(["quotient-manifolds", *sys.argv[1:]])
