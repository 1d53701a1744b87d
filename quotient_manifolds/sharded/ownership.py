"""Give parameters that are computed with as a whole to one process each: gather them there, and scatter the results.

All processes call everything here together, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from quotient_manifolds.sharded.layout import Box, Params, box_shape, box_size
from quotient_manifolds.sharded.model import ShardedModel

TOGETHER = 2**22
"""Numbers sent at once: enough for a network's speed, little beside a model that needs several processes."""


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

    def gather(self, held: Params, *, consume: bool = False) -> Params:
        """Return this process's share: its parts of what nobody owns, and what it owns as a whole.

        consume: drop from `held` what is owned as soon as it is sent, which saves memory where nobody else holds it.
        """
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
            if consume:
                del sent
                for name in names:
                    del held[name]
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
        totals = [sum(box_size(box) for _, box in parts) for parts in expected]
        received = like.new_empty(sum(totals))
        flat = [tensor.reshape(-1) for tensors in sent for tensor in tensors]
        dist.all_to_all_single(received, torch.cat(flat) if flat else like.new_empty(0), totals, sizes)
        parts = [part for own in expected for part in own]
        for part, numbers in zip(parts, received.split([box_size(box) for _, box in parts]), strict=True):
            yield part, numbers.view(box_shape(part[1]))


def _joined(groups: list[set[str]]) -> list[set[str]]:
    """Return the groups, those that share a name as one."""
    found: list[set[str]] = []
    for group in groups:
        meeting = [other for other in found if not other.isdisjoint(group)]
        found = [other for other in found if other.isdisjoint(group)] + [group.union(*meeting)]
    return found
