"""Biases that attention does not need: translations of a model's parameters that leave its function as it is.

Softmax over keys ignores what all keys add to a score, so the key bias does nothing; attention weights add up to one,
so a value bias reaches the output as a constant, which the output bias can hold just as well. Neither is true of a key
bias that is rotated after it is added, nor where the keys have a partner without the bias (attention sinks,
appended tokens).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quotient_manifolds.symmetries.pair import Factor, Params, Part, SymmetricPair

TranslationKind = Literal["key bias", "value/output bias"]


@dataclass(frozen=True)
class Translation:
    """b_K -> b_K + c, or (b_V, b_O) -> (b_V + c, b_O - W_O c): the function does not change, for any c.

    `pair` is the name of the pair that has the bias as a row. bias: (heads, 1, h), or (heads, k, h) with several rows.
    weight (heads, m, h) and output (1, d, 1) are W_O and b_O of a value/output bias; m = g d, output heads outermost,
    where g of them share a value head.
    """

    name: str
    kind: TranslationKind
    pair: str
    bias: Part
    weight: Factor | None = None
    output: Part | None = None

    @property
    def dimension(self) -> int:
        heads, rows, h = self.bias.shape
        return heads * rows * h

    @property
    def group(self) -> str:
        return f"R^{self.dimension}"

    @property
    def moved(self) -> tuple[str, ...]:
        """The parameters a translation changes."""
        return (self.bias.name, *([self.output.name] if self.output else []))

    def shift(self, params: Params, c: Tensor, *, compensate: bool = True) -> None:
        """Translates the dict's tensors by c (heads, 1, h), in place (clone them first), in float64."""
        self.bias.write(params, self.bias.read(params).double() + c)
        if compensate and self.weight is not None and self.output is not None:
            b = self.output.read(params).double()
            self.output.write(params, b - self._reaching(params, c))

    def _reaching(self, params: Mapping[str, Tensor], c: Tensor) -> Tensor:
        """W_O c, the constant that a value bias c adds to every output, (1, d, 1)."""
        weight = self.weight
        if weight is None or self.output is None:
            raise TypeError(f"{self.name} has no output bias")
        each = torch.einsum("kmh,kh->km", weight.read(params).double(), c.double().sum(dim=1))
        return each.reshape(-1, self.output.rows).sum(dim=0).reshape(1, -1, 1)


def key_bias(pair: SymmetricPair, bias: Part) -> Translation:
    """The translation of the key bias `bias`, a part of pair.H: softmax over keys ignores it."""
    return Translation(f"{pair.name.removesuffix('query/key')}key bias", "key bias", pair.name, bias)


def value_output_bias(pair: SymmetricPair, bias: Part, output: Part) -> Translation:
    """The translation of the value bias `bias`, a part of pair.G, into the output bias `output` of shape (1, d, 1)."""
    name = f"{pair.name.removesuffix('value/output')}value/output bias"
    return Translation(name, "value/output bias", pair.name, bias, pair.H, output)
