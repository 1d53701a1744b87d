"""Judge finite moves by the model itself, in float64, on batches that the finder did not use."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.batches import tensors_in
from quotient_manifolds.symmetries.charges.variations import Axes, Variations, other_sizes, unwarned
from quotient_manifolds.symmetries.outputs import RUN_ERRORS, Evaluate, ModelOutputs, doubled, relative_change

ENTRIES, WORK, _FLOOR = 2e5, 1e10, 32
"""How many entries the batches have in all at most, how many times parameters, and what a run costs besides."""
_FEW = 20
"""How many batches of the size that is given there should be at least; if that is too much work, smaller ones."""
_PART = 1e-3
"""Batches on which outputs change by this part of the largest change, or more, are named."""
_SHORT = 8
"""Of at most so many tokens all smaller numbers are tried."""
_LEAST = 1e-12
"""Outputs that are all smaller than this are compared with it."""
_HELD = 3e6
"""Up to so many entries parameters are held in float64."""


class Answers:
    """Compare outputs before and after a move.

    batches: with other values, of other sizes, and far ones: 1000 times larger and smaller numbers, 64 times the
    examples, 16 times the length, each if the model runs on it without NaN; and others that are given, as a model may
    do other operations there. limits: by tensor of the batch the number of its words. own: the model's parameters,
    those of small models in float64, once for all runs.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        evaluate: Evaluate | None,
        generator: torch.Generator,
        limits: Mapping[int, int] | None = None,
        others: Sequence[Any] = (),
    ) -> None:
        variations = Variations(batch, generator, limits or {})
        self.batches: list[Any] = []
        self._outputs = ModelOutputs(model, self.batches, evaluate)
        self.own = {name: doubled(w.detach()) for name, w in model.named_parameters()}
        self._before: Mapping[str, Tensor] = {}
        self._known: list[list[Tensor]] = []
        self._telling = 0  # the last batch with a change that was enough
        left = min(ENTRIES, WORK / max(1, sum(w.numel() for w in model.parameters())))
        small: dict[Axes, int] = {}
        if _FEW * variations.numel({}) > left:
            most = variations.numel({}) + _FLOOR
            for axes in variations.axes:
                for size in other_sizes(axes, True):
                    if size < axes.size and self._tried(variations, {**small, axes: size}, "normal", most) < most:
                        self._forget()
                        small[axes] = size
                        break
            self._tried(variations, {}, "normal", inf)
        least = variations.numel(small) + _FLOOR  # tried in any case
        left = self._tried(variations, small, "normal", max(left, least))
        sizes: dict[Axes, int] = {}
        for axes in variations.axes:
            for k, size in enumerate(_sizes(axes, small.get(axes, axes.size))):
                if (new := self._tried(variations, {**small, axes: size}, "normal", left)) < left:
                    left, sizes[axes] = new, small.get(axes, axes.size)
                elif k == 2 and axes not in sizes:  # neither longer nor shorter
                    break
        for mood in (
            ("negative", "positive", "huge", "small", "far", "near") if variations.real else ("positive", "negative")
        ):
            left = self._tried(variations, small, mood, max(left, least))
        far = ((axes, factor) for axes in sizes for factor in ((64, 16) if axes.leads else (16,)))
        for axes, factor in far:
            left = self._tried(variations, {**small, axes: factor * sizes[axes]}, "normal", left)
        for other in others:
            self._keeps(other)
        if not self.batches:
            self.batches.append(batch)
            self._known.append(self._at({}, 0))
        if sum(w.numel() for w in self.own.values()) > _HELD:
            self.own = {name: w.detach() for name, w in model.named_parameters()}
        self._own = {name: w.detach() for name, w in model.named_buffers()} | self.own

    def _forget(self) -> None:
        self.batches.pop()
        self._known.pop()

    def _tried(self, variations: Variations, sizes: Mapping[Axes, int], mood: str, left: float) -> float:
        """Keep a batch if it is not too large and the model runs there. Return how many entries are left then."""
        size = variations.numel(sizes) + _FLOOR
        if size > left:
            return left
        return left - size if self._keeps(variations.made(sizes, mood)) else left

    def _keeps(self, batch: Any) -> bool:
        """Keep a batch if the model runs there, and return whether it does."""
        self.batches.append(batch)
        try:
            outputs = self._at({}, len(self.batches) - 1)
        except RUN_ERRORS:
            outputs = []
        self._known.append(outputs)
        finite = all(bool(torch.isfinite(y).any()) and not bool(y.isnan().any()) for y in outputs)
        if outputs and finite and _size(outputs) >= _LEAST * _size(self._known[0]):  # less is what rounding left
            return True
        self._forget()
        return False

    def _at(self, params: Mapping[str, Tensor], index: int) -> list[Tensor]:
        with torch.no_grad(), unwarned():
            return [y.detach() for y in self._outputs.at({**self.own, **params}, index)]

    def change(
        self,
        before: Mapping[str, Tensor],
        after: Mapping[str, Tensor],
        which: Collection[int] = (),
        *,
        enough: float = inf,
    ) -> tuple[float, list[int]]:
        """Return the largest relative change of an output, infinite if the model raises, and on which batches it is.

        Of batches of one shape the first is named, and the worst one first of all. which: on these batches alone, if
        there are any. enough: a change that is more is the last that is looked for, first where there was such a one
        before. Parameters and buffers that are not given are the model's own. Outputs are computed once for the same
        `before`.
        """
        known = {**self._own, **self._before}
        if not all(_equal(w, before.get(name, self._own[name])) for name, w in known.items()):
            self._before, self._known = dict(before), [self._at(before, k) for k in range(len(self.batches))]
        changes: dict[int, float] = {}
        for k in sorted(which or range(len(self.batches)), key=lambda k: k != self._telling):
            changes[k] = self._change(after, k)
            if not changes[k] <= enough:
                self._telling = k
                break
        worst = max(changes.values())
        order = sorted(changes, key=lambda k: changes[k] < worst)
        shapes = {k: tuple(t.shape for t in tensors_in(self.batches[k])) for k in order if changes[k] > _PART * worst}
        return worst, [next(k for k in shapes if shapes[k] == shape) for shape in dict.fromkeys(shapes.values())]

    def _change(self, after: Mapping[str, Tensor], index: int) -> float:
        try:
            new = self._at(after, index)
        except RUN_ERRORS:
            return inf
        old = self._known[index]
        if [y.shape for y in new] != [y.shape for y in old]:
            return inf
        return max(map(_relative, new, old), default=0.0)


def _size(outputs: list[Tensor]) -> float:
    """Return the largest finite absolute value."""
    return max((float(y[torch.isfinite(y)].abs().max()) for y in outputs if y.numel()), default=0.0)


def _relative(new: Tensor, old: Tensor) -> float:
    if float(old.abs().max() if old.numel() else 0) < _LEAST:
        return float((new - old).abs().max()) / _LEAST if old.numel() else 0.0
    return relative_change([new], [old])


def _equal(one: Tensor, other: Tensor) -> bool:
    return one is other or torch.equal(one.double(), other.double())


def _sizes(axes: Axes, size: int) -> Iterator[int]:
    """Yield sizes that the finder does not use, larger and smaller than one, some no multiple of anything.

    Of lengths more smaller ones than there are rounds, or all: a table of positions may hide something at each.
    """
    least = 2 if axes.leads else 1
    shorter = () if axes.leads else (2 * size // 3, *range(1, size if size <= _SHORT else 1))
    tried = (size + 1, 3 * size, size - 1, 2 * size + 1, max(least, size // 3), 1, *shorter)
    yield from (other for other in dict.fromkeys(tried) if other >= least and other != size)
