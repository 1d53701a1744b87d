"""Refuse what processes that share a model must not do each in a way of its own: they would wait for each other."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from quotient_manifolds.sharded import ShardedModel, from_all


def check_agreed(settings: Mapping[str, Any]) -> None:
    """Raise ValueError on all processes unless all of them have the same settings."""
    own = dict(settings)
    for other in from_all(own):
        for name in own.keys() | other.keys():
            if own.get(name) != other.get(name):
                raise ValueError(
                    f"All processes must measure the same. Found {name} {own.get(name)!r} on this one and "
                    f"{other.get(name)!r} on another"
                )


def check_shares(model: ShardedModel, batches: Sequence[Any]) -> None:
    """Warn where processes have tensors of different shapes: the mean over processes is not the one over rows then.

    Raises ValueError on all processes where one of them has no rows at all, and where all must have the same.
    """
    own = [tuple(_shapes(batch)) for batch in batches]
    every = from_all(own)
    different = [pair for other in every for pair in zip(own, other, strict=True) if pair[0] != pair[1]]
    if not different:
        return
    mine, theirs = map(list, different[0])
    found = f"Found one with tensors of shapes {mine} on this process and {theirs} on another"
    if model.alike:
        raise ValueError(f"Under tensor parallelism all processes must have the same batches. {found}")
    if any(shape[:1] == (0,) for batches in every for shapes in batches for shape in shapes):
        raise ValueError(f"All processes must have rows of every batch. {found}")
    warnings.warn(
        f"The loss is the mean over processes, however much of a batch each of them has. {found}; give all as many "
        f"rows and labels, or read the value as such a mean",
        stacklevel=2,
    )


def check_same_loss(losses: Tensor, precision: float, index: int) -> None:
    """Raise ValueError where processes that must have the same loss have different ones: they have different data."""
    if bool(losses.max() - losses.min() > min(64 * precision, 1e-3) * losses.abs().max()):
        raise ValueError(
            f"Under tensor parallelism all processes must have the same batches. Found losses from "
            f"{float(losses.min())!r} to {float(losses.max())!r} of batch {index}"
        )


def _shapes(batch: Any) -> Iterator[tuple[int, ...]]:
    for leaf in tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch):
        if isinstance(leaf, Tensor):
            yield tuple(leaf.shape)
        elif isinstance(leaf, Mapping):  # Hugging Face's BatchEncoding, which torch takes for a leaf
            yield from _shapes(leaf)
