"""The table of operations: what each allows the channels that it takes, a few lines for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from quotient_manifolds.symmetries.wires.entries import Entries
from quotient_manifolds.symmetries.wires.record import Operation
from quotient_manifolds.symmetries.wires.walk import FIXED, ZERO, Array, Flow, Walk, flat, hashed, named, on_labels, rule, segments

MOST_ENTRIES = 1 << 20  # of a table that is taken row by row

# views


@rule("view")
def view(walk: Walk, operation: Operation) -> None:
    """Move labels as values are moved. Where tokens are dropped or moved, the channels it happens to are marked."""
    name, args = operation.name, operation.args
    if name in ("native_dropout", "dropout"):
        made = [walk.label(args[0])]
    elif name in ("view", "_unsafe_view", "_reshape_alias"):
        made = [walk.label(args[0]).reshape(operation.out.shape)]
    elif name == "copy":
        made = [walk.label(args[1]).expand(operation.out.shape)]
    else:
        parts = _parts_of_tokens(walk, operation)
        if parts and name in ("cat", "slice_scatter", "select_scatter"):
            kept = {}
            for place, part in enumerate(operation.inputs):
                if place in parts and id(part) not in kept:
                    kept[id(part)] = walk.labels[id(part)]
                    walk.labels[id(part)] = walk.moved(kept[id(part)], place)
            made = on_labels(walk, operation)
            walk.labels.update(kept)
        else:
            made = on_labels(walk, operation)
            made = [walk.moved(label, place) if place in parts else label for place, label in enumerate(made)]
    for out, label in zip(operation.outputs, made, strict=False):
        walk.put(out, label)
    source = args[0]
    if name in ("slice", "split", "split_with_sizes") and not _parts_of_tokens(walk, operation):
        where = 2 if name != "slice" else 1
        axis = (args[where] if len(args) > where else operation.kwargs.get("dim", 0)) % source.ndim
        for out in operation.outputs:
            if out.shape[axis] == 1 < source.shape[axis]:
                walk.notes["single", id(out)] = axis  # one of several channels, and no token
    if isinstance(source, Tensor):
        for kind in ("group", "pending", "normalised"):
            if (kind, id(source)) in walk.notes:
                _carry(walk, kind, operation)


def _carry(walk: Walk, kind: str, operation: Operation) -> None:
    found = walk.notes[kind, id(operation.args[0])]
    if kind in ("pending", "normalised"):
        for out in operation.outputs:
            walk.notes[kind, id(out)] = found
        return
    if operation.name in ("view", "_unsafe_view", "_reshape_alias"):
        parts = [found.reshape(operation.out.shape)]
    elif len(operation.inputs) > 1:
        return
    else:
        made = operation.func(found, *operation.args[1:], **operation.kwargs)
        parts = [made] if isinstance(made, Tensor) else list(made)
    for out, part in zip(operation.outputs, parts, strict=False):
        walk.notes[kind, id(out)] = part


def _parts_of_tokens(walk: Walk, operation: Operation) -> set[int]:
    """Return the places of inputs, of cat, or of outputs, otherwise, whose tokens are moved, dropped or put beside others."""
    name, args = operation.name, operation.args
    if name in ("slice", "select", "split", "split_with_sizes", "unbind", "roll", "flip", "index_select", "unfold"):
        where = {"split": 2, "split_with_sizes": 2, "roll": 2}.get(name, 1)
        axes = args[where] if len(args) > where else operation.kwargs.get("dim", 0)
        label = walk.label(args[0])
        for axis in [axes] if isinstance(axes, int) else axes:
            if label.shape[axis] > 1 and walk.tokens(label, axis):
                whole = name == "slice" and operation.out.shape[axis] == label.shape[axis]
                return set() if whole else set(range(len(operation.outputs)))
    if name == "cat":
        axis = args[1] if len(args) > 1 else 0
        return {place for place, part in enumerate(args[0]) if part.numel() and walk.moving(part)
                and walk.notes.get(("single", id(part))) != axis % part.ndim and walk.tokens(walk.label(part), axis)}
    if name in ("slice_scatter", "select_scatter"):
        return {place for place, part in enumerate(operation.inputs) if walk.moving(part)}
    return set()


@rule("_to_copy", "copy_")
def to_copy(walk: Walk, operation: Operation) -> None:
    if not operation.out.dtype.is_floating_point:
        walk.opaque(operation)
        return
    source = operation.args[0]
    walk.put(operation.out, walk.label(source))
    for kind in ("group", "pending", "normalised"):
        if (kind, id(source)) in walk.notes:
            walk.notes[kind, id(operation.out)] = walk.notes[kind, id(source)]


@rule("zeros_like", "new_zeros", "new_empty", "empty_like")
def zeros(walk: Walk, operation: Operation) -> None:
    walk.put(operation.out, torch.zeros((), dtype=torch.long).expand(operation.out.shape))


@rule("ones_like", "full_like", "new_ones", "new_full")
def ones(walk: Walk, operation: Operation) -> None:
    walk.settle(operation)


@rule("constant_pad_nd")
def pad(walk: Walk, operation: Operation) -> None:
    """Zeros beside tokens are no constant: the channels that get them have nodes of their own."""
    source, sizes = operation.args[:2]
    value = operation.args[2] if len(operation.args) > 2 else 0
    label = walk.label(source)
    names = walk.nodes(label)
    fresh = walk.new(len(names))
    table = np.arange(walk.count)
    table[names] = fresh
    walk.put(operation.out, operation.func(torch.from_numpy(table)[label], sizes, FIXED if value else ZERO))
    walk.same(names, fresh)
    walk.follow(fresh, names, key=walk.at)
    walk.passed("number", fresh, names, keys=np.zeros(len(names)))


@rule("index")
def index(walk: Walk, operation: Operation) -> None:
    source, places = operation.args[:2]
    if id(source) in walk.entries and ("used", id(source)) not in walk.notes and len(places) == 1:
        lookup(walk, source, places[0], operation.out)
        return
    label = walk.label(source)
    given = [axis for axis, each in enumerate(places) if each is not None]
    known = all(walk.codes.constant(places[axis]) for axis in given)
    if any(places[axis].dtype == torch.bool for axis in given) or not (known or all(walk.tokens(label, axis) for axis in given)):
        walk.opaque(operation)
        return
    made = operation.func(label, places)
    walk.put(operation.out, walk.moved(made) if any(walk.tokens(label, axis) for axis in given) else made)


# sums


@rule("add", "sub", "rsub")
def add(walk: Walk, operation: Operation) -> None:
    a, b = operation.args[:2]
    alpha = float(operation.kwargs.get("alpha", operation.args[2] if len(operation.args) > 2 else 1.0))
    first, second = (1.0, alpha) if operation.name == "add" else (1.0, -alpha) if operation.name == "sub" else (-alpha, 1.0)
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        tensor, number, factor = (a, b, first) if isinstance(a, Tensor) else (b, a, second)
        add_number(walk, operation, tensor, factor, 0.0 if number == 0 else 1.0)
        return
    if operation.name == "sub" and _centred(walk, operation, a, b):
        return
    total(walk, operation.out, [(a, first), (b, second)])


def add_number(walk: Walk, operation: Operation, tensor: Tensor, factor: float, number: float) -> None:
    label, names, nodes = walk.combined(walk.label(tensor))
    walk.put(operation.out, label if number == 0 else torch.where(label == ZERO, FIXED, label))
    walk.same(names[:, 0], nodes, factor)
    walk.follow(nodes, names[:, 0])
    if number:
        walk.fix(names[:, 0], seen=False)
    walk.passed("sum", nodes, names, factor)
    _keep_group(walk, tensor, operation.out)


def total(walk: Walk, out: Tensor, parts: Sequence[tuple[Tensor, float]]) -> None:
    """A weighted sum: all its parts change alike."""
    labels = [walk.label(tensor).expand(out.shape) for tensor, _ in parts]
    for place, (tensor, _) in enumerate(parts):
        if not walk.live(tensor) and bool((labels[place] != ZERO).any()):  # where a constant happens to be 0 tells no kinds apart
            labels[place] = torch.full((), FIXED).expand(out.shape)
    label, names, nodes = walk.combined(*labels)
    walk.put(out, label)
    walk.follow(nodes, *names.T)
    factors = np.array([factor for _, factor in parts])
    plain = ~_turned(walk, names, factors, nodes)
    for a, factor in zip(names.T, factors, strict=True):
        walk.same(a[plain], nodes[plain], factor)
    walk.passed("sum", nodes, names, np.broadcast_to(factors, names.shape))
    for tensor, _ in parts:
        _keep_group(walk, tensor, out)


def _keep_group(walk: Walk, tensor: Tensor, out: Tensor) -> None:
    group = walk.notes.get(("group", id(tensor)))
    if group is not None and group.shape == out.shape:
        walk.notes["group", id(out)] = group


def _turned(walk: Walk, names: Array, factors: Array, nodes: Array) -> Array:
    """Keep x cos + y sin until its other half is there, and say where it is: together they turn a plane."""
    if names.shape[1] != 2:
        return np.zeros(len(nodes), bool)
    origin, size, angle = (walk.about(name)[names] for name in ("turned", "turn", "angle"))
    found = (origin >= 0).all(1) & (origin[:, 0] != origin[:, 1]) & (angle[:, 0] != angle[:, 1])
    if found.any():
        some = (nodes[found], names[found], np.broadcast_to(factors, names.shape)[found])
        walk.notes.setdefault(("planes", None), []).append((*some, origin[found], size[found] * factors, angle[found]))
    return found


def _planes(walk: Walk) -> None:
    """Join the halves of planes; what has no other half is a sum like any other."""
    found = walk.notes.get(("planes", None))
    if not found:
        return
    nodes, names, factors, origin, size, angle = (np.concatenate(each) for each in zip(*found, strict=True))
    halves: dict[tuple[int, int], list[int]] = {}
    for i, pair in enumerate(np.sort(origin, 1).tolist()):
        halves.setdefault((pair[0], pair[1]), []).append(i)
    done = np.zeros(len(nodes), bool)
    pairs = []
    for several in halves.values():
        for i in several:
            for j in several:
                if j <= i or done[i] or done[j]:
                    continue
                k = int(origin[j, 0] != origin[i, 0])  # where the other half has the first of this one
                turned = (size[j, 1 - k], angle[j, 1 - k]) == (size[i, 0], angle[i, 0])
                if turned and (size[j, k], angle[j, k]) == (-size[i, 1], angle[i, 1]):
                    done[[i, j]] = True
                    pairs.append((i, j))
    if pairs:
        one, other = np.array(pairs).T
        p, q = origin[one].T
        walk.same(p, nodes[one])
        walk.same(q, nodes[other])
        walk.equal((p, 1.0), (q, -1.0))
        walk.planes.append((p, q))
    for a, factor in zip(names[~done].T, factors[~done].T, strict=True):
        walk.same(a, nodes[~done], factor)


# products


@rule("mul", "div")
def mul(walk: Walk, operation: Operation) -> None:
    a, b = operation.args[:2]
    power = -1.0 if operation.name == "div" else 1.0
    if operation.name == "div" and not isinstance(b, Tensor):
        scaled(walk, operation, a, 1 / float(b))
    elif not isinstance(b, Tensor) or not isinstance(a, Tensor):
        tensor, number = (a, b) if isinstance(a, Tensor) else (b, a)
        scaled(walk, operation, tensor, float(number)) if power > 0 else product(walk, operation, None, b, power)
    elif a is b and power > 0:
        square(walk, operation, a)
    elif walk.still(b) and id(a) in walk.labels and walk.moving(a) and not walk.still(a):
        as_numbers(walk, b, lambda: number_times(walk, operation, a, b, power))
    elif walk.still(a) and id(b) in walk.labels and walk.moving(b) and not walk.still(b) and power > 0:
        as_numbers(walk, a, lambda: number_times(walk, operation, b, a, power))
    elif power > 0 and any(id(each) in walk.entries and id(each) not in walk.labels for each in (a, b)):
        gain(walk, operation, *((a, b) if id(b) in walk.entries and id(b) not in walk.labels else (b, a)))
    elif walk.moving(a) and not walk.moving(b):
        number_times(walk, operation, a, b, power)
    elif walk.moving(b) and not walk.moving(a) and power > 0:
        number_times(walk, operation, b, a, power)
    else:
        product(walk, operation, a, b, power)


def scaled(walk: Walk, operation: Operation, tensor: Tensor, factor: float) -> None:
    """A number that is known."""
    if factor == 0:
        walk.put(operation.out, torch.zeros((), dtype=torch.long).expand(operation.out.shape))
        return
    label, names, nodes = walk.combined(walk.label(tensor))
    walk.put(operation.out, label)
    a = names[:, 0]
    walk.same(a, nodes)
    walk.follow(nodes, a)
    origin = walk.about("origin")
    origin[nodes] = np.where(origin[a] < 0, a, origin[a])
    walk.about("size")[nodes] = walk.about("size")[a] * factor
    walk.passed("sum", nodes, names, factor)
    _keep_group(walk, tensor, operation.out)
    if ("single", id(tensor)) in walk.notes:
        walk.notes["single", id(operation.out)] = walk.notes["single", id(tensor)]


@rule("neg")
def neg(walk: Walk, operation: Operation) -> None:
    scaled(walk, operation, operation.args[0], -1.0)


def number_times(walk: Walk, operation: Operation, tensor: Tensor, number: Tensor, power: float) -> None:
    """Numbers that no symmetry changes: a known one for a channel is a weight, others tell channels apart."""
    shape = operation.out.shape
    label, names, nodes = walk.combined(walk.label(tensor).expand(shape))
    zero = walk.label(number).expand(shape) == ZERO
    walk.put(operation.out, torch.where(zero, ZERO, label) if bool(zero.any()) else label)
    a = names[:, 0]
    known, codes, values = walk.column_codes(walk.label(tensor).expand(shape), number)
    at = np.searchsorted(known, a)
    code, value = codes[at], values[at]
    exact = np.isfinite(value) & (value != 0)
    weight = np.ones(len(a))
    weight[exact] = value[exact] ** power
    walk.same(a, nodes, weight)
    walk.follow(nodes[exact], a[exact])
    other, b = nodes[~exact], a[~exact]
    walk.follow(other, b, key=hashed(code[~exact], named(("column", power))))
    walk.about("turned")[other] = np.where(walk.about("origin")[b] < 0, b, walk.about("origin")[b])
    walk.about("turn")[other] = walk.about("size")[b]
    walk.about("angle")[other] = code[~exact]
    walk.passed("sum", nodes[exact], names[exact], weight[exact])
    walk.passed("number", other, b, keys=code[~exact])


def product(walk: Walk, operation: Operation, a: Tensor | None, b: Tensor, power: float) -> None:
    """Two activations, entry by entry: log-scales add. One number for several channels lets these mix."""
    shape = operation.out.shape
    first = torch.full((), FIXED).expand(shape) if a is None else walk.label(a).expand(shape)
    second = walk.label(b).expand(shape)
    label, names, nodes = walk.combined(first, second)
    walk.put(operation.out, label)
    walk.equal((nodes, 1.0), (names[:, 0], -1.0), (names[:, 1], -power))
    walk.fix(nodes[((names <= FIXED) | walk.dead[names]).all(1)], seen=False)
    one, other = names[:, 0], names[:, 1]
    several = [_partners(each, beside) for each, beside in ((one, other), (other, one))]
    turned = (power > 0) & (one > FIXED) & (several[0] > several[1])
    one, other = np.where(turned, other, one), np.where(turned, one, other)
    alone, shared = np.where(turned, several[1], several[0]), np.where(turned, several[0], several[1])
    number = (one > FIXED) & (other > FIXED) & (shared > 1) & (alone == 1)
    a, b, out = one[number], other[number], nodes[number]
    walk.same(a, out, scale=False)
    going = ~walk.dead[a]
    walk.follow(out[going], a[going], key=hashed(b[going], named(("times", walk.at))))
    walk.alone(b)
    walk.alone(np.concatenate([one[~number], other[~number], nodes[~number]]))
    through(walk, nodes[~number], names[~number])
    through(walk, out, b[:, None])
    walk.passed("number", out, a, keys=b)


def _partners(names: Array, others: Array) -> Array:
    """Return with how many others each of the names stands together."""
    pairs = np.unique(np.stack([names, others], 1), axis=0)
    found, count = np.unique(pairs[:, 0], return_counts=True)
    return count[np.searchsorted(found, names)]


def gain(walk: Walk, operation: Operation, tensor: Tensor, numbers: Tensor) -> None:
    """A parameter that multiplies: X' = g X g^-1, and diagonal maps are its own."""
    if not walk.moving(tensor):
        source = walk.label(numbers)
        del source
        number_times(walk, operation, numbers, tensor, 1.0)
        return
    entries = walk.entries[id(numbers)]
    shape = operation.out.shape
    index = entries.index()
    names, inverse = index.unique(return_inverse=True)
    values = entries.read(walk.parameters).reshape(-1)
    value_of = torch.empty(len(names), dtype=torch.float64)
    value_of[inverse.reshape(-1)] = values.cpu()
    unknown = walk.notes.setdefault(("gain", entries.name), {})
    fresh = [i for i in names.tolist() if i not in unknown]
    unknown.update(zip(fresh, walk.new(len(fresh)).tolist(), strict=True))
    ids = np.array([unknown[i] for i in names.tolist()], np.int64)
    walk.scales.name(ids)
    first, second = walk.label(tensor).expand(shape), torch.from_numpy(ids)[inverse].view(entries.shape).expand(shape)
    label, pairs, nodes = walk.combined(first, second)
    walk.put(operation.out, torch.where((first == ZERO) | (label == ZERO), ZERO, label))
    kept = pairs[:, 0] != ZERO
    a, g, nodes = pairs[kept, 0], pairs[kept, 1], nodes[kept]
    order = np.argsort(ids)
    place = order[np.searchsorted(ids[order], g)]
    weight = value_of.numpy()[place]
    walk.equal((nodes, 1.0), (a, -1.0), (g, -1.0))
    walk.alone(nodes[a == FIXED])
    nothing = (a != FIXED) & (weight == 0)
    walk.fix(np.concatenate([a[nothing], nodes[nothing]]))
    kept = (a != FIXED) & (weight != 0)
    walk.same(a[kept], nodes[kept], weight[kept], scale=False)
    going = kept & ~walk.dead[a]
    walk.follow(nodes[going], a[going])
    made = walk.vector(entries, [a.tolist()], [nodes.tolist()], gain=True)
    made.unknowns = [g.tolist()]
    walk.notes["gain index", id(made)] = names.numpy()[place].tolist(), weight.tolist()


