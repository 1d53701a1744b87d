"""Check what a manifold is to compute with, in one sentence each, also tensors that have no values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NOT_FINITE = "the entries of a point should be finite; found NaN or infinity"

PRECISIONS = (torch.float32, torch.float64)


def require_counts(**counts: Any) -> None:
    """Raise TypeError unless all are integers, ValueError unless all are at least 1."""
    for name, k in counts.items():
        if isinstance(k, bool) or not isinstance(k, int):
            raise TypeError(f"{name} should be an integer; found {k!r}")
        if k < 1:
            raise ValueError(f"{name}, a number of rows or entries, should be at least 1; found {name} = {k}")


def require_size(eps: Any) -> None:
    """Raise TypeError unless eps is a number, ValueError unless it is finite and >= 0."""
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise TypeError(f"eps should be a number; found {eps!r}")
    if not 0 <= eps < float("inf"):
        raise ValueError(f"eps should be a finite number >= 0; found {eps}")


def require_tensor(x: Any, name: str) -> None:
    """Raise TypeError unless x is a tensor, ValueError unless it is dense, real, and in single or double precision."""
    require_type(x, name)
    if reason := unusable(x, name):
        raise ValueError(reason)


def require_type(x: Any, name: str) -> None:
    """Raise TypeError unless x is a tensor."""
    if not isinstance(x, Tensor):
        kind = type(x).__name__
        raise TypeError(f"{name} should be a torch tensor; found {'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}")


def unusable(x: Tensor, name: str) -> str | None:
    """Say why nothing can be computed with a tensor, whatever its values and its shape, or None."""
    if x.is_nested or x.layout != torch.strided:
        found = "a nested tensor" if x.is_nested else f"layout {x.layout}"
        return f"{name} should be a dense tensor; found {found}: call .to_dense() or stack its parts"
    if x.dtype not in PRECISIONS:
        cure = "give real and imaginary parts as real numbers" if x.is_complex() else "cast it, e.g. with .float()"
        return f"{name} should be in float32 or float64; found {x.dtype}: {cure}"
    return None


def require_values(x: Tensor, name: str) -> None:
    """Raise ValueError for a tensor on the meta device."""
    if x.is_meta:
        raise ValueError(f"{name} should have values; found a tensor on the meta device: load or initialise it first")


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
            f"{what} should be called on the whole batch, whose dimensions come first; found a call under "
            "torch.func.vmap, where the values that it searches by are not known"
        )


def require_vector(x: Tensor, eta: Tensor, ndim: int = 2, what: str = "vector and point") -> None:
    """Raise ValueError unless eta has the trailing shape, dtype and device of the point x and broadcasts against it."""
    require_tensor(eta, "a vector")
    if eta.ndim < ndim or eta.shape[-ndim:] != x.shape[-ndim:]:
        raise ValueError(
            f"{what} should end in one shape, {tuple(x.shape[-ndim:])}; found shape {tuple(eta.shape)} at "
            f"{tuple(x.shape)}"
        )
    if eta.dtype != x.dtype:
        raise ValueError(f"{what} should have one dtype; found {eta.dtype} at a point of {x.dtype}: cast one")
    if eta.device != x.device:
        raise ValueError(f"{what} should be on one device; found {eta.device} at a point on {x.device}: move one")
    if not broadcast(x.shape[: x.ndim - ndim], eta.shape[: eta.ndim - ndim]):
        raise ValueError(
            f"{what} should have leading dimensions, the batch, that broadcast; found shape {tuple(eta.shape)} at "
            f"{tuple(x.shape)}"
        )


def broadcast(a: torch.Size, b: torch.Size) -> bool:
    """Tell whether two batches go together."""
    return all(1 in pair or pair[0] == pair[1] for pair in zip(reversed(a), reversed(b), strict=False))


def require_factors(A: Any, x: Tensor, *, complex_too: bool = False) -> None:
    """Raise TypeError or ValueError unless A is a tensor of nonzero numbers, one for each entry of x or for all."""
    require_numbers(A, x, complex_too=complex_too)
    if some(A == 0) or some(~torch.isfinite(A)):
        raise ValueError("A should be finite and nowhere 0, an element of the group; found 0, NaN or infinity")


def require_matrix(A: Any, x: Tensor) -> None:
    """Raise TypeError or ValueError unless A is an invertible (..., h, h) for points x (..., rows, h)."""
    require_tensor(A, "A")
    h = x.shape[-1]
    if A.ndim < 2 or A.shape[-2:] != (h, h) or not broadcast(A.shape[:-2], x.shape[:-2]):
        raise ValueError(
            f"A should have shape (..., {h}, {h}) for points of shape {tuple(x.shape)}; found {tuple(A.shape)}"
        )
    if A.dtype != x.dtype or A.device != x.device:
        raise ValueError(
            f"A and x should have one dtype and one device; found {A.dtype} on {A.device} and {x.dtype} on {x.device}"
        )
    require_values(A, "A")
    if some(torch.linalg.lu_factor_ex(A.detach()).info != 0) or some(~torch.isfinite(A)):
        raise ValueError("A should be finite and invertible; found a singular matrix, NaN or infinity")


def require_numbers(A: Any, x: Tensor, *, complex_too: bool = False) -> None:
    """Raise TypeError unless A is a tensor, ValueError unless it is dense, real where it must be, and goes with x."""
    require_type(A, "A")
    if A.is_nested or A.layout != torch.strided:
        raise ValueError("A should be a dense tensor; found a sparse or nested one: call .to_dense()")
    require_values(A, "A")
    allowed = (*PRECISIONS, torch.complex64, torch.complex128) if complex_too else PRECISIONS
    if A.dtype not in allowed:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise ValueError(f"A should be in one of {names}; found {A.dtype}")
    if not broadcast(A.shape, x.shape):
        raise ValueError(f"A should broadcast against shape {tuple(x.shape)} here; found {tuple(A.shape)}")
    if A.ndim and A.device != x.device:
        raise ValueError(f"A and x should be on one device; found {A.device} and {x.device}: move one")
