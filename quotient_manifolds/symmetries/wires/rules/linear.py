"""Rules of linear maps by parameters (they absorb GL on both sides), of contractions, and of mixtures of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from quotient_manifolds.symmetries.wires.codes import folded, hashed, mixed, named, segments
from quotient_manifolds.symmetries.wires.entries import Entries
from quotient_manifolds.symmetries.wires.linear_algebra import Array
from quotient_manifolds.symmetries.wires.nodes import FIXED, ZERO, flat, moving, ragged, thinned
from quotient_manifolds.symmetries.wires.record import Operation
from quotient_manifolds.symmetries.wires.rules.products import gain
from quotient_manifolds.symmetries.wires.rules.sums import total
from quotient_manifolds.symmetries.wires.uses import NONE, Flow
from quotient_manifolds.symmetries.wires.walk import Walk, rule

MOST_ENTRIES = 1 << 20  # of a table that is taken row by row


@rule("mm", "bmm")
def matmul(walk: Walk, operation: Operation) -> None:
    (a, b), out = operation.args[:2], operation.out
    still = [each for each in (a, b) if walk.still(each)]
    if len(still) == 1 and id(a if still[0] is b else b) not in walk.entries:
        walk.as_numbers(still[0], lambda: matmul(walk, operation))
        return
    plain = [id(each) in walk.entries and id(each) not in walk.labels for each in (a, b)]
    if all(plain):
        walk.label(a)
        plain[0] = False
    if plain[1]:
        by_weight(walk, a, walk.entries[id(b)], out, turned=False)
    elif plain[0]:
        by_weight(walk, b, walk.entries[id(a)], out, turned=True)
    elif walk.moving(a) and walk.moving(b):
        contract(walk, operation, a, b, out)
    elif walk.moving(b):
        mix(walk, operation, a, b, out, turned=False)
    elif walk.moving(a):
        mix(walk, operation, b, a, out, turned=True)
    else:
        walk.put(out, torch.full((), FIXED).expand(out.shape))


def by_weight(walk: Walk, tensor: Tensor, entries: Entries, out: Tensor, *, turned: bool) -> None:
    """x W, or W x with the channels of x before its tokens; a batch of weights is one weight a member."""
    if not turned:
        (entries,) = entries.apply(lambda layout: layout.mT)
    layout = entries.layout  # (..., out, in)
    label = walk.label(tensor).mT if turned else walk.label(tensor)
    shape = (*out.shape[:-2], out.shape[-1], out.shape[-2]) if turned else out.shape
    if layout.ndim == 3 and layout.stride(0) == 0:
        layout = layout[0]
    if layout.ndim == 2:
        made = walk.linear(replace(entries, layout=layout[None]), label, shape)
    else:
        parts = []
        for member in range(layout.shape[0]):
            single = replace(entries, layout=layout[member][None])
            parts.append(walk.linear(single, label[member % label.shape[0]], shape[1:]))
            if len(walk.linears) > 1:
                walk.mark(walk.linears[-1].outs, "member", walk.at, member)
        made = torch.stack(parts)
    walk.put(out, made.mT if turned else made)


def contract(walk: Walk, operation: Operation, a: Tensor, b: Tensor, out: Tensor) -> None:
    """q k^T: the two change contragrediently, and what comes out not at all."""
    first, second = walk.label(a), walk.label(b).mT  # (..., tokens, channels)
    if a.ndim == 2:
        first, second = first[None], second[None]
    several = any(ragged(walk.rows(each, each.shape[-1])[0]) for each in (first, second))
    if several or (walk.tokens(first, -1) and walk.tokens(second, -1) and first.shape[-1] > 1):
        walk.opaque(operation)
        return
    batch, m, c = first.reshape(-1, *first.shape[-2:]).shape
    n = second.shape[-2]
    first, second = first.reshape(batch, m, c), second.reshape(batch, n, c)
    short = [each.narrow(1, 0, 1) if flat(each, 1) else each for each in (first, second)]
    together = torch.cat([each.reshape(batch, -1) for each in short], 1)
    groups, inverse = torch.unique(together, dim=0, return_inverse=True)
    labels = []
    for place, group in enumerate(groups):
        parts = group[: short[0][0].numel()].view(-1, c), group[short[0][0].numel() :].view(-1, c)
        (q, at_q), (k, at_k) = (torch.unique(part, dim=0, return_inverse=True) for part in parts)
        labels.append(_dot(walk, q.numpy(), k.numpy(), place)[at_q][:, at_k].expand(m, n))
    made = torch.stack(labels)[inverse].reshape(out.shape)
    walk.put(out, made)
    shape = (*out.shape[:-1], 1)
    walk.notes["group", id(out)] = torch.arange(out[..., :1].numel()).view(shape).expand(out.shape)


def _dot(walk: Walk, q: Array, k: Array, place: int) -> Tensor:
    for side, rows in enumerate((q, k)):
        walk.read_together(rows, "dot", walk.at, place, side)
        walk.same(moving(rows), rows)
    walk.same(moving(q), moving(k), dual=True, scale=False)
    scores = walk.new(len(q) * len(k))
    walk.same(scores[0], scores[1:])
    walk.alone(scores)
    for node, (x, y) in zip(scores.tolist(), ((x, y) for x in q for y in k), strict=True):
        live = (x != ZERO) & (y != ZERO)
        walk.equal((np.full(int(live.sum()), node), 1.0), (x[live], -1.0), (y[live], -1.0))
        walk.flows.append(Flow("dot", [node], (x.tolist(), y.tolist())))
    return torch.from_numpy(scores).view(len(q), len(k))


def mix(walk: Walk, operation: Operation, weights: Tensor, tensor: Tensor, out: Tensor, *, turned: bool) -> None:
    """Mix tokens by weights that no symmetry changes; if these differ by head, so do the channels of heads."""
    label = walk.label(tensor).mT if turned else walk.label(tensor)  # (..., tokens, channels)
    matrix = weights.mT if turned else weights
    codes = walk.codes(weights)
    codes = folded((codes.mT if turned else codes).reshape(*matrix.shape[:-2], -1))[..., None, None]
    rows, _ = walk.rows(label, label.shape[-1])
    if ragged(rows):  # a weight without some of its entries
        walk.opaque(operation)
        return
    walk.read_together(rows, "mixed", walk.at)
    if not flat(label, -2):  # which tokens a channel has
        (thin,) = thinned(label.mT)
        tokens = folded(torch.from_numpy(walk.made_of(thin.numpy())))[..., None, :]
        codes = mixed(codes * 1000003 + tokens, 5)
    thin = walk.first_kind(label, [label.ndim - 2])
    known, column = _columns(thin, codes)
    made, names, nodes = walk.combined(thin)
    target = (*out.shape[:-2], out.shape[-1], out.shape[-2]) if turned else out.shape
    made = made.expand(*target[:-2], target[-2], made.shape[-1])
    walk.put(out, made.mT if turned else made)
    walk.about("mixed")[nodes] = True
    a = names[:, 0]
    marks = column[np.searchsorted(known, a)]
    kinds = walk.kinds_along(label, label.ndim - 2)
    walk.same(a, nodes)
    walk.follow(nodes, a, key=hashed(marks, named(("mixed", walk.at))))
    alike = [(n, node) for node, each in zip(nodes.tolist(), a.tolist(), strict=True) for n in kinds.get(each, [])]
    walk.same(*np.array([pair for pair in alike if pair[0] > FIXED], np.int64).reshape(-1, 2).T)  # what is added up
    group = walk.notes.get(("group", id(weights)))
    axis = -2 if turned else -1
    whole = group is not None and ("normalised", id(weights)) in walk.notes and flat(group, axis)
    if whole:  # each of those that one softmax normalises is there once
        place = walk.notes["place", id(weights)].sort(axis).values
        whole = place.shape[axis] == walk.notes["normalised", id(weights)] and bool((place.diff(dim=axis) > 0).all())
    zeros = any(ZERO in row for row in kinds.values())
    terms = [[(n, 1.0) for n in kinds.get(each, [each]) if n > FIXED] for each in a.tolist()]
    fixed = any(FIXED in row for row in kinds.values())
    plus = np.full(len(nodes), np.nan) if fixed else None
    walk.flows.append(Flow("mix" if whole and not zeros else "number", nodes.tolist(), terms, marks.tolist(), plus))
    if fixed:
        walk.fix(nodes, seen=False)


def _columns(label: Tensor, codes: Tensor) -> tuple[Array, Array]:
    shape = torch.broadcast_shapes(label.shape, codes.shape)
    label, codes = thinned(label.expand(shape), codes.expand(shape))
    flat_label = label.reshape(-1).numpy()
    order = np.argsort(flat_label, kind="stable")
    nodes, start, count = np.unique(flat_label[order], return_index=True, return_counts=True)
    return nodes, segments(codes.reshape(-1).numpy()[order], start, count)


@rule("embedding")
def embedding(walk: Walk, operation: Operation) -> None:
    weight, ids = operation.args[:2]
    if id(weight) in walk.entries and not walk.live(ids):
        lookup(walk, weight, ids, operation.out)
    else:
        walk.opaque(operation)


def lookup(walk: Walk, weight: Tensor, ids: Tensor, out: Tensor) -> None:
    entries = walk.entries[id(weight)]
    if entries.layout.ndim != 2:
        walk.fix(walk.label(weight))
        walk.put(out, torch.full((), FIXED).expand(out.shape))
        return
    if walk.codes.constant(ids) and entries.layout.numel() < MOST_ENTRIES:
        # Places that no input chooses, such as positions: each row is a vector of its own, of those that are asked for.
        asked, place = (ids % weight.shape[0]).cpu().unique(return_inverse=True)
        known = walk.notes.setdefault(("rows", entries.key), {})
        fresh = torch.tensor([row for row in asked.tolist() if row not in known], dtype=torch.long)
        if len(fresh):
            (part,) = entries.apply(lambda layout: layout[fresh.to(layout.device)])
            nodes = torch.from_numpy(walk.new(len(fresh) * weight.shape[1])).view(len(fresh), -1)
            known.update(zip(fresh.tolist(), nodes, strict=True))
            walk.vector(part, NONE, nodes.numpy(), gain=False)
        walk.put(out, torch.stack([known[row] for row in asked.tolist()])[place])
        return
    table = replace(entries, layout=entries.layout.T[None])
    walk.put(out, walk.linear(table, None, out.shape, table=True))


@rule("convolution")
def convolution(walk: Walk, operation: Operation) -> None:
    tensor, weight, _, stride, padding, _, transposed, _, groups = operation.args[:9]
    plain = id(weight) in walk.entries and id(weight) not in walk.labels and id(tensor) not in walk.entries
    if not plain or (transposed and groups > 1):
        walk.opaque(operation)
        return
    entries = walk.entries[id(weight)]
    order = (2, 1, 0) if transposed else (2, 0, 1)
    (entries,) = entries.apply(lambda layout: layout.flatten(2).permute(order))  # (taps, out, in)
    layout = entries.layout
    label = walk.label(tensor).movedim(1, -1)
    spatial = range(1, label.ndim - 1)
    alone = weight[0, 0].numel() == 1 and not any(padding) and all(each == 1 for each in stride) and not transposed
    if bool((label <= FIXED).all()):
        label = torch.full((), FIXED).expand(label.shape)
    if any(not walk.tokens(label, axis) for axis in spatial):
        beside = label
        for axis in spatial:
            beside = torch.where(beside == ZERO, beside.amax(axis, keepdim=True), beside)
        if not _flat(beside, spatial) or ragged(walk.rows(label, label.shape[-1])[0]):
            _by_numbers(walk, operation)
            return
        label, alone = beside, False  # zeros beside tokens, as the operation itself puts there
    out, size = operation.out, layout.shape[1] // groups
    parts = []
    shape = [out.shape[0], *out.shape[2:], size]
    taps = None if alone else (tuple(padding), tuple(weight.shape[2:]))
    if not alone and all(flat(label, axis) for axis in spatial):
        for axis in spatial:
            label = label.narrow(axis, 0, 1)
    for group in range(groups):
        width = layout.shape[2]
        part = replace(entries, layout=layout[:, group * size : (group + 1) * size])
        channels = label[..., group * width : (group + 1) * width]
        if alone or all(flat(channels, axis) for axis in spatial):
            parts.append(walk.linear(part, channels, shape, taps=taps))
        else:  # an answer is made of tokens of several kinds
            walk.linear(part, channels, (*channels.shape[:-1], size), taps=taps)
            answers = walk.linears[-1].outs
            made = walk.new(size)
            for each in answers:
                walk.same(each, made)
            walk.follow(made, *answers)
            walk.passed("number", made, answers.T, keys=walk.history[made])
            parts.append(torch.from_numpy(made).expand(shape))
    walk.put(out, torch.cat(parts, -1).movedim(-1, 1))


def _by_numbers(walk: Walk, operation: Operation) -> None:
    """Mix tokens by a row of numbers for each head, by a kernel 1 wide along channels: a gain for each place in it."""
    tensor, weight, bias, stride, padding, _, _, _, groups = operation.args[:9]
    label, out = walk.label(tensor), operation.out
    channels = [axis for axis in range(2, label.ndim) if not walk.tokens(label, axis)]
    alone = all((weight.shape[axis], stride[axis - 2], padding[axis - 2]) == (1, 1, 0) for axis in channels)
    axes = [axis for axis in range(2, label.ndim) if axis not in channels]
    if bias is not None or not alone or not groups == len(weight) == tensor.shape[1] or not _flat(label, axes):
        walk.opaque(operation)
        return
    (rows,) = walk.entries[id(weight)].apply(lambda layout: layout.reshape(groups, -1))
    behind = [1] * (out.ndim - 2)
    columns = rows.apply(lambda layout: [each.view(-1, *behind) for each in layout.unbind(1)])
    sums = None
    for tap, part in enumerate(columns):
        numbers, moved, product, after = (torch.empty(out.shape, device="meta") for _ in range(4))
        walk.notes["kept", walk.at, tap] = numbers, moved, product, after
        walk.entries[id(numbers)] = part
        kind = "number" if any(padding) else "token"
        walk.put(moved, walk.moved(walk.first_kind(label, axes), tap, kind=kind).expand(out.shape))
        gain(walk, Operation(operation.func, (moved, numbers), {}, product), moved, numbers)
        total(walk, after, [(product, 1.0)] if sums is None else [(sums, 1.0), (product, 1.0)])
        sums = after
    walk.put(out, walk.labels[id(sums)])


def _flat(label: Tensor, axes: Sequence[int]) -> bool:
    return all(flat(label, axis) for axis in axes)
