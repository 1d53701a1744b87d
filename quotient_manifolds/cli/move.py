"""quotient-manifolds move: another model with the same function, for testing any measure for invariance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from quotient_manifolds.cli.options import EXIT_CODES, inputs_option, one_sentence_errors, symmetries_option


@click.command(epilog=EXIT_CODES)
@click.argument("source", metavar="IN")
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--balance", "balanced", is_flag=True, help="To the canonical representative instead of a random one.")
@click.option("--scale", type=float, default=1.0, show_default=True, help="Of the random group elements.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the random group elements.")
@inputs_option
@symmetries_option
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
@one_sentence_errors
def move(**settings: Any) -> None:
    """Move the Hugging Face model in IN along its symmetry orbit and write it to the new directory OUT.

    The weights become others, of the same dtype; the function stays the same up to rounding, which is checked on
    example inputs before OUT is there. Only symmetries that are proved on these inputs are used. Files beside the
    weights, such as a tokenizer, are copied.
    """
    from quotient_manifolds.cli.relocating import relocate

    relocate(**settings)
