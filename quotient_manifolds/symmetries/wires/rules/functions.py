"""Rules of comparisons, choices and functions of one entry: homogeneous ones pass positive scales, others nothing."""

from __future__ import annotations

from math import nan

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from quotient_manifolds.symmetries.wires.codes import hashed, named
from quotient_manifolds.symmetries.wires.linear_algebra import Array
from quotient_manifolds.symmetries.wires.nodes import FIXED, ZERO
from quotient_manifolds.symmetries.wires.record import Operation
from quotient_manifolds.symmetries.wires.uses import Flow
from quotient_manifolds.symmetries.wires.walk import COMPARISONS, Walk, rule

MASKED = -1e30  # a score that is smaller has no weight after a softmax


@rule(*COMPARISONS)
def comparison(walk: Walk, operation: Operation) -> None:
    """Against zero, a positive scale changes nothing."""
    tensor, other = operation.args[:2]
    if isinstance(other, Tensor) or float(other) != 0:
        walk.opaque(operation)
        return
    nodes = walk.nodes(walk.label(tensor))
    walk.alone(nodes)
    walk.positive(nodes)
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
        picked = torch.where(condition.cpu(), labels[0], labels[1])
        label, names, nodes = walk.combined(picked, torch.full((), FIXED).expand(shape))
        label = torch.where(picked == ZERO, ZERO, label)
        left = names[:, 0] > FIXED
        names, nodes = names[left][:, [0, 0]], nodes[left]
    else:
        labels = [
            torch.zeros_like(found) if _hides(walk, each) else found for found, each in zip(labels, (a, b), strict=True)
        ]
        label, names, nodes = walk.combined(*labels)
    walk.put(operation.out, label)
    spread = torch.empty(shape, device="meta")
    walk.notes["kept", walk.at] = spread
    walk.put(spread, label)
    x, y = names.T
    key = np.full(len(nodes), named(("where", walk.at)))
    for each, column in zip(labels, names.T, strict=True):
        known, codes, _ = walk.column_codes(each, condition if not walk.live(condition) else spread)
        place = np.searchsorted(known, column).clip(max=len(known) - 1)
        key = hashed(key, np.where((known[place] == column) & (column > FIXED), codes[place], 0))
    walk.fix(nodes[(names == FIXED).any(1)], seen=False)
    for each in (x, y):
        some = (each > FIXED) & ((each is x) | (x != y))
        walk.same(each[some], nodes[some])
    moving = (names > FIXED).any(1)
    walk.follow(nodes[moving], x[moving], y[moving], key=key[moving])
    either = (x != y) & (names > FIXED).all(1)
    walk.flows.append(Flow("max", nodes[either], names[either]))
    still = [(names[:, i] <= FIXED) & (not _hides(walk, each)) for i, each in enumerate((a, b))]
    partly = bool(((still[0] | still[1]) & (names.max(1) > FIXED)).any()) if len(names) else False
    one = np.where(x > FIXED, x, y)
    plus = np.where((names == FIXED).any(1), np.nan, 0.0)
    walk.passed("number" if partly else "sum", nodes[~either], one[~either], keys=key[~either], plus=plus[~either])
    walk.keep_group(a, operation.out)
    walk.keep_group(b, operation.out)
    one, other = (walk.level((each, 1.0)) for each in (a, b))
    known = walk.codes.constant(condition)
    walk.keep_level(
        operation.out, torch.where(condition.cpu() if known else one == other, one, other if known else nan)
    )


def _hides(walk: Walk, tensor: Tensor) -> bool:
    """Return whether scores that are replaced by a constant have no weight after a softmax."""
    return walk.codes.constant(tensor) and bool((tensor <= MASKED).all())


@rule("maximum", "minimum")
def maximum(walk: Walk, operation: Operation) -> None:
    a, b = operation.args[:2]
    shape = operation.out.shape
    label, names, nodes = walk.combined(walk.label(a).expand(shape), walk.label(b).expand(shape))
    walk.put(operation.out, label)
    most(walk, names, nodes)


