"""Settle at the end what waited for something else, and what parameters that are used twice have in common."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quotient_manifolds.symmetries.wires.nodes import moving
from quotient_manifolds.symmetries.wires.record import Operation
from quotient_manifolds.symmetries.wires.rules.sums import settle_planes
from quotient_manifolds.symmetries.wires.uses import NONE, SUMS, Flow, Linear, Vector
from quotient_manifolds.symmetries.wires.walk import Walk, rule


@rule("end")
def end(walk: Walk, operation: Operation) -> None:
    """Settle what waited for something else, and what parameters that are used twice have in common."""
    settle_planes(walk)
    _spare_rows(walk)
    _open_pools(walk)
    _ties(walk)


def _uses(walk: Walk) -> dict[str, list[Any]]:
    """Return the uses of each parameter."""
    found: dict[str, list[Any]] = {}
    for each in walk.uses:
        found.setdefault(each.entries.name, []).append(each)
    return found


def _spare_rows(walk: Walk) -> None:
    """Rows of a table that nobody asks for change as those that somebody does: longer inputs will ask for them."""
    for name, several in _uses(walk).items():
        shape = walk.shapes[name]
        width = shape[-1] if len(shape) > 1 else 0
        if not all(isinstance(each, Vector) and not each.gain and each.entries.shape[-1] == width for each in several):
            continue
        index, columns = torch.cat([each.entries.index() for each in several]), torch.arange(width)
        asked = index[:, 0] // width
        spare = sorted(set(range(shape.numel() // width)) - set(asked.tolist()))
        factors = {(each.entries.scale, each.entries.offset) for each in several}
        if spare and len(factors) == 1 and torch.equal(index, asked[:, None] * width + columns):
            _add_spare(walk, several, torch.tensor(spare)[:, None] * width + columns)


def _add_spare(walk: Walk, several: list[Vector], index: Tensor) -> None:
    """Add rows like others, if these are all alike."""
    rows = np.concatenate([each.outs for each in several])
    root, weight, dual = walk.turns.find(rows)
    if not bool(((root == root[0]) & (weight == weight[0]) & (dual == dual[0])).all()):
        walk.fix(rows)
        return
    nodes = walk.new(index.shape[1])
    walk.same(rows[0], nodes)
    entries = replace(several[0].entries, layout=index)
    made = Vector(entries, NONE, np.broadcast_to(nodes, index.shape), gain=False, like=rows)
    walk.vectors.append(made)
    walk.flows.insert(0, Flow("bias", nodes, made))  # backward it comes last, when all is known of the others


def _open_pools(walk: Walk) -> None:
    """Sums and means over tokens are of more tokens where longer inputs ask for more rows of a table."""
    apart = np.zeros(walk.count, bool)
    """Nodes that tell rows of such tables apart."""
    for vector in walk.vectors:
        apart[vector.like] = True
    for flow in walk.flows if apart.any() else ():
        apart[flow.outs] |= apart[flow.terms[0]].any(1) if flow.kind in SUMS else apart[flow.taken].any()
        if flow.kind == "pool" and apart[flow.outs].any():
            flow.kind = "mix" if np.allclose(flow.terms[1].sum(1), 1.0) else "number"


def _ties(walk: Walk) -> None:
    """A parameter used twice changes in one way: alike, contragrediently where it is transposed, or not at all."""
    for several in _uses(walk).values():
        if len(several) == 2 and _transposed(*several):
            _turn(walk, *several)
            continue
        for i, one in enumerate(several):
            for j in range(i):
                if not one.entries.meets(several[j].entries):
                    continue
                alike = _tie(walk, several[j], one)
                for each in (one, several[j]):
                    each.shared = "alike" if alike and each.shared in ("", "alike") else "other"


def _tie(walk: Walk, one: Any, other: Any) -> bool:
    """Let what uses the same entries in the same way change alike, anything else not at all; return which it is."""
    alike = type(one) is type(other) and one.entries.is_multiple(other.entries)
    alike = alike and one.outs.shape[1] == other.outs.shape[1]
    if alike:
        for a, b in ((one.ins, other.ins), (one.outs, other.outs)):
            if len(a) and len(b):
                walk.same(*(moving(rows) if isinstance(one, Linear) else rows for rows in (a, b)))
        if isinstance(one, Linear):  # what one of them takes may be zero
            one.takes = other.takes = moving(np.stack([one.takes, other.takes]))
    else:
        for each in (one, other):
            rows = (*each.ins, *each.outs, *getattr(each, "unknowns", ()))
            walk.fix(np.concatenate(rows), seen=False)
    return alike


def _transposed(one: Any, other: Any) -> bool:
    if not (isinstance(one, Linear) and isinstance(other, Linear)) or not (one.takes.all() and other.takes.all()):
        return False  # a channel that is zero is none of those that the transposed weight writes to
    return one.entries.is_multiple(other.entries.turned)


def _turn(walk: Walk, one: Linear, other: Linear) -> None:
    """Let a weight change as its transpose does; what moves it is told of its first use alone."""
    for a, b in ((one, other), (other, one)):
        walk.same(moving(a.ins), moving(b.outs), dual=True)
        for rows in (a.ins, a.outs):
            walk.same(moving(rows), rows)
    one.shared = other.shared = "turned"
    walk.linears.remove(other)
