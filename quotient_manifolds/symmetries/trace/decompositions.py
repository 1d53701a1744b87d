"""Decompose operations into simpler ones, so that the derivatives of each show which channels it keeps separate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from quotient_manifolds.symmetries.double_precision import grouped_product

aten = torch.ops.aten

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
    op.name().removeprefix("aten::").partition(".")[0]: function
    for op, function in torch._decomp.get_decompositions([getattr(aten, name) for name in _OF_TORCH]).items()
}
"""Decompositions by name of the operation; they return NotImplemented if the result would be no simpler."""
DECOMPOSITIONS["_grouped_mm"] = grouped_product


def _decomposition(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def put(function: Callable[..., Any]) -> Callable[..., Any]:
        DECOMPOSITIONS.update(dict.fromkeys(names, function))
        return function

    return put


@_decomposition("addmm", "baddbmm")
def _add_product(bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    made = a @ b if alpha == 1 else alpha * (a @ b)
    return made if beta == 0 else (bias if beta == 1 else beta * bias) + made


@_decomposition("convolution")
def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *others: Any) -> Any:
    if bias is None:
        return NotImplemented
    return aten.convolution.default(x, weight, None, *others) + _by_channel(bias, x.ndim)


@_decomposition("native_batch_norm")
def _batch_norm(
    x: Tensor, weight: Any, bias: Any, mean: Tensor, variance: Tensor, training: bool, _: float, eps: float
) -> Any:
    """Multiply each channel by a number and add another, if the running statistics are used."""
    if training:
        return NotImplemented
    size = (variance.double() + eps).rsqrt()
    made = _affine(x, _by_channel(size, x.ndim), _by_channel(-mean.double() * size, x.ndim)).to(x.dtype)
    return _affine(made, _by_channel(weight, x.ndim), _by_channel(bias, x.ndim)), mean, size


@_decomposition("_native_batch_norm_legit_no_training")
def _batch_norm_of_training(x: Tensor, weight: Any, bias: Any, mean: Tensor, variance: Tensor, *numbers: float) -> Any:
    return _batch_norm(x, weight, bias, mean, variance, False, *numbers)


@_decomposition("linalg_vector_norm")
def _vector_norm(x: Tensor, order: float = 2, axes: Any = None, keep: bool = False, *, dtype: Any = None) -> Any:
    if float(order) != 2 or axes is None or dtype is not None:
        return NotImplemented
    return x.square().sum(axes, keep).sqrt()


@_decomposition("var")
def _variance(x: Tensor, axes: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    if not axes:
        return NotImplemented
    count = math.prod(x.shape[axis] for axis in axes) - (1 if correction is None else correction)
    if count <= 0:  # the variance is not a number
        return NotImplemented
    squares = (x - x.mean(axes, keepdim=True)).square()
    return squares.sum(axes, keepdim) / count


@_decomposition("std")
def _deviation(x: Tensor, axes: Any = None, **options: Any) -> Any:
    found = _variance(x, axes, **options)
    return found if found is NotImplemented else found.sqrt()


@_decomposition("mul")
def _product(a: Any, b: Any) -> Any:
    """Multiply complex numbers by their real and imaginary parts, which are channels."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return NotImplemented
    if a.is_complex() and b.is_complex():
        (u, v), (x, y) = (torch.view_as_real(each.resolve_conj()).unbind(-1) for each in (a, b))
        return torch.view_as_complex(torch.stack([u * x - v * y, u * y + v * x], -1))
    z, x = (a, b) if a.is_complex() else (b, a)
    if not z.is_complex():
        return NotImplemented
    return torch.view_as_complex((torch.view_as_real(z.resolve_conj()) * x[..., None]).contiguous())


@_decomposition("glu")
def _gated(x: Tensor, axis: int = -1) -> Tensor:
    one, gate = x.split(x.shape[axis] // 2, axis)
    return one * gate.sigmoid()


@_decomposition("_prelu_kernel")
def _leaky(x: Tensor, slope: Tensor) -> Tensor:
    return torch.where(x > 0, x, slope * x)


@_decomposition("as_strided")
def _by_strides(x: Tensor, sizes: Sequence[int], strides: Sequence[int], offset: int | None = None) -> Any:
    """Index the memory of a tensor that covers all of it."""
    x = x.permute(sorted(range(x.ndim), key=lambda axis: -x.stride()[axis]))
    if not x.is_contiguous() or x.untyped_storage().nbytes() != x.numel() * x.element_size():
        return NotImplemented
    places = torch.full((), offset or 0)
    for size, stride in zip(sizes, strides, strict=True):
        places = places[..., None] + stride * torch.arange(size)
    return x.view(-1)[places.to(x.device)]


@_decomposition("index_select")
def _selected(x: Tensor, axis: int, index: Tensor) -> Any:
    return x[(slice(None),) * (axis % x.ndim) + (index.reshape(-1),)] if x.ndim else NotImplemented


@_decomposition("index")
def _picked(x: Tensor, places: Sequence[Tensor | None]) -> Any:
    """Replace masks by the indices of their nonzero entries."""
    masks = {id(each) for each in places if each is not None and each.ndim and each.dtype in (torch.bool, torch.uint8)}
    if not masks:
        return NotImplemented
    found = [each.nonzero().unbind(1) if each is not None and id(each) in masks else [each] for each in places]
    return aten.index.Tensor(x, [each for several in found for each in several])


@_decomposition("masked_fill")
def _masked_fill(x: Tensor, mask: Tensor, value: Any) -> Tensor:
    filled = value if isinstance(value, Tensor) else torch.full((), value, dtype=x.dtype, device=x.device)
    return torch.where(mask, filled, x)


@_decomposition("_weight_norm_interface")
def _weight_norm(v: Tensor, g: Tensor, axis: int = 0) -> tuple[Tensor, Tensor]:
    norm = v.square().sum([a for a in range(v.ndim) if a != axis % v.ndim], keepdim=True).sqrt()
    return v * (g / norm), norm


@_decomposition("_cdist_forward")
def _distances(a: Tensor, b: Tensor, order: float, *_: Any) -> Any:
    if order != 2:
        return NotImplemented
    return (a[..., :, None, :] - b[..., None, :, :]).square().sum(-1).sqrt()


@_decomposition("_euclidean_dist")
def _euclidean_distances(a: Tensor, b: Tensor) -> Any:
    return _distances(a, b, 2)


@_decomposition("copy")
def _copied(x: Tensor, source: Tensor, *_: Any) -> Tensor:
    """Return a copy of `source` in the shape of `x`."""
    return torch.zeros_like(x) + source


@_decomposition("_embedding_bag", "_embedding_bag_forward_only")
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
    """Compute sums, means or maxima (modes 0, 1, 2) of the rows of each bag of words."""
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


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _by_channel(numbers: Any, axes: int) -> Any:
    """Return numbers of channels in a shape that broadcasts over a tensor with `axes` axes, channels on axis 1."""
    return None if numbers is None else numbers.view(-1, *[1] * (axes - 2))
