"""Compute in float64 even if a model casts to a narrower type, optionally with another eps in its norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

NARROW = (torch.float32, torch.float16, torch.bfloat16)
LARGEST_EPS = 2e-3  # the norms of Keras have 1e-3; larger numbers that are added to a tensor are not an eps

_CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)
_SUMS = (Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__, torch.add)
_PLACE_OF_EPS = {  # norms by statistics of their inputs only; norms by running statistics are linear for any eps
    F.layer_norm: 4,
    torch.layer_norm: 4,
    torch.native_layer_norm: 4,
    F.group_norm: 4,
    torch.group_norm: 4,
    F.rms_norm: 3,
    torch.rms_norm: 3,
    F.instance_norm: 7,
}


def grouped_product(
    x: Tensor,
    weights: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """Multiply rows (n, i) by the matrix (groups, i, o) of their group; the rows of group k end at offs[k].

    torch has no such product in float64. Returns NotImplemented for other arguments of `torch._grouped_mm`.
    """
    if offs is None or bias is not None or (x.ndim, weights.ndim) != (2, 3):
        return NotImplemented
    group = torch.searchsorted(offs, torch.arange(len(x), dtype=offs.dtype, device=x.device), right=True)
    made = x.new_zeros(len(x), weights.shape[2])
    for number in range(len(weights)):
        rows = (group == number).nonzero()[:, 0]
        made = made.index_add(0, rows, x[rows] @ weights[number])
    return made if out_dtype is None else made.to(out_dtype)


class DoublePrecision(TorchFunctionMode):
    """Make every floating point result float64, whatever type the code under this mode requests, and replace each eps.

    Models with RMSNorm cast to float32 inside, and so do many softmaxes. Their derivatives are then accurate to 1e-8
    only, which hides a rank. eps: replaces the eps of norms, either an argument (`F.layer_norm`) or an added number of
    at most LARGEST_EPS (`torch.rsqrt(variance + 1e-6)`); None keeps it. found_eps: whether an eps occurred.
    """

    def __init__(self, eps: float | None = None) -> None:
        super().__init__()
        self.eps, self.found_eps = eps, False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args = tuple(map(_widened, args))
        kwargs = {name: _widened(argument) for name, argument in (kwargs or {}).items()}
        if func in _CASTS:
            return args[0].double()
        if func in (torch.tensor, torch.full) and any(isinstance(value, float) for value in (*args, *kwargs.values())):
            kwargs = {"dtype": torch.float64, **kwargs}  # the smallest float64 masks attention and overflows float32
        if func in _PLACE_OF_EPS:
            args, kwargs = self._with_eps(_PLACE_OF_EPS[func], args, kwargs)
        elif func in _SUMS and len(args) == 2 and isinstance(args[1], float) and 0 < args[1] <= LARGEST_EPS:
            self.found_eps = True
            args = args if self.eps is None else (args[0], self.eps)
        grouped = grouped_product(*args, **kwargs) if func is torch._grouped_mm else NotImplemented
        result = func(*args, **kwargs) if grouped is NotImplemented else grouped
        return tree_map(_double, result) if isinstance(result, (tuple, list)) else _double(result)

    def _with_eps(
        self, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.found_eps = True
        if self.eps is None:
            return args, kwargs
        if len(args) > place:
            return (*args[:place], self.eps, *args[place + 1 :]), kwargs
        return args, {**kwargs, "eps": self.eps}


def _widened(argument: Any) -> Any:
    return torch.float64 if isinstance(argument, torch.dtype) and argument in NARROW else argument


def _double(result: Any) -> Any:
    return result.double() if isinstance(result, Tensor) and result.dtype in NARROW else result
