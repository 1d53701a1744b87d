"""Rules of norms and softmax."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quotient_manifolds.symmetries.wires.record import Operation
from quotient_manifolds.symmetries.wires.rules.products import mul
from quotient_manifolds.symmetries.wires.rules.sums import add
from quotient_manifolds.symmetries.wires.walk import (
    FIXED,
    MASKED,
    ZERO,
    Flow,
    Walk,
    flat,
    rule,
    thinned,
)


@rule("native_layer_norm")
def layer_norm(walk: Walk, operation: Operation) -> None:
    tensor, shape, weight, bias = operation.args[:4]
    label = walk.label(tensor)
    width = 1
    for size in shape:
        width *= size
    wide = label.reshape(*label.shape[: label.ndim - len(shape)], width)
    rows, inverse = walk.rows(wide, width)
    first = walk.alike(rows)
    made = np.zeros_like(rows)
    for place, row in enumerate(rows):  # kinds of tokens that were told apart by constants alone are one again
        walk.normed(row)
        made[place] = walk.new(width) if first[place] == place else made[first[place]]
        nodes = made[place]
        walk.equal((nodes, 1.0))
        walk.equal((row[row > FIXED], 1.0))
        moving = row > FIXED
        walk.alone(nodes[~moving])
        walk.same(row[moving], nodes[moving], scale=False, norm=True)
        if first[place] == place:
            walk.follow(nodes[moving], row[moving])
        walk.about("normed")[nodes[moving]] = True
        walk.flows.append(Flow("norm", nodes.tolist(), row.tolist(), True))
    answer = torch.from_numpy(made)[inverse].expand(wide.shape).reshape(tensor.shape)
    _affine(walk, operation, answer, weight, bias)


@rule("native_group_norm")
def group_norm(walk: Walk, operation: Operation) -> None:
    """Over channels and tokens of a group: only scales of one number for the group leave it, and eps takes these."""
    tensor, weight, bias = operation.args[:3]
    groups = operation.args[6]
    label = walk.label(tensor).movedim(1, -1)
    spatial = range(1, label.ndim - 1)
    if any(not walk.tokens(label, axis) for axis in spatial):
        walk.opaque(operation)
        return
    (thin,) = thinned(label)
    rows = thin.expand(*thin.shape[:-1], tensor.shape[1]).reshape(-1, groups, tensor.shape[1] // groups)
    names = np.arange(walk.count)
    moving = walk.nodes(label)
    names[moving] = walk.new(len(moving))
    walk.fix(np.concatenate([moving, names[moving]]), seen=False)
    for row in torch.unique(rows.reshape(-1, rows.shape[-1]), dim=0).numpy():
        walk.flows.append(Flow("norm", names[row[row > FIXED]].tolist(), row.tolist(), "even"))
    made = torch.from_numpy(names)[walk.label(tensor)]
    _affine(walk, operation, made, *(_by_channel(walk, each, tensor) for each in (weight, bias)))


@rule("native_batch_norm", "_native_batch_norm_legit_no_training", "_batch_norm_with_update")
def batch_norm(walk: Walk, operation: Operation) -> None:
    """With the statistics of training it is a number times each channel, plus another."""
    tensor, weight, bias = operation.args[:3]
    if operation.name == "native_batch_norm" and operation.args[5]:
        walk.opaque(operation)
        return
    mean, variance = operation.args[3:5]
    eps = operation.args[7] if operation.name == "native_batch_norm" else operation.args[6]
    shape = (-1, *[1] * (tensor.ndim - 2))
    size = (variance.double() + eps).rsqrt()
    steps = (
        (size.view(shape), torch.ops.aten.mul.Tensor, mul),
        ((-mean.double() * size).view(shape), torch.ops.aten.add.Tensor, add),
    )
    for numbers, func, step in steps:
        after = torch.empty(tensor.shape, device="meta")
        walk.notes["kept", walk.at, func] = numbers, after
        step(walk, Operation(func, (tensor, numbers), {}, after))
        tensor = after
    numbers_of = [_by_channel(walk, each, tensor) for each in (weight, bias)]
    _affine(walk, operation, walk.labels[id(tensor)], *numbers_of)


@rule("_weight_norm_interface")
def weight_norm(walk: Walk, operation: Operation) -> None:
    """g v / |v| along an axis: the length of v is free, and nothing else while no rule knows what it is used for."""
    v, g, axis = (*operation.args, 0)[:3]
    if id(v) not in walk.entries:
        walk.opaque(operation)
        return
    rows = walk.label(v).movedim(axis, 0).reshape(v.shape[axis], -1).numpy()
    walk.alone(rows)
    walk.scales.name(rows.reshape(-1))
    walk.equal((rows[:, 1:], 1.0), (rows[:, :1], -1.0))
    walk.flows.append(Flow("seen", rows.reshape(-1).tolist()))
    walk.fix(walk.label(g))
    walk.settle(operation)


def _by_channel(walk: Walk, numbers: Tensor | None, like: Tensor) -> Tensor | None:
    """Return numbers of channels in a shape that stands beside tokens."""
    if numbers is None:
        return None
    if id(numbers) not in walk.entries or id(numbers) in walk.labels:
        return numbers.view(-1, *[1] * (like.ndim - 2))
    shape = (-1, *[1] * (like.ndim - 2))
    made = torch.empty(numbers.view(shape).shape, device="meta")
    walk.notes["kept", walk.at, id(numbers)] = made
    (walk.entries[id(made)],) = walk.entries[id(numbers)].apply(lambda layout: layout.view(shape))
    return made


def _affine(walk: Walk, operation: Operation, label: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    """Gain and bias of a norm."""
    out = operation.outputs[0]
    between = torch.empty(out.shape, device="meta")
    walk.notes["kept", walk.at] = between
    walk.put(between, label)
    for step, (numbers, func) in enumerate(((weight, torch.ops.aten.mul.Tensor), (bias, torch.ops.aten.add.Tensor))):
        if numbers is None:
            continue
        if step == 0:
            walk.about("gated")[walk.nodes(label)] = True
        after = torch.empty(out.shape, device="meta")
        walk.notes["kept", walk.at, step] = after
        (mul if step == 0 else add)(walk, Operation(func, (between, numbers), {}, after))
        between = after
    walk.put(out, walk.labels[id(between)])
    for other in operation.outputs[1:]:
        walk.put(other, torch.full((), FIXED).expand(other.shape))


@rule("_softmax", "_safe_softmax", "_log_softmax", "softmax", "log_softmax", "logsumexp")
def softmax(walk: Walk, operation: Operation) -> None:
    tensor, axis = operation.args[:2]
    axis = axis[0] if isinstance(axis, (list, tuple)) else axis
    label = walk.label(tensor)
    if tensor.shape[axis] == 1:
        walk.single.append(walk.nodes(label))
    if bool((label == ZERO).any()):  # a score that is known is one, unless it is masked
        label = torch.where((label == ZERO) & (tensor > MASKED).to(label.device), FIXED, label)
    hidden = walk.hidden(tensor)
    if hidden is not None:
        label = torch.where(hidden & ~hidden.all(axis, keepdim=True), ZERO, label)
    group = walk.notes.get(("group", id(tensor)))
    if walk.tokens(label, axis, masked=True):
        nodes = walk.nodes(label)
        walk.fix(nodes, seen=False)
        (thin,) = thinned(label.movedim(axis, -1))
        rows = torch.unique(thin.reshape(-1, thin.shape[-1]), dim=0).tolist()
        rows = [[n for n in row if n != ZERO] for row in rows]
        walk.flows.append(Flow("soft", nodes.tolist(), rows, group is not None and flat(group, axis)))
    else:
        (thin,) = thinned(label.movedim(axis, -1))
        for row in torch.unique(thin.reshape(-1, thin.shape[-1]), dim=0).tolist():
            walk.fix(row, seen=FIXED in row)
            if FIXED not in row:
                walk.flows.append(Flow("norm", [], row, True))
    walk.settle(operation)
    if operation.name not in ("_log_softmax", "log_softmax", "logsumexp"):
        shape = list(tensor.shape)
        shape[axis] = 1
        codes = torch.arange(torch.Size(shape).numel()).view(shape).expand(tensor.shape)
        walk.notes["group", id(operation.out)] = codes
        walk.notes["normalised", id(operation.out)] = tensor.shape[axis]
