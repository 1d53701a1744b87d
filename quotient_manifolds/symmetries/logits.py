"""Find what a softmax does not see of the linear map before it: the same number added to all of its answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from quotient_manifolds.symmetries.freedom import Freedom, gaussian, typical
from quotient_manifolds.symmetries.norm_scale import NormScale, Reader
from quotient_manifolds.symmetries.operations import key
from quotient_manifolds.symmetries.pair import Params
from quotient_manifolds.symmetries.post_norm import UnseenDirection
from quotient_manifolds.symmetries.trace import Trace


@dataclass(frozen=True, eq=False)
class LogitShift(Freedom):
    """Describe a linear map W x + b of which softmax or log-softmax alone is taken, over all of its units.

    (W + 1 v^T, b + c 1) is the same function for any v and c: of the loss for the head of a model that is trained by
    cross-entropy, of the outputs for the router of a mixture of experts. The one place has columns of mean 0, and a b
    of mean 0. counted: whether a direction of W that a norm leaves free is one of these, too.
    """

    linear: Reader
    counted: bool
    kind: ClassVar[str] = "logits"

    @property
    def names(self) -> tuple[str, ...]:
        """Return the parameters that a move touches."""
        return tuple(name for name, _ in self.linear.parts)

    @property
    def families(self) -> dict[str, int]:
        """Return the dimension of the moves that leave the function alone, by its name."""
        return {"shift of all logits": len(self.linear.elements) + bool(self.linear.bias) - self.counted}

    def fold(self, params: Params) -> None:
        """Make the mean over units 0, in place."""
        W, b = self.linear.matrix(params), self.linear.constant(params)
        self.linear.set(params, W - W.mean(dim=1, keepdim=True), -b.mean().expand(b.shape))

    def move(self, params: Params, generator: torch.Generator, size: float, control: bool = False) -> None:
        """Add a random vector to the rows of W, and a number to b, in place; with `control`, to every other unit."""
        W, b = self.linear.matrix(params), self.linear.constant(params)
        shift = (size * typical(W) * gaussian(W, generator, len(W), 1)).expand(W.shape).clone()
        constant = (size * typical(b) * gaussian(b, generator, 1)).expand(b.shape).clone()
        if control:
            shift[:, ::2], constant[::2] = 0.0, 0.0
        self.linear.set(params, W + shift, constant)


def find_logit_shifts(trace: Trace, found: Iterable[Freedom]) -> Iterator[LogitShift]:
    """Yield the linear maps whose answers go into a softmax alone. found: what norms leave free."""
    unseen = [reader for each in found if isinstance(each, (NormScale, UnseenDirection)) for reader in each.unseen]
    for operation in trace.operations:
        linear = trace.linear(operation)
        user = trace.only_user(linear.y) if linear is not None else None
        if linear is None or user is None or user.name not in ("_softmax", "_log_softmax"):
            continue
        units = torch.arange(linear.y.shape[-1])
        views = trace.follow(linear.y, units.expand(linear.y.shape))
        along = next(its for view, its in views if key(view) == key(user.arguments[0])).movedim(user.arguments[1], -1)
        reader = Reader(linear.weight, linear.elements, torch.arange(0), linear.bias, linear.bias_elements)
        over_all = along.shape[-1] == len(units) and torch.equal(along, units.expand(along.shape))
        if over_all and not trace.used_besides(reader.parts, {id(operation), id(linear.adding)}):
            counted = any(one.weight == reader.weight and torch.equal(one.elements, reader.elements) for one in unseen)
            yield LogitShift(reader, counted)
