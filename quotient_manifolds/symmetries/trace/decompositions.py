"""Write operations as several simpler ones, so that the derivatives of each say which channels it keeps apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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
    "_weight_norm_interface": _weight_norm,
    "_cdist_forward": _distances,
    "_euclidean_dist": lambda a, b: _distances(a, b, 2),
    "copy": _copied,
}
"""By the name of an operation what it is made of; NotImplemented where that is no simpler."""