@rule("square", "pow")
def power(walk: Walk, operation: Operation) -> None:
    base, exponent = operation.args[0], operation.args[1] if operation.name == "pow" else 2
    if exponent == 2 and isinstance(base, Tensor):
        square(walk, operation, base)
    else:
        pointwise(walk, operation)


def square(walk: Walk, operation: Operation, tensor: Tensor) -> None:
    """Wait whether the squares are summed over channels: then turning the channels leaves the sum alone."""
    label, names, nodes = walk.combined(walk.label(tensor))
    walk.put(operation.out, label)
    walk.notes["pending", id(operation.out)] = ("square", (nodes, names[:, 0]))
    walk.equal((nodes, 1.0), (names[:, 0], -2.0))
    through(walk, nodes, names)


@rule("resolve")
def _resolve(walk: Walk, operation: Operation) -> None:
    resolve(walk, operation.args[0])


def resolve(walk: Walk, tensor: Tensor) -> None:
    """Take a square or a mean over channels as what it is by itself."""
    kind, about = walk.notes["pending", id(tensor)]
    if kind == "square":
        walk.alone(np.concatenate(about))
    else:
        for row in about.values():
            walk.alone(row)


# reductions


@rule("sum", "mean", "sum_to_size")
def reduce(walk: Walk, operation: Operation) -> None:
    tensor = operation.args[0]
    axes = operation.args[1] if len(operation.args) > 1 and operation.args[1] is not None else list(range(tensor.ndim))
    keep = operation.args[2] if len(operation.args) > 2 else operation.kwargs.get("keepdim", False)
    axes = [axis % tensor.ndim for axis in ([axes] if isinstance(axes, int) else axes)] or list(range(tensor.ndim))
    count = 1
    for axis in axes:
        count *= tensor.shape[axis]
    label = walk.label(tensor)
    channels = [axis for axis in axes if not walk.tokens(label, axis)]
    mean = operation.name == "mean"
    if not channels:
        thin = _pool(walk, label, axes, 1 / count if mean else 1.0)
    else:
        label = walk.first_kind(label, [axis for axis in axes if axis not in channels])
        thin, owners = _over_channels(walk, operation, label, channels, 1 / count if mean else 1.0)
        if mean and all(axis in channels or tensor.shape[axis] == 1 for axis in axes):
            walk.notes["pending", id(operation.out)] = ("mean", owners)
        else:
            for row in owners.values():
                walk.alone(row)
    if not keep:
        for axis in sorted(axes, reverse=True):
            thin = thin.select(axis, 0)
    walk.put(operation.out, thin.expand(operation.out.shape))


