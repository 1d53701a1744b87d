"""Hold the operations that a model computes, and tell tensors from one another."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

# Operations that move numbers and change none; a cast rounds them, which is none of their meaning.
_VIEWS = frozenset(
    [
        "view",
        "_unsafe_view",
        "reshape",
        "permute",
        "transpose",
        "t",
        "expand",
        "slice",
        "select",
        "unsqueeze",
        "squeeze",
        "clone",
        "alias",
        "detach",
        "_to_copy",
        "split",
        "split_with_sizes",
        "unbind",
        "roll",
    ]
)

TURNS = {  # what changes the shape of the tensor that it takes: what gives a view of it instead
    torch.ops.aten.transpose_.default: torch.ops.aten.transpose.int,
    torch.ops.aten.t_.default: torch.ops.aten.t.default,
    torch.ops.aten.unsqueeze_.default: torch.ops.aten.unsqueeze.default,
    torch.ops.aten.squeeze_.default: torch.ops.aten.squeeze.default,
    torch.ops.aten.squeeze_.dim: torch.ops.aten.squeeze.dim,
    torch.ops.aten.squeeze_.dims: torch.ops.aten.squeeze.dims,
}


@dataclass(frozen=True, eq=False)
class Operation:
    """Hold one call of an operation of ATen: its name, such as "addmm", its arguments and its tensors."""

    name: str
    call: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    outputs: tuple[Tensor, ...]

    @cached_property
    def inputs(self) -> list[Tensor]:
        """Return the tensors among the arguments."""
        return [leaf for leaf in tree_leaves((self.arguments, self.options)) if isinstance(leaf, Tensor)]

    @property
    def is_view(self) -> bool:
        """Return whether it moves numbers and changes none."""
        return self.name in _VIEWS and self.call is not torch.ops.aten.view.dtype

    def moved(self, numbers: Tensor) -> tuple[Tensor, ...]:
        """Apply a view to other numbers in place of its input."""
        if self.name in ("_to_copy", "detach", "alias", "clone"):
            return (numbers,)
        if self.name in ("view", "_unsafe_view", "reshape"):  # numbers may lie in memory in another way
            return (numbers.reshape(self.outputs[0].shape),)
        found = self.call(numbers, *self.arguments[1:], **self.options)
        return (found,) if isinstance(found, Tensor) else tuple(found)


SUMS = ("add", "add_")
CHOICES = frozenset(("embedding", "index", "index_select", "gather"))  # of few numbers out of what may be many
Key = tuple[Any, ...]


def key(tensor: Tensor) -> Key:
    """Return what tells a tensor from others that are alive: autograd makes new objects of the same memory."""
    if tensor.is_nested or tensor.layout != torch.strided:  # several memories, or none that can be asked for
        return (id(tensor),)
    storage = tensor.untyped_storage().data_ptr()
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def looked_up(operation: Operation) -> tuple[Tensor, Tensor] | None:
    """Return a matrix and the numbers of its rows that an operation asks it for; None if that is not what it does."""
    if operation.name == "embedding":
        return operation.arguments[0], operation.arguments[1]
    if operation.name == "index" and operation.arguments[0].ndim == 2 and len(operation.arguments[1]) == 1:
        (rows,) = operation.arguments[1]
        return (operation.arguments[0], rows) if not rows.is_floating_point() and rows.dtype != torch.bool else None
    return None


def is_plain(operation: Operation) -> bool:
    """Return whether a sum has no factors."""
    return operation.options.get("alpha", 1) == operation.options.get("beta", 1) == 1
