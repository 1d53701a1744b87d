"""Read, change and restore, bit for bit, a model whose parameters are sharded over processes.

Such a model cannot be called with other parameters, because hooks gather the stored parts layer by layer. So its own
parameters are changed in place, and always restored. All processes call the functions here together, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from quotient_manifolds.sharded.parts import Layout, Params, from_all, gathered, together

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")
"""Parts of names that wrappers for checkpointing and compilation add. Symmetries are found before wrapping."""


def is_sharded(model: nn.Module) -> bool:
    """Return whether the model is under `fully_shard`, or any parameter is a DTensor."""
    if not dist.is_available() or not dist.is_initialized():
        return False
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    return any(isinstance(each, FSDPModule) for each in model.modules()) or any(
        isinstance(w, DTensor) for w in model.parameters()
    )


def plain_name(name: str) -> str:
    """Return a parameter's name without the wrappers of checkpointing and compilation."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


@final
class ShardedModel:
    """Hold a sharded model and this process's parts of its parameters; parameters with requires_grad are measured."""

    def __init__(self, model: nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.tensor import DTensor

        self.model = model
        self.rank, self.processes = dist.get_rank(), dist.get_world_size()
        self.reshard()
        self._named = {plain_name(name): w for name, w in model.named_parameters()}
        if any(names != list(self._named) for names in from_all(list(self._named))):
            raise ValueError(
                "All processes must hold a part of every parameter. Found parameters that some do not have, as "
                "pipelines do; measure models that are sharded by fully_shard or tensor parallelism"
            )
        if any(each != self.measured for each in from_all(self.measured)):
            raise ValueError(
                "All processes must measure the same parameters. Found some with requires_grad on one process alone"
            )
        if any(not group.reduce_grads or group.gradient_divide_factor is not None for group in self._groups()):
            raise ValueError(
                "Gradients must be averaged over the processes after every backward pass. Found fully_shard told "
                "otherwise: call set_requires_gradient_sync(True), measure between steps, set no divide factor"
            )
        plain = [name for name, w in self._named.items() if w.requires_grad and not isinstance(w, DTensor)]
        if plain and any(isinstance(each, FSDPModule) for each in model.modules()):
            raise ValueError(
                f"Measured parameters of a model under fully_shard must be sharded, or processes have gradients of "
                f"their own. Found {plain[0]}, which is not; call fully_shard on the whole model last, or freeze it"
            )
        self.layouts = {name: Layout.of(w) for name, w in self._named.items()}

    @property
    def measured(self) -> tuple[str, ...]:
        """Return the names of the parameters that require a gradient."""
        return tuple(name for name, w in self._named.items() if w.requires_grad)

    @property
    def alike(self) -> bool:
        """Return whether all processes compute the same loss, by tensor parallelism over all of them."""
        from torch.distributed.fsdp import FSDPModule

        meshes = [layout.mesh for layout in self.layouts.values() if layout.mesh is not None]
        averaged = any(isinstance(each, FSDPModule) for each in self.model.modules())
        return not averaged and any(mesh.size() == self.processes for mesh in meshes)

    @property
    def device(self) -> torch.device:
        """Return the device of the parameters."""
        return next(_local(w).device for w in self._named.values())

    @cached_property
    def original(self) -> Params:
        """Return copies of this process's parts of the measured parameters, made and checked once.

        Raises TypeError or ValueError for parameters that cannot be measured.
        """
        return together(lambda: {name: self._fit(name).clone() for name in self.measured})

    def held(self) -> Params:
        """Return this process's parts of all parameters, detached but sharing the model's memory."""
        return {name: _local(w) for name, w in self._named.items()}

    def reshard(self, *, interrupted: bool = False) -> None:
        """Free the parameters that were gathered for a pass, so that the next pass gathers the current parts.

        interrupted: whether an exception ended the pass. Hooks then treat it as running and keep gathered parameters,
        so their state is reset. An interrupted pass of the caller's own is detected from that state.
        """
        from torch.distributed.fsdp import FSDPModule

        interrupted = interrupted or any(group._training_state.name != "IDLE" for group in self._groups())
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                reset = getattr(module, "reset_iter_state", None)  # since torch 2.13
                if interrupted and reset is not None and module._get_fsdp_state()._is_root:
                    reset()
                module.reshard()

    def _groups(self) -> Iterator[Any]:
        """Yield the groups in which `fully_shard` gathers parameters."""
        from torch.distributed.fsdp import FSDPModule

        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                yield from getattr(module._get_fsdp_state(), "_fsdp_param_groups", ())

    def _set_aside(self) -> list[tuple[Any, Tensor | None, Tensor | None]]:
        """Remove and return gradients of gathered parameters (accumulated or left over), to which hooks would add."""
        whole = [each for group in self._groups() for each in group.fsdp_params if hasattr(each, "_unsharded_param")]
        taken = [(each, each._unsharded_param.grad, each.unsharded_accumulated_grad) for each in whole]
        for each in whole:
            each._unsharded_param.grad = each.unsharded_accumulated_grad = None
        return taken

    @contextmanager
    def restored(self, more: Params | None = None) -> Iterator[Params]:
        """Yield this process's parts, to be written to, and restore them afterwards, with gradients and buffers.

        Only measured parameters, and those with copies in `more`, may be written to.
        Raises ValueError if the parameters differ from `original`, which would be restored.
        """
        self.reshard()
        held = self.held()
        if any(from_all(not all(torch.equal(held[name], before) for name, before in self.original.items()))):
            raise ValueError(
                "The parameters must stay as they were when the measure was prepared. Found others; prepare it again"
            )
        grads = {name: w.grad for name, w in self._named.items()}
        buffers = [(buffer, buffer.detach().clone()) for buffer in self.model.buffers()]
        # A forward pass may replace buffers by other tensors.
        places = [(module._buffers, dict(module._buffers)) for module in self.model.modules()]
        interrupted, pending = True, self._set_aside()
        try:
            for w in self._named.values():
                w.grad = None
            yield held
            interrupted = False
        finally:
            with torch.no_grad():
                for name, before in (self.original | (more or {})).items():
                    held[name].copy_(before)
                for place, own in places:
                    place.clear()
                    place.update(own)
                for buffer, earlier in buffers:
                    if not buffer.is_meta:
                        buffer.copy_(earlier)
            for name, grad in grads.items():
                self._named[name].grad = grad
            self.reshard(interrupted=interrupted)
            self._set_aside()
            for each, grad, accumulated in pending:
                each._unsharded_param.grad, each.unsharded_accumulated_grad = grad, accumulated

    def take_gradients(self) -> Params:
        """Remove and return this process's parts of the gradients; 0 for parameters that the loss does not depend on.

        Partial gradients, such as gradients of norms under sequence parallelism, are summed over processes. The result
        is empty, on all processes, if the loss depends on no measured parameter.
        """
        from torch.distributed.tensor import DTensor

        reached = any(self._named[name].grad is not None for name in self.measured)
        if not gathered(torch.tensor([float(reached)], device=self.device)).any():
            return {}
        taken: Params = {}
        for name in self.measured:
            w = self._named[name]
            grad = torch.zeros_like(w) if w.grad is None else w.grad
            if isinstance(grad, DTensor) and isinstance(w, DTensor) and grad.placements != w.placements:
                grad = grad.redistribute(w.device_mesh, w.placements)
            taken[name] = _local(grad)
            w.grad = None
        return taken

    def _fit(self, name: str) -> Tensor:
        """Return this process's part of a parameter. Raises TypeError or ValueError if it cannot be measured."""
        w = _local(self._named[name])
        if w.is_meta:
            raise ValueError(f"Parameter {name} has no values here (meta device): load the weights first")
        if not w.is_floating_point() or w.dtype.itemsize < 4:
            raise TypeError(
                f"Parameters of a sharded model must be float32 or float64 to be moved in place. Found {name} in "
                f"{w.dtype}; convert the model by model.float() before it is sharded"
            )
        if not bool(torch.isfinite(w).all()):
            raise ValueError(f"Parameter {name} holds NaN or infinity; repair the checkpoint")
        return w

    def values(self, value: Tensor) -> Tensor:
        """Return a scalar of every process (processes,), in float64, in the order of the processes."""
        return gathered(value.detach().double().reshape(1)).flatten()

    def mean(self, value: Tensor) -> float:
        """Return the mean of a scalar over the processes, in float64; it is identical on all of them."""
        return float(self.values(value).mean())


def _local(w: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    w = w.detach()
    return w.to_local() if isinstance(w, DTensor) else w
