"""Bring together what processes have; all of them call everything here together, in the same order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

Result = TypeVar("Result")


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
