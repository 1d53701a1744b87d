"""Hold a model whose processes have a part of every parameter each: read it, move it, and put it back bit for bit.

Models sharded by FSDP2 (`fully_shard`) or by tensor parallelism have parameters that are DTensors. Calls of such a
model do not look at tensors that are handed to them: hooks gather what the processes hold, layer by layer. So the
model itself is moved, in place, and always put back.

What is elementwise stays in parts. What is not, such as a symmetric pair, is *owned* by one process: it gathers the
parameter, computes with it, and sends every process its part of the result. All processes call everything here
together, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, TypeVar, cast, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

Params = dict[str, Tensor]
Result = TypeVar("Result")
Box = tuple[slice, ...]
"""Which entries of a parameter a process holds: a range in every dimension."""

TOGETHER = 2**24
"""Numbers sent at once: enough for a network's speed, little beside a model that needs several processes."""

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")
"""Parts of names that checkpointing and compilation add: symmetries are found before."""


def is_sharded(model: nn.Module) -> bool:
    """Tell whether any parameter is distributed over processes (a DTensor)."""
    if not dist.is_available() or not dist.is_initialized():
        return False
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    return any(isinstance(each, FSDPModule) for each in model.modules()) or any(
        isinstance(w, DTensor) for w in model.parameters()
    )


