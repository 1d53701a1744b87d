"""The command group. A command is imported when it is used: `--help` needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import click

from quotient_manifolds.cli.exits import OUTPUT_CLOSED, discard_output
from quotient_manifolds.cli.options import EXIT_CODES
from quotient_manifolds.version import VERSION

COMMANDS = {  # and the first sentence of the help of each
    "compare": "Measure every checkpoint that the YAML file SPEC names, and rank the measures.",
    "demo": "Train, measure and rank a zoo of small vision transformers.",
    "export": "Write all that STORE holds to FILE, a .csv, .parquet or .json.",
    "inspect": "Print the continuous symmetries of MODEL and prove each.",
    "measure": "Measure the worst-case sharpness of MODEL on DATA.",
    "move": "Move the Hugging Face model in IN along its symmetry orbit and write it to OUT.",
    "orbit": "Measure the sharpness of MODEL before and after moving it along its symmetry orbit.",
}


class Commands(click.Group):
    """A group whose commands are modules of this package, each with a command of its own name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        found: click.Command = getattr(import_module(f"quotient_manifolds.cli.{cmd_name}"), cmd_name)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))

    def make_context(self, *args: Any, **settings: Any) -> click.Context:
        with _told_apart():
            return super().make_context(*args, **settings)

    def invoke(self, ctx: click.Context) -> Any:
        with _told_apart():
            return super().invoke(ctx)


@contextmanager
def _told_apart() -> Iterator[None]:
    """A closed output ends with a code of its own: click, to which it is any error, makes 1 of it."""
    try:
        yield
    except BrokenPipeError:
        discard_output()
        raise click.exceptions.Exit(OUTPUT_CLOSED) from None


@click.group(cls=Commands, epilog=EXIT_CODES)
@click.version_option(VERSION, prog_name="quotient-manifolds")
def cli() -> None:
    """Symmetries of neural networks, and sharpness that does not change along them."""
