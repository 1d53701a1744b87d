"""Write operations as several simpler ones, so that the derivatives of each say which channels it keeps apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quotient_manifolds.symmetries.double_precision import grouped_product
from quotient_manifolds.symmetries.wires import decompositions as simpler

aten = torch.ops.aten


def _weight_norm(v: Tensor, g: Tensor, axis: int = 0) -> tuple[Tensor, Tensor]:
    norm = v.square().sum([a for a in range(v.ndim) if a != axis % v.ndim], keepdim=True).sqrt()
    return v * (g / norm), norm


def _distances(a: Tensor, b: Tensor, order: float, *_: Any) -> Any:
    if order != 2:
        return NotImplemented
    return (a[..., :, None, :] - b[..., None, :, :]).square().sum(-1).sqrt()


def _copied(x: Tensor, source: Tensor, *_: Any) -> Tensor:
    """A copy of `source` in the shape of `x`."""
    return torch.zeros_like(x) + source


def _bags(
    weight: Tensor,
    words: Tensor,
    offsets: Tensor,
    _: bool = False,
    mode: int = 0,
    sparse: bool = False,
    factors: Tensor | None = None,
    last: bool = False,
    padding: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sums, means or maxima (modes 0, 1, 2) of the rows of each bag of words."""
    offsets = offsets[:-1] if last else offsets
    bag = torch.searchsorted(offsets, torch.arange(len(words), device=words.device), right=True) - 1
    shown = (words != padding)[:, None].to(weight.dtype)
    counts = shown.new_zeros(len(offsets), 1).index_add(0, bag, shown)
    rows = aten.embedding.default(weight, words)
    rows = rows if factors is None else rows * factors[:, None]
    empty = rows.new_zeros(len(offsets), rows.shape[1])
    if mode == 2:
        places = bag[shown[:, 0] > 0][:, None].expand(-1, rows.shape[1])
        made = empty.scatter_reduce(0, places, rows[shown[:, 0] > 0], "amax", include_self=False)
    else:
        made = empty.index_add(0, bag, rows * shown)
        made = made / counts.clamp(min=1) if mode == 1 else made
    return made, bag, counts[:, 0].to(bag.dtype), bag


_OF_TORCH = (
    "native_layer_norm",
    "native_group_norm",
    "addcmul",
    "addcdiv",
    "embedding_renorm",
    "_trilinear",
    "_native_batch_norm_legit",
)

DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    **{
        op.name().removeprefix("aten::").partition(".")[0]: function
        for op, function in torch._decomp.get_decompositions([getattr(aten, name) for name in _OF_TORCH]).items()
    },
    **{name: made for name, made in simpler.DECOMPOSITIONS.items() if not name.startswith("native_")},
    "native_batch_norm": simpler.DECOMPOSITIONS["native_batch_norm"],
    "_grouped_mm": grouped_product,
    "_weight_norm_interface": _weight_norm,
    "_cdist_forward": _distances,
    "_euclidean_dist": lambda a, b: _distances(a, b, 2),
    "copy": _copied,
    "_embedding_bag": _bags,
    "_embedding_bag_forward_only": _bags,
}
"""By the name of an operation what it is made of; NotImplemented where that is no simpler."""