def _pool(walk: Walk, label: Tensor, axes: list[int], factor: float) -> Tensor:
    """Sum over tokens, which may be of several kinds."""
    rest = [axis for axis in range(label.ndim) if axis not in axes]
    moved = label.permute(*rest, *axes)
    thin = moved
    for axis in range(len(rest)):
        if flat(thin, axis):
            thin = thin.narrow(axis, 0, 1)
    lines = thin.reshape(*thin.shape[: len(rest)], -1)
    rows, inverse = torch.unique(lines.reshape(-1, lines.shape[-1]), dim=0, return_inverse=True)
    if flat(lines.reshape(-1, lines.shape[-1]), 1):
        rows, repeated = rows[:, :1], lines.shape[-1]
    else:
        repeated = 1
    names = rows.numpy()
    nodes = np.minimum(names.max(1), FIXED)
    moving = (names > FIXED).any(1)
    nodes[moving] = fresh = walk.new(int(moving.sum()))
    names = names[moving]
    for column in names.T:
        walk.same(np.where(column > FIXED, column, ZERO), fresh)
    zero, fixed = (names == ZERO).any(1), (names == FIXED).any(1)
    walk.follow(fresh, *names.T, key=hashed(zero, named(("pool", walk.at))) if lines.shape[-1] > 1 else None)
    walk.fix(fresh[fixed], seen=False)
    for kind, some in (("pool", ~zero), ("number", zero)):
        if some.any():
            terms = []
            for row in names[some].tolist():
                counted = {n: row.count(n) for n in row if n > FIXED}
                terms.append([(n, factor * repeated * count) for n, count in counted.items()])
            walk.flows.append(Flow(kind, fresh[some].tolist(), terms, [0] * int(some.sum())))
    made = torch.from_numpy(nodes)[inverse].view(thin.shape[: len(rest)]).expand(moved.shape[: len(rest)])
    for axis in sorted(axes):
        made = made.unsqueeze(axis)
    return made


