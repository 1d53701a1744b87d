"""Merge LoRA adapters on disk to one, by what they add to the weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from quotient_manifolds.cli.errors import BadInput
from quotient_manifolds.cli.options import command, quiet_option
from quotient_manifolds.cli.terminal import Terminal
from quotient_manifolds.report import Table

if TYPE_CHECKING:
    from quotient_manifolds.merge import MergedAdapter


def _numbers(context: click.Context, parameter: click.Parameter, value: str | None) -> list[float] | None:
    try:
        return None if value is None else [float(part) for part in value.split(",")]
    except ValueError:
        raise click.BadParameter(f"expected numbers with commas between them, as 0.7,0.3; found {value!r}") from None


@command
@click.argument("adapters", metavar="ADAPTER...", nargs=-1, required=True)
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--weights",
    callback=_numbers,
    metavar="W,W,...",
    help="A number for each adapter, taken as it is.  [default: 1/k for each of k]",
)
@click.option("--rank", type=int, help="Of the merged adapter.  [default: in each module the largest of the adapters]")
@quiet_option
def merge(adapters: tuple[str, ...], target: Path, weights: list[float] | None, rank: int | None, quiet: bool) -> None:
    """Merge LoRA adapters of one base model to one adapter of peft in the new directory OUT.

    Each ADAPTER is a directory of peft with safetensors weights. The result adds to every weight of the base model the
    weighted mean of what the adapters add to it, or what is closest to that at the given rank. It does not depend on
    how an adapter is factored. Heads and other tensors that are stored whole must be in all adapters, and are averaged.

    The table says, module by module, which part of the mean is lost by the truncation (in the Frobenius norm).
    """
    if target.exists():
        raise BadInput(f"{target} is there already; give a new directory.")
    if not target.absolute().parent.is_dir():
        raise BadInput(f"{target.absolute().parent} is no directory to write {target.name} into.")
    from quotient_manifolds.merge import merge_adapters

    merged = merge_adapters(adapters, weights, rank=rank)
    merged.save(target)
    if not quiet:
        given = ", ".join(f"{weight:.3g}" for weight in merged.weights)
        Terminal().show(
            _modules(merged),
            f"{target}: {len(adapters)} adapters merged with the weights {given}; of all updates together "
            f"{merged.relative_error:.2%} is lost.",
        )


def _modules(merged: MergedAdapter) -> Table:
    rows = [
        (
            module.name,
            " x ".join(map(str, module.size)),
            ", ".join(map(str, module.ranks)),
            str(module.rank),
            f"{module.relative_error:.2%}",
        )
        for module in merged.modules
    ]
    columns = ("Module", "Update", "Ranks", "Merged rank", "Lost")
    return Table("merged", "What the adapters add to the weights", columns, rows, (False, False, False, True, True))