def plain_name(name: str) -> str:
    """Return a parameter's name as it is without the wrappers of checkpointing and compilation."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


@final
@dataclass(frozen=True)
class Layout:
    """Say which entries of a parameter of this shape each process holds, by its rank."""

    shape: torch.Size
    boxes: tuple[Box, ...]

    @cached_property
    def senders(self) -> frozenset[int]:
        """Return the processes whose parts make up the parameter: of several that hold the same part, the first."""
        first: dict[tuple[tuple[int, int], ...], int] = {}
        for rank, box in enumerate(self.boxes):
            if _size(box):
                first.setdefault(tuple((each.start, each.stop) for each in box), rank)
        return frozenset(first.values())

    @property
    def split(self) -> bool:
        """Tell whether every entry is held by exactly one process."""
        return sum(map(_size, self.boxes)) == prod(self.shape)


@final
class ShardedModel:
    """Hold the parameters that are measured of a sharded model, as tensors of what this process has of them."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.rank, self.processes = dist.get_rank(), dist.get_world_size()
        self.reshard()
        self._named = {plain_name(name): w for name, w in model.named_parameters()}
        own = {name: _box(w) for name, w in self._named.items()}
        every = from_all(own)
        if any(each.keys() != own.keys() for each in every):
            raise ValueError(
                "All processes must hold a part of every parameter. Found parameters that some do not have, as "
                "pipelines do; measure models that are sharded by fully_shard or tensor parallelism"
            )
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.tensor import DTensor

        for module in model.modules():
            if isinstance(module, FSDPModule):
                _check_reduction(module)
        plain = [name for name, w in self._named.items() if w.requires_grad and not isinstance(w, DTensor)]
        if plain and any(isinstance(each, FSDPModule) for each in model.modules()):
            raise ValueError(
                f"Measured parameters of a model under fully_shard must be sharded, or processes have gradients of "
                f"their own. Found {plain[0]}, which is not; call fully_shard on the whole model last, or freeze it"
            )
        self.layouts = {
            name: Layout(w.shape, tuple(_slices(each[name]) for each in every)) for name, w in self._named.items()
        }

    @property
    def measured(self) -> tuple[str, ...]:
        """Return the names of the parameters that require a gradient."""
        return tuple(name for name, w in self._named.items() if w.requires_grad)

    @property
    def device(self) -> torch.device:
        """Return where the parameters are."""
        return next(_local(w).device for w in self._named.values())

    @cached_property
    def original(self) -> Params:
        """Return copies of what this process holds of the measured parameters, made once; checked.

        Raises TypeError or ValueError for parameters that cannot be measured.
        """
        return together(lambda: {name: self._fit(name).clone() for name in self.measured})

    def held(self) -> Params:
        """Return what this process holds of all parameters: the model's own memory, detached."""
        return {name: _local(w) for name, w in self._named.items()}

    def reshard(self) -> None:
        """Drop whatever parameters were gathered for a pass: the next one must see what the parts are then."""
        from torch.distributed.fsdp import FSDPModule

        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @contextmanager
    def restored(self, more: Params | None = None) -> Iterator[Params]:
        """Yield what this process holds, to be written to; put it back afterwards, with gradients and buffers.

        Written may be what is measured, and what `more` has copies of.
        Raises ValueError if the parameters are no longer the `original` ones, which would be put back.
        """
        self.reshard()
        held = self.held()
        if any(from_all(not all(torch.equal(held[name], before) for name, before in self.original.items()))):
            raise ValueError(
                "The parameters must stay as they were when the measure was prepared. Found others; prepare it again"
            )
        grads = {name: w.grad for name, w in self._named.items()}
        buffers = [(buffer, buffer.detach().clone()) for buffer in self.model.buffers()]
        try:
            for w in self._named.values():
                w.grad = None
            yield held
        finally:
            with torch.no_grad():
                for name, before in (self.original | (more or {})).items():
                    held[name].copy_(before)
                for buffer, earlier in buffers:
                    if not buffer.is_meta:
                        buffer.copy_(earlier)
            for name, grad in grads.items():
                self._named[name].grad = grad
            self.reshard()

    def gradients(self) -> Params:
        """Return what this process holds of the gradients of the last backward pass; 0 where a loss reaches nothing.

        Those that are sums not done yet, as of norms under sequence parallelism, are added up first.
        """
        return {
            name: torch.zeros_like(_local(w)) if w.grad is None else _local(_placed(w.grad, w))
            for name, w in self._named.items()
            if w.requires_grad
        }

    def _fit(self, name: str) -> Tensor:
        """Return what this process holds of a parameter, checked."""
        w = _local(self._named[name])
        if w.is_meta:
            raise ValueError(f"Parameter {name} has no values (meta device); load the weights first")
        if not w.is_floating_point() or w.dtype.itemsize < 4:
            raise TypeError(
                f"Parameters of a sharded model must be float32 or float64 to be moved in place. Found {name} in "
                f"{w.dtype}; shard them in float32, with MixedPrecisionPolicy(param_dtype={w.dtype}) for the products"
            )
        if not bool(torch.isfinite(w).all()):
            raise ValueError(f"Parameter {name} holds NaN or infinity; repair the checkpoint")
        return w

    def mean(self, value: Tensor) -> float:
        """Return the mean of one number over the processes, in float64; the same on all, to the last digit."""
        return float(gathered(value.detach().double().reshape(1)).mean())


def together(check: Callable[[], Result]) -> Result:
    """Return what the function returns; where it raises ValueError or TypeError on one process, all of them raise it.

    For a process that is alone in raising leaves the others waiting for it.
    """
    problem: Exception | None = None
    result: Any = None
    try:
        result = check()
    except (ValueError, TypeError) as error:
        problem = error
    for other in from_all(problem):
        if other is not None:
            raise other if problem is None else problem
    return cast(Result, result)


