"""Define the exit codes, options, output and progress bars that commands share.

No module of a command imports torch before the command runs, so that help is printed at once.
"""

from __future__ import annotations

import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich import progress
from rich.console import Console

from quotient_manifolds.data_options import OPTIONS, Option
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
    """Print one sentence on standard error, and leave with exit code 2."""

    exit_code = 2


class Commands(click.Group):
    """Run commands; errors about bad input become one sentence, any other error is a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: click.echo(f"Warning: {message}", err=True)
            try:
                return super().invoke(ctx)
            except (KeyboardInterrupt, click.Abort):
                raise BadInput("Interrupted") from None
            except BrokenPipeError:  # the reader of the output has exited, as in `| head -1`; click exits with 1
                raise
            except (ValueError, TypeError, ImportError, OSError, MemoryError) as error:
                raise BadInput(sentence(error)) from error


# ---- options

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def command(function: Callable[..., Any]) -> click.Command:
    """Turn a function with click's options into a command of the same name."""
    return click.command(epilog=EXIT_CODES)(function)


def _usable_device(context: click.Context, parameter: click.Parameter, value: str) -> torch.device:
    import torch

    try:
        device = torch.device(value)
        float(torch.zeros(1, device=device))  # fails on "meta", whose tensors have no values
    except Exception as error:  # torch and its backends raise a dozen types
        raise click.BadParameter(f"{value!r} cannot be used here: {str(error).partition('. ')[0]}") from error
    return device


def _figure(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    if value is not None and value.suffix not in FIGURES:
        raise click.BadParameter(f"must be {', '.join(FIGURES)}. Found {value.name!r}")
    return value


def directory_option(text: str, **settings: Any) -> Decorator:
    """Return the option --out for a directory."""
    return click.option("--out", type=click.Path(path_type=Path, file_okay=False), help=text, **settings)


def record_option(what: str) -> Decorator:
    """Return the option --out for a JSON file."""
    return click.option("--out", type=click.Path(path_type=Path), help=f"Write the {what} to this JSON file.")


def count_option(flag: str, text: str, *, least: int = 1, **settings: Any) -> Decorator:
    """Return an option for an integer of at least `least`; its default, if it has one, is shown."""
    settings = {"show_default": "default" in settings, **settings}
    return click.option(flag, type=click.IntRange(min=least), help=text, **settings)


def data_options(*names: str, **helps: str) -> Decorator:
    """Return a decorator that adds data options by name; `data_settings` returns their values.

    helps: data options with a different help text, by name.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in reversed([name for name in OPTIONS if name in {*names, *helps}]):
            option = OPTIONS[name]
            function = _data_option(name, replace(option, help=helps.get(name, option.help)))(function)
        return function

    return decorate


def _data_option(name: str, option: Option) -> Decorator:
    def keep(context: click.Context, parameter: click.Parameter, value: Any) -> None:
        if value not in (None, ()):
            data_settings(context)[name] = dict(value) if option.is_mapping else value

    kind: Any = click.IntRange(min=option.kind) if isinstance(option.kind, int) else option.kind
    return click.option(
        option.flag or f"--{name.replace('_', '-')}",
        f"data_{name}",  # `seed` is an option of the command, too
        type=kind if option.is_mapping or isinstance(option.kind, int) else click.Choice(kind),
        multiple=option.is_mapping,
        metavar=option.metavar,
        help=option.help,
        expose_value=False,
        callback=keep,
    )


def data_settings(context: click.Context | None = None) -> dict[str, Any]:
    """Return the data options that were given to the command, by their names in `DataSource`."""
    settings: dict[str, Any] = (context or click.get_current_context()).meta.setdefault("data_settings", {})
    return settings


quiet_option = click.option(
    "--quiet",
    is_flag=True,
    expose_value=False,
    callback=lambda context, parameter, value: context.meta.update(quiet=value),
    help="Print nothing but errors.",
)
device_option = click.option(
    "--device", default="cpu", show_default=True, callback=_usable_device, help="Device: cpu, cuda, cuda:1, ..."
)
seed_option = click.option(
    "--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True, help="Seed of all random numbers."
)
symmetries_option = click.option(
    "--symmetries",
    metavar="all|pairs|paper|PACKAGE.MODULE:FUNCTION",
    help="Symmetries of the model: all, pairs (with redundant biases) or paper (pairs with biases as rows); or a "
    "function of the model that declares them.  [default: all]",
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
    help="A function that returns further inputs on which the function must not change; may be given several times.",
)
figure_option = click.option(
    "--figure", type=click.Path(path_type=Path), callback=_figure, help="Draw the result into this .svg, .pdf or .png."
)


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
        click.echo(str(block))  # rich would fail on an ASCII terminal


def exit_if_failed(failures: Sequence[str]) -> None:
    """Print a line for each failure to standard error, and leave with exit code 1 if there is one."""
    for failure in failures:
        click.echo(f"Failed: {failure}", err=True)
    if failures:
        raise click.exceptions.Exit(NEGATIVE_FINDING)


@contextmanager
def warnings_without_advice() -> Iterator[None]:
    """Print warnings inside the block without advice on Python arguments, which no command takes."""
    with warnings.catch_warnings():
        show = warnings.showwarning
        warnings.showwarning = lambda message, *others, **more: show(without_advice(str(message)), *others, **more)
        yield


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """Yield a function that shows a progress bar for each task, unless --quiet is given."""
    with progress.Progress(console=Console(stderr=True), disable=_is_quiet()) as bars:
        tasks: dict[str, Any] = {}

        def report(what: str, finished: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=finished, total=total)

        yield report


@contextmanager
def step(progress: Progress, what: str) -> Iterator[None]:
    """Report the start and the end of a task with a single part."""
    progress(what, 0, 1)
    yield
    progress(what, 1, 1)


def command_line() -> str:
    """Return the present command line, quoted for a shell."""
    return shlex.join(["quotient-manifolds", *sys.argv[1:]])
