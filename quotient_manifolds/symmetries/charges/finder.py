"""Read symmetries off charges, test a finite element of the whole group, and learn from inputs on which it fails."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeVar

import torch
from torch import Tensor

from quotient_manifolds.symmetries.charges.evidence import MOST, Evidence
from quotient_manifolds.symmetries.charges.frame import Frame
from quotient_manifolds.symmetries.charges.points import Points, tamed
from quotient_manifolds.symmetries.charges.positions import vectors
from quotient_manifolds.symmetries.charges.readings import Readings
from quotient_manifolds.symmetries.charges.samples import Sample, Undecided
from quotient_manifolds.symmetries.charges.spans import translations
from quotient_manifolds.symmetries.charges.walk import Walk
from quotient_manifolds.symmetries.groups import DirectSum, Draft, Gauge, Symmetry, Torus, Translation
from quotient_manifolds.symmetries.trace.record import Recording, movable

T = TypeVar("T")
CHANGE = 1e-9
"""Outputs are invariant if a finite element changes them by less than this, relatively."""
_ROUNDS, _LESSONS = 3, 4
_STEP = 0.3
Change = Callable[..., tuple[float, list[int]]]
"""(candidates, which=()) -> the largest relative change of an output under all of them, and the batches that change."""
_POINTS, _LOSSES = 4, 2
"""Points, and losses at each, whose token vectors determine shifts."""


@dataclass(frozen=True, eq=False)
class Found:
    """Hold the symmetries that leave a model's outputs unchanged, at all weights, on all inputs that were tried.

    refused: sentences on symmetries that charges or a finite transformation rejected. held: sentences on properties of
    the inputs that could not be varied. largest: the largest charge of the symmetries, over the sum of its absolute
    summands. smallest: the smallest pivot among rejected ones. change: the largest relative change of an output under
    a joint random element. finder: the finder used, None if there was nothing to search.
    """

    symmetries: tuple[Symmetry, ...]
    refused: tuple[str, ...]
    held: tuple[str, ...]
    largest: float
    smallest: float
    change: float
    finder: Finder | None = None


class Finder(ABC):
    """Hold a walk and its points, and the recordings of inputs on which finite transformations have failed so far."""

    def __init__(self, points: Points, generator: torch.Generator) -> None:
        self.points, self.generator = points, generator
        self.walk = Walk(self.recording)
        self.frame = Frame(self.walk)
        self.answers = points.answers()
        known, parameters = self.answers.own, self.recording.parameters
        self.own = {name: tamed(known.get(name, w.detach().double())) for name, w in parameters.items() if movable(w)}
        self.all_own = {**parameters, **self.own}
        self.failed: list[int] = []
        self.sampled: list[tuple[Mapping[str, Tensor], list[Sample]]] = []
        """The last points, which `shifts` uses, too."""
        self.count = 0

    @property
    @abstractmethod
    def recording(self) -> Recording:
        """Return the recording of the walk."""

    @abstractmethod
    def everywhere(self) -> Readings:
        """Return the symmetries that hold at all weights."""

    def completed(self, read: Readings) -> Readings:
        """Return the readings, with missing symmetries if these can be searched for."""
        return read

    def which(self) -> list[int] | None:
        """Return the recordings for the next point; every other time, one on which a transformation failed, if any."""
        self.count += 1
        return [self.failed[self.count // 2 % len(self.failed)]] if self.failed and self.count % 2 else None

    def tokens(self, points: int, losses: int) -> Iterator[tuple[Mapping[str, Tensor], Sample]]:
        """Yield weights and samples with token vectors at generic points, with constants included in biases."""
        constants = self.frame.constants
        for _ in range(points):
            at, found = self._sampled(losses)
            self.sampled = [*self.sampled[1 - _POINTS :], (at, found[-_LOSSES:])]
            weights = constants.included(at)
            for sample in found:
                yield weights, replace(sample, gradients=constants.pulled(at, sample.gradients))

    def shifts(self) -> Readings:
        """Return translations that hold at all weights, from token vectors at the points of `tokens` and more."""
        drawn = [*self.sampled, *(self._sampled(_LOSSES) for _ in range(_POINTS - len(self.sampled)))]
        self.sampled = []
        pairs = [(at, sample) for at, found in drawn for sample in found]
        return translations(Evidence(self.frame, pairs, self._alike))

    def _alike(self) -> Sample:
        """Return a sample at weights with statistically alike units, or at others if the model does not run there."""
        with suppress(Undecided):
            return self._sampled(1, self.points.weights(alike=True))[1][0]
        return self._sampled(1)[1][0]

    def _sampled(
        self, losses: int, weights: Mapping[str, Tensor] | None = None
    ) -> tuple[Mapping[str, Tensor], list[Sample]]:
        """Return weights, and samples with gradients of biases and small tables, whose columns may be shifted."""
        tables = {self.walk.entries.plain.get(use.memory) for use in self.walk.uses if use.tokens.place is None}
        shapes = self.frame.entries.shapes
        names = [name for name in shapes if name in tables and shapes[name].numel() <= MOST]
        every = list(dict.fromkeys([*vectors(self.frame), *names]))
        at, found = self.points.samples(losses, walk=self.walk, vectors=every, weights=weights)
        return at.weights, found

    def found(self) -> Found:
        """Read symmetries, test a finite transformation, and repeat with the inputs on which it failed."""
        refused: list[str] = []
        for _ in range(_ROUNDS):
            read = self._read()
            kept = tuple(map(_reflected, read.symmetries))
            change, where = self.change(kept)
            if change < CHANGE:
                break
            if any(each is not own for each, own in zip(kept, read.symmetries, strict=True)):
                change, where = self.change(read.symmetries)
            if change < CHANGE:
                kept = tuple(self._with_reflections(read.symmetries))
                break
            refused = [f"a finite move changed outputs by {change:.1e} on inputs that then became points"]
            if not [self._learned(index) for index in where[:_LESSONS]].count(True):
                break
        if not change < CHANGE:
            good, changing = self._invariant([*read.symmetries], self.change, _atoms)
            refused += [f"{_named(each)} changed outputs by {size:.1e}" for each, size in changing]
            kept = tuple(self._with_reflections(good))
            change, _ = self.change(kept)
        why = tuple(dict.fromkeys([*refused, *read.refused]))
        return Found(kept, why, self.points.held, read.largest, read.smallest, change, self)

    def _read(self) -> Readings:
        """Return the symmetries read off charges that act at the model's own weights; none if charges are undecided."""
        try:
            read = self.everywhere()
        except Undecided as error:
            read = Readings((), (str(error),), 0.0, float("inf"))
        whole = [(each, self._unable(each)) for each in read.symmetries]
        parted = ([(p, self._unable(p)) for p in _parts(each)] if why else [(each, why)] for each, why in whole)
        unable = [pair for some in parted for pair in some]
        acting = tuple(each for each, why in unable if not why)
        failed = tuple(why for _, why in unable if why)
        read = replace(read, symmetries=acting, refused=(*read.refused, *failed))
        try:
            return self.completed(read)
        except Undecided as error:
            return replace(read, refused=(*read.refused, str(error)))

    def _unable(self, symmetry: Symmetry) -> str:
        return unable(symmetry, self.own)

    def _learned(self, index: int) -> bool:
        """Add a batch to the sources of points; return whether that is possible."""
        try:
            self.failed.append(self.points.add(self.answers.batches[index]))
        except (ValueError, RuntimeError):
            return False
        return True

    # Finite transformations

    def _moved(self, symmetries: Iterable[Symmetry]) -> Mapping[str, Tensor]:
        """Return the model's weights, in float64, acted on by a random element of each symmetry in turn."""
        draft = Draft(self.own)
        for symmetry in symmetries:
            symmetry.move(draft, self._element(symmetry))
        return draft

    def _element(self, symmetry: Symmetry) -> Tensor:
        if isinstance(symmetry, Gauge) and symmetry.reflections is not None:  # apply all, not each at random
            element = replace(symmetry, reflections=None).element(self.generator, _STEP)
            return symmetry.algebra.reflect(symmetry.reflections) @ element
        if not isinstance(symmetry, Translation):
            return symmetry.element(self.generator, _STEP)
        sizes = [(len(part.rows) * part.rows.columns, self._sizes[part.rows.name]) for part in symmetry.parts]
        mean = sum(count * size**2 for count, size in sizes) / sum(count for count, _ in sizes)
        return symmetry.element(self.generator, _STEP * mean**0.5)

    @cached_property
    def _sizes(self) -> dict[str, float]:
        """Return the root mean square of each parameter, at least 0.001."""
        norm = partial(torch.linalg.vector_norm, dtype=torch.float64)
        return {name: max(float(norm(w)) / max(1, w.numel()) ** 0.5, 1e-3) for name, w in self.own.items()}

    def change(self, symmetries: Sequence[Symmetry], which: Collection[int] = ()) -> tuple[float, list[int]]:
        """Return the largest relative change of an output under joint random elements, and the batches that change.

        which: the batches to evaluate, all if empty.
        """
        if not symmetries:
            return 0.0, []
        try:
            moved = self._moved(symmetries)
        except ValueError:  # an element cannot act at these weights; bisection finds its symmetry
            return float("inf"), []
        return self.answers.change(self.own, moved, which)

    def _invariant(
        self, some: list[T], change: Change, apart: Callable[[T], list[T]]
    ) -> tuple[list[T], list[tuple[T, float]]]:
        """Return the candidates, or their parts, that together change no output, and the others with their changes.

        apart: splits a candidate into parts. Bisection first uses a few batches on which the whole set changes outputs,
        then all batches.
        """
        refused: list[tuple[T, float]] = []
        for _ in range(_ROUNDS):
            size, where = change(some) if some else (0.0, [])
            if size < CHANGE:
                return some, refused
            some = _bisected(some, (), partial(change, which=where[:_LESSONS]), apart, refused)
        return _bisected(some, (), change, apart, refused), refused

    # Components of groups

    def _with_reflections(self, symmetries: Sequence[Symmetry]) -> Iterator[Symmetry]:
        """Yield the symmetries; gauges get the reflections, outside the identity component, that are symmetries."""
        gauges = {k: each for k, each in enumerate(symmetries) if isinstance(each, Gauge)}
        flips = [(k, bit) for k, gauge in gauges.items() for bit in range(gauge.algebra.components)]
        good = self._invariant(flips, partial(self._flipped, gauges), lambda flip: [flip])[0]
        for k, symmetry in enumerate(symmetries):
            if isinstance(symmetry, Gauge) and bool((bits := _bits(symmetry, k, good)).any()):
                yield replace(symmetry, reflections=bits)
            else:
                yield symmetry

    def _flipped(
        self, gauges: Mapping[int, Gauge], flips: Sequence[tuple[int, int]], which: Collection[int] = ()
    ) -> tuple[float, list[int]]:
        """Return the largest change of an output under reflections (gauge, bit), and the batches that change."""
        draft = Draft(self.own)
        for k in dict.fromkeys(k for k, _ in flips):
            gauges[k].move(draft, gauges[k].algebra.reflect(_bits(gauges[k], k, flips)))
        return self.answers.change(self.own, draft, which)


