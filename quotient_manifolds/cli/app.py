"""Gather the commands."""

from __future__ import annotations

import click

from quotient_manifolds.cli import common
from quotient_manifolds.cli.align import align, descend
from quotient_manifolds.cli.compare import compare, demo, measure
from quotient_manifolds.cli.inspect import inspect
from quotient_manifolds.cli.merge import merge
from quotient_manifolds.cli.orbit import move, orbit
from quotient_manifolds.version import VERSION


@click.group(cls=common.Commands, epilog=common.EXIT_CODES)
@click.version_option(VERSION, prog_name="quotient-manifolds")
def cli() -> None:
    """Find symmetries of neural networks, measure sharpness that is invariant under them, and use them."""


for _command in (align, compare, demo, descend, inspect, measure, merge, move, orbit):
    cli.add_command(_command)
