"""Represent translations: biases that attention does not need, and that move without changing its function.

Softmax over keys ignores what all keys add to a score, so the key bias does nothing; attention weights add up to one,
so a value bias reaches the output as a constant, which the output bias can hold just as well. Neither is true of a key
bias that is rotated after it is added, nor where the keys have a partner without the bias (attention sinks,
appended tokens).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from quotient_manifolds.symmetries.pair import Factor, Params, SymmetricPair
from quotient_manifolds.symmetries.strided_view import StridedView

TranslationKind = Literal["key bias", "value/output bias"]


@dataclass(frozen=True)
class Translation:
    """Describe a bias of attention that may be shifted by any c without changing the function.

    A key bias, b_K -> b_K + c, for softmax over keys ignores it; or a value bias, (b_V, b_O) -> (b_V + c, b_O - W_O c),
    for attention weights add up to 1 and the output bias makes up for it.

    `pair` is the name of the pair whose factor `factor` has the bias as a row. bias: (heads, 1, h). weight (heads, m,
    h) and output (1, d, 1) are W_O and b_O of a value/output bias; m = g d, and the g query heads that share a value
    head are the outer axis.
    """

    name: str
    kind: TranslationKind
    pair: str
    factor: Factor
    bias: StridedView
    weight: Factor | None = None
    output: StridedView | None = None

    @property
    def dimension(self) -> int:
        """Return the number of directions in which it moves."""
        heads, rows, h = self.bias.shape
        return heads * rows * h

    @property
    def group(self) -> str:
        """Return the name of the group, such as R^768."""
        return f"R^{self.dimension}"

    @property
    def moved(self) -> tuple[str, ...]:
        """Return the parameters a translation changes."""
        return (self.bias.name, *([self.output.name] if self.output else []))

    @property
    def names(self) -> tuple[str, ...]:
        """Return the parameters that a translation and its random size depend on, each once."""
        views = (*self.factor.views, *(self.weight.views if self.weight else ()))
        return tuple(dict.fromkeys((*self.moved, *(view.name for view in views))))

    def shift(self, params: Params, c: Tensor, *, compensate: bool = True) -> None:
        """Translate the dict's tensors by c (heads, 1, h), in place (clone them first), in the precision of c."""
        before = self.bias.read(params).to(c.dtype)
        self.bias.write(params, before + c)
        if compensate and self.weight is not None and self.output is not None:
            reaching = torch.einsum("kmh,krh->km", self.weight.read(params).to(c.dtype), c)
            constant = reaching.reshape(-1, self.output.rows).sum(dim=0).reshape(1, -1, 1)  # W_O c
            self.output.write(params, self.output.read(params).to(c.dtype) - constant)

    def remove(self, params: Params) -> None:
        """Move to the canonical representative, b_K = 0, or b_V = 0 and b_O + W_O b_V, in place."""
        self.shift(params, -self.bias.read(params).double())


def key_bias(pair: SymmetricPair, bias: StridedView) -> Translation:
    """Return the translation of the key bias `bias`, a view in pair.H: softmax over keys ignores it."""
    return Translation(pair.name.replace("query/key", "key bias"), "key bias", pair.name, pair.H, bias)


def value_output_bias(pair: SymmetricPair, bias: StridedView, output: StridedView) -> Translation:
    """Return the translation of the value bias `bias`, a view in pair.G, into the output bias `output`, (1, d, 1)."""
    return Translation(f"{pair.name} bias", "value/output bias", pair.name, pair.G, bias, pair.H, output)


def without_biases(pairs: Iterable[SymmetricPair], translations: Iterable[Translation]) -> tuple[SymmetricPair, ...]:
    """Return the pairs without the rows that translations can make 0."""
    removed: dict[str, set[StridedView]] = {}
    for translation in translations:
        removed.setdefault(translation.pair, set()).add(translation.bias)

    def left(pair: SymmetricPair, factor: Factor) -> Factor:
        gone = removed.get(pair.name, set())
        return Factor(tuple(view for view in factor.views if view not in gone))

    return tuple(replace(pair, G=left(pair, pair.G), H=left(pair, pair.H)) for pair in pairs)
