"""Merge LoRA adapters on disk into one, in weight space."""

from __future__ import annotations

from pathlib import Path

import click

from quotient_manifolds.cli import common


def _numbers(context: click.Context, parameter: click.Parameter, value: str | None) -> list[float] | None:
    try:
        return None if value is None else [float(part) for part in value.split(",")]
    except ValueError:
        raise click.BadParameter(f"must be numbers separated by commas, such as 0.7,0.3. Found {value!r}") from None


@common.command
@click.argument("adapters", metavar="ADAPTER...", nargs=-1, required=True)
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--weights",
    callback=_numbers,
    metavar="W,W,...",
    help="A number for each adapter, not normalised.  [default: 1/k for each of k]",
)
@click.option("--rank", type=int, help="Rank of the result.  [default: in each module the largest of the adapters]")
@common.quiet_option
def merge(adapters: tuple[str, ...], target: Path, weights: list[float] | None, rank: int | None, quiet: bool) -> None:
    """Merge LoRA adapters of one base model into one adapter of peft, in the new directory OUT.

    Each ADAPTER is a directory of peft with safetensors weights. The result adds to every weight of the base model the
    weighted mean of the adapters' updates, or the matrix of the given rank that is closest to it. It does not depend on
    how an adapter is factored. Heads and other tensors that are stored whole must be in all adapters, and are averaged.

    For each module the part of the mean that the truncation cuts off is printed (relative, in the Frobenius norm).
    """
    common.check_new(target)
    from quotient_manifolds.merge import merge_adapters

    merged = merge_adapters(adapters, weights, rank=rank)
    merged.save(target)
    if quiet:
        return
    for each in merged.modules:
        size, ranks = " x ".join(map(str, each.size)), ", ".join(map(str, each.ranks))
        common.show(f"{each.name}, {size}: ranks {ranks} to {each.rank}, {each.relative_error:.2%} lost")
    common.show(
        f"{target}: {len(adapters)} adapters merged with the weights "
        f"{', '.join(f'{weight:.3g}' for weight in merged.weights)}; of all updates together "
        f"{merged.relative_error:.2%} is lost."
    )
