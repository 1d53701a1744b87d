"""Name channels: integers that say which channel an entry belongs to, in labels of activations and in rows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quotient_manifolds.symmetries.wires.linear_algebra import Array

ZERO, FIXED = 0, 1
"""The node of the number 0, which fits anything, and that of what may not change."""


def flat(label: Tensor, axis: int) -> bool:
    """Return whether a label is the same along an axis."""
    if label.shape[axis] <= 1 or label.stride(axis) == 0:
        return True
    axis %= label.ndim
    for other in range(label.ndim):
        if other != axis and label.stride(other) == 0:
            label = label.narrow(other, 0, min(1, label.shape[other]))
    one = tuple(slice(None) if other == axis else slice(1) for other in range(label.ndim))
    lines = (label[one], label)  # most labels that differ do so in one line
    return all(bool((some == some.narrow(axis, 0, 1)).all()) for some in lines)


def thinned(*labels: Tensor) -> tuple[Tensor, ...]:
    """Broadcast together, and drop what is the same along an axis."""
    found = torch.broadcast_tensors(*labels)
    for axis in range(found[0].ndim):
        if all(flat(each, axis) for each in found):
            found = tuple(each.narrow(axis, 0, min(1, each.shape[axis])) for each in found)
    return tuple(found)


def moving(rows: Array) -> Array:
    """Return for each channel of rows of nodes (k, n) the first node that may change: in some rows it may be zero."""
    return rows[(rows > FIXED).argmax(0), np.arange(rows.shape[1])]


def ragged(rows: Array) -> bool:
    """Say of rows of nodes (k, n) whether some channels are zero in one of them and others are not."""
    zero = rows == ZERO
    zero = zero[:, ~zero.all(0)]
    return bool((zero.any(1) & ~zero.all(1)).any())


def earlier(names: Array, segment: Array) -> Array:
    """Return for names how many before them in the same segment are the same."""
    order = np.lexsort((names, segment))
    place, found = np.arange(len(order)), np.empty_like(order)
    fresh = (np.diff(names[order], prepend=-1) != 0) | (np.diff(segment[order], prepend=-1) != 0)
    found[order] = place - np.maximum.accumulate(np.where(fresh, place, 0))
    return found


def again(rows: Array) -> Array:
    """Return for rows of nodes (k, n) the first row in which each node stands in its column."""
    order = np.argsort(rows, axis=0, kind="stable")
    ordered, place = np.take_along_axis(rows, order, 0), np.arange(len(rows))[:, None]
    start = np.maximum.accumulate(np.where(np.diff(ordered, axis=0, prepend=-1) != 0, place, 0), axis=0)
    first = np.empty_like(order)
    np.put_along_axis(first, order, np.take_along_axis(order, start, 0), 0)
    return first
