"""Rules of sums: all that is added changes alike; x cos + y sin beside its other half turns a plane."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quotient_manifolds.symmetries.wires.record import Operation
from quotient_manifolds.symmetries.wires.rules.reductions import centred
from quotient_manifolds.symmetries.wires.walk import (
    FIXED,
    ZERO,
    Array,
    Flow,
    Walk,
    rule,
)


@rule("add", "sub", "rsub")
def add(walk: Walk, operation: Operation) -> None:
    a, b = operation.args[:2]
    alpha = float(operation.kwargs.get("alpha", operation.args[2] if len(operation.args) > 2 else 1.0))
    first, second = (
        (1.0, alpha) if operation.name == "add" else (1.0, -alpha) if operation.name == "sub" else (-alpha, 1.0)
    )
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        tensor, number, factor = (a, b, first) if isinstance(a, Tensor) else (b, a, second)
        add_number(walk, operation, tensor, factor, 0.0 if number == 0 else 1.0)
        return
    if operation.name == "sub" and centred(walk, operation, a, b):
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
    walk.keep_group(tensor, operation.out)


def total(walk: Walk, out: Tensor, parts: Sequence[tuple[Tensor, float]]) -> None:
    """A weighted sum: all its parts change alike."""
    if len(parts) == 2:
        for (tensor, factor), (number, size) in (parts, parts[::-1]):
            if walk.live(tensor) and not walk.live(number) and walk.codes.constant(number):
                if bool((walk.label(number) != ZERO).any()):
                    offset(walk, out, (tensor, factor), size * number)
                    return
    labels = [walk.label(tensor).expand(out.shape) for tensor, _ in parts]
    for place, (tensor, _) in enumerate(parts):
        if not walk.live(tensor) and bool(
            (labels[place] != ZERO).any()
        ):  # where a constant happens to be 0 tells no kinds apart
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
        walk.keep_group(tensor, out)


def offset(walk: Walk, out: Tensor, part: tuple[Tensor, float], number: Tensor) -> None:
    """A known constant c of a channel: its change X x is X (x + c) and a shift of -X c. Of unknown ones, nothing may change."""
    tensor, factor = part
    before = walk.label(tensor).expand(out.shape)
    walk.notes["offset", walk.at] = number  # as long as its code is kept
    label, names, nodes = walk.combined(before)
    walk.put(out, torch.where(label == ZERO, FIXED, label))
    a = names[:, 0]
    known, _, values = walk.column_codes(before, number)
    value = values[np.searchsorted(known, a)]
    exact = np.isfinite(value)
    walk.fix(a[~exact], seen=False)
    walk.same(a, nodes, factor)
    walk.follow(nodes, a)
    walk.mark(nodes[exact], "offset", walk.at)
    if exact.any():
        terms = [[(n, factor)] for n in a[exact].tolist()]
        walk.flows.append(Flow("offset", nodes[exact], terms, plus=value[exact]))
    walk.passed("sum", nodes[~exact], names[~exact], factor)
    walk.keep_group(tensor, out)


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


def settle_planes(walk: Walk) -> None:
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