def _over_channels(walk: Walk, operation: Operation, label: Tensor, axes: list[int], factor: float) -> tuple[Tensor, dict[int, list[int]]]:
    """Sum over channels: of squares it is what turning leaves alone; a mean waits for what it is taken from."""
    tensor = operation.args[0]
    rest = [axis for axis in range(label.ndim) if axis not in axes]
    moved = label.permute(*rest, *axes)
    shape = moved.shape[: len(rest)]
    thin = moved
    for axis in range(len(rest)):
        if flat(thin, axis):
            thin = thin.narrow(axis, 0, 1)
    flat_rows = thin.reshape(*thin.shape[: len(rest)], -1)
    rows, inverse = torch.unique(flat_rows.reshape(-1, flat_rows.shape[-1]), dim=0, return_inverse=True)
    nodes = walk.new(len(rows))
    pending = walk.notes.get(("pending", id(tensor)))
    squares = pending is not None and pending[0] == "square"
    if pending is not None and not squares:
        resolve(walk, tensor)
    owners: dict[int, list[int]] = {}
    for node, row in zip(nodes.tolist(), rows.numpy(), strict=True):
        row = row[row != ZERO]
        moving = row[row > FIXED]
        if not len(moving):
            walk.fix([node], seen=False)
            continue
        if (row == FIXED).any():
            walk.fix(moving, seen=False)
            walk.fix([node], seen=False)
        walk.equal((np.full(len(moving), node), 1.0), (moving, -1.0))
        walk.alone([node])
        if squares:
            walk.norm("orthogonal", _bases(pending[1], moving), node)
        else:
            owners[node] = moving.tolist()
        inside = moving.tolist()
        walk.flows.append(Flow("through" if squares else "sum", [node], [inside if squares else [(n, factor) for n in inside]]))
    if squares:
        for row in owners.values():
            walk.alone(_bases(pending[1], np.array(row)))
        owners = {}
    made = torch.from_numpy(nodes)[inverse].view(thin.shape[: len(rest)]).expand(shape)
    for axis in sorted(axes):
        made = made.unsqueeze(axis)
    return made, owners


