"""One of several processes at the same work, as `torchrun` starts them; alone where it does not."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, final

import torch
from torch import distributed

# A rank waits at the end for the slowest unit of all others, however long that takes.
PATIENCE = timedelta(days=30)

Item = TypeVar("Item")


@final
@dataclass(frozen=True)
class Worker:
    """Rank `rank` of `world` processes, and the device it computes on."""

    rank: int
    world: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether it is the one that prints and writes reports."""
        return self.rank == 0

    def own_first(self, items: Sequence[Item]) -> tuple[Item, ...]:
        """All items, its own share of them first: then it helps the ranks after it, which are slower."""
        start = self.rank * len(items) // self.world
        return (*items[start:], *items[:start])

    def total(self, count: int) -> int:
        """The sum over all ranks, when all have come here."""
        if self.world == 1:
            return count
        box = torch.tensor(count, device=self.device)
        distributed.all_reduce(box)
        return int(box)


@contextmanager
def joined(device: torch.device) -> Iterator[Worker]:
    """This process among those that `torchrun` started: gloo on CPU, NCCL with a GPU for each local rank on CUDA."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Worker(0, 1, device)
        return
    if device.type == "cuda":
        local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= gpus:
            raise ValueError(
                f"Every process needs a GPU of its own, and this host has {gpus}: give --nproc-per-node {gpus}"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
    try:
        yield Worker(distributed.get_rank(), distributed.get_world_size(), device)
    finally:
        distributed.destroy_process_group()


def leads() -> bool:
    """Whether this process is the one that speaks, also before it has joined the others."""
    return int(os.environ.get("RANK", "0")) == 0