def unable(symmetry: Symmetry, params: Mapping[str, Tensor]) -> str:
    """Return the reason if a symmetry cannot act at these parameters, else an empty string."""
    try:
        for slot in symmetry.wire.slots if isinstance(symmetry, Gauge) else ():
            slot.units(params)
        for part in symmetry.parts if isinstance(symmetry, Translation) else ():
            if not all(w is None or bool(torch.isfinite(w).all()) for w in part.at(params)):
                return f"{_named(symmetry)}: gains must not be 0. Found some that are"
    except ValueError as error:
        return f"{_named(symmetry)}: {error}"
    return ""


def _bisected(
    some: list[T], beside: Sequence[T], change: Change, apart: Callable[[T], list[T]], refused: list[tuple[T, float]]
) -> list[T]:
    """Return the candidates, or their parts, that change no output together with the kept ones in `beside`.

    refused: receives the others, with the relative changes that they cause.
    """
    size = change([*some, *beside])[0] if some else 0.0
    if size < CHANGE:
        return some
    some = some if len(some) > 1 else apart(some[0])
    if len(some) == 1:
        refused.append((some[0], size))
        return []
    half = len(some) // 2
    first = _bisected(some[:half], beside, change, apart, refused)
    return first + _bisected(some[half:], (*first, *beside), change, apart, refused)


