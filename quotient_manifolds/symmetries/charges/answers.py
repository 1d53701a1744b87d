"""Verify finite transformations by the outputs of the model, in float64, on batches that the finder did not use."""

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
"""ENTRIES: most entries of all batches together. WORK: most entries times parameters. _FLOOR: extra cost of a run."""
_FEW = 20
"""If this many batches of the given size are too much work, smaller ones are used."""
_PART = 1e-3
"""Batches on which outputs change by more than this fraction of the largest change are named."""
_SHORT = 8
"""For at most this many tokens, all smaller numbers of tokens are tried."""
_LEAST = 1e-12
"""If all outputs are smaller than this, their change is relative to it."""
_HELD = 3e6
"""Parameters are held in float64 if they have at most this many entries in all."""


class Answers:
    """Compare the model's outputs before and after a transformation of its weights.

    batches: variations of a batch with other values and sizes, if the model runs on them without NaN. Some are far
    away: numbers 1000 times larger and smaller, 64 times the examples, 16 times the length. `others` are added, as a
    model may run other operations on them. limits: the number of words, by index of the tensor in the batch. own:
    the model's parameters; for small models in float64, converted once for all runs.
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
        self._telling = 0  # the batch that last exceeded `enough`
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
        least = variations.numel(small) + _FLOOR  # one batch is tried in any case
        left = self._tried(variations, small, "normal", max(left, least))
        sizes: dict[Axes, int] = {}
        for axes in variations.axes:
            for k, size in enumerate(_sizes(axes, small.get(axes, axes.size))):
                if (new := self._tried(variations, {**small, axes: size}, "normal", left)) < left:
                    left, sizes[axes] = new, small.get(axes, axes.size)
                elif k == 2 and axes not in sizes:  # no longer or shorter batch was kept
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
        """Keep a batch if it is not too large and the model runs on it; return how many entries are then left."""
        size = variations.numel(sizes) + _FLOOR
        if size > left:
            return left
        return left - size if self._keeps(variations.made(sizes, mood)) else left

    def _keeps(self, batch: Any) -> bool:
        """Keep a batch if the model runs on it, with outputs above rounding; return whether it is kept."""
        self.batches.append(batch)
        try:
            outputs = self._at({}, len(self.batches) - 1)
        except RUN_ERRORS:
            outputs = []
        self._known.append(outputs)
        finite = all(bool(torch.isfinite(y).any()) and not bool(y.isnan().any()) for y in outputs)
        if outputs and finite and _size(outputs) >= _LEAST * _size(self._known[0]):  # less is rounding
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
        """Return the largest relative change of an output, infinite if the model raises, and the batches that change.

        The batches are given by index, the worst first, and one for each shape. which: the batches to evaluate, all if
        empty. enough: evaluation stops at the first larger change, and begins with the batch that last exceeded it.
        Parameters and buffers that are not given are the model's own. Outputs for the same `before` are computed once.
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
    """Return the largest finite absolute value of outputs."""
    return max((float(y[torch.isfinite(y)].abs().max()) for y in outputs if y.numel()), default=0.0)


def _relative(new: Tensor, old: Tensor) -> float:
    if float(old.abs().max() if old.numel() else 0) < _LEAST:
        return float((new - old).abs().max()) / _LEAST if old.numel() else 0.0
    return relative_change([new], [old])


def _equal(one: Tensor, other: Tensor) -> bool:
    return one is other or torch.equal(one.double(), other.double())


def _sizes(axes: Axes, size: int) -> Iterator[int]:
    """Yield sizes of axes, larger and smaller than the given one, mostly sizes that the finder does not use.

    For lengths there are more smaller sizes than rounds, or all: a table of positions may hide something at each.
    """
    least = 2 if axes.leads else 1
    shorter = () if axes.leads else (2 * size // 3, *range(1, size if size <= _SHORT else 1))
    tried = (size + 1, 3 * size, size - 1, 2 * size + 1, max(least, size // 3), 1, *shorter)
    yield from (other for other in dict.fromkeys(tried) if other >= least and other != size)
