"""Name the entries of tensors by how they are computed: equal codes are equal numbers on every input.

A rule may look at a number only where nothing that the caller gave reaches it. Everything else has codes: an entry that
depends on the inputs is known by the operation and the entries it is made of, never by its value on this batch.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from quotient_manifolds.symmetries.wires.linear_algebra import Array
from quotient_manifolds.symmetries.wires.record import Operation, Recording, tensors

VIEWS = frozenset(
    [
        "view",
        "permute",
        "transpose",
        "t",
        "expand",
        "unsqueeze",
        "squeeze",
        "clone",
        "alias",
        "detach",
        "slice",
        "select",
        "split",
        "split_with_sizes",
        "unbind",
        "cat",
        "stack",
        "roll",
        "flip",
        "repeat",
        "lift_fresh",
        "unfold",
        "diagonal",
        "_reshape_alias",
        "copy",
        "lift",
        "slice_scatter",
        "select_scatter",
        "native_dropout",
    ]
)
"""Operations that move entries and change none."""
POINTWISE = torch.Tag.pointwise
STILL = frozenset(  # take nothing of a tensor but its shape
    ["zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "empty_like", "new_empty"]
)
RESIZED = (
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d"),
    *(f"{each}_pad{n}d" for n in "123" for each in ("reflection", "replication")),
)
"""Operations that make tokens of a picture of others, channel by channel, with numbers that add up to 1."""
LARGEST = tuple(
    f"{each}{n}d{some}" for n in "23" for each, some in (("max_pool", "_with_indices"), ("adaptive_max_pool", ""))
)
"""Operations that take the largest of tokens of a picture."""


class Codes:
    """Compute codes on demand: int64 tensors of the shape of what they name."""

    def __init__(self, recording: Recording) -> None:
        self._made: dict[int, tuple[Operation, int]] = {}
        self._codes: dict[int, Tensor] = {}
        self._free: dict[int, bool] = {}
        self._count = 1
        for operation in recording.operations:
            for place, out in enumerate(operation.outputs):
                if operation.name not in STILL or "empty" in operation.name:
                    self._made.setdefault(id(out), (operation, place))
            # What is there first is not what is there later, and what is drawn at random is another the next time.
            if operation.func._schema.is_mutable or torch.Tag.nondeterministic_seeded in operation.func.tags:
                self._free.update((id(out), False) for out in operation.outputs)
        for given in (*recording.given, *recording.parameters.values()):
            self._free[id(given)] = False
            self._made.pop(id(given), None)

    def constant(self, tensor: Tensor) -> bool:
        """Return whether neither inputs nor parameters reach a tensor, so that its values may be read."""
        stack = [tensor]
        while stack:
            each = stack[-1]
            if each.is_meta:  # what stands between two steps of one operation
                self._free[id(each)] = False
            if id(each) in self._free:
                stack.pop()
                continue
            made = self._made.get(id(each))
            inputs = made[0].inputs if made else []
            missing = [t for t in inputs if id(t) not in self._free and t is not each]
            if missing:
                stack += missing
                continue
            self._free[id(each)] = all(self._free.get(id(t), True) for t in inputs)
            stack.pop()
        return self._free[id(tensor)]

    def __call__(self, tensor: Tensor) -> Tensor:
        stack = [tensor]
        while stack:
            each = stack[-1]
            if id(each) in self._codes:
                stack.pop()
                continue
            if self.constant(each):
                self._codes[id(each)] = mixed(_bits(each), 7)
                continue
            made = self._made.get(id(each))
            passes = made is not None and (made[0].name in VIEWS or POINTWISE in made[0].func.tags)
            inputs = made[0].inputs if made and (passes or made[0].name == "embedding") else []
            missing = [t for t in inputs if id(t) not in self._codes]
            if missing:
                stack += missing
                continue
            self._codes[id(each)] = self._of(each, made, passes)
        return self._codes[id(tensor)]

    def fresh(self, shape: torch.Size) -> Tensor:
        """Return codes that nothing else has."""
        size = max(1, shape.numel())
        self._count += size
        return mixed(torch.arange(self._count - size, self._count), 3)[: shape.numel()].view(shape)

    def _of(self, tensor: Tensor, made: tuple[Operation, int] | None, passes: bool) -> Tensor:
        if made is None:
            return self.fresh(tensor.shape)
        operation, place = made
        if operation.name in VIEWS:
            several = viewed(operation, lambda t: self._codes[id(t)])
            found = several[min(place, len(several) - 1)]  # a dropout gives its mask as well
            return found if found.shape == tensor.shape else self.fresh(tensor.shape)
        if operation.name == "embedding":
            table, ids = operation.args[:2]
            columns = folded(self._codes[id(table)].T)
            return mixed(self._codes[id(ids)][..., None] * 31 + columns, 11)
        if passes and len(operation.outputs) == 1:
            plain = tree_map_only(Tensor, lambda _: "tensor", (operation.args, operation.kwargs))
            code = torch.full((), named((operation.name, *plain)))
            for each in operation.inputs:
                code = mixed(code * 1000003 + self._codes[id(each)], 5)
            return code.expand(tensor.shape)
        return self.fresh(tensor.shape)


def axes_of(operation: Operation, count: int) -> list[int]:
    """Return the axes, of so many, that an operation goes over: those of a picture, those that it is given, or all."""
    picture = re.search(r"(\d)d", operation.name)
    if picture is not None:
        return [*range(count - int(picture[1]), count)]
    given = operation.args[1] if len(operation.args) > 1 else operation.kwargs.get("dim")
    axes = range(count) if given is None or given == [] or isinstance(given, bool) else given
    return [axis % count for axis in ([axes] if isinstance(axes, int) else axes)]


def viewed(operation: Operation, beside: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return what a view makes of tensors that stand beside those that it takes, such as labels."""
    name, args = operation.name, operation.args
    if name == "native_dropout":
        return [beside(args[0])]
    if name in ("view", "_reshape_alias"):
        return [beside(args[0]).reshape(operation.out.shape)]
    if name == "copy":
        return [beside(args[1]).expand(operation.out.shape)]
    args, kwargs = tree_map_only(Tensor, beside, (args, operation.kwargs))
    return tensors(operation.func(*args, **kwargs))


