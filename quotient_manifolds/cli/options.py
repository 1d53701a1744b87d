"""What every command shares: options, exit codes, the console, and errors as one sentence."""

from __future__ import annotations

import functools
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from quotient_manifolds.files import write_text
from quotient_manifolds.sharpness import MeasurementWarning

NEGATIVE_FINDING = 1
INTERRUPTED = 130
EXIT_CODES = """\b
Exit codes:
  0    done
  1    done, with a negative finding (such as a symmetry that is not proved)
  2    bad usage or bad input; one sentence on standard error says which
  70   a defect of this program
  130  interrupted
"""
DTYPES = {"float32": torch.float32, "float64": torch.float64}

Command = TypeVar("Command", bound=Callable[..., Any])
Report = Callable[[str, int, int], None]  # (what is being done, units finished, units in all)


class BadInput(click.ClickException):
    """One sentence on standard error, and exit code 2."""

    exit_code = 2


def one_sentence_errors(command: Command) -> Command:
    """What the package says about bad input becomes the message of the command; Ctrl-C leaves quietly."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            with _warnings_in_one_line():
                return command(*args, **kwargs)
        except (ValueError, TypeError, ImportError, OSError) as error:
            raise BadInput(" ".join(str(error).split())) from error
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            raise click.exceptions.Exit(INTERRUPTED) from None

    return run  # type: ignore[return-value]


@contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """What a measure warns of is one line on standard error; the same sentence comes once, as Python has it."""
    with warnings.catch_warnings():
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, MeasurementWarning):
                click.echo(f"Warning: {message}", err=True)
            else:
                others(message, category, *where, **more)

        warnings.showwarning = show
        yield


def _usable_device(context: click.Context, parameter: click.Parameter, value: str) -> torch.device:
    try:
        device = torch.device(value)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise click.BadParameter(f"{value!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device


quiet_option = click.option("--quiet", is_flag=True, help="Print nothing but errors.")


def out_option(default: str) -> Callable[[Command], Command]:
    """--out, the directory that a command writes to."""
    place = click.Path(path_type=Path, file_okay=False)
    return click.option("--out", type=place, default=Path(default), show_default=True, help="Directory.")


device_option = click.option(
    "--device", default="cpu", show_default=True, callback=_usable_device, help="cpu, cuda, cuda:1, ..."
)
dtype_option = click.option(
    "--dtype",
    type=click.Choice(list(DTYPES)),
    callback=lambda context, parameter, value: DTYPES[value],
    default="float32",
    show_default=True,
    help="Precision the model runs in.",
)
seed_option = click.option(
    "--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True, help="Seed of all draws."
)


def common_options(command: Command) -> Command:
    """--seed, --device, --dtype and --quiet."""
    for option in (quiet_option, dtype_option, device_option, seed_option):
        command = option(command)
    return command


def console(*, quiet: bool) -> Console:
    """Standard output; wide enough for a table of parameter names where it is no terminal."""
    plain = Console(quiet=quiet, markup=False, highlight=False, emoji=False)
    return plain if plain.is_terminal else Console(quiet=quiet, markup=False, highlight=False, emoji=False, width=140)


def table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], numeric: Sequence[bool] = ()) -> Table:
    """A table with a title; the columns that `numeric` marks are aligned right."""
    made = Table(title=title, title_justify="left")
    for name, right in zip_longest(header, numeric, fillvalue=False):
        made.add_column(str(name), justify="right" if right else "left")
    for row in rows:
        made.add_row(*row)
    return made


@contextmanager
def progress_bars(*, quiet: bool) -> Iterator[Report]:
    """A function (what, finished, in all) that shows one bar for each `what`, on standard error."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as bars:
        tasks: dict[str, Any] = {}

        def report(what: str, finished: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=finished, total=total)

        yield report


def check_writable(file: Path | None) -> None:
    """Says now, not after an hour of measuring, that a result could not be written."""
    if file is not None and (file.is_dir() or not file.parent.is_dir() or not os.access(file.parent, os.W_OK)):
        raise BadInput(
            f"Cannot write {file}: expected the name of a file in a directory that exists and can be written."
        )


def write_json(file: Path, record: Any) -> None:
    """Writes all of it or nothing; a number that is not finite is an error."""
    write_text(file, json.dumps(record, indent=1, allow_nan=False) + "\n")
