"""Gather the commands. None imports torch before it runs, so that help comes at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from quotient_manifolds.cli.compare import compare
from quotient_manifolds.cli.demo import demo
from quotient_manifolds.cli.exits import OUTPUT_CLOSED, discard_output
from quotient_manifolds.cli.export import export
from quotient_manifolds.cli.inspect import inspect
from quotient_manifolds.cli.measure import measure
from quotient_manifolds.cli.move import move
from quotient_manifolds.cli.options import EXIT_CODES
from quotient_manifolds.cli.orbit import orbit
from quotient_manifolds.version import VERSION


class Commands(click.Group):
    """Run a command; end with a code of its own when the output is closed, where click would end with 1."""

    def make_context(self, *args: Any, **settings: Any) -> click.Context:
        with _closed_output_told_apart():
            return super().make_context(*args, **settings)

    def invoke(self, ctx: click.Context) -> Any:
        with _closed_output_told_apart():
            return super().invoke(ctx)


@contextmanager
def _closed_output_told_apart() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        discard_output()
        raise click.exceptions.Exit(OUTPUT_CLOSED) from None


@click.group(cls=Commands, epilog=EXIT_CODES)
@click.version_option(VERSION, prog_name="quotient-manifolds")
def cli() -> None:
    """Symmetries of neural networks, and sharpness that does not change along them."""


for each in (compare, demo, export, inspect, measure, move, orbit):
    cli.add_command(each)
