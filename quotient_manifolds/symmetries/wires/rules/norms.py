"""Rules of norms and softmax."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from quotient_manifolds.symmetries.wires.nodes import FIXED, ZERO, flat, thinned
from quotient_manifolds.symmetries.wires.record import Operation
from quotient_manifolds.symmetries.wires.uses import Flow
from quotient_manifolds.symmetries.wires.walk import HIDDEN, Walk, rule


@rule("native_layer_norm")
def layer_norm(walk: Walk, operation: Operation) -> None:
    tensor, shape = operation.args[:2]
    label = walk.label(tensor)
    width = math.prod(shape)
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
    _put(walk, operation, torch.from_numpy(made)[inverse].expand(wide.shape).reshape(tensor.shape))


@rule("native_group_norm")
def group_norm(walk: Walk, operation: Operation) -> None:
    """Over channels and tokens of a group: only scales of one number for the group leave it, and eps takes these."""
    tensor, groups = operation.args[0], operation.args[6]
    label = walk.label(tensor).movedim(1, -1)
    spatial = range(1, label.ndim - 1)
    if any(not walk.tokens(label, axis) for axis in spatial):
        walk.opaque(operation)
        return
    (thin,) = thinned(label)
    rows = thin.expand(*thin.shape[:-1], tensor.shape[1]).reshape(-1, groups, tensor.shape[1] // groups)
    names = np.maximum(np.arange(walk.count), FIXED)  # a zero is one no longer
    moving = walk.nodes(label)
    names[moving] = walk.new(len(moving))
    walk.fix(np.concatenate([moving, names[moving]]), seen=False)
    for group in rows.unbind(1):  # of all its kinds of tokens
        row = group.unique().numpy()
        walk.flows.append(Flow("norm", names[row[row > FIXED]].tolist(), row.tolist(), "even"))
    _put(walk, operation, torch.from_numpy(names)[walk.label(tensor)])


def _put(walk: Walk, operation: Operation, label: Tensor) -> None:
    """Enter what is normalised; its statistics do not change."""
    walk.settle(operation)
    walk.put(operation.outputs[0], label)
    walk.about("gated")[walk.nodes(label)] = True


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


@rule("_softmax", "_safe_softmax", "_log_softmax")
def softmax(walk: Walk, operation: Operation) -> None:
    tensor, axis = operation.args[:2]
    label = walk.label(tensor)
    if tensor.shape[axis] == 1:
        walk.single.append(walk.nodes(label))
    if bool((label == ZERO).any()):  # a score that is known is one
        label = torch.where(label == ZERO, FIXED, label)
    level = walk.level((tensor, 1.0))
    if level.ndim:  # and one that has no weight beside others is none
        label = torch.where(level - level.amax(axis, keepdim=True) <= HIDDEN, ZERO, label)
    group = walk.notes.get(("group", id(tensor)))
    (thin,) = thinned(label.movedim(axis, -1))
    rows = torch.unique(thin.reshape(-1, thin.shape[-1]), dim=0).tolist()
    if walk.tokens(label, axis, masked=True):
        nodes = walk.nodes(label)
        walk.fix(nodes, seen=False)
        rows = [[n for n in row if n != ZERO] for row in rows]
        walk.flows.append(Flow("soft", nodes.tolist(), rows, group is not None and flat(group, axis)))
    else:
        for row in rows:
            walk.fix(row, seen=FIXED in row)
            if FIXED not in row:
                walk.flows.append(Flow("norm", [], row, True))
    walk.settle(operation)
    if operation.name != "_log_softmax":
        shape = list(tensor.shape)
        shape[axis] = 1
        codes = torch.arange(torch.Size(shape).numel()).view(shape).expand(tensor.shape)
        walk.notes["group", id(operation.out)] = codes
        places = torch.arange(tensor.shape[axis]).expand(tensor.movedim(axis, -1).shape)
        walk.notes["place", id(operation.out)] = places.movedim(-1, axis)
        walk.notes["normalised", id(operation.out)] = tensor.shape[axis]
