"""Rules of sums: all that is added changes alike; x cos + y sin beside its other half turns a plane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quotient_manifolds.symmetries.wires.linear_algebra import Array
from quotient_manifolds.symmetries.wires.nodes import FIXED, ZERO
from quotient_manifolds.symmetries.wires.record import Operation
from quotient_manifolds.symmetries.wires.rules.reductions import centred
from quotient_manifolds.symmetries.wires.uses import Flow
from quotient_manifolds.symmetries.wires.walk import Walk, rule


@rule("add", "sub", "rsub")
def add(walk: Walk, operation: Operation) -> None:
    a, b = operation.args[:2]
    alpha = float(operation.kwargs.get("alpha", operation.args[2] if len(operation.args) > 2 else 1.0))
    first, second = (
        (1.0, alpha) if operation.name == "add" else (1.0, -alpha) if operation.name == "sub" else (-alpha, 1.0)
    )
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        tensor, number, factor = (a, b, first) if isinstance(a, Tensor) else (b, a, second)
        add_number(walk, operation, tensor, factor, number * (second if isinstance(a, Tensor) else first))
        return
    if operation.name == "sub":
        if alpha == 1 and centred(walk, operation, a, b):
            return
        walk.resolve(b)
    total(walk, operation.out, [(a, first), (b, second)])


def add_number(walk: Walk, operation: Operation, tensor: Tensor, factor: float, number: Any) -> None:
    label, names, nodes = walk.combined(walk.label(tensor))
    walk.put(operation.out, label if number == 0 else torch.where(label == ZERO, FIXED, label))
    walk.same(names[:, 0], nodes, factor)
    walk.follow(nodes, names[:, 0], factors=[factor])
    if number:
        walk.fix(names[:, 0], seen=False)
    walk.passed("sum", nodes, names, factor, plus=np.nan if isinstance(number, complex) else float(number))
    walk.keep_group(tensor, operation.out)
    walk.keep_level(operation.out, walk.level((tensor, factor)))


def total(walk: Walk, out: Tensor, parts: Sequence[tuple[Tensor, float]]) -> None:
    """A weighted sum: all its parts change alike."""
    walk.keep_level(out, walk.level(*parts))
    if len(parts) == 2:
        for (tensor, factor), (number, size) in (parts, parts[::-1]):
            known = walk.live(tensor) and not walk.live(number) and walk.codes.constant(number)
            if known and bool((walk.label(number) != ZERO).any()):
                offset(walk, out, (tensor, factor), size * number)
                return
    labels = [walk.label(tensor).expand(out.shape) for tensor, _ in parts]
    for place, (tensor, _) in enumerate(parts):
        if not walk.live(tensor) and bool((labels[place] != ZERO).any()):
            # where a constant happens to be 0 tells no kinds apart
            labels[place] = torch.full((), FIXED).expand(out.shape)
    label, names, nodes = walk.combined(*labels)
    walk.put(out, label)
    factors = np.array([factor for _, factor in parts])
    walk.follow(nodes, *names.T, factors=factors.tolist())
    plain = ~_turned(walk, names, factors, nodes)
    for a, factor in zip(names.T, factors, strict=True):
        walk.same(a[plain], nodes[plain], factor)
    walk.passed("sum", nodes, names, np.broadcast_to(factors, names.shape))
    groups: list[Any] = [walk.notes.get(("group", id(tensor))) for tensor, _ in parts]
    if all(each is not None and each.shape == out.shape and torch.equal(each, groups[0]) for each in groups):
        walk.aligned.append(nodes)
    for tensor, _ in parts:
        walk.keep_group(tensor, out)


def offset(walk: Walk, out: Tensor, part: tuple[Tensor, float], number: Tensor) -> None:
    """A known constant c of a channel: its change X x is X (x + c) and a shift of -X c. Unknown ones may not change."""
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
    walk.follow(nodes, a, factors=[factor])
    walk.mark(nodes[exact], "offset", walk.at)
    if exact.any():
        terms = [[(n, factor)] for n in a[exact].tolist()]
        walk.flows.append(Flow("offset", nodes[exact], terms, plus=value[exact]))
    walk.passed("sum", nodes[~exact], names[~exact], factor, plus=np.nan)
    walk.keep_group(tensor, out)


def _turned(walk: Walk, names: Array, factors: Array, nodes: Array) -> Array:
    """Keep x cos + y sin until its other half is there, and say where it is: together they turn a plane."""
    if names.shape[1] != 2:
        return np.zeros(len(nodes), bool)
    origin, size, angle = (walk.about(name)[names] for name in ("turned", "turn", "angle"))
    found = (origin >= 0).all(1) & (origin[:, 0] != origin[:, 1]) & (angle[:, 0] != angle[:, 1])
    waiting = walk.notes.setdefault(("planes", None), {})
    pairs = []
    for i in np.flatnonzero(found).tolist():
        row = (origin[i], size[i] * factors, angle[i])
        terms = list(zip(*(each.tolist() for each in row), strict=True))
        halves = waiting.setdefault(tuple(sorted(origin[i].tolist())), [])
        other = next((each for each in halves if _makes_a_plane(each[1], terms)), None)
        if other is None:
            halves.append((int(nodes[i]), terms, names[i], factors))
        else:
            halves.remove(other)
            pairs.append((other[0], int(nodes[i]), other[1][0][0], other[1][1][0]))
    if pairs:
        one, second, p, q = np.array(pairs).T
        walk.same(p, one)
        walk.same(q, second)
        walk.equal((p, 1.0), (q, -1.0))
        walk.planes.append((p, q))
        for name in ("history", "writer"):  # in whatever order they were added
            walk.about(name)[second] = walk.about(name)[one]
    return found


def _makes_a_plane(one: list[tuple[int, float, int]], other: list[tuple[int, float, int]]) -> bool:
    """Say of sums of channels, factors and codes of numbers whether they are x c - y s and y c + x s."""
    (x, size, c), (_, across, s) = one
    here, there = other if other[0][0] == x else other[::-1]
    return there[1:] == (size, c) and here[1:] == (-across, s)


def settle_planes(walk: Walk) -> None:
    """Take what has no other half as a sum like any other."""
    left = [half for halves in walk.notes.get(("planes", None), {}).values() for half in halves]
    for node, _, names, factors in left:
        walk.same(names, np.full(len(names), node), factors)
