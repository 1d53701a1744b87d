"""What every command shares: options, exit codes, the console, and errors as one sentence.

Nothing here imports torch when it is imported: help is to come at once.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich import progress
from rich.console import Console
from rich.table import Table

from quotient_manifolds.cli.blame import place_in_users_code
from quotient_manifolds.cli.exits import INTERRUPTED as INTERRUPTED
from quotient_manifolds.files import is_special, write_text
from quotient_manifolds.progress import Progress

if TYPE_CHECKING:
    import torch

NEGATIVE_FINDING = 1
EXIT_CODES = """\b
Exit codes:
  0    done
  1    done, with a negative finding (such as a symmetry that is not proved)
  2    bad usage or bad input; one sentence on standard error says which
  70   a defect of this program
  130  interrupted
  141  whoever read the output has left, as in `| head -1`; files are written
"""
DTYPES = ("float32", "float64")

Command = TypeVar("Command", bound=Callable[..., Any])


class BadInput(click.ClickException):
    """One sentence on standard error, and exit code 2."""

    exit_code = 2


def one_sentence_errors(command: Command) -> Command:
    """What the package says about bad input becomes the message of the command; Ctrl-C leaves quietly.

    So does whatever goes wrong in code of the user's, with its place there. Only errors of this package's own code and
    of libraries are left to be seen as defects.
    """

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            with _warnings_in_one_line():
                return command(*args, **kwargs)
        except (click.ClickException, click.exceptions.Exit, BrokenPipeError):
            raise
        except (KeyboardInterrupt, click.Abort):
            click.echo("Interrupted.", err=True)
            raise click.exceptions.Exit(INTERRUPTED) from None
        except SystemExit as left:
            raise BadInput(_with_place(f"The program was told to end by sys.exit({left.code!r})", left)) from left
        except (ValueError, TypeError, ImportError, OSError, SyntaxError) as error:
            raise BadInput(_with_place(_one_line(error), error)) from error
        except MemoryError as error:
            raise BadInput(f"There is not enough memory for this: {_one_line(error)}") from error
        except BaseException as error:
            if type(error).__name__ == "OutOfMemoryError":  # of torch, which need not be imported here
                raise BadInput(f"The device has not enough memory: {_first_sentence(error)}") from error
            if place_in_users_code(error) is None:
                raise
            raise BadInput(_with_place(f"{type(error).__name__}: {_one_line(error)}", error)) from error

    return run  # type: ignore[return-value]


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _first_sentence(error: BaseException) -> str:
    return _one_line(error).partition(". ")[0]


def _with_place(sentence: str, error: BaseException) -> str:
    place = place_in_users_code(error)
    return sentence if place is None else f"{sentence.rstrip('.')} ({place})."


@contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """What the package warns of is one line on standard error; the same sentence comes once, as Python has it."""
    with warnings.catch_warnings():
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if category.__module__.startswith("quotient_manifolds."):
                click.echo(f"Warning: {message}", err=True)
            else:
                others(message, category, *where, **more)

        warnings.showwarning = show
        yield


def _usable_device(context: click.Context, parameter: click.Parameter, value: str) -> torch.device:
    import torch

    try:
        device = torch.device(value)
        float(torch.zeros(1, device=device))  # meta has no numbers
    except Exception as error:  # of torch and its backends: a dozen kinds
        raise click.BadParameter(f"{value!r} cannot be used here: {_first_sentence(error)}") from error
    return device


def _torch_dtype(context: click.Context, parameter: click.Parameter, value: str) -> torch.dtype:
    import torch

    found: torch.dtype = getattr(torch, value)
    return found


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
    type=click.Choice(DTYPES),
    callback=_torch_dtype,
    default="float32",
    show_default=True,
    help="Precision the model runs in.",
)
seed_option = click.option(
    "--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True, help="Seed of all draws."
)
symmetries_option = click.option(
    "--symmetries",
    metavar="PACKAGE.MODULE:FUNCTION",
    help="A function of the model that declares its symmetries, instead of those that are found.",
)
inputs_option = click.option(
    "--inputs",
    metavar="PACKAGE.MODULE:FUNCTION",
    help="A function that returns inputs of the model, instead of those made from its configuration.",
)
report_option = click.option(
    "--report", type=click.Path(path_type=Path), help="Write a page to read in a browser to this .html file."
)


def common_options(command: Command) -> Command:
    """--seed, --device, --dtype and --quiet."""
    for option in (quiet_option, dtype_option, device_option, seed_option):
        command = option(command)
    return command


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would end the program here


def console(*, quiet: bool) -> Console:
    """Standard output; wide enough for a table of parameter names where it is no terminal."""
    plain = _Console(quiet=quiet, markup=False, highlight=False, emoji=False)
    return plain if plain.is_terminal else _Console(quiet=quiet, markup=False, highlight=False, emoji=False, width=140)


def table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], numeric: Sequence[bool] = ()) -> Table:
    """A table with a title; the columns that `numeric` marks are aligned right."""
    made = Table(title=title, title_justify="left")
    for name, right in zip_longest(header, numeric, fillvalue=False):
        made.add_column(str(name), justify="right" if right else "left", overflow="fold")  # no name is cut
    for row in rows:
        made.add_row(*row)
    return made


@contextmanager
def progress_bars(*, quiet: bool) -> Iterator[Progress]:
    """Yield a function that shows one bar for each thing it is told about, on standard error."""
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
    """The command that is being run, to be run again; None where this is no command."""
    program = Path(sys.argv[0]).name
    if program not in ("quotient-manifolds", "__main__.py"):
        return None
    return shlex.join(["quotient-manifolds", *sys.argv[1:]])


def check_writable(file: Path | None, *inputs: str | Path | None) -> None:
    """Says now, not after an hour of measuring, that a result could not be written, or would replace an input."""
    if file is None:
        return
    if is_special(file):
        if not os.access(file, os.W_OK):
            raise BadInput(f"Cannot write {file}: it is not open for writing.")
        return
    target = Path(os.path.realpath(file))  # a link stays, and what it leads to is written
    if target.is_dir() or not target.parent.is_dir() or not os.access(target.parent, os.W_OK):
        raise BadInput(
            f"Cannot write {file}: expected the name of a file in a directory that exists and can be written."
        )
    if target.exists():
        for each in [str(given) for given in inputs if given]:
            here = Path(os.path.realpath(os.path.expanduser(each)))
            if target == here or here in target.parents or (here.exists() and target.samefile(here)):
                raise BadInput(f"Cannot write {file}: it is {'part of ' * (target != here)}the input {each}.")


def check_different(**files: Path | None) -> None:
    """Refuses two results under one name."""
    seen: dict[str, str] = {}
    for name, file in files.items():
        if file is None or is_special(file):
            continue
        if (other := seen.setdefault(os.path.realpath(file), name)) != name:
            raise BadInput(f"--{other} and --{name} name the same file, {file}.")


def write_json(file: Path, record: Any) -> None:
    """Writes all of it or nothing; a number that is not finite is an error."""
    write_text(file, json.dumps(record, indent=1, allow_nan=False) + "\n")
