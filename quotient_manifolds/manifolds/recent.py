"""Remember, for a manifold, the points it was asked about: factorisations, and tensors that were points before."""

from __future__ import annotations

import math
from typing import NamedTuple

import geoopt
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from quotient_manifolds.linalg import in_no_graph
from quotient_manifolds.manifolds.horizontal import HorizontalSpace

REMEMBERED = 2
"""An optimizer's step asks for its start a few times, then for its end, which is where the next step starts."""

PLAIN = (Tensor, torch.nn.Parameter, geoopt.ManifoldTensor, geoopt.ManifoldParameter)

GROWN = 1e3
"""Entries that many times as large as at the first look are no ordinary training."""


class Known(NamedTuple):
    """Hold a space nobody else holds, and the largest entry of its point."""

    space: HorizontalSpace
    largest: Tensor


class Recent:
    """Keep the last horizontal spaces, found again by the values of the point, and the parameters that were points.

    Comparing values costs one pass over the point, little against a factorisation, and cannot be stale whoever wrote to
    the tensor in whatever way. A space is of a private copy of the point and in no graph. The tuple is replaced as a
    whole, so threads can at worst lose an entry. Copies and pickles of a manifold begin empty.
    """

    def __init__(self) -> None:
        self._spaces: tuple[Known, ...] = ()
        self._seen = WeakTensorKeyDictionary()  # parameter -> its largest entry at first and at last

    def __reduce__(self) -> tuple[type[Recent], tuple[()]]:
        return Recent, ()

    def find(self, x: Tensor) -> HorizontalSpace | None:
        """Return the space at a point of these values, if it is remembered."""
        for known in self._spaces:
            point = known.space.point
            if (point.dtype, point.device) == (x.dtype, x.device) and _equal(point, x):
                self._see(x, known)
                return known.space
        return None

    def remember(self, x: Tensor, space: HorizontalSpace) -> None:
        """Remember a space at a copy of x that nothing else refers to."""
        point = space.point
        largest = torch.stack(torch.aminmax(point)).abs().amax() if point.numel() else point.new_zeros(())
        known = Known(space, largest)
        self._spaces = (known, *self._spaces[: REMEMBERED - 1])
        self._see(x, known)

    def _see(self, x: Tensor, known: Known) -> None:
        if isinstance(x, geoopt.ManifoldTensor):
            first, _ = self._seen.get(x, (known.largest, None))
            self._seen[x] = first, known.largest

    def grown(self, x: Tensor) -> bool:
        """Tell whether x is a parameter whose entries have become so large that only a run that fails gets there."""
        first = float(self._seen[x][0]) if x in self._seen else 0.0
        return first > 0 and float(x.detach().abs().amax()) > GROWN * first

    def explain(self, reason: str, x: Tensor, start: Tensor | None = None) -> str:
        """Say why x is no point, where it is known to have been one, or to be the end of a step from `start`."""
        now = float(x.detach().abs().amax()) if x.numel() else 0.0
        fails = reason.partition(";")[0]
        if x in self._seen:
            first, last = map(float, self._seen[x])
            entries = f"its largest entry was {first:.3g} at first, {last:.3g} while it was a point, and is {now:.3g}"
            past = f"x was a point before and is none now: {fails}; {entries}"
        elif start is not None:
            first, _ = map(float, self._seen.get(start, (start.detach().abs().amax(), 0.0)))
            entries = f"its largest entry is {now:.3g}, where x began with {first:.3g}"
            past = f"y, to which a vector is carried from x, is no point: {fails}; {entries}"
        else:
            return reason
        if math.isfinite(now) and now <= GROWN * first:
            return f"{past}: either the last step was too long (a smaller lr), or the loss asks for a lower rank"
        return f"{past}: the steps are too long, take a smaller learning rate (lr), which is a length in the metric"


def _equal(x: Tensor, y: Tensor) -> bool:
    """Tell whether shapes and bits are equal; integers of 8 bytes compare faster than floating-point numbers."""
    if x.shape != y.shape or any(not z.is_contiguous() or z.numel() % 2 or z.storage_offset() % 2 for z in (x, y)):
        return torch.equal(x, y)
    return torch.equal(*(z.detach().view(-1).view(torch.int64) for z in (x, y)))


def lasts(x: Tensor) -> bool:
    """Tell if what is computed from x now may be used at another time: it is in no graph, under no transform."""
    return (
        type(x) in PLAIN
        and in_no_graph(x)
        and not (x.is_inference() or torch.is_inference_mode_enabled())
        and torch._C._len_torch_dispatch_stack() == 0
    )
