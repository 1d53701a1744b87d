"""The command group."""

from __future__ import annotations

import click

from quotient_manifolds.cli.compare import compare
from quotient_manifolds.cli.demo import demo
from quotient_manifolds.cli.export import export
from quotient_manifolds.cli.inspect import inspect
from quotient_manifolds.cli.measure import measure
from quotient_manifolds.cli.move import move
from quotient_manifolds.cli.options import EXIT_CODES
from quotient_manifolds.cli.orbit import orbit
from quotient_manifolds.cli.study import study
from quotient_manifolds.version import VERSION


@click.group(epilog=EXIT_CODES)
@click.version_option(VERSION, prog_name="quotient-manifolds")
def cli() -> None:
    """Symmetries of neural networks, and sharpness that does not change along them."""


cli.add_command(compare)
cli.add_command(demo)
cli.add_command(export)
cli.add_command(inspect)
cli.add_command(measure)
cli.add_command(move)
cli.add_command(orbit)
cli.add_command(study)