def most(walk: Walk, names: Array, nodes: Array, about: str = "") -> None:
    """Say that nodes are the largest, or the smallest, of others (m, k); about: "tokens" where these are of several."""
    both = np.concatenate([names.reshape(-1), nodes])
    both = both[both > FIXED]
    walk.alone(both)
    walk.positive(both)
    stuck = (names == FIXED).any(1)
    walk.fix(nodes[stuck], seen=False)
    for each in names.T:
        live = each > FIXED
        walk.equal((nodes[live], 1.0), (each[live], -1.0))
    every = (names > FIXED).all(1)
    walk.flows.append(Flow("max", nodes[every], names[every], about))
    walk.through(nodes[~every], names[~every])


@rule("pointwise")
def pointwise(walk: Walk, operation: Operation) -> None:
    """A function of one entry: by its degree where it is homogeneous, and otherwise the channel is fixed."""
    moving = [each for each in operation.inputs if walk.moving(each)]
    if not moving or not all(out.dtype.is_floating_point for out in operation.outputs):
        walk.opaque(operation) if moving else walk.settle(operation)
        return
    shape = operation.out.shape
    labels = [walk.label(each).expand(shape) for each in moving]
    label, names, nodes = walk.combined(*labels)
    walk.put(operation.out, label if _keeps_zero(operation) else torch.where(label == ZERO, FIXED, label))
    length = ("length", id(moving[0])) in walk.notes
    degree = _degree(operation, length=length) if len(operation.inputs) == 1 else None
    if length and degree is not None:
        walk.notes["length", id(operation.out)] = True
    if degree is None:
        walk.fix(names[names > FIXED], seen=False)
        walk.fix(nodes, seen=False)
    else:
        walk.alone(np.concatenate([names[:, 0], nodes]))
        walk.equal((nodes, 1.0), (names[:, 0], -degree))
        if not _passes_signs(operation, degree):
            walk.positive(np.concatenate([names[:, 0], nodes]))
    walk.through(nodes, names)


def _keeps_zero(operation: Operation) -> bool:
    """Return whether what is 0 stays so."""
    return len(operation.inputs) == 1 and bool((_at(operation, 0.0) == 0).all())


def _degree(operation: Operation, *, length: bool) -> float | None:
    """Return p where f(c t) = c^p f(t) for all c > 0, by values of all sizes and both signs; a length is positive.

    A number that only keeps it from being 0 counts for nothing: then all that it is the length of is 0 as well.
    """
    try:
        one = _at(operation, 1.0, length=length)
        known = one.isfinite() & (one != 0)
        if not bool(known.any()) or not one.dtype.is_floating_point:
            return None
        p = float((_at(operation, 2.0, length=length)[known] / one[known]).log2()[0])
        for c in (1e-8 if length else 0.5, 0.01, 0.5, 2.0, 3.7, 40.0):
            found = _at(operation, c, length=length)[one.isfinite()]
            if not torch.allclose(found, c**p * one[one.isfinite()], rtol=1e-9, atol=0):
                return None
    except (RuntimeError, TypeError):
        return None
    return round(p, 9) if p == p else None


def _passes_signs(operation: Operation, degree: float) -> bool:
    """Return whether f(-t) = (-1)^p f(t), as of a cube or a square: then negative scales pass as well."""
    one = _at(operation, 1.0)
    return degree == round(degree) and torch.equal(_at(operation, -1.0), (-1) ** round(degree) * one)


def _at(operation: Operation, c: float, *, length: bool = False) -> Tensor:
    """Return f(c t) for numbers t of all sizes, and both signs if t is no length."""
    t = torch.tensor([0.013, 0.2, 0.7, 1.0, 1.9, 5.3, 17.0, 1e3, 1e5, 1e9, 1e30], dtype=torch.float64)
    args = tree_map_only(Tensor, lambda _: c * (t if length else torch.cat([t, -t])), operation.args)
    found: Tensor = operation.func(*args, **operation.kwargs)
    return found
