"""Choose the pairs that an optimizer steps along, and refuse those that it has in part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from quotient_manifolds.symmetries import BESIDE_ATTENTION, SymmetricPair

Parameters = Iterable[tuple[str, Tensor]] | Iterable[Mapping[str, Any]]
"""Named parameters, as `model.named_parameters()` gives them, or groups of them with their own settings."""


def listed(params: Parameters) -> list[Any]:
    """Return named parameters, or groups of them, as a list; TypeError for a module or a tensor."""
    if isinstance(params, (torch.nn.Module, Tensor)) or not isinstance(params, Iterable):
        raise TypeError(
            "params should be named parameters, model.named_parameters(), or groups of such; found "
            f"{type(params).__name__}"
        )
    return list(params)


def is_optimized(pair: SymmetricPair, params: Mapping[str, Tensor], place: Mapping[str, int]) -> bool:
    """Tell whether all of a pair is trained here; ValueError for attention and adapters of which a part is."""
    own = [name for name in pair.names if name in params and params[name].requires_grad]
    if not own:
        return False
    absent = [name for name in pair.names if name not in own]
    if absent and pair.kind in BESIDE_ATTENTION:  # neurons and bottlenecks: their parameters are moved as all others
        return False
    cure = "or pass symmetries without it (Symmetries.without)"
    if absent:
        raise ValueError(
            f"the pair {pair.name!r} should be trained as a whole or not at all; {absent[0]} is frozen or not among "
            f"params: train or freeze all of it, {cure}"
        )
    if len({place[name] for name in own}) > 1:
        raise ValueError(
            f"the pair {pair.name!r} should be in one group of parameters; {', '.join(own)} are in several: put them "
            f"together, {cure}"
        )
    kinds = {(params[name].dtype, params[name].device) for name in own}
    if len(kinds) > 1:
        found = " and ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ValueError(f"the pair {pair.name!r} should be on one device in one dtype; found {found}: move it, {cure}")
    if pair.h > min(pair.n, pair.m):
        raise ValueError(
            f"the pair {pair.name!r} should have at most as many columns as rows; found {pair.h} columns and "
            f"{min(pair.n, pair.m)} rows: take a smaller rank, {cure}"
        )
    return True
