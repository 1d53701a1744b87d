"""The table of operations: what each allows the channels that it takes, a few lines for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from quotient_manifolds.symmetries.wires.entries import Entries
from quotient_manifolds.symmetries.wires.record import Operation
from quotient_manifolds.symmetries.wires.relations import DUAL, Relation
from quotient_manifolds.symmetries.wires.walk import FIXED, ZERO, Flow, Walk, flat, on_labels, rule

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
                and walk.tokens(walk.label(part), axis)}
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
    table = torch.arange(len(walk.marks))
    table[names] = torch.tensor(fresh, dtype=torch.long)
    made = operation.func(table[label], sizes, FIXED if value else ZERO)
    walk.put(operation.out, made)
    for a, b in zip(names, fresh, strict=True):
        walk.same(a, b)
        walk.follow(b, a, key=walk.at)
    walk.flows.append(Flow("number", fresh, [[(a, 1.0)] for a in names], [0] * len(names)))


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
    label, pairs, nodes = walk.combined(walk.label(tensor))
    walk.put(operation.out, label if number == 0 else torch.where(label == ZERO, FIXED, label))
    for (a,), node in zip(pairs, nodes, strict=True):
        walk.same(a, node, Relation(factor))
        walk.follow(node, a)
        if number:
            walk.fix([a], seen=False)
    walk.flows.append(Flow("sum", nodes, [[(a, factor)] for (a,) in pairs]))
    _keep_group(walk, tensor, operation.out)


def total(walk: Walk, out: Tensor, parts: Sequence[tuple[Tensor, float]]) -> None:
    """A weighted sum: all its parts change alike."""
    labels = [walk.label(tensor).expand(out.shape) for tensor, _ in parts]
    label, tuples, nodes = walk.combined(*labels)
    walk.put(out, label)
    for each, node in zip(tuples, nodes, strict=True):
        walk.follow(node, *each)
        if _turned(walk, each, [factor for _, factor in parts], node):
            continue
        for a, (_, factor) in zip(each, parts, strict=True):
            if a == FIXED:
                walk.fix([node], seen=False)
            else:
                walk.same(a, node, Relation(factor))
    terms = [
        [(a, factor) for a, (_, factor) in zip(each, parts, strict=True) if a > FIXED] for each in tuples
    ]
    walk.flows.append(Flow("sum", nodes, terms))
    for tensor, _ in parts:
        _keep_group(walk, tensor, out)


def _keep_group(walk: Walk, tensor: Tensor, out: Tensor) -> None:
    group = walk.notes.get(("group", id(tensor)))
    if group is not None and group.shape == out.shape:
        walk.notes["group", id(out)] = group


def _turned(walk: Walk, parts: Sequence[int], factors: Sequence[float], node: int) -> bool:
    """Keep x cos + y sin until its other half is there: together they turn a plane."""
    found = [walk.notes.get(("turned", part)) for part in parts]
    if len(parts) != 2 or None in found or found[0][0] == found[1][0] or found[0][2] == found[1][2]:
        return False
    turns = [(origin, size * factor, code) for (origin, size, code), factor in zip(found, factors, strict=True)]
    walk.notes.setdefault(("planes", None), []).append((node, tuple(parts), tuple(factors), turns))
    return True


def _planes(walk: Walk) -> None:
    """Join the halves of planes; what has no other half is a sum like any other."""
    waiting: dict[Any, list[Any]] = {}
    for plane in walk.notes.get(("planes", None), []):
        waiting.setdefault(frozenset(origin for origin, _, _ in plane[3]), []).append(plane)
    for key, halves in waiting.items():
        done = set()
        for i, (one, _, _, turns) in enumerate(halves):
            (p, cp, code_p), (q, cq, code_q) = turns
            for j, (other, _, _, others) in enumerate(halves):
                by_origin = {origin: (size, code) for origin, size, code in others}
                if j <= i or {i, j} & done or by_origin.get(q) != (cp, code_p) or by_origin.get(p) != (-cq, code_q):
                    continue
                done |= {i, j}
                walk.same(p, one)
                walk.same(q, other)
                walk.equal({p: 1.0, q: -1.0})
                walk.notes.setdefault(("plane", None), []).append((p, q))
        for i, (node, parts, factors, _) in enumerate(halves):
            if i not in done:
                for part, factor in zip(parts, factors, strict=True):
                    walk.same(part, node, Relation(factor))
        del key


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
    label, tuples, nodes = walk.combined(walk.label(tensor))
    walk.put(operation.out, label)
    for (a,), node in zip(tuples, nodes, strict=True):
        walk.same(a, node)
        walk.follow(node, a)
        origin, size = walk.notes.get(("origin", a), (a, 1.0))
        walk.notes["origin", node] = origin, size * factor
    walk.flows.append(Flow("sum", nodes, [[(a, factor)] for (a,) in tuples]))
    _keep_group(walk, tensor, operation.out)


@rule("neg")
def neg(walk: Walk, operation: Operation) -> None:
    scaled(walk, operation, operation.args[0], -1.0)


def number_times(walk: Walk, operation: Operation, tensor: Tensor, number: Tensor, power: float) -> None:
    """Numbers that no symmetry changes: a known one for a channel is a weight, others tell channels apart."""
    shape = operation.out.shape
    label, tuples, nodes = walk.combined(walk.label(tensor).expand(shape))
    zero = walk.label(number).expand(shape) == ZERO
    walk.put(operation.out, torch.where(zero, ZERO, label) if bool(zero.any()) else label)
    codes = walk.column_codes(walk.label(tensor).expand(shape), number)
    exact, other = [], []
    for (a,), node in zip(tuples, nodes, strict=True):
        kind, *code = codes[a]
        if kind == "value" and code[0]:
            walk.same(a, node, Relation(code[0] ** power))
            walk.follow(node, a)
            exact.append((node, a, code[0] ** power))
            continue
        walk.same(a, node)
        walk.follow(node, a, key=("column", power, codes[a]))
        other.append((node, a, codes[a]))
        origin, size = walk.notes.get(("origin", a), (a, 1.0))
        walk.notes["turned", node] = origin, size, codes[a]
    if exact:
        walk.flows.append(Flow("sum", [node for node, _, _ in exact], [[(a, factor)] for _, a, factor in exact]))
    if other:
        keys = [code for _, _, code in other]
        walk.flows.append(Flow("number", [node for node, _, _ in other], [[(a, 1.0)] for _, a, _ in other], keys))


def product(walk: Walk, operation: Operation, a: Tensor | None, b: Tensor, power: float) -> None:
    """Two activations, entry by entry: log-scales add. One number for several channels lets these mix."""
    shape = operation.out.shape
    first = torch.full((), FIXED).expand(shape) if a is None else walk.label(a).expand(shape)
    second = walk.label(b).expand(shape)
    label, tuples, nodes = walk.combined(first, second)
    walk.put(operation.out, label)
    many: dict[int, set[int]] = {}
    for one, other in tuples:
        many.setdefault(other, set()).add(one)
        many.setdefault(one, set()).add(other)
    walk_through = []
    for (one, other), node in zip(tuples, nodes, strict=True):
        walk.equal({node: 1.0, one: -1.0, other: -power})
        if all(n <= FIXED or n in walk.dead for n in (one, other)):
            walk.fix([node], seen=False)
        if power > 0 and one > FIXED and len(many[one]) > len(many[other]):
            one, other = other, one
        if one > FIXED and other > FIXED and len(many[other]) > 1 and len(many[one]) == 1:
            walk.same(one, node, scale=False)
            walk.follow(node, one, key=("times", walk.at, other)) if one not in walk.dead else None
            walk.alone([other])
            walk_through.append((node, one, other))
        else:
            walk.alone([one, other, node])
            walk_through.append((node, None, [n for n in (one, other) if n > FIXED]))
    for node, one, other in walk_through:
        if one is None:
            walk.flows.append(Flow("through", [node], [other]))
        else:
            walk.flows.append(Flow("through", [node], [[other]]))
    numbers = [each for each in walk_through if each[1] is not None]
    if numbers:
        nodes, ins, keys = zip(*numbers, strict=True)
        walk.flows.append(Flow("number", list(nodes), [[(one, 1.0)] for one in ins], list(keys)))


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
    ids = [unknown.setdefault(int(i), None) for i in names]
    for place, each in enumerate(names.tolist()):
        if ids[place] is None:
            (ids[place],) = walk.new(1)
            unknown[each] = ids[place]
            walk.scales.unknowns.add(ids[place])
    kinds = torch.tensor([i for i in ids if i is not None])[inverse].view(entries.shape)
    weight = dict(zip(ids, value_of.tolist(), strict=True))
    first, second = walk.label(tensor).expand(shape), kinds.expand(shape)
    label, tuples, nodes = walk.combined(first, second)
    label = torch.where(first == ZERO, ZERO, torch.where(label == ZERO, ZERO, label))
    walk.put(operation.out, label)
    ins, outs, unknowns = [], [], []
    for (a, g), node in zip(tuples, nodes, strict=True):
        if a == ZERO:
            continue
        walk.equal({node: 1.0, a: -1.0, g: -1.0})
        if a == FIXED:
            walk.alone([node])
        elif weight[g]:
            walk.same(a, node, Relation(weight[g]), scale=False)
            if a not in walk.dead:
                walk.follow(node, a)
        else:
            walk.fix([a, node])
        ins.append(a)
        outs.append(node)
        unknowns.append(g)
    place = {g: int(names[ids.index(g)]) for g in set(unknowns)}
    made = walk.vector(entries, [ins], [outs], gain=True)
    made.unknowns = [unknowns]
    walk.notes["gain index", id(made)] = [place[g] for g in unknowns], [weight[g] for g in unknowns]


@rule("square", "pow")
def power(walk: Walk, operation: Operation) -> None:
    base, exponent = operation.args[0], operation.args[1] if operation.name == "pow" else 2
    if exponent == 2 and isinstance(base, Tensor):
        square(walk, operation, base)
    else:
        pointwise(walk, operation)


def square(walk: Walk, operation: Operation, tensor: Tensor) -> None:
    """Wait whether the squares are summed over channels: then turning the channels leaves the sum alone."""
    label, tuples, nodes = walk.combined(walk.label(tensor))
    walk.put(operation.out, label)
    base = {node: a for (a,), node in zip(tuples, nodes, strict=True)}
    walk.notes["pending", id(operation.out)] = ("square", base)
    for (a,), node in zip(tuples, nodes, strict=True):
        walk.equal({node: 1.0, a: -2.0})
    walk.flows.append(Flow("through", nodes, [list(each) for each in tuples]))


@rule("resolve")
def _resolve(walk: Walk, operation: Operation) -> None:
    resolve(walk, operation.args[0])


def resolve(walk: Walk, tensor: Tensor) -> None:
    """Take a square or a mean over channels as what it is by itself."""
    kind, about = walk.notes["pending", id(tensor)]
    if kind == "square":
        walk.alone([*about, *about.values()])
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
    nodes, terms = [], []
    for row in rows.tolist():
        moving = [n for n in row if n > FIXED]
        if not moving:
            nodes.append(ZERO if max(row) == ZERO else FIXED)
            continue
        (node,) = walk.new(1)
        nodes.append(node)
        for n in dict.fromkeys(moving):
            walk.same(n, node)
        walk.follow(node, *moving, key=("pool", walk.at, ZERO in row) if len(row) > 1 else None)
        if FIXED in row:
            walk.fix([node], seen=False)
        terms.append((node, [(n, factor * moving.count(n)) for n in dict.fromkeys(moving)], ZERO in row))
    for kind, some in (("pool", [t for t in terms if not t[2]]), ("number", [t for t in terms if t[2]])):
        if some:
            walk.flows.append(Flow(kind, [t[0] for t in some], [t[1] for t in some], [0] * len(some)))
    made = torch.tensor(nodes)[inverse].view(thin.shape[: len(rest)]).expand(moved.shape[: len(rest)])
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
    for node, row in zip(nodes, rows.tolist(), strict=True):
        row = [n for n in row if n != ZERO]
        moving = [n for n in row if n > FIXED]
        if not moving:
            walk.fix([node], seen=False)
            continue
        if FIXED in row:
            walk.fix(moving, seen=False)
            walk.fix([node], seen=False)
        for n in moving:
            walk.equal({node: 1.0, n: -1.0})
        walk.alone([node])
        if squares and len(set(moving)) == len(moving):
            walk.mark([pending[1][n] for n in moving], "orthogonal", walk.at, node)
        else:
            owners[node] = moving
        walk.flows.append(Flow("through" if squares else "sum", [node], [moving if squares else [(n, factor) for n in moving]]))
    if squares:
        for row in owners.values():
            walk.alone([pending[1][n] for n in row])
        owners = {}
    made = torch.tensor(nodes)[inverse].view(thin.shape[: len(rest)]).expand(shape)
    for axis in sorted(axes):
        made = made.unsqueeze(axis)
    return made, owners


def _centred(walk: Walk, operation: Operation, tensor: Tensor, mean: Tensor) -> bool:
    """x - mean(x): the mean may take up anything, for nobody sees it."""
    pending = walk.notes.get(("pending", id(mean)))
    if pending is None or pending[0] != "mean":
        return False
    label, tuples, nodes = walk.combined(walk.label(tensor), walk.label(mean))
    rows: dict[int, dict[int, int]] = {}
    for (a, m), node in zip(tuples, nodes, strict=True):
        rows.setdefault(m, {})[a] = node
    if any(m not in pending[1] or sorted(row) != sorted(pending[1][m]) for m, row in rows.items()):
        return False
    walk.put(operation.out, label)
    for row in rows.values():
        for a, node in row.items():
            walk.same(a, node, norm=True)
            walk.follow(node, a)
            walk.mark([node], "normed")
        walk.mark(list(row), "centred", walk.at, min(row), len(row))
        walk.flows.append(Flow("centre", list(row.values()), list(row)))
    return True


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
    for node, row in zip(nodes, rows.tolist(), strict=True):
        _normed(walk, row)
        walk.alone([node])
        for n in row:
            walk.equal({node: 1.0, n: -2.0})
        walk.flows.append(Flow("norm", [node], row, True))
    made = torch.tensor(nodes)[inverse].view(thin.shape[:-1]).expand(moved.shape[:-1])
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
    walk.flows.append(Flow("seen", walk.nodes(label)))
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
                walk.mark([n for row in walk.linears[-1].outs for n in row], "member", walk.at, member)
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
        labels.append(_dot(walk, q.tolist(), k.tolist(), place)[at_q][:, at_k].expand(m, n))
    made = torch.stack(labels)[inverse].reshape(out.shape)
    walk.put(out, made)
    shape = (*out.shape[:-1], 1)
    walk.notes["group", id(out)] = torch.arange(out[..., :1].numel()).view(shape).expand(out.shape)


def _dot(walk: Walk, q: list[list[int]], k: list[list[int]], place: int) -> Tensor:
    for rows in (q, k):
        for row in rows:
            walk.mark(row, "dot", walk.at, place)
        for one, other in pairwise(rows):
            for x, y in zip(one, other, strict=True):
                walk.same(x, y)
    for x, y in zip(q[0], k[0], strict=True):
        walk.same(x, y, DUAL, scale=False)
    scores: list[list[int]] = []
    for one in q:
        nodes = walk.new(len(k))
        for node in nodes:
            walk.same((scores or [nodes])[0][0], node)
        walk.alone(nodes)
        scores.append(nodes)
        for node, other in zip(nodes, k, strict=True):
            for x, y in zip(one, other, strict=True):
                if ZERO not in (x, y):
                    walk.equal({node: 1.0, **_sum({x: -1.0}, {y: -1.0})})
            walk.flows.append(Flow("dot", [node], (one, other)))
    return torch.tensor(scores)


def _sum(*terms: dict[int, float]) -> dict[int, float]:
    found: dict[int, float] = {}
    for each in terms:
        for key, value in each.items():
            found[key] = found.get(key, 0.0) + value
    return found


def mix(walk: Walk, operation: Operation, weights: Tensor, tensor: Tensor, out: Tensor, *, turned: bool) -> None:
    """Tokens mixed by weights that no symmetry changes; weights that differ by head tell the channels of heads apart."""
    label = walk.label(tensor).mT if turned else walk.label(tensor)  # (..., tokens, channels)
    if not walk.tokens(label, -2):
        walk.fix(label)
        walk.put(out, torch.full((), FIXED).expand(out.shape))
        return
    matrix = weights.mT if turned else weights
    codes = walk.codes(weights)
    codes = (codes.mT if turned else codes).reshape(*matrix.shape[:-2], -1, 1)
    thin = walk.first_kind(label, [label.ndim - 2])
    spread = thin.expand(*thin.shape[:-2], codes.shape[-2], thin.shape[-1])
    marks = _columns(walk, spread, codes)
    made, tuples, nodes = walk.combined(thin)
    target = (*out.shape[:-2], out.shape[-1], out.shape[-2]) if turned else out.shape
    made = made.expand(*target[:-2], target[-2], made.shape[-1])
    walk.put(out, made.mT if turned else made)
    for (a,), node in zip(tuples, nodes, strict=True):
        walk.same(a, node)
        walk.follow(node, a, key=("mixed", walk.at, marks[a]))
    group = walk.notes.get(("group", id(weights)))
    axis = -2 if turned else -1
    whole = group is not None and ("normalised", id(weights)) in walk.notes and flat(group, axis)
    whole = whole and weights.shape[axis] == walk.notes["normalised", id(weights)]
    kinds = walk.kinds_along(label, label.ndim - 2)
    zeros = any(ZERO in row for row in kinds.values())
    terms = [[(n, 1.0) for n in kinds.get(a, [a]) if n > FIXED] for (a,) in tuples]
    keys = [marks[a] for (a,) in tuples]
    walk.flows.append(Flow("mix" if whole and not zeros else "number", nodes, terms, keys))
    if any(FIXED in row for row in kinds.values()):
        walk.fix(nodes, seen=False)


def _columns(walk: Walk, label: Tensor, codes: Tensor) -> dict[int, int]:
    from quotient_manifolds.symmetries.wires.codes import folded

    shape = torch.broadcast_shapes(label.shape, codes.shape)
    label, codes = walk.thin(label.expand(shape), codes.expand(shape))
    order = label.reshape(-1).argsort(stable=True)
    nodes, counts = label.reshape(-1)[order].unique_consecutive(return_counts=True)
    parts = codes.reshape(-1)[order].split(counts.tolist())
    return {node: int(folded(part[None])[0]) for node, part in zip(nodes.tolist(), parts, strict=True)}


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
        # Places that no input chooses, such as positions: each row is a vector of its own, those not asked for stay.
        label = walk.label(weight)
        rows = (ids % weight.shape[0]).cpu()
        walk.put(out, label[rows])
        unasked = torch.ones(weight.shape[0], dtype=torch.bool)
        unasked[rows.reshape(-1)] = False
        walk.fix(label[unasked])
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


def _normed(walk: Walk, row: list[int]) -> None:
    moving = [n for n in row if n > FIXED]
    walk.mark(moving, "orthogonal", walk.at, min(moving, default=0))
    walk.mark(moving, "centred", walk.at, min(moving, default=0), len(row))
    if len(set(moving)) < len(moving):
        walk.alone(moving)


@rule("native_layer_norm")
def layer_norm(walk: Walk, operation: Operation) -> None:
    tensor, shape, weight, bias, eps = operation.args[:5]
    label = walk.label(tensor)
    width = 1
    for size in shape:
        width *= size
    rows_label = label.reshape(*label.shape[: label.ndim - len(shape)], width)
    (thin,) = walk.thin(rows_label)
    if thin.shape[-1] != width:
        thin = thin.expand(*thin.shape[:-1], width)
    rows, inverse = torch.unique(thin.reshape(-1, width), dim=0, return_inverse=True)
    made = []
    for row in rows.tolist():
        _normed(walk, row)
        nodes = walk.new(width)
        for a, node in zip(row, nodes, strict=True):
            if a <= FIXED:
                walk.alone([node])
                walk.equal({node: 1.0})
            else:
                walk.same(a, node, scale=False, norm=True)
                walk.follow(node, a)
                walk.mark([node], "normed")
                walk.equal({node: 1.0})
                walk.equal({a: 1.0})
        walk.flows.append(Flow("norm", nodes, row, True))
        made.append(nodes)
    answer = torch.tensor(made)[inverse].view(*thin.shape[:-1], width).expand(rows_label.shape).reshape(tensor.shape)
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
    fresh: dict[int, int] = {}
    for row in torch.unique(rows.reshape(-1, rows.shape[-1]), dim=0).tolist():
        moving = [n for n in row if n > FIXED]
        walk.fix(moving, seen=False)
        for n in moving:
            fresh.setdefault(n, walk.new(1)[0])
        walk.fix([fresh[n] for n in moving], seen=False)
        walk.flows.append(Flow("norm", [fresh[n] for n in moving], row, "even"))
    names = torch.arange(len(walk.marks))
    for n, node in fresh.items():
        names[n] = node
    _affine(walk, operation, names[walk.label(tensor)], *(_by_channel(walk, each, tensor) for each in (weight, bias)))


@rule("native_batch_norm", "_native_batch_norm_legit_no_training", "_batch_norm_with_update")
def batch_norm(walk: Walk, operation: Operation) -> None:
    """With the statistics of training it is a number times each channel, plus another."""
    tensor, weight, bias = operation.args[:3]
    if operation.name == "native_batch_norm" and operation.args[5]:
        walk.opaque(operation)
        return
    label, tuples, nodes = walk.combined(walk.label(tensor))
    eps = operation.args[7] if operation.name == "native_batch_norm" else operation.args[6]
    size = (operation.args[4].double() + eps).rsqrt()
    spread = size.view(-1, *[1] * (tensor.ndim - 2)).expand(tensor.shape)
    walk.notes["kept", walk.at, "size"] = spread
    factor = {}
    flat_label = walk.label(tensor).movedim(1, -1).reshape(-1, tensor.shape[1])
    for channel in range(tensor.shape[1]):
        for n in flat_label[:, channel].unique().tolist():
            factor[n] = float(size[channel])
    for (a,), node in zip(tuples, nodes, strict=True):
        walk.same(a, node, Relation(factor[a]))
        walk.follow(node, a)
    walk.flows.append(Flow("sum", nodes, [[(a, factor[a])] for (a,) in tuples]))
    mean = bool((operation.args[3] != 0).any())
    if mean:
        walk.fix([a for (a,) in tuples], seen=False)
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
        walk.flows.append(Flow("soft", nodes, rows, group is not None and flat(group, axis)))
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
    walk.flows.append(Flow("seen", nodes))


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
        label, tuples, nodes = walk.combined(picked, torch.full((), FIXED).expand(shape))
        label = torch.where(picked == ZERO, ZERO, label)
        tuples = [(x, x) for x, _ in tuples]
    else:
        label, tuples, nodes = walk.combined(*labels)
    walk.put(operation.out, label)
    spread = torch.empty(shape, device="meta")
    walk.notes["kept", walk.at] = spread
    walk.put(spread, label)
    source = {n for pair in tuples for n in pair if n > FIXED}
    codes = walk.column_codes(label, condition if not walk.live(condition) else spread)
    terms: list[list[tuple[int, float]]] = []
    for (x, y), node in zip(tuples, nodes, strict=True):
        for each in {x, y}:
            if each == FIXED:
                walk.fix([node], seen=False)
            elif each != ZERO:
                walk.same(each, node)
                walk.follow(node, *(n for n in (x, y)), key=("where", walk.at, codes.get(node)))
        terms.append([(each, 1.0) for each in sorted({x, y}) if each > FIXED])
        if x <= FIXED < y or y <= FIXED < x:
            pass
        elif x != y:
            walk.flows.append(Flow("max", [node], (x, y)))
            terms[-1] = []
    del source
    kept = [(node, each) for node, each in zip(nodes, terms, strict=True) if each]
    partly = any(walk_zero(pair) for pair in tuples)
    if kept:
        keys = [codes.get(node) for node, _ in kept]
        walk.flows.append(Flow("number" if partly else "sum", [n for n, _ in kept], [t for _, t in kept], keys))
    _keep_group(walk, a, operation.out)
    _keep_group(walk, b, operation.out)


def walk_zero(pair: tuple[int, int]) -> bool:
    return ZERO in pair and max(pair) > FIXED


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
    label, tuples, nodes = walk.combined(walk.label(a).expand(shape), walk.label(b).expand(shape))
    walk.put(operation.out, label)
    for (x, y), node in zip(tuples, nodes, strict=True):
        walk.alone([x, y, node])
        for each in (x, y):
            if each == FIXED:
                walk.fix([node], seen=False)
                walk.equal({node: 1.0})
            elif each != ZERO:
                walk.equal({node: 1.0, each: -1.0})
        if min(x, y) > FIXED:
            walk.flows.append(Flow("max", [node], (x, y)))
        else:
            walk.flows.append(Flow("through", [node], [[n for n in (x, y) if n > FIXED]]))


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
    label, tuples, nodes = walk.combined(*labels)
    walk.put(operation.out, label)
    degree = _degree(operation) if len(operation.inputs) == 1 else None
    names = [[n for n in each if n > FIXED] for each in tuples]
    if degree is None:
        walk.fix([n for each in names for n in each], seen=False)
        walk.fix(nodes, seen=False)
    else:
        for (a,), node in zip(tuples, nodes, strict=True):
            walk.alone([a, node])
            walk.equal({node: 1.0, a: -degree})
    walk.flows.append(Flow("through", nodes, names))


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
                one.shared = several[j].shared = True


def _tie(walk: Walk, one: Any, other: Any) -> None:
    if type(one) is type(other):
        if one.entries.key == other.entries.key:
            for a, b in ((one.ins, other.ins), (one.outs, other.outs)):
                for x, y in zip(a[0] if a else [], b[0] if b else [], strict=True):
                    walk.same(x, y)
            return
        if not hasattr(one, "gain"):
            if replace(other.entries, layout=other.entries.layout.transpose(1, 2)).key == one.entries.key:
                for a, b in ((one.ins[0], other.outs[0]), (one.outs[0], other.ins[0])):
                    for x, y in zip(a, b, strict=True):
                        walk.same(x, y, DUAL)
                return
    for each in (one, other):
        walk.fix([n for row in (*each.ins, *each.outs) for n in row], seen=False)
        for row in getattr(each, "unknowns", []):
            walk.fix(row, seen=False)