def _bases(pending: tuple[Array, Array], nodes: Array) -> Array:
    """Return the channels of which nodes are the squares."""
    squares, bases = pending
    order = np.argsort(squares)
    return bases[order[np.searchsorted(squares[order], nodes)]]


def _centred(walk: Walk, operation: Operation, tensor: Tensor, mean: Tensor) -> bool:
    """x - mean(x): the mean may take up anything, for nobody sees it."""
    pending = walk.notes.get(("pending", id(mean)))
    if pending is None or pending[0] != "mean":
        return False
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


@rule("linalg_vector_norm")
def vector_norm(walk: Walk, operation: Operation) -> None:
    """The root of a sum of squares."""
    args = dict(enumerate(operation.args))
    order, axes = args.get(1, operation.kwargs.get("ord", 2)), args.get(2, operation.kwargs.get("dim"))
    tensor = args[0]
    if float(order) != 2 or axes is None or any(walk.tokens(walk.label(tensor), axis) for axis in axes):
        walk.opaque(operation)
        return
    keep = bool(args.get(3, operation.kwargs.get("keepdim", False)))
    squares, total_of_them = torch.empty(tensor.shape, device="meta"), torch.empty(operation.out.shape, device="meta")
    walk.notes["kept", walk.at] = squares, total_of_them
    aten = torch.ops.aten
    square(walk, Operation(aten.square.default, (tensor,), {}, squares), tensor)
    reduce(walk, Operation(aten.sum.dim_IntList, (squares, list(axes), keep), {}, total_of_them))
    pointwise(walk, Operation(aten.sqrt.default, (total_of_them,), {}, operation.out))


@rule("var", "var_mean", "std")
def variance(walk: Walk, operation: Operation) -> None:
    tensor = operation.args[0]
    axes = operation.args[1] if len(operation.args) > 1 else None
    label = walk.label(tensor)
    if axes is None or len(axes) != 1 or flat(label, axes[0] % tensor.ndim) or operation.name != "var":
        walk.opaque(operation)
        return
    axis = axes[0] % tensor.ndim
    moved = label.movedim(axis, -1)
    (thin,) = walk.thin(moved)
    rows, inverse = torch.unique(thin.reshape(-1, thin.shape[-1]), dim=0, return_inverse=True)
    nodes = walk.new(len(rows))
    for node, row in zip(nodes.tolist(), rows.numpy(), strict=True):
        _normed(walk, row)
        walk.alone([node])
        walk.equal((np.full(len(row), node), 1.0), (row, -2.0))
        walk.flows.append(Flow("norm", [node], row.tolist(), True))
    made = torch.from_numpy(nodes)[inverse].view(thin.shape[:-1]).expand(moved.shape[:-1])
    keep = operation.kwargs.get("keepdim", False)
    walk.put(operation.out, made.unsqueeze(axis) if keep else made)


# linear maps


@rule("mm", "bmm", "matmul", "dot", "mv")
def matmul(walk: Walk, operation: Operation) -> None:
    multiply(walk, operation, *operation.args[:2], operation.out)


@rule("addmm", "baddbmm")
def addmm(walk: Walk, operation: Operation) -> None:
    bias, a, b = operation.args[:3]
    beta, alpha = (float(operation.kwargs.get(key, 1.0)) for key in ("beta", "alpha"))
    between = torch.empty(operation.out.shape, device="meta")
    walk.notes["kept", walk.at] = between
    multiply(walk, operation, a, b, between)
    total(walk, operation.out, [(bias, beta), (between, alpha)] if beta else [(between, alpha)])


