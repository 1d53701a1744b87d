"""Evaluate tangents of what is unseen, unreached and shifted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quotient_manifolds.symmetries.wires.blocks import offset_directions, zeros
from quotient_manifolds.symmetries.wires.linear_algebra import kernel
from quotient_manifolds.symmetries.wires.shifts import Shifts
from quotient_manifolds.symmetries.wires.unreached import Unreached
from quotient_manifolds.symmetries.wires.unseen import Unseen
from quotient_manifolds.symmetries.wires.values import Values
from quotient_manifolds.symmetries.wires.walk import Walk


def flow_tangents(walk: Walk) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield tangents of what is unseen, unreached and shifted."""
    values = Values(walk, walk.parameters)
    unreached = Unreached(walk, values)
    unseen = Unseen(walk, values, unreached)
    for same in uses(walk.linears):
        linear = same[0]
        taps, out, width = linear.shape
        K = unseen.common([row for each in same for row in each.outs])
        for k in K.T:
            for t in range(taps):
                for i in range(width):
                    change = torch.zeros(taps, out, width, dtype=torch.float64)
                    change[t, :, i] = torch.from_numpy(k)
                    tangent = zeros(walk)
                    linear.entries.add_to(tangent, change)
                    yield "unseen", tangent
        if linear.table:
            continue
        U, c = unreached.common([row for each in same for row in each.ins])
        N = kernel(c[None]) if len(c) else np.zeros((0, 0))
        for u in N.T @ U if len(c) else []:
            for t in range(taps):
                for o in range(out):
                    change = torch.zeros(taps, out, width, dtype=torch.float64)
                    change[t, o] = torch.from_numpy(u)
                    tangent = zeros(walk)
                    linear.entries.add_to(tangent, change)
                    yield "unreached", tangent
    for same in uses([each for each in walk.vectors if each.gain]):
        index = same[0].index
        seen = {place for each in same for place, out in zip(each.index, each.outs[0], strict=True) if unseen.any(out)}
        for place in sorted(set(index) - seen):
            tangent = zeros(walk)
            tangent[same[0].entries.name].view(-1)[place] = 1.0
            yield "unseen gain", tangent
    for same in uses([each for each in walk.vectors if not each.gain]):
        vector = same[0]
        for r, row in enumerate(vector.outs):
            for k in unseen.common([each.outs[r] for each in same]).T:
                change = torch.zeros(len(vector.outs), len(row), dtype=torch.float64)
                change[r] = torch.from_numpy(k)
                tangent = zeros(walk)
                vector.entries.add_to(tangent, change)
                yield "unseen bias", tangent
    for tangent in Shifts(walk, values, unseen, unreached, offset_directions(walk)).tangents():
        yield "shift", tangent


def uses(several: list[Any]) -> list[list[Any]]:
    """Group what takes the same entries in the same way, and leave out what is used in another way, too."""
    found: dict[Any, list[Any]] = {}
    for each in several:
        if each.shared != "other":
            found.setdefault(each.entries.key, []).append(each)
    return list(found.values())
