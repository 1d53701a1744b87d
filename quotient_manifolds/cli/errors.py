"""Say what goes wrong: bad input in one sentence with exit code 2, a defect of this package with a traceback."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from quotient_manifolds.cli.exits import INTERRUPTED, OUTPUT_CLOSED, discard_output
from quotient_manifolds.messages import innermost, is_users, one_line


class BadInput(click.ClickException):
    """Say one sentence on standard error, and leave with exit code 2."""

    exit_code = 2


class Commands(click.Group):
    """Run commands, and turn what goes wrong in them into one sentence and an exit code."""

    def make_context(self, *args: Any, **settings: Any) -> click.Context:
        with _one_sentence():
            return super().make_context(*args, **settings)

    def invoke(self, ctx: click.Context) -> Any:
        with _one_sentence(), _warnings_inone_line():
            return super().invoke(ctx)


@contextmanager
def _one_sentence() -> Iterator[None]:
    """Make what the package says about bad input the message of a command; let Ctrl-C leave quietly.

    What goes wrong in the user's own code is said likewise, with its place there. Only errors of this package's code
    and of libraries are left to be seen as defects.
    """
    try:
        yield
    except (click.ClickException, click.exceptions.Exit):
        raise
    except BrokenPipeError:  # of which click would make exit code 1
        discard_output()
        raise click.exceptions.Exit(OUTPUT_CLOSED) from None
    except (KeyboardInterrupt, click.Abort):
        click.echo("Interrupted.", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None
    except SystemExit as left:
        raise BadInput(_with_place(f"The program was told to end by sys.exit({left.code!r})", left)) from left
    except (ValueError, TypeError, ImportError, OSError, SyntaxError) as error:
        raise BadInput(_with_place(one_line(error), error)) from error
    except MemoryError as error:
        raise BadInput(f"There is not enough memory for this: {one_line(error)}") from error
    except BaseException as error:
        if is_out_of_memory(error):
            raise BadInput(f"The device has not enough memory: {first_sentence(error)}") from error
        if place_in_users_code(error) is None:
            raise
        raise BadInput(_with_place(f"{type(error).__name__}: {one_line(error)}", error)) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether torch found no memory on a device; torch need not be imported to tell."""
    return type(error).__name__ == "OutOfMemoryError"


def first_sentence(error: BaseException) -> str:
    return one_line(error).partition(". ")[0]


def place_in_users_code(error: BaseException) -> str | None:
    """Return file, line and function of the user's code in which the error, or its cause, arose; or None.

    Code in the standard library or among installed packages is not the user's, nor is this package.
    """
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__
    for each in reversed(chain):  # what was raised first says most
        if (frame := innermost(each, is_users)) is not None:
            where = "at import" if frame.name == "<module>" else f"in {frame.name}"
            return f"{frame.filename}, line {frame.lineno}, {where}"
    return None


def _with_place(sentence: str, error: BaseException) -> str:
    place = place_in_users_code(error)
    return sentence if place is None else f"{sentence.rstrip('.')} ({place})."


@contextmanager
def _warnings_inone_line() -> Iterator[None]:
    """Show a warning of the package as one line on standard error, and only the first of equal ones."""
    with warnings.catch_warnings():
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if category.__module__.startswith("quotient_manifolds."):
                click.echo(f"Warning: {message}", err=True)
            else:
                others(message, category, *where, **more)

        warnings.showwarning = show
        yield