def multiply(walk: Walk, operation: Operation, a: Tensor, b: Tensor, out: Tensor) -> None:
    if a.ndim < 2 or b.ndim < 2:
        walk.opaque(operation)
        return
    still = [each for each in (a, b) if walk.still(each)]
    if len(still) == 1 and id(a if still[0] is b else b) not in walk.entries:
        as_numbers(walk, still[0], lambda: multiply(walk, operation, a, b, out))
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


def as_numbers(walk: Walk, tensor: Tensor, run: Any) -> None:
    """Take channels that do not change as numbers, which are seen."""
    label = walk.labels[id(tensor)]
    walk.flows.append(Flow("seen", walk.nodes(label).tolist()))
    walk.labels[id(tensor)] = torch.full((), FIXED).expand(label.shape)
    run()
    walk.labels[id(tensor)] = label


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
                walk.mark(np.array(walk.linears[-1].outs).reshape(-1), "member", walk.at, member)
        made = torch.stack(parts)
    walk.put(out, made.mT if turned else made)


def contract(walk: Walk, operation: Operation, a: Tensor, b: Tensor, out: Tensor) -> None:
    """q k^T: the two change contragrediently, and what comes out not at all."""
    first, second = walk.label(a), walk.label(b).mT  # (..., tokens, channels)
    if a.ndim == 2:
        first, second = first[None], second[None]
    if walk.tokens(first, -1) and walk.tokens(second, -1) and first.shape[-1] > 1:
        walk.opaque(operation)
        walk.put(out, torch.full((), FIXED).expand(out.shape))
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
    for rows in (q, k):
        walk.mark(rows.reshape(-1), "dot", walk.at, place)
        walk.same(rows[:1], rows[1:])
    walk.same(q[0], k[0], dual=True, scale=False)
    scores = walk.new(len(q) * len(k))
    walk.same(scores[0], scores[1:])
    walk.alone(scores)
    for node, (x, y) in zip(scores.tolist(), ((x, y) for x in q for y in k), strict=True):
        live = (x != ZERO) & (y != ZERO)
        walk.equal((np.full(int(live.sum()), node), 1.0), (x[live], -1.0), (y[live], -1.0))
        walk.flows.append(Flow("dot", [node], (x.tolist(), y.tolist())))
    return torch.from_numpy(scores).view(len(q), len(k))


def mix(walk: Walk, operation: Operation, weights: Tensor, tensor: Tensor, out: Tensor, *, turned: bool) -> None:
    """Tokens mixed by weights that no symmetry changes; weights that differ by head tell the channels of heads apart."""
    label = walk.label(tensor).mT if turned else walk.label(tensor)  # (..., tokens, channels)
    matrix = weights.mT if turned else weights
    codes = walk.codes(weights)
    codes = (codes.mT if turned else codes).reshape(*matrix.shape[:-2], -1, 1)
    thin = walk.first_kind(label, [label.ndim - 2])
    spread = thin.expand(*thin.shape[:-2], codes.shape[-2], thin.shape[-1])
    known, column = _columns(walk, spread, codes)
    made, names, nodes = walk.combined(thin)
    target = (*out.shape[:-2], out.shape[-1], out.shape[-2]) if turned else out.shape
    made = made.expand(*target[:-2], target[-2], made.shape[-1])
    walk.put(out, made.mT if turned else made)
    a = names[:, 0]
    marks = column[np.searchsorted(known, a)]
    kinds = walk.kinds_along(label, label.ndim - 2)
    walk.same(a, nodes)
    walk.follow(nodes, a, key=hashed(marks, named(("mixed", walk.at))))
    for node, each in zip(nodes.tolist(), a.tolist(), strict=True):
        walk.same([n for n in kinds.get(each, []) if n > FIXED], node)  # whatever is added up changes alike
    group = walk.notes.get(("group", id(weights)))
    axis = -2 if turned else -1
    whole = group is not None and ("normalised", id(weights)) in walk.notes and flat(group, axis)
    whole = whole and weights.shape[axis] == walk.notes["normalised", id(weights)]
    zeros = any(ZERO in row for row in kinds.values())
    terms = [[(n, 1.0) for n in kinds.get(each, [each]) if n > FIXED] for each in a.tolist()]
    walk.flows.append(Flow("mix" if whole and not zeros else "number", nodes.tolist(), terms, marks.tolist()))
    if any(FIXED in row for row in kinds.values()):
        walk.fix(nodes, seen=False)


def _columns(walk: Walk, label: Tensor, codes: Tensor) -> tuple[Array, Array]:
    shape = torch.broadcast_shapes(label.shape, codes.shape)
    label, codes = walk.thin(label.expand(shape), codes.expand(shape))
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
        key = "asked", (entries.key, tuple(asked.tolist()))
        if key not in walk.notes:
            (part,) = entries.apply(lambda layout: layout[asked.to(layout.device)])
            walk.notes[key] = torch.from_numpy(walk.new(len(asked) * weight.shape[1])).view(len(asked), -1)
            walk.vector(part, [], walk.notes[key].tolist(), gain=False)
        walk.put(out, walk.notes[key][place])
        return
    table = replace(entries, layout=entries.layout.T[None])
    walk.put(out, walk.linear(table, None, out.shape, table=True))


