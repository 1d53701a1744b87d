"""Gather values from all processes, and assign every parameter that is needed as a whole to one process.

All processes call the functions here together, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar, cast, final

import torch
import torch.distributed as dist
from torch import Tensor

Params = dict[str, Tensor]
Result = TypeVar("Result")


def together(check: Callable[[], Result]) -> Result:
    """Return check(); if it raises ValueError or TypeError on one process, raise on all processes.

    If only one process raised, the others would wait for it forever.
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
    """Return the objects `own` of all processes, in the order of the processes."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return every


def gathered(values: Tensor) -> Tensor:
    """Return the values (k,) of all processes, (processes, k), in the order of the processes."""
    every = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(every, values)
    return torch.stack(every)


@final
@dataclass(frozen=True)
class Layout:
    """Describe which entries of a parameter of this shape each process holds, as a DTensor does.

    mesh, placements: of the DTensor; None and () for a parameter that every process has as a whole.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    mesh: Any
    placements: tuple[Any, ...]

    @classmethod
    def of(cls, w: Tensor) -> Layout:
        """Return the layout of a parameter. Raises ValueError for partial placements (pending sums)."""
        from torch.distributed.tensor import DTensor

        if not isinstance(w, DTensor):
            return cls(w.shape, w.stride(), None, ())
        if any(place.is_partial() for place in w.placements):
            raise ValueError(f"Parameters must be sharded or replicated. Found {w.placements}, sums not done yet")
        return cls(w.shape, w.stride(), w.device_mesh, w.placements)

    @cached_property
    def box(self) -> tuple[slice, ...]:
        """Return the entries that this process holds, as a range in every dimension."""
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        if self.mesh is None:
            return tuple(slice(0, size) for size in self.shape)
        sizes, starts = compute_local_shape_and_global_offset(self.shape, self.mesh, self.placements)
        return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))

    @property
    def split(self) -> bool:
        """Return whether every entry is held by exactly one process."""
        whole_mesh = self.mesh is not None and self.mesh.size() == dist.get_world_size()
        return whole_mesh and all(place.is_shard() for place in self.placements)

    def full(self, part: Tensor) -> Tensor:
        """Gather the whole parameter from the parts of all processes."""
        from torch.distributed.tensor import DTensor

        if self.mesh is None:
            return part
        shaped: dict[str, Any] = {"shape": self.shape, "stride": self.stride}
        return DTensor.from_local(part.detach(), self.mesh, self.placements, **shaped).full_tensor()


@final
class Whole(dict[str, Tensor]):
    """Act as a dict of whole parameters, of which every process stores only its part.

    Items are gathered when they are read, and split into parts when they are written. A tensor that was read and then
    changed in place must be written back. The last whole parameter is cached, as folding reads a table row by row.
    """

    def __init__(self, parts: Params, layouts: Mapping[str, Layout]) -> None:
        super().__init__(parts)
        self._layouts = layouts
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None  # frees its memory before the next is gathered
            self._last = name, self._layouts[name].full(super().__getitem__(name))
        return self._last[1]

    def get(self, name: str, default: Any = None) -> Any:  # dict.get would return the part
        return self[name] if name in self.keys() else default

    def __setitem__(self, name: str, whole: Tensor) -> None:
        layout = self._layouts[name]
        if whole.shape != layout.shape:
            raise ValueError(f"{name} must have shape {tuple(layout.shape)}. Found {tuple(whole.shape)}")
        super().__setitem__(name, whole[layout.box].clone(memory_format=torch.contiguous_format))
        self._last = name, whole

    def parts(self) -> Params:
        """Return the parts that this process holds."""
        return {name: super(Whole, self).__getitem__(name) for name in self}


@final
class Ownership:
    """Assign parameters to owner processes, gather them there, and scatter the results.

    names: of the measured parameters. groups: sets of names that one process must own together. Parameters with
    entries that are not held by exactly one process are owned, too. The largest groups are assigned first, each to the
    process with the smallest load.
    """

    def __init__(self, layouts: Mapping[str, Layout], names: Iterable[str], groups: Iterable[Iterable[str]]) -> None:
        self._layouts, self.names, self.rank = layouts, tuple(names), dist.get_rank()
        joined: list[set[str]] = []
        for group in (*map(set, groups), *({name} for name in self.names if not layouts[name].split)):
            meeting = [other for other in joined if not other.isdisjoint(group)]
            joined = [other for other in joined if other.isdisjoint(group)] + [group.union(*meeting)]
        loads = [0] * dist.get_world_size()
        owners: dict[str, int] = {}
        sizes = [sum(layouts[name].shape.numel() for name in group) for group in joined]
        for size, place in sorted(((size, place) for place, size in enumerate(sizes)), reverse=True):
            owner = loads.index(min(loads))
            loads[owner] += size
            owners |= dict.fromkeys(joined[place], owner)
        self.owners = {name: owners[name] for name in self.names if name in owners}

    def here(self, name: str) -> bool:
        """Return whether this process computes with the parameter, as its owner, or on its part if nobody owns it."""
        return self.owners.get(name, self.rank) == self.rank

    def gather(self, held: Params, *, consume: bool = False) -> Params:
        """Return this process's share: the whole parameters that it owns, and its parts of parameters without an owner.

        consume: remove owned parameters from `held` as they are gathered, which saves memory unless they are held
        elsewhere.
        """
        share: Params = {}
        for name in self.names:
            owned = name in self.owners
            part = held.pop(name) if consume and owned else held[name]
            whole = self._layouts[name].full(part) if owned else part
            if self.here(name):
                share[name] = whole
        return share

    def scatter(self, share: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> None:
        """Write the owners' whole parameters into the parts that the processes hold, in place."""
        for name, owner in self.owners.items():
            layout = self._layouts[name]
            mine = owner == self.rank
            whole = share[name].detach().contiguous() if mine else held[name].new_empty(layout.shape)
            dist.broadcast(whole, owner)
            held[name].copy_(whole[layout.box])
