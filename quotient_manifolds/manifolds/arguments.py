"""Check what a manifold is to compute with, also tensors whose values are not known (`torch.func.vmap`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TOO_LONG = "if steps of an optimizer led there, take a smaller learning rate (lr), which is a length in the metric"
NOT_FINITE = f"the entries of a point must be finite. Found NaN or infinity: {TOO_LONG}"

PRECISIONS = (torch.float32, torch.float64)


def require_sizes(n: Any, m: Any, eps: Any) -> None:
    """Raise ValueError unless n and m are integers of at least 1, and eps a finite number >= 0."""
    for name, k in (("n", n), ("m", m)):
        if not isinstance(k, int) or isinstance(k, bool) or k < 1:
            raise ValueError(f"{name}, a number of rows, must be an integer of at least 1. Found {name} = {k!r}")
    if not isinstance(eps, (int, float)) or isinstance(eps, bool) or not 0 <= eps < float("inf"):
        raise ValueError(f"eps must be a finite number >= 0. Found {eps!r}")


def require_tensor(x: Any, name: str, complex_too: bool = False) -> None:
    """Raise TypeError unless x is a tensor, ValueError unless its entries are of single or double precision."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch tensor. Found {type(x).__name__}")
    if x.dtype not in PRECISIONS and not (complex_too and x.is_complex()):
        raise ValueError(f"{name} must be in float32 or float64. Found {x.dtype}: cast it, e.g. with .float()")


def has_values(x: Tensor) -> bool:
    """Tell whether Python code may look at the entries: not under `torch.func.vmap`."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            return False
        x = functorch.get_unwrapped(x)
    return True


def some(condition: Tensor) -> bool:
    """Tell whether any entry is True; False where there are no values to look at."""
    return has_values(condition) and bool(condition.any())


def all_finite(x: Tensor) -> bool:
    """Tell whether no entry is NaN or infinite; True where there are no values to look at."""
    # A sum of finite entries can overflow, so only a finite one decides: one pass instead of several.
    return not has_values(x) or bool(x.detach().sum().isfinite()) or bool(torch.isfinite(x).all())


def require_vector(x: Tensor, eta: Tensor, ndim: int = 2, what: str = "vector and point") -> None:
    """Raise ValueError unless eta has the trailing shape, dtype and device of the point x and broadcasts against it."""
    require_tensor(eta, "a vector")
    shapes = f"Found shape {tuple(eta.shape)} at {tuple(x.shape)}"
    if eta.ndim < ndim or eta.shape[-ndim:] != x.shape[-ndim:]:
        raise ValueError(f"{what} must end in one shape, {tuple(x.shape[-ndim:])}. {shapes}")
    if (eta.dtype, eta.device) != (x.dtype, x.device):
        found = f"{eta.dtype} on {eta.device} at a point of {x.dtype} on {x.device}"
        raise ValueError(f"{what} must have one dtype and one device. Found {found}: cast or move one")
    if not broadcast(x.shape[: x.ndim - ndim], eta.shape[: eta.ndim - ndim]):
        raise ValueError(f"{what} must have leading dimensions, the batch, that broadcast. {shapes}")


def broadcast(a: torch.Size, b: torch.Size) -> bool:
    """Tell whether two batches go together."""
    return all(1 in pair or pair[0] == pair[1] for pair in zip(reversed(a), reversed(b), strict=False))


def require_element(A: Any, batch: torch.Size, shape: tuple[int, ...], complex_too: bool) -> None:
    """Raise TypeError or ValueError unless A is a tensor (..., *shape) that goes with a batch of points."""
    require_tensor(A, "A, an element of the group,", complex_too)
    split = A.ndim - len(shape)
    if split < 0 or tuple(A.shape[split:]) != shape or not broadcast(A.shape[:split], batch):
        wanted = ", ".join(["...", *map(str, shape)])
        raise ValueError(f"A must have shape ({wanted}) for a batch {tuple(batch)} of points. Found {tuple(A.shape)}")