@rule("convolution")
def convolution(walk: Walk, operation: Operation) -> None:
    tensor, weight, bias, stride, padding, dilation, transposed, _, groups = operation.args[:9]
    if id(weight) not in walk.entries or id(weight) in walk.labels or transposed or id(tensor) in walk.entries:
        walk.opaque(operation)
        return
    entries = walk.entries[id(weight)]
    (entries,) = entries.apply(lambda layout: layout.flatten(2).permute(2, 0, 1))  # (taps, out, in)
    layout = entries.layout
    label = walk.label(tensor).movedim(1, -1)
    spatial = range(1, label.ndim - 1)
    if bool((label <= FIXED).all()):
        label = torch.full((), FIXED).expand(label.shape)
    if any(not walk.tokens(label, axis) for axis in spatial):
        walk.opaque(operation)
        return
    out, size = operation.out, layout.shape[1] // groups
    parts = []
    shape = [out.shape[0], *out.shape[2:], size]
    alone = weight[0, 0].numel() == 1 and not any(padding) and all(each == 1 for each in stride)
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
            parts.append(torch.tensor(walk.linears[-1].outs[0]).expand(shape))
    made = torch.cat(parts, -1).movedim(-1, 1)
    if bias is None:
        walk.put(out, made)
        return
    between = torch.empty(out.shape, device="meta")
    walk.notes["kept", walk.at] = between
    walk.put(between, made)
    names = walk.label(bias).view(1, -1, *[1] * (out.ndim - 2))
    spread = torch.empty(out.shape, device="meta")
    walk.notes["spread", walk.at] = spread
    walk.put(spread, names.expand(out.shape))
    total(walk, out, [(between, 1.0), (spread, 1.0)])


# norms


def _normed(walk: Walk, row: Array) -> None:
    moving = row[row > FIXED]
    lowest = int(moving.min()) if len(moving) else 0
    walk.norm("orthogonal", moving, lowest)  # a channel that is there twice is so twice, as heads that share their values
    walk.norm("centred", moving, lowest, len(row))


@rule("native_layer_norm")
def layer_norm(walk: Walk, operation: Operation) -> None:
    tensor, shape, weight, bias, eps = operation.args[:5]
    label = walk.label(tensor)
    width = 1
    for size in shape:
        width *= size
    wide = label.reshape(*label.shape[: label.ndim - len(shape)], width)
    rows, inverse = walk.rows(wide, width)
    first = walk.alike(rows)
    made = np.zeros_like(rows)
    for place, row in enumerate(rows):  # kinds of tokens that were told apart by constants alone are one again
        _normed(walk, row)
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
    """Over channels and tokens of a group together: only scales of one number for the group leave it, and eps takes these."""
    tensor, weight, bias = operation.args[:3]
    groups = operation.args[6]
    label = walk.label(tensor).movedim(1, -1)
    spatial = range(1, label.ndim - 1)
    if any(not walk.tokens(label, axis) for axis in spatial):
        walk.opaque(operation)
        return
    (thin,) = walk.thin(label)
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
    label, names, nodes = walk.combined(walk.label(tensor))
    eps = operation.args[7] if operation.name == "native_batch_norm" else operation.args[6]
    size = (operation.args[4].double() + eps).rsqrt().cpu().numpy()
    factor = np.ones(walk.count)
    for channel, each in enumerate(walk.label(tensor).movedim(1, 0)):
        factor[walk.nodes(each)] = size[channel]
    a = names[:, 0]
    walk.same(a, nodes, factor[a])
    walk.follow(nodes, a)
    walk.passed("sum", nodes, names, factor[a])
    mean = bool((operation.args[3] != 0).any())
    if mean:
        walk.fix(a, seen=False)
    _affine(walk, operation, label, *(_by_channel(walk, each, tensor) for each in (weight, bias)))


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
    group = walk.notes.get(("group", id(tensor)))
    if walk.tokens(label, axis, masked=True):
        nodes = walk.nodes(label)
        walk.fix(nodes, seen=False)
        (thin,) = walk.thin(label.movedim(axis, -1))
        rows = torch.unique(thin.reshape(-1, thin.shape[-1]), dim=0).tolist()
        rows = [[n for n in row if n != ZERO] for row in rows]
        walk.flows.append(Flow("soft", nodes.tolist(), rows, group is not None and flat(group, axis)))
    else:
        (thin,) = walk.thin(label.movedim(axis, -1))
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


# functions of entries


@rule("gt", "lt", "ge", "le")
def comparison(walk: Walk, operation: Operation) -> None:
    """Against zero, a positive scale changes nothing."""
    tensor, other = operation.args[:2]
    if isinstance(other, Tensor) or float(other) != 0:
        walk.opaque(operation)
        return
    nodes = walk.nodes(walk.label(tensor))
    walk.alone(nodes)
    walk.flows.append(Flow("seen", nodes.tolist()))


@rule("where")
def where(walk: Walk, operation: Operation) -> None:
    if len(operation.args) != 3:
        walk.opaque(operation)
        return
    condition, a, b = operation.args
    shape = operation.out.shape
    labels = [walk.label(each).expand(shape) for each in (a, b)]
    if not walk.live(condition) and walk.codes.constant(condition):
        picked = torch.where(condition.cpu(), *labels)
        label, names, nodes = walk.combined(picked, torch.full((), FIXED).expand(shape))
        label = torch.where(picked == ZERO, ZERO, label)
        moving = names[:, 0] > FIXED
        names, nodes = names[moving][:, [0, 0]], nodes[moving]
    else:
        label, names, nodes = walk.combined(*labels)
    walk.put(operation.out, label)
    spread = torch.empty(shape, device="meta")
    walk.notes["kept", walk.at] = spread
    walk.put(spread, label)
    known, codes, _ = walk.column_codes(label, condition if not walk.live(condition) else spread)
    key = hashed(codes[np.searchsorted(known, nodes)], named(("where", walk.at)))
    x, y = names.T
    walk.fix(nodes[(names == FIXED).any(1)], seen=False)
    for each in (x, y):
        some = (each > FIXED) & ((each is x) | (x != y))
        walk.same(each[some], nodes[some])
    moving = (names > FIXED).any(1)
    walk.follow(nodes[moving], x[moving], y[moving], key=key[moving])
    either = (x != y) & (names > FIXED).all(1)
    for pair, node in zip(names[either].tolist(), nodes[either].tolist(), strict=True):
        walk.flows.append(Flow("max", [node], tuple(pair)))
    partly = bool((((names == ZERO).any(1)) & (names.max(1) > FIXED)).any()) if len(names) else False
    one = np.where(x > FIXED, x, y)
    walk.passed("number" if partly else "sum", nodes[~either], one[~either], keys=key[~either])
    _keep_group(walk, a, operation.out)
    _keep_group(walk, b, operation.out)