def _bits(gauge: Gauge, k: int, flips: Iterable[tuple[int, int]]) -> Tensor:
    """Return which reflections of gauge k occur in the pairs (gauge, bit), bool (components,)."""
    own = {bit for number, bit in flips if number == k}
    return torch.tensor([bit in own for bit in range(gauge.algebra.components)], dtype=torch.bool)


def _reflected(symmetry: Symmetry) -> Symmetry:
    """Return a symmetry with all of its group's elements outside the identity component."""
    if not isinstance(symmetry, Gauge) or not symmetry.algebra.components:
        return symmetry
    return replace(symmetry, reflections=torch.ones(symmetry.algebra.components, dtype=torch.bool))


def _atoms(symmetry: Symmetry) -> list[Symmetry]:
    """Return the parts that can hold alone: each log-scale of a torus, and each block of a gauge."""
    if not isinstance(symmetry, Torus):
        return [*_parts(symmetry)]
    atoms: list[Symmetry] = []
    for k in range(symmetry.size):
        slices = []
        for each in symmetry.slices:
            keep = each.index[1] == k
            if bool(keep.any()):
                index = torch.stack([each.index[0][keep], torch.zeros(int(keep.sum()), dtype=torch.long)])
                slices.append(replace(each, index=index, powers=each.powers[keep]))
        atoms.append(replace(symmetry, slices=tuple(slices), size=1))
    return atoms


def _parts(symmetry: Symmetry) -> tuple[Symmetry, ...]:
    """Return the symmetries of the blocks of a gauge, or the symmetry itself."""
    blocks = isinstance(symmetry, Gauge) and isinstance(symmetry.algebra, DirectSum)
    return symmetry.parts if blocks else (symmetry,)  # type: ignore[attr-defined]


def _named(symmetry: Symmetry) -> str:
    kind = type(symmetry.algebra).__name__ if isinstance(symmetry, Gauge) else type(symmetry).__name__
    return f"{kind} of {', '.join(symmetry.names)}"
