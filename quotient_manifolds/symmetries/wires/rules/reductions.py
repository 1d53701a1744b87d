"""Rules of sums and means over tokens or channels: squares summed over channels are what turning leaves alone."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quotient_manifolds.symmetries.wires.codes import LARGEST, RESIZED, axes_of, hashed, named
from quotient_manifolds.symmetries.wires.linear_algebra import Array
from quotient_manifolds.symmetries.wires.nodes import FIXED, ZERO, flat, thinned
from quotient_manifolds.symmetries.wires.record import Operation
from quotient_manifolds.symmetries.wires.rules.functions import most
from quotient_manifolds.symmetries.wires.uses import Flow
from quotient_manifolds.symmetries.wires.walk import RULES, Walk, rule

FEW = 64  # slices that are added one by one


@rule("sum", "mean")
def reduce(walk: Walk, operation: Operation) -> None:
    tensor = operation.args[0]
    axes = axes_of(operation, tensor.ndim)
    keep = operation.args[2] if len(operation.args) > 2 else operation.kwargs.get("keepdim", False)
    count = math.prod(tensor.shape[axis] for axis in axes)
    label = walk.label(tensor)
    channels = [axis for axis in axes if not walk.tokens(label, axis)]
    mean = operation.name == "mean"
    if operation.name == "sum" and axes == channels and _in_slices(walk, operation, label, axes, keep=bool(keep)):
        return
    if not channels:
        walk.resolve(tensor)
        thin = pool(walk, label, axes, 1 / count if mean else 1.0, whole=mean)
    else:
        tokens = [axis for axis in axes if axis not in channels]
        pending: Any = walk.notes.get(("pending", id(tensor)))
        if pending is not None and pending[0] == "square" and all(flat(label, axis) for axis in tokens):
            label = walk.first_kind(label, tokens)
        elif tokens:
            if pending is not None:
                walk.resolve(tensor)
                del walk.notes["pending", id(tensor)]
            size = math.prod(tensor.shape[axis] for axis in tokens)
            label, count = pool(walk, label, tokens, 1 / size if mean else 1.0, whole=mean), count // size
        thin, owners = _over_channels(walk, operation, label, channels, 1 / count if mean else 1.0)
        if mean and not tokens:
            numbers = walk.codes(operation.out)
            for axis in sorted(axes) if not keep else ():
                numbers = numbers.unsqueeze(axis)
            walk.notes["pending", id(operation.out)] = ("mean", owners, tensor, numbers)
        else:
            for row in owners.values():
                walk.alone(row)
    if not keep:
        for axis in sorted(axes, reverse=True):
            thin = thin.select(axis, 0)
    walk.put(operation.out, thin.expand(operation.out.shape))


def _in_slices(walk: Walk, operation: Operation, label: Tensor, axes: list[int], *, keep: bool) -> bool:
    """Add up a few slices of several channels each, such as experts: t[0] + t[1] + ..., which change alike."""
    tensor, axis, aten = operation.args[0], axes[0], torch.ops.aten
    pending: Any = walk.notes.get(("pending", id(tensor)))
    if len(axes) > 1 or not 1 < tensor.shape[axis] <= FEW or (pending is not None and pending[0] == "square"):
        return False
    (thin,) = thinned(label.movedim(axis, -1))
    if len(torch.unique(thin.reshape(-1, thin.shape[-1]), dim=0)) < 2:  # one channel: what is added is a number
        return False
    walk.resolve(tensor)
    slices, found = list[Tensor](), label.unbind(axis)
    for each in found:
        slices.append(torch.empty(operation.out.shape, device="meta"))
        walk.put(slices[-1], each.unsqueeze(axis) if keep else each)
    sums = [torch.empty(operation.out.shape, device="meta") for _ in slices[2:]]
    walk.notes["kept", walk.at] = slices, sums
    first = slices[0]
    for second, out in zip(slices[1:], [*sums, operation.out], strict=True):
        RULES["add"](walk, Operation(aten.add.Tensor, (first, second), {}, out))
        first = out
    return True


def pool(
    walk: Walk, label: Tensor, axes: list[int], factor: float = 1.0, *, whole: bool | None = None, any_of: bool = False
) -> Tensor:
    """Sum over tokens, which may be of several kinds.

    whole: whether it is a mean over all of an axis, which may be longer on other inputs; None over windows of one size.
    any_of: no sum, but one of them that the inputs choose.
    """
    names, back = _lines(label, axes)
    count, repeated = names.shape[1], 1
    if bool((names == names[:, :1]).all()):
        names, repeated = names[:, :1], count
    nodes = np.minimum(names.max(1), FIXED)
    moving = (names > FIXED).any(1)
    nodes[moving] = fresh = walk.new(int(moving.sum()))
    names = names[moving]
    for column in names.T:
        walk.same(np.where(column > FIXED, column, ZERO), fresh)
    zero, fixed = (names == ZERO).any(1), (names == FIXED).any(1)
    walk.follow(fresh, *names.T, key=hashed(*walk.made_of(names.T), named(("pool", walk.at))) if count > 1 else None)
    walk.fix(fresh[fixed], seen=False)
    flows: dict[str, list[tuple[int, list[tuple[int, float]]]]] = defaultdict(list)
    open_ = set(fresh[fixed].tolist())
    for node, row, none in zip(fresh.tolist(), names.tolist(), zero.tolist(), strict=True):
        counted = Counter(n for n in row if n > FIXED)
        once = whole is None or (count > 1 and repeated * max(counted.values()) == 1)  # or there may be more of them
        kind = "number" if none or not (once or whole or any_of) else "pool" if once and not any_of else "mix"
        flows[kind].append((node, [(n, factor * repeated * times) for n, times in counted.items()]))
    for kind, found in flows.items():
        nodes_of, plus = [node for node, _ in found], np.array([np.nan if node in open_ else 0.0 for node, _ in found])
        walk.flows.append(Flow(kind, nodes_of, [terms for _, terms in found], [0] * len(found), plus))
    return back(nodes)


def _lines(label: Tensor, axes: list[int]) -> tuple[Array, Callable[[Array], Tensor]]:
    """Return the distinct rows of nodes along some axes, and what puts a node for each in their places."""
    rest = [axis for axis in range(label.ndim) if axis not in axes]
    moved = label.permute(*rest, *axes)
    thin = moved
    for axis in range(len(rest)):
        if flat(thin, axis):
            thin = thin.narrow(axis, 0, 1)
    lines = thin.reshape(math.prod(thin.shape[: len(rest)]), -1)
    rows, inverse = torch.unique(lines, dim=0, return_inverse=True)

    def back(nodes: Array) -> Tensor:
        made = torch.from_numpy(nodes)[inverse].view(thin.shape[: len(rest)]).expand(moved.shape[: len(rest)])
        for axis in sorted(axes):
            made = made.unsqueeze(axis)
        return made

    return rows.numpy(), back


@rule(*RESIZED)
def resize(walk: Walk, operation: Operation) -> None:
    """Make each token a mean of others, with numbers that add up to 1."""
    label = walk.label(operation.args[0])
    axes = axes_of(operation, label.ndim)
    if any(not walk.tokens(label, axis, masked=True) for axis in axes):
        walk.opaque(operation)
        return
    thin = pool(walk, label, axes, 1 / math.prod(label.shape[axis] for axis in axes), any_of=True)
    walk.put(operation.out, thin.expand(operation.out.shape))


@rule("amax", "amin", "max", "min", *LARGEST)
def most_of_several(walk: Walk, operation: Operation) -> None:
    """Take the largest of tokens or channels, or the smallest: what may change does not change which one that is."""
    label, out = walk.label(operation.args[0]), operation.outputs[0]
    axes = axes_of(operation, label.ndim)
    names, back = _lines(label, axes)
    if bool((names == names[:, :1]).all()):
        names = names[:, :1]
    nodes = np.minimum(names.max(1), FIXED)
    moving = (names > FIXED).any(1)
    nodes[moving] = walk.new(int(moving.sum()))
    most(walk, names[moving], nodes[moving], "tokens")
    walk.settle(operation)
    thin = back(nodes)
    if out.ndim < label.ndim:
        for axis in sorted(axes, reverse=True):
            thin = thin.select(axis, 0)
    walk.put(out, thin.expand(out.shape))


@rule("avg_pool2d", "avg_pool3d")
def averagepool(walk: Walk, operation: Operation) -> None:
    """Means over windows of tokens; zeros beside them are no constant."""
    tensor, kernel, *rest = operation.args
    given = dict(zip(("stride", "padding", "ceil_mode", "", "divisor_override"), rest, strict=False)) | operation.kwargs
    stride, padding, divisor = (given.get(name) for name in ("stride", "padding", "divisor_override"))
    label = walk.label(tensor)
    count = int(operation.name[-2])
    sizes, steps, beside = (_each(some, count) for some in (kernel, stride or kernel, padding or 0))
    axes = range(label.ndim - len(sizes), label.ndim)
    if given.get("ceil_mode") or any(not walk.tokens(label, axis, masked=True) for axis in axes):
        walk.opaque(operation)
        return
    for size, step, pad, axis in zip(sizes, steps, beside, axes, strict=True):
        if pad:
            shape = [*label.shape[:axis], pad, *label.shape[axis + 1 :]]
            zeros = torch.full((), ZERO).expand(shape)
            label = torch.cat([zeros, label, zeros], axis)
        label = label.unfold(axis, size, step)
    windows = list(range(tensor.ndim, label.ndim))
    thin = pool(walk, label, windows, 1 / (divisor or math.prod(sizes)))
    first: tuple[Any, ...] = (..., *[0] * len(windows))
    walk.put(operation.out, thin[first].expand(operation.out.shape))


def _each(given: Any, count: int) -> list[int]:
    """Return one number for every axis."""
    several = [given] if isinstance(given, int) else list(given)
    return several * (count // len(several))


def _over_channels(
    walk: Walk, operation: Operation, label: Tensor, axes: list[int], factor: float
) -> tuple[Tensor, dict[int, list[int]]]:
    """Sum over channels: of squares it is what turning leaves alone; a mean waits for what it is taken from."""
    tensor = operation.args[0]
    rows, back = _lines(label, axes)
    nodes = walk.new(len(rows))
    pending: Any = walk.notes.get(("pending", id(tensor)))
    squares = pending is not None and pending[0] == "square" and np.isin(walk.nodes(label), pending[1][0]).all()
    if not squares:  # or squares of some of the tokens
        walk.resolve(tensor)
    owners: dict[int, list[int]] = {}
    for node, row in zip(nodes.tolist(), rows, strict=True):
        row = row[row != ZERO]
        moving = row[row > FIXED]
        if not len(moving):
            walk.fix([node], seen=False)
            continue
        plus = None
        if (row == FIXED).any():
            plus = np.array([np.nan])
            walk.fix(moving, seen=False)
            walk.fix([node], seen=False)
        walk.equal((np.full(len(moving), node), 1.0), (moving, -1.0))
        walk.alone([node])
        if squares:
            walk.norm("orthogonal", _bases(pending[1], moving), node)
        else:
            owners[node] = moving.tolist()
        inside = moving.tolist()
        kind = "sum" if len(set(inside)) == len(inside) else "number"  # of tokens there may be more
        terms = [inside if squares else [(n, factor) for n in inside]]
        walk.flows.append(Flow("through" if squares else kind, [node], terms, plus=plus))
    if squares:
        walk.notes["length", id(operation.out)] = True
    return back(nodes), owners


def _bases(pending: tuple[Array, Array], nodes: Array) -> Array:
    """Return the channels of which nodes are the squares."""
    squares, bases = pending
    order = np.argsort(squares)
    return bases[order[np.searchsorted(squares[order], nodes)]]


def centred(walk: Walk, operation: Operation, tensor: Tensor, mean: Tensor) -> bool:
    """x - mean(x): the mean may take up anything, for nobody sees it."""
    pending = walk.notes.get(("pending", id(mean)))
    if pending is None or pending[0] != "mean" or pending[2] is not tensor:
        return False
    shape = operation.out.shape
    if tensor.shape != shape or not torch.equal(walk.codes(mean).expand(shape), pending[3].expand(shape)):
        return False  # means of other tokens
    label, names, nodes = walk.combined(walk.label(tensor), walk.label(mean))
    rows: dict[int, tuple[Array, Array]] = {
        m: (names[names[:, 1] == m, 0], nodes[names[:, 1] == m]) for m in np.unique(names[:, 1]).tolist()
    }
    if any(m not in pending[1] or sorted(a.tolist()) != sorted(pending[1][m]) for m, (a, _) in rows.items()):
        return False
    walk.put(operation.out, label)
    for a, out in rows.values():
        walk.same(a, out, norm=True)
        walk.follow(out, a)
        walk.about("normed")[out] = True
        walk.norm("centred", a, int(a.min()), len(a))
        walk.flows.append(Flow("centre", out.tolist(), a.tolist()))
    return True