def from_all(own: Result) -> list[Result]:
    """Return what every process has, in the order of the processes."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return every


def gathered(values: Tensor) -> Tensor:
    """Return the values (k,) of all processes, (processes, k), in the order of the processes."""
    every = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(every, values)
    return torch.stack(every)


@final
class Whole(dict[str, Tensor]):
    """Behave as a dict of whole parameters, of which every process holds its part: what is read is gathered.

    Items are gathered when they are read and stored in parts when they are written. A tensor that was read and then
    changed in place must be written back. One whole parameter is kept, the last: folding reads a table row by row.
    All processes must read and write the same, in the same order.
    """

    def __init__(self, parts: Params, layouts: Mapping[str, Layout]) -> None:
        super().__init__(parts)
        self._layouts = layouts
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None  # before the next is made
            self._last = name, self._gathered(name)
        return self._last[1]

    def get(self, name: str, default: Any = None) -> Any:  # as __getitem__: dict's own would return the part
        return self[name] if name in self.keys() else default

    def __setitem__(self, name: str, whole: Tensor) -> None:
        layout = self._layouts[name]
        if whole.shape != layout.shape:
            raise ValueError(f"{name} must have shape {tuple(layout.shape)}. Found {tuple(whole.shape)}")
        super().__setitem__(name, whole[layout.boxes[dist.get_rank()]].clone(memory_format=torch.contiguous_format))
        self._last = name, whole

    def parts(self) -> Params:
        """Return what this process holds."""
        return {name: super(Whole, self).__getitem__(name) for name in self}

    def _gathered(self, name: str) -> Tensor:
        part, layout = super().__getitem__(name), self._layouts[name]
        whole = part.new_empty(layout.shape)
        flat = [part.new_empty(_size(box)) for box in layout.boxes]
        flat[dist.get_rank()] = part.reshape(-1).contiguous()
        for source, numbers in enumerate(flat):
            if source in layout.senders:
                dist.broadcast(numbers, source)
                whole[layout.boxes[source]] = numbers.view(_shape(layout.boxes[source]))
        return whole


@final
class Ownership:
    """Say which process owns which parameters, and bring them to their owner and back.

    groups: sets of names that are computed with together, so that one process owns them all. Every parameter that is
    not held exactly once is owned, too. The largest groups are dealt out first, each to the process that has least.
    """

    def __init__(self, model: ShardedModel, groups: Iterable[Iterable[str]]) -> None:
        self._layouts, self.rank, self._processes = model.layouts, model.rank, model.processes
        self.names = model.measured
        joined = _joined([set(group) for group in groups])
        taken = {name for group in joined for name in group}
        joined += [{name} for name in model.measured if name not in taken and not self._layouts[name].split]
        loads = [0] * model.processes
        owners: dict[str, int] = {}
        sizes = [sum(prod(self._layouts[name].shape) for name in group) for group in joined]
        for size, _, group in sorted(zip(sizes, range(len(joined)), joined, strict=True), reverse=True):
            owner = loads.index(min(loads))
            loads[owner] += size
            owners |= dict.fromkeys(group, owner)
        self.owners = {name: owners[name] for name in model.measured if name in owners}

    def here(self, name: str) -> bool:
        """Tell whether this process computes with the parameter: it owns it, or nobody does and it holds a part."""
        return self.owners.get(name, self.rank) == self.rank

    def gather(self, held: Mapping[str, Tensor]) -> Params:
        """Return this process's share: its parts of what nobody owns, and what it owns as a whole."""
        share = {name: held[name] for name in self.names if name not in self.owners}
        for names in self._rounds(held):
            mine = [name for name in names if self.owners[name] == self.rank]
            sent = [
                [
                    held[name]
                    for name in names
                    if self.owners[name] == owner and self.rank in self._layouts[name].senders
                ]
                for owner in range(self._processes)
            ]
            expected = [
                [(name, self._layouts[name].boxes[rank]) for name in mine if rank in self._layouts[name].senders]
                for rank in range(self._processes)
            ]
            share |= {name: held[name].new_empty(self._layouts[name].shape) for name in mine}
            for (name, box), numbers in self._exchanged(held[names[0]], sent, expected):
                share[name][box] = numbers
        return {name: share[name] for name in self.names if name in share}

    def scatter(self, share: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> None:
        """Write what the owners have into the parts that the processes hold, in place."""
        for names in self._rounds(held):
            mine = [name for name in names if self.owners[name] == self.rank]
            sent = [[share[name][self._layouts[name].boxes[rank]] for name in mine] for rank in range(self._processes)]
            expected = [
                [(name, self._layouts[name].boxes[self.rank]) for name in names if self.owners[name] == owner]
                for owner in range(self._processes)
            ]
            for (name, _), numbers in self._exchanged(held[names[0]], sent, expected):
                held[name].copy_(numbers)

    def _rounds(self, held: Mapping[str, Tensor]) -> Iterator[list[str]]:
        """Yield the owned names in groups of one precision that are sent at once; owners take turns."""
        queues: dict[tuple[Any, int], list[str]] = {}
        for name, owner in self.owners.items():
            queues.setdefault((held[name].dtype, owner), []).append(name)
        for dtype in dict.fromkeys(dtype for dtype, _ in queues):
            own = [list(names) for (each, _), names in queues.items() if each == dtype]
            while any(own):
                names: list[str] = []
                while any(own) and (not names or sum(prod(self._layouts[name].shape) for name in names) < TOGETHER):
                    names += [queue.pop(0) for queue in own if queue]
                yield names

    def _exchanged(
        self, like: Tensor, sent: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[tuple[str, Box]]]
    ) -> Iterator[tuple[tuple[str, Box], Tensor]]:
        """Send to every process what is for it, and yield what was expected from them with the numbers that came."""
        sizes = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
        totals = [sum(_size(box) for _, box in parts) for parts in expected]
        received = like.new_empty(sum(totals))
        flat = [tensor.reshape(-1) for tensors in sent for tensor in tensors]
        dist.all_to_all_single(received, torch.cat(flat) if flat else like.new_empty(0), totals, sizes)
        parts = [part for own in expected for part in own]
        for part, numbers in zip(parts, received.split([_size(box) for _, box in parts]), strict=True):
            yield part, numbers.view(_shape(part[1]))


