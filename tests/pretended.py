"""A pretended accelerator: tensors that obey the rules of another device and are computed by the processor.

A tensor of the device wraps one of the processor. What CUDA refuses is refused here: operands on two devices, numbers
drawn there by the processor's generator, a view of it by NumPy. So code that leaves `device=` out somewhere fails as it
would there, and no accelerator is needed. Speed, memory, rounding and kernels of a real device are not pretended, and
autocast is not either.

The device is the process's accelerator from `start()` on, for good; so that is for processes of their own.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

NAME = "pretended"
POSSIBLE = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")  # torch of 2026 has it, 2.6 not

aten = torch.ops.aten
BETWEEN = {aten.copy_.default, aten._to_copy.default}
"""Operations that go from one device to another."""
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
"""Operations by which a tensor of the device takes indices of the processor."""

IN_FULL = {aten._conj.default: aten._conj_physical.default, aten._neg_view.default: aten.neg.default}
"""Operations that mark a tensor as conjugate or negative, which a wrapper would not show."""


def start() -> torch.device:
    """Make the device the process's accelerator."""
    module = {
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "_is_in_bad_fork": lambda: False,
        "manual_seed_all": lambda seed: None,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    backend_registration._setup_privateuseone_for_python_backend(NAME, SimpleNamespace(**module))
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=) makes it here and moves it, which is seen
    autocast = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    autocast.fallback(torch.library.fallthrough_kernel)
    KEPT.append(autocast)
    Rules().__enter__()
    return torch.device(NAME, 0)


KEPT: list[Any] = []  # what takes its effect back when it is dropped


class Pretended(Tensor):
    """A tensor of the device; `own` is that of the processor with its numbers."""

    own: Tensor

    @staticmethod
    def __new__(cls, own: Tensor) -> Pretended:
        strides, offset, device = own.stride(), own.storage_offset(), torch.device(NAME, 0)
        made = Tensor._make_wrapper_subclass(
            cls, own.size(), strides=strides, storage_offset=offset, dtype=own.dtype, device=device
        )
        made.own = own
        return made

    def untyped_storage(self) -> Any:  # by which views of one tensor are known
        return self.own.untyped_storage()

    def data_ptr(self) -> int:
        return self.own.data_ptr()

    def tolist(self) -> Any:  # a copy to the processor, which wrappers are denied
        return self.own.tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:  # of a storage of the device, which wrappers do not have
        return memo.setdefault(id(self), self.detach().clone().requires_grad_(self.requires_grad))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{self.own!r} on the {NAME} device"

    def __tensor_flatten__(self) -> tuple[list[str], None]:  # by which nn.Module.to exchanges parameters
        return ["own"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatched(func, args, kwargs or {})


class Rules(TorchDispatchMode):
    """See also operations that have no tensor of the device yet: those that make one, or move one there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatched(func, args, kwargs or {})


def dispatched(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the processor, if the device would."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    asked = kwargs.get("device")
    from_there = any(isinstance(tensor, Pretended) for tensor in tensors)
    there = asked.type == NAME if asked is not None else from_there
    if not (from_there or there):
        return func(*args, **kwargs)
    require_one_device(func, tensors, there, kwargs.get("generator"))
    if func is aten._fused_sdp_choice.default:
        return 0  # the formula: fused kernels are a real device's own
    func = IN_FULL.get(func, func)
    inside, named = tree_map_only(Pretended, lambda tensor: tensor.own, (args, kwargs))
    if there and asked is not None:
        named["device"] = torch.device("cpu")
    found = func(*inside, **named)
    if isinstance(found, Tensor) and (not there or func in BETWEEN - {aten._to_copy.default}):
        return args[0] if func in BETWEEN - {aten._to_copy.default} else found
    return return_and_correct_aliasing(func, args, kwargs, tree_map_only(Tensor, Pretended, found))


def require_one_device(func: Any, tensors: list[Tensor], there: bool, generator: torch.Generator | None) -> None:
    """Raise RuntimeError where CUDA would."""
    if there and generator is not None:
        raise RuntimeError(f"{func} expects a generator of the {NAME} device. Found one of {generator.device}")
    if func in BETWEEN:
        return
    if func in INDEXED and isinstance(tensors[0], Pretended):
        tensors = [tensors[0], *(t for t in tensors[1:] if t.is_floating_point())]
    if torch.Tag.pointwise in func.tags:
        tensors = [t for t in tensors if t.ndim or t.device.type != "cpu"]
    devices = {str(tensor.device) for tensor in tensors}
    if len(devices) > 1:
        raise RuntimeError(f"{func} expects all tensors on one device. Found {' and '.join(sorted(devices))}")
