"""Merge LoRA adapters on disk to one, in weight space."""

from __future__ import annotations

from pathlib import Path

import click

from quotient_manifolds.cli import common


def _numbers(context: click.Context, parameter: click.Parameter, value: str | None) -> list[float] | None:
    try:
        return None if value is None else [float(part) for part in value.split(",")]
    except ValueError:
        raise click.BadParameter(f"expected numbers with commas between them, as 0.7,0.3; found {value!r}") from None


@common.command
@click.argument("adapters", metavar="ADAPTER...", nargs=-1, required=True)
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--weights",
    callback=_numbers,
    metavar="W,W,...",
    help="A number for each adapter, taken as it is.  [default: 1/k for each of k]",
)
@click.option("--rank", type=int, help="Of the merged adapter.  [default: in each module the largest of the adapters]")
@common.quiet_option
def merge(adapters: tuple[str, ...], target: Path, weights: list[float] | None, rank: int | None, quiet: bool) -> None:
    """Merge LoRA adapters of one base model to one adapter of peft in the new directory OUT.

    Each ADAPTER is a directory of peft with safetensors weights. The result adds to every weight of the base model the
    weighted mean of what the adapters add to it, or what is closest to that at the given rank. It does not depend on
    how an adapter is factored. Heads and other tensors that are stored whole must be in all adapters, and are averaged.

    Printed is, module by module, which part of the mean is lost by the truncation (in the Frobenius norm).
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
