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
    help="Weight of an adapter, not normalized; give one for each, in order.  [default: 1/k for k adapters]",
)
@click.option("--rank", type=int, help="Rank of the result.  [default: the largest of the adapters, in each module]")
@common.quiet_option
def merge(adapters: Sequence[str], target: Path, weights: Sequence[float], rank: int | None) -> None:
    """Merge LoRA adapters of one base model into one peft adapter, in the new directory OUT.

    Each ADAPTER is a peft directory with safetensors weights. The result adds the weighted mean of the adapters'
    updates to every weight of the base model, or the closest matrix of the given rank. It does not depend on how an
    adapter is factored. Full tensors, such as heads, must be in all adapters, and are averaged.

    For each module the relative error of the truncation in the Frobenius norm is printed.
    """
    check_new(target, *adapters)
    from quotient_manifolds.merge import merge_adapters

    merged = merge_adapters(adapters, weights or None, rank=rank)
    merged.save(target)
    common.show(f"{target}: {merged}")