def _bits(tensor: Tensor) -> Tensor:
    values = tensor.detach().to("cpu")
    if values.is_complex():
        real, imaginary = (_bits(each) for each in torch.view_as_real(values).unbind(-1))
        return real ^ mixed(imaginary, 1)
    return (values.double() + 0.0).contiguous().view(torch.int64)


def mixed(code: Any, salt: int) -> Any:
    """Scatter the bits of codes, of tensors or arrays."""
    code = (code ^ (code >> 29)) * (-7046029254386353131 + 2 * salt)
    return (code ^ (code >> 32)) * -4417276706812531889


def folded(rows: Tensor) -> Tensor:
    """Return one code a row (..., n): equal for rows of equal codes in the same order."""
    code = torch.zeros(rows.shape[:-1], dtype=torch.int64)
    weights = mixed(torch.arange(1, rows.shape[-1] + 1), 13) | 1
    return mixed(code + (mixed(rows, 17) * weights).sum(-1), 19)


def named(token: Any) -> int:
    """Return a number for a name."""
    return zlib.crc32(repr(token).encode())


def hashed(*codes: Any) -> Array:
    """Mix codes, entry by entry, into one."""
    found = np.zeros((), np.int64)
    with np.errstate(over="ignore"):
        for each in codes:
            found = mixed(found * 1000003 + np.asarray(each).astype(np.int64), 5)
    return found


def segments(code: Array, start: Array, count: Array) -> Array:
    """Return one code for each segment, equal for equal codes in the same order."""
    place = np.arange(len(code)) - np.repeat(start, count)
    with np.errstate(over="ignore"):
        return np.add.reduceat(mixed(code, 17) * (mixed(place + 1, 13) | 1), start)


def distinct(codes: Array) -> tuple[Array, Array]:
    """Return where each code is first, in this order, and which of them stands where."""
    _, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return first[order], place[inverse.reshape(-1)]
