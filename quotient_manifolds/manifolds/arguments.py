"""Check what a manifold is to compute with, also tensors whose values are not known (`torch.func.vmap`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TOO_LONG = "if steps of an optimizer led there, take a smaller learning rate (lr), which is a length in the metric"
NOT_FINITE = f"the entries of a point must be finite. Found NaN or infinity: {TOO_LONG}"

PRECISIONS = (torch.float32, torch.float64)


def require_sizes(n: Any, m: Any, eps: Any) -> None:
    """Raise TypeError or ValueError unless n and m are integers of at least 1, and eps a finite number >= 0."""
    for name, k in (("n", n), ("m", m)):
        if isinstance(k, bool) or not isinstance(k, int):
            raise TypeError(f"{name}, a number of rows, must be an integer. Found {k!r}")
        if k < 1:
            raise ValueError(f"{name}, a number of rows, must be at least 1. Found {name} = {k}")
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise TypeError(f"eps must be a number. Found {eps!r}")
    if not 0 <= eps < float("inf"):
        raise ValueError(f"eps must be a finite number >= 0. Found {eps}")


def require_tensor(x: Any, name: str, dtypes: tuple[torch.dtype, ...] = PRECISIONS) -> None:
    """Raise TypeError unless x is a tensor, ValueError unless it is dense, in one of these dtypes, and has values."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch tensor. Found {type(x).__name__}")
    if x.is_nested or x.layout != torch.strided:
        found = "a nested tensor" if x.is_nested else f"layout {x.layout}"
        raise ValueError(f"{name} must be a dense tensor. Found {found}: call .to_dense() or stack its parts")
    if x.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        cure = "give real and imaginary parts as real numbers" if x.is_complex() else "cast it, e.g. with .float()"
        raise ValueError(f"{name} must be in {names}. Found {x.dtype}: {cure}")
    if x.is_meta:
        raise ValueError(f"{name} must have values. Found a tensor on the meta device: load or initialise it first")


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


def require_no_vmap(what: str, *tensors: Tensor) -> None:
    """Raise ValueError under `torch.func.vmap`, for what searches by values."""
    if not all(map(has_values, tensors)):
        raise ValueError(
            f"{what} must be called on the whole batch, whose dimensions come first. Found a call under "
            "torch.func.vmap, where values are not known"
        )


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


def require_element(A: Any, like: Tensor, shape: tuple[int, ...], *, complex_too: bool = False) -> None:
    """Raise TypeError or ValueError unless A is a finite group element (..., *shape) for a batch of points like x[...].

    `like` has the shape of the batch. Numbers must not be 0, matrices must be invertible where they are of a group.
    """
    complex_dtypes = (torch.complex64, torch.complex128)
    require_tensor(A, "A, an element of the group,", (*PRECISIONS, *complex_dtypes) if complex_too else PRECISIONS)
    split = A.ndim - len(shape)
    if split < 0 or tuple(A.shape[split:]) != shape or not broadcast(A.shape[:split], like.shape):
        wanted = ", ".join(["...", *map(str, shape)])
        raise ValueError(
            f"A must have shape ({wanted}) for a batch {tuple(like.shape)} of points. Found {tuple(A.shape)}"
        )
    if A.ndim and A.device != like.device:
        raise ValueError(f"A and x must be on one device. Found {A.device} and {like.device}: move one")
    if some(~torch.isfinite(A)):
        raise ValueError("A must be finite, an element of the group. Found NaN or infinity")


def require_nonzero(A: Tensor) -> None:
    """Raise ValueError unless no number is 0."""
    if some(A == 0):
        raise ValueError("A must be nowhere 0, an element of the group. Found 0")
