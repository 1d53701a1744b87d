"""Find weights that a weight norm divides by their length, so that no output depends on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quotient_manifolds.symmetries.freedom import Freedom, gaussian
from quotient_manifolds.symmetries.operations import key
from quotient_manifolds.symmetries.pair import Params
from quotient_manifolds.symmetries.trace import Trace


@dataclass(frozen=True, eq=False)
class WeightLength(Freedom):
    """Describe v of a weight norm g v / |v|: any positive factor for each slice along an axis is the same function.

    The length is taken over all other axes, and nothing else uses v. The one place has slices of length 1.
    """

    weight: str
    axis: int
    size: int
    kind: ClassVar[str] = "length"

    @property
    def names(self) -> tuple[str, ...]:
        """Return the parameter."""
        return (self.weight,)

    @property
    def families(self) -> dict[str, int]:
        """Return the dimension of the moves that leave the function alone, by its name."""
        return {"length that a weight norm divides by": self.size}

    def fold(self, params: Params) -> None:
        """Make the length of every slice 1, in place; a slice of zeros stays."""
        v = params[self.weight].double()
        lengths = v.movedim(self.axis, 0).flatten(1).square().sum(dim=1).sqrt()
        self._multiply(params, 1 / torch.where(lengths > 0, lengths, 1.0))

    def move(self, params: Params, generator: torch.Generator, size: float, control: bool = False) -> None:
        """Multiply every slice by exp(size z), in place; with `control`, half of its numbers."""
        self._multiply(params, (size * gaussian(params[self.weight], generator, self.size)).exp(), 2 if control else 1)

    def _multiply(self, params: Params, factors: Tensor, step: int = 1) -> None:
        w = params[self.weight]
        rows = w.double().movedim(self.axis, 0).flatten(1).clone()
        rows[:, ::step] *= factors[:, None]
        params[self.weight] = rows.view_as(w.movedim(self.axis, 0)).movedim(0, self.axis).to(w.dtype).contiguous()


def find_weight_lengths(trace: Trace) -> Iterator[WeightLength]:
    """Yield the weights of weight norms, which have axes of their own for the slices whose lengths are taken."""
    for operation in trace.operations:
        if operation.name != "_weight_norm_interface":
            continue
        v, axis = operation.arguments[0], operation.arguments[2] if len(operation.arguments) > 2 else 0
        name, elements = trace.parts.get(key(v), ("", v))
        whole = bool(name) and torch.equal(elements.flatten(), torch.arange(trace.params[name].numel()))
        if whole and v.ndim > 1 and not trace.used_besides([(name, elements)], {id(operation)}):
            yield WeightLength(name, axis % v.ndim, v.shape[axis])