def _joined(groups: list[set[str]]) -> list[set[str]]:
    """Return the groups, those that share a name as one."""
    found: list[set[str]] = []
    for group in groups:
        meeting = [other for other in found if not other.isdisjoint(group)]
        found = [other for other in found if other.isdisjoint(group)] + [group.union(*meeting)]
    return found


def _check_reduction(module: Any) -> None:
    """Raise unless gradients are averaged over the processes after every backward pass, as the loss is."""
    groups = getattr(module._get_fsdp_state(), "_fsdp_param_groups", ())
    if any(not group.reduce_grads or group.gradient_divide_factor is not None for group in groups):
        raise ValueError(
            "Gradients must be averaged over the processes after every backward pass. Found fully_shard told "
            "otherwise: call set_requires_gradient_sync(True), measure between steps, set no divide factor"
        )


def _local(w: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    w = w.detach()
    return w.to_local() if isinstance(w, DTensor) else w


def _placed(grad: Tensor, w: Tensor) -> Tensor:
    """Return a gradient placed as its parameter is."""
    from torch.distributed.tensor import DTensor

    if isinstance(grad, DTensor) and isinstance(w, DTensor) and grad.placements != w.placements:
        return grad.redistribute(w.device_mesh, w.placements)
    return grad


def _box(w: Tensor) -> list[tuple[int, int]]:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(w, DTensor):
        return [(0, size) for size in w.shape]
    if any(place.is_partial() for place in w.placements):
        raise ValueError(f"Parameters must be sharded or replicated. Found {w.placements}, sums that are not done yet")
    shape, offset = compute_local_shape_and_global_offset(w.shape, w.device_mesh, w.placements)
    if tuple(shape) != tuple(w.to_local().shape):
        raise ValueError(
            f"A parameter's part must be what its placements say. Found {tuple(w.to_local().shape)} and {shape}"
        )
    return [(start, start + size) for start, size in zip(offset, shape, strict=True)]


def _slices(box: Iterable[tuple[int, int]]) -> Box:
    return tuple(slice(start, stop) for start, stop in box)


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(each.stop - each.start for each in box)


def _size(box: Box) -> int:
    return prod(_shape(box))
