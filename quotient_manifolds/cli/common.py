"""What commands share: how they end, their options, and output and progress in a terminal.

Nothing here or in a command's module imports torch before the command runs: help is to come at once.
"""

from __future__ import annotations

import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich import progress
from rich.console import Console

from quotient_manifolds.messages import Progress, sentence, without_advice

if TYPE_CHECKING:
    import torch

NEGATIVE_FINDING = 1
FIGURES = (".svg", ".pdf", ".png")
DATA = "A .jsonl, .csv, .tsv, .txt or .npz file, or package.module:function, a function that returns batches."
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


def _figure(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    if value is not None and value.suffix not in FIGURES:
        raise click.BadParameter(f"must be {', '.join(FIGURES)}. Found {value.name!r}")
    return value


quiet_option = click.option(
    "--quiet",
    is_flag=True,
    expose_value=False,
    callback=lambda context, parameter, value: context.meta.update(quiet=value),
    help="Print nothing but errors.",
)
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
more_inputs = click.option(
    "--inputs",
    metavar="PACKAGE.MODULE:FUNCTION",
    multiple=True,
    help="A function that returns inputs on which the model must compute the same, besides those made from its "
    "configuration; may be given several times.",
)
figure_option = click.option(
    "--figure", type=click.Path(path_type=Path), callback=_figure, help="Draw the result into this .svg, .pdf or .png."
)
task_option = click.option(
    "--task",
    type=click.Choice(("classification", "causal")),
    help="What a model of text predicts: a label, or the next token, for which the data need no labels and may be a "
    ".txt file.  [default: classification]",
)
batch_size_option = click.option("--batch-size", type=click.IntRange(min=1), help="Examples in a batch.  [default: 32]")


def run_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --seed, --device and --quiet."""
    return seed_option(device_option(quiet_option(function)))


# ---- the terminal


def _is_quiet() -> bool:
    context = click.get_current_context(silent=True)
    return context is not None and context.meta.get("quiet", False)


def show(*blocks: object) -> None:
    """Print sentences and tables to standard output, unless --quiet is given."""
    for block in () if _is_quiet() else blocks:
        click.echo(str(block))  # which an ASCII terminal takes, too


def say_failures(failures: Sequence[str]) -> None:
    """Print a line for each failure to standard error, and leave with exit code 1 if there is one."""
    for failed in failures:
        click.echo(f"Failed: {failed}", err=True)
    if failures:
        raise click.exceptions.Exit(NEGATIVE_FINDING)


@contextmanager
def findings_alone() -> Iterator[None]:
    """Print warnings, inside, without advice on arguments of Python that are no options of a command."""
    with warnings.catch_warnings():
        show = warnings.showwarning
        warnings.showwarning = lambda message, *others, **more: show(without_advice(str(message)), *others, **more)
        yield


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """Yield a function that shows one bar for each thing it is told about, unless --quiet is given."""
    with progress.Progress(console=Console(stderr=True), disable=_is_quiet()) as bars:
        tasks: dict[str, Any] = {}

        def report(what: str, finished: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=finished, total=total)

        yield report


def command_line() -> str:
    """Return the command that is being run, to be run again."""
    return shlex.join(["quotient-manifolds", *sys.argv[1:]])