@rule("masked_fill")
def masked_fill(walk: Walk, operation: Operation) -> None:
    tensor, mask, value = operation.args[:3]
    filled = value if isinstance(value, Tensor) else torch.full((), float(value))
    walk.notes["kept", walk.at, "value"] = filled
    if not walk.live(filled):
        kept = bool(((filled != 0) & (filled > -1e30)).any())
        walk.put(filled, torch.full((), FIXED if kept else ZERO).expand(filled.shape))
    where(walk, Operation(operation.func, (mask, filled, tensor), {}, operation.out))


@rule("maximum", "minimum")
def maximum(walk: Walk, operation: Operation) -> None:
    a, b = operation.args[:2]
    shape = operation.out.shape
    label, names, nodes = walk.combined(walk.label(a).expand(shape), walk.label(b).expand(shape))
    walk.put(operation.out, label)
    walk.alone(np.concatenate([names.reshape(-1), nodes]))
    stuck = (names == FIXED).any(1)
    walk.fix(nodes[stuck], seen=False)
    for each in names.T:
        live = each > FIXED
        walk.equal((nodes[live], 1.0), (each[live], -1.0))
    both = (names > FIXED).all(1)
    for pair, node in zip(names[both].tolist(), nodes[both].tolist(), strict=True):
        walk.flows.append(Flow("max", [node], tuple(pair)))
    through(walk, nodes[~both], names[~both])


def through(walk: Walk, nodes: Array, names: Array) -> None:
    """Say that nodes are functions of others, entry by entry."""
    if len(nodes):
        terms = [[n for n in row if n > FIXED] for row in names.tolist()]
        walk.flows.append(Flow("through", nodes.tolist(), terms))


@rule("pointwise")
def pointwise(walk: Walk, operation: Operation) -> None:
    """A function of one entry: by its degree where it is homogeneous, and otherwise the channel is fixed."""
    moving = [each for each in operation.inputs if walk.moving(each)]
    if len(moving) != 1 or not operation.out.dtype.is_floating_point or len(operation.outputs) != 1:
        if not moving or not all(out.dtype.is_floating_point for out in operation.outputs):
            walk.opaque(operation) if moving else walk.settle(operation)
            return
    shape = operation.out.shape
    labels = [walk.label(each).expand(shape) for each in moving]
    label, names, nodes = walk.combined(*labels)
    walk.put(operation.out, label)
    degree = _degree(operation) if len(operation.inputs) == 1 else None
    if degree is None:
        walk.fix(names[names > FIXED], seen=False)
        walk.fix(nodes, seen=False)
    else:
        walk.alone(np.concatenate([names[:, 0], nodes]))
        walk.equal((nodes, 1.0), (names[:, 0], -degree))
    through(walk, nodes, names)


def _degree(operation: Operation) -> float | None:
    """Return p where f(c t) = c^p f(t) for all c > 0, by values of all sizes and both signs."""
    t = torch.tensor([0.013, 0.2, 0.7, 1.0, 1.9, 5.3, 17.0], dtype=torch.float64)
    t = torch.cat([t, -t])

    def at(c: float) -> Tensor:
        args = tree_map_only(Tensor, lambda _: c * t, operation.args)
        found: Tensor = operation.func(*args, **operation.kwargs)
        return found

    try:
        one = at(1.0)
        known = one.isfinite() & (one != 0)
        if not bool(known.any()) or not one.dtype.is_floating_point:
            return None
        p = float((at(2.0)[known] / one[known]).log2()[0])
        for c in (0.01, 0.5, 2.0, 3.7, 40.0):
            if not torch.allclose(at(c)[one.isfinite()], c**p * one[one.isfinite()], rtol=1e-9, atol=0):
                return None
    except (RuntimeError, TypeError):
        return None
    return round(p, 9) if p == p else None


@rule("end")
def end(walk: Walk, operation: Operation) -> None:
    """Settle what waited for something else, and what parameters that are used twice have in common."""
    _planes(walk)
    _ties(walk)


def _ties(walk: Walk) -> None:
    """A parameter that is used twice changes in one way: alike, contragrediently where it is transposed, or not at all."""
    uses: dict[str, list[Any]] = {}
    for each in (*walk.linears, *walk.vectors):
        uses.setdefault(each.entries.name, []).append(each)
    for several in uses.values():
        if len(several) < 2:
            continue
        spans = []
        for each in several:
            index = each.entries.index()
            spans.append((int(index.min()), int(index.max()), set(index.reshape(-1).tolist()) if index.numel() < 1e5 else None))
        for i, one in enumerate(several):
            for j in range(i):
                (a0, a1, a), (b0, b1, b) = spans[i], spans[j]
                if a1 < b0 or b1 < a0 or (a is not None and b is not None and not a & b):
                    continue
                _tie(walk, several[j], one)
                alike = type(one) is type(several[j]) and one.entries.key == several[j].entries.key
                for each in (one, several[j]):
                    each.shared = "alike" if alike and each.shared in ("", "alike") else "other"


def _tie(walk: Walk, one: Any, other: Any) -> None:
    if type(one) is type(other):
        if one.entries.key == other.entries.key:
            for a, b in ((one.ins, other.ins), (one.outs, other.outs)):
                if a and b:
                    walk.same(a[0], b[0])
            return
        if not hasattr(one, "gain"):
            if replace(other.entries, layout=other.entries.layout.transpose(1, 2)).key == one.entries.key:
                for a, b in ((one.ins[0], other.outs[0]), (one.outs[0], other.ins[0])):
                    walk.same(a, b, dual=True)
                return
    for each in (one, other):
        walk.fix([n for row in (*each.ins, *each.outs, *getattr(each, "unknowns", [])) for n in row], seen=False)
