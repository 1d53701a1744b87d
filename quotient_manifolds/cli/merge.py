"""Merge LoRA adapters on disk into one, in weight space."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from quotient_manifolds.cli import common
from quotient_manifolds.files import check_new


@common.command
@click.argument("adapters", metavar="ADAPTER...", nargs=-1, required=True)
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--weight",
    "weights",
    type=float,
    multiple=True,
    help="Weight of an adapter, not normalised; once for each, in their order.  [default: 1/k for each of k]",
)
@click.option("--rank", type=int, help="Rank of the result.  [default: in each module the largest of the adapters]")
@common.quiet_option
def merge(adapters: Sequence[str], target: Path, weights: Sequence[float], rank: int | None) -> None:
    """Merge LoRA adapters of one base model into one adapter of peft, in the new directory OUT.

    Each ADAPTER is a directory of peft with safetensors weights. The result adds to every weight of the base model the
    weighted mean of the adapters' updates, or the matrix of the given rank that is closest to it. It does not depend on
    how an adapter is factored. Heads and other tensors that are stored whole must be in all adapters, and are averaged.

    For each module the part of the mean that the truncation cuts off is printed (relative, in the Frobenius norm).
    """
    check_new(target, *adapters)
    from quotient_manifolds.merge import merge_adapters

    merged = merge_adapters(adapters, weights or None, rank=rank)
    merged.save(target)
    common.show(f"{target}: {merged}")
