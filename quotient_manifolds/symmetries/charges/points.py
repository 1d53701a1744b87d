"""Draw generic points: random weights and inputs for forward passes recorded at several sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quotient_manifolds.batches import mapped, tensors_in
from quotient_manifolds.messages import first_line
from quotient_manifolds.replica import Cast, replica
from quotient_manifolds.symmetries.charges.answers import Answers
from quotient_manifolds.symmetries.charges.samples import Sample, Undecided, Uses, samples, stacked_gradients
from quotient_manifolds.symmetries.charges.variations import (
    MOODS,
    Axes,
    Variations,
    numbers,
    other_sizes,
    unwarned,
)
from quotient_manifolds.symmetries.charges.walk import Walk
from quotient_manifolds.symmetries.outputs import RUN_ERRORS, Evaluate, answer, first_examples
from quotient_manifolds.symmetries.trace.program import Program
from quotient_manifolds.symmetries.trace.record import PRECISIONS, Recording, movable, record, recorded
from quotient_manifolds.symmetries.trace.replay import wide

OTHERS = 3
"""Number of recordings of variations that is enough."""
_TRIES = 24
"""Points in a row at which the model may fail to run, or to be finite, before drawing stops with an error."""
_PATIENCE = 3
"""Number of failed replays after which the model is recorded anew at the point."""
WORK = 1e8
"""A model is large, and gets small points, if parameters times entries of the batch exceed this number."""
_SPREAD = 4
"""Points of a large model use recordings that are at most this many times larger than the smallest one."""
_BY_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Tags of operations that return numbers or sizes to Python, which may branch on them."""
_ROUNDING = 1e-6
"""Relative to the outputs on the given batch: smaller outputs may be rounding errors of sums that cancel."""
_NOISE, _OFFSET, _LEAST = 0.3, 0.1, 1e-3
_GAIN, _ORDINARY, _ZERO, _SOME = 6.0, 16.0, 1e-6, 1 << 16
"""_GAIN: largest root mean square gain of a matrix. _ORDINARY: largest ordinary entry, in medians of absolute values.
The median is over at most _SOME entries, without those below _ZERO times the largest."""
_UNIFORM = 3**0.5 / (1 << 15)
"""A uniform random 16-bit integer times this number has standard deviation 1."""
_CHUNK = 1 << 17
HELD = 1 << 16
"""Drawn parameters with at most this many entries are held in memory."""


class Point(NamedTuple):
    """Hold a recording, weights by name (at least float32), and inputs in the order of its program (float64)."""

    recording: Recording
    weights: Mapping[str, Tensor]
    inputs: tuple[Tensor, ...]


class Drawn(Mapping[str, Tensor]):
    """Draw random weights: w plus uniform noise with standard deviation 0.3 |w| + 0.1 s, s the parameter's size.

    The size is the root mean square. alike: entries are the parameter's mean plus noise of its standard deviation, but
    at least 0.1 s. Units then differ by chance alone, and each is active for some inputs; at the model's own weights,
    some hardly ever are. Large parameters are never held: each access draws them again from a seed. All are on the CPU.
    """

    def __init__(self, own: Mapping[str, Tensor], seed: int, alike: bool) -> None:
        self._own, self._alike = own, alike
        chunks = (-(-w.numel() // self._chunk(w)) for w in own.values())
        self._seeds = dict(zip(own, accumulate(chunks, initial=seed), strict=False))
        self._large = {name for name, w in own.items() if w.numel() > HELD}
        self._kept: dict[str, Tensor] = {}
        self._sizes: dict[str, tuple[float, float]] = {}
        """The root mean square and the mean of each parameter."""

    def __len__(self) -> int:
        return len(self._own)

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __getitem__(self, name: str) -> Tensor:
        if not movable(w := self._own[name]):
            return w
        if name in self._large:
            return self._drawn(name, w)
        if name not in self._kept:
            self._kept[name] = self._drawn(name, w)
        return self._kept[name]

    def rows(self, name: str, index: Tensor) -> Tensor | None:
        """Return rows of a large table, drawing only the chunks that hold them; None for any other parameter."""
        w = self._own[name]
        if name not in self._large or not movable(w):
            return None
        wanted, at = index.unique(return_inverse=True)
        many = self._chunk(w) // w[0].numel()
        parts = ((k, wanted[wanted // many == k] % many) for k in (wanted // many).unique().tolist())
        return torch.cat([self._drawn(name, w, k).view(-1, *w.shape[1:])[rows] for k, rows in parts])[at]

    @staticmethod
    def _chunk(w: Tensor) -> int:
        """Return how many entries share a seed: whole rows, as many as fit in a processor's cache."""
        row = max(1, w[0].numel()) if w.ndim and len(w) else 1
        return max(1, _CHUNK // row) * row

    def _drawn(self, name: str, w: Tensor, only: int | None = None) -> Tensor:
        """Draw values for a parameter, or for one of its chunks as a vector."""
        size, mean = self._size(name, w)
        chunks = w.detach().reshape(-1).split(self._chunk(w))
        like, places = (w, range(len(chunks))) if only is None else (chunks[only], (only,))
        made = torch.empty(like.shape, dtype=torch.promote_types(w.dtype, torch.float32), device="cpu")
        for k, new in zip(places, made.view(-1).split(self._chunk(w)), strict=True):
            generator, known = torch.Generator().manual_seed(self._seeds[name] + k), chunks[k].cpu()
            words = torch.empty(-(-len(known) // 4), dtype=torch.int64).random_(-(1 << 63), None, generator=generator)
            drawn = words.view(torch.int16)[: len(known)].to(new)  # four numbers per word save time
            if self._alike:
                spread = max(max(0.0, size**2 - mean**2) ** 0.5, _OFFSET * size)
                torch.mul(drawn, _UNIFORM * spread, out=new).add_(mean)
                continue
            noise = known.to(new.dtype).abs().mul_(_NOISE * _UNIFORM).add_(_OFFSET * _UNIFORM * size)
            torch.addcmul(known.to(new.dtype), noise, drawn, out=new)
        return made

    def _size(self, name: str, w: Tensor) -> tuple[float, float]:
        if name not in self._sizes:
            wide = torch.promote_types(w.dtype, torch.float32)
            norm, mean = torch.linalg.vector_norm(w.detach(), dtype=wide), w.detach().mean(dtype=wide)
            self._sizes[name] = max(float(norm) / w.numel() ** 0.5, _LEAST), float(mean)
        return self._sizes[name]


def tamed(w: Tensor) -> Tensor:
    """Return a parameter with outliers compressed and its gain as a matrix limited; ordinary ones are unchanged.

    Far along an orbit, some entries are thousands of times larger than others, or than the entries of another layer.
    Noise of a tenth of that size saturates every softmax, and transformations of that size leave only rounding errors.
    An entry c x, with c the largest ordinary one and x > 1, becomes c (2 - 1 / x), so that distinct entries stay so.
    """
    if not movable(w) or w.numel() < 2:
        return w
    w = w.detach()
    some = w.reshape(-1)[:: -(-w.numel() // _SOME)].double().abs()
    largest = max(-float(w.min()), float(w.max()))
    present = some[some > _ZERO * largest]
    if not len(present):
        return w
    ordinary = _ORDINARY * float(present.median())
    if largest > ordinary:
        far = (w.abs() / ordinary).clamp(min=1.0)
        w = w / far * (2 - 1 / far)
    if w.ndim < 2:
        return w
    size = torch.linalg.vector_norm(w, dtype=torch.promote_types(w.dtype, torch.float32))
    gain = float(size) / max(w.shape) ** 0.5
    return w * (_GAIN / gain) if gain > _GAIN else w


class Points:
    """Draw generic points, at which charges decide which symmetries hold for all weights, inputs and sizes.

    recordings: the given batch, then variations of it on which the model runs and is finite. They have other sizes if
    the model takes these, and other values if Python reads numbers from tensors. held: a sentence for each property
    that could not be varied. left_out: the number of points at which the model did not run or was not finite.
    """

    def __init__(
        self, model: nn.Module, batch: Any, evaluate: Evaluate | None = None, *, seed: int = 0, shapes: bool = True
    ) -> None:
        self.model, self.evaluate, self.generator = model, evaluate or answer, torch.Generator().manual_seed(seed)
        entries = sum(t.numel() for t in tensors_in(batch))
        self._casts: tuple[Cast, ...] = PRECISIONS
        self._large = entries * sum(w.numel() for w in model.parameters()) > WORK
        first, batch = self._first(batch)
        if any(bool(first.values[number].isnan().any()) for number in first.program.outputs):
            raise ValueError("Outputs on the batch must be numbers, to be compared. Found NaN; give other inputs")
        self.recordings, self.batches, self.left_out = [first], [batch], 0
        self._tame = {name: tamed(w) for name, w in first.parameters.items()}
        self.given: list[Any] = []
        rows = first.program.limits
        self.limits = {origin: rows[k] for k, origin in enumerate(first.origins) if k in rows and origin is not None}
        self._raised: Counter[int] = Counter()
        self._uses: dict[tuple[int, bool], tuple[Walk | None, Uses]] = {}
        self._turn = 0
        self._trusted = set[tuple[int, bool]]()
        """(recording, whether words differ) for which stacked gradients agreed with the gradients of one batch."""
        variations = Variations(batch, self.generator, self.limits)
        varied, apart = self._sizes(variations) if shapes else ({}, {})
        self.held = variations.held(list(varied))
        if None in first.origins:
            self.held += ("tensors that are not part of the batch: of one shape",)
        self.held += tuple(f"{name}: always as at the first call, which writes to it" for name in first.written)
        if any(_BY_VALUES & set(operation.func.tags) for operation in first.program.operations):
            for mood in MOODS[1:]:
                if len(self.recordings) <= OTHERS + 1:
                    self._try(variations, apart if self._large else {}, mood)

    def _first(self, batch: Any) -> tuple[Recording, Any]:
        """Record a batch, or its first examples if the model is large and takes them; return the batch, too."""
        for some in first_examples(batch) if self._large else ():
            try:
                return self._recorded(some), some
            except RUN_ERRORS:
                continue
        return self._recorded(batch), batch

    def _sizes(self, variations: Variations) -> tuple[dict[Axes, int], dict[Axes, int]]:
        """Record variations of other sizes: each axis alone, then all together. Return the sizes of both."""
        varied: dict[Axes, int] = {}
        for axes in variations.axes:
            if set(axes.places) <= {place for other in varied for place in other.places}:
                continue
            for size in other_sizes(axes, self._large):
                if self._try(variations, {axes: size}, None):
                    varied[axes] = size
                    break
        apart: dict[Axes, int] = {}
        for axes, size in varied.items():
            if not any(set(axes.places) & set(other.places) for other in apart):
                apart[axes] = next((n for n in other_sizes(axes, True) if n != size), size)
        for mood, wanted in (("normal", len(apart) > 1), ("negative", False)) if apart else ():
            if wanted or len(self.recordings) <= OTHERS:
                ways = (apart, *({axes: size} for axes, size in varied.items()))
                next((way for way in ways if self._try(variations, way, mood)), None)
        return varied, apart

    def _try(self, variations: Variations, sizes: Mapping[Axes, int], mood: str | None) -> bool:
        """Record a variation, and return whether it runs and is finite."""
        try:
            with unwarned():
                self.add(variations.made(sizes, mood))
        except RUN_ERRORS:
            return False
        return True

    def _recorded(self, batch: Any) -> Recording:
        """Record a copy of the model, in the precision of the first recording."""
        made, cast = recorded(self.model, batch, self.evaluate, self._casts)
        self._casts = (cast,)
        return made

    def add(self, batch: Any) -> int:
        """Record another batch, which becomes a source of points, and return the index of its recording.

        Raises ModelError if the model raises, and ValueError if outputs are not finite or no more than rounding.
        """
        made = self._recorded(batch)
        outputs = [made.values[number] for number in made.program.outputs]
        if not outputs or any(bool(y.isnan().any()) or not bool(torch.isfinite(y).any()) for y in outputs):
            raise ValueError("Outputs must be finite to give charges. Found some that are not; leave this batch out")
        if _size(made) < _ROUNDING * _size(self.recordings[0]):
            raise ValueError("Outputs must be more than rounding to give charges. Found less; leave this batch out")
        kept = {*made.program.inputs, *made.program.choices}
        if self._large and _entries(made) >= _entries(self.recordings[0]):  # walks use a smaller one
            made = replace(made, values=tuple(t if n in kept else t.new_empty(0) for n, t in enumerate(made.values)))
        self.recordings.append(made)
        self.batches.append(batch)
        return len(self.recordings) - 1

    def give(self, batch: Any) -> None:
        """Record a batch that the user gave; outputs are compared on it, too."""
        self.add(batch)
        self.given.append(batch)

    def like(self, program: Program) -> list[int]:
        """Return the indices of the recordings that have the same operations as a program, at any sizes."""
        return [k for k, each in enumerate(self.recordings) if each.program.names == program.names]

    def places(self, walk: Walk) -> list[int]:
        """Return the indices of recordings with the operations and uses of a walk, only `exercised` ones if any."""
        like = self.like(walk.program)
        alike = [k for k in like if self._used(k, self.recordings[k].program, walk).fit]
        good = self.exercised()
        return [k for k in alike if k in good] or alike

    def weights(self, *, alike: bool = False) -> Mapping[str, Tensor]:
        """Return random weights; if `alike`, all units have the same distribution (see `Drawn`)."""
        seed = int(torch.randint(1 << 62, (), generator=self.generator))
        return Drawn(self._tame, seed, alike)

    def _mood(self) -> str:
        return MOODS[int(torch.randint(len(MOODS), (), generator=self.generator))]

    def inputs(self, recording: Recording, *, kept: bool = False, stacked: tuple[int, ...] = ()) -> tuple[Tensor, ...]:
        """Draw inputs of the same shapes; if `kept`, integers that are not words stay as recorded.

        Words are integers that index a table, such as token ids. stacked: leading axes, for several batches at once,
        to which words are dealt together.
        """
        mood, rows, made = self._mood(), recording.program.limits, []
        for place, number in enumerate(recording.program.inputs):
            like, limit = recording.values[number], rows.get(place)
            like = like.expand(*stacked, *like.shape)
            if kept and not like.is_floating_point() and limit is None:
                made.append(like)
                said = f"input {place}: integers always as recorded"
                self.held += () if said in self.held else (said,)
                continue
            made.append(wide(numbers(like, like.shape, self.generator, mood, limit)).to(like.device))
        return tuple(made)

    def point(self, which: Collection[int] | None = None) -> Point:
        """Return a fresh point, taking the recordings in turn: the `exercised` ones, or those at indices `which`."""
        return self._at(self._next(which))

    def _next(self, which: Collection[int] | None) -> int:
        places = self.exercised() if which is None else list(which)
        self._turn += 1
        return places[self._turn % len(places)]

    def _at(self, place: int, weights: Mapping[str, Tensor] | None = None) -> Point:
        recording = self.recordings[place]
        if self._raised[place] >= _PATIENCE and not recording.program.chosen:
            made = self._anew(place, weights)
            if made.recording.program.names == recording.program.names:
                return made
            recording = self._choosing(place)
        inputs = self.inputs(recording, kept=self._raised[place] > 0)
        return Point(recording, self.weights() if weights is None else weights, inputs)

    def _choosing(self, place: int) -> Recording:
        """Return a recording with fixed choices, e.g. of experts: other choices need other operations."""
        old = self.recordings[place]
        chosen = {number: old.values[number] for number in old.program.choices}
        self.recordings[place] = replace(old, program=replace(old.program, chosen=chosen))
        self._uses = {key: used for key, used in self._uses.items() if key[0] != place}
        said = "experts and other sizes within: always chosen as recorded"
        self.held += () if said in self.held else (said,)
        return self.recordings[place]

    def exercised(self) -> list[int]:
        """Return the indices of the recordings that make good points, or of all if there are none.

        Excluded are recordings of one example, as its signs show little; of one token if others have more, as it
        attends only to itself; and the largest ones of a large model.
        """
        tensors = [[each.values[n] for n in each.program.inputs] for each in self.recordings]
        sizes = list(map(_entries, self.recordings))
        most = _SPREAD * min(sizes) if self._large else max(sizes)
        rows = [max((t.shape[0] if t.ndim else 1 for t in each), default=2) for each in tensors]
        axes = [{(n, axis): size for n, t in enumerate(each) for axis, size in enumerate(t.shape)} for each in tensors]
        longer = {at for each in axes for at, size in each.items() if size > 1}
        alone = [any(each[at] == 1 for at in longer.intersection(each)) for each in axes]
        good = [k for k, size in enumerate(sizes) if size <= most and rows[k] > 1 and not alone[k]]
        return good or list(range(len(sizes)))

    def _anew(self, place: int, weights: Mapping[str, Tensor] | None) -> Point:
        """Record the model at a fresh point: its inner shapes depend on values, so the old recording cannot run."""
        weights, old = dict(self.weights() if weights is None else weights), self.recordings[place]
        own = {name: w.to(old.parameters[name], copy=True) for name, w in weights.items()}
        known = {name for name, _ in self.model.named_parameters()}  # shared parameters have one name here
        own |= {name: own[first] for name, first in old.tied.items() if name in known}
        batch = Variations(self.batches[place], self.generator, self.limits).made({}, self._mood())
        (cast,) = self._casts
        made = record(replica(self.model, own, cast), mapped(cast, batch), self.evaluate)
        return Point(made, weights, tuple(wide(made.values[number]) for number in made.program.inputs))

    def samples(
        self,
        losses: int,
        *,
        walk: Walk | None = None,
        vectors: Collection[str] = (),
        which: Collection[int] | None = None,
        weights: Mapping[str, Tensor] | None = None,
        generic: bool = True,
    ) -> tuple[Point, list[Sample]]:
        """Return a fresh point, with the given weights if any, and a sample for each of `losses` random losses.

        walk: samples hold the token vectors of its uses, at recordings with the same operations. Without a walk, they
        hold only gradients of the parameters `vectors`. which: indices of the recordings to choose from.

        Raises Undecided if 24 points in a row do not run or are not finite.
        """
        if walk is not None and which is None:
            which = self.places(walk)
        place, why = self._next(which), ""
        for _ in range(_TRIES):
            try:
                point = self._at(place, weights)
                used, own = self._used(place, point.recording.program, walk), point.recording.parameters
                drawn = samples(used, *point[1:], losses, self.generator, vectors=vectors, generic=generic, own=own)
                made = list(drawn)
            except RUN_ERRORS as error:
                self._raised[place] += 1
                self.left_out, why = self.left_out + 1, f"{type(error).__name__}: {first_line(error)}"
                place = place if self._raised[place] <= _PATIENCE else self._next(which)
                continue
            if len(made) == losses:
                return point, made
            self.left_out, place = self.left_out + 1, self._next(which)
            why = "outputs are not finite, or none depends on a weight"
        raise Undecided(
            f"Points must exist at which the model runs and is finite. Found none among {_TRIES} of other weights and "
            f"inputs ({why}); give inputs that leave the model more room"
        )

    def stacked(
        self,
        count: int,
        losses: int,
        vectors: Collection[str],
        which: Collection[int] | None,
        weights: Sequence[Mapping[str, Tensor]],
        *,
        words: bool,
    ) -> list[dict[str, Tensor]]:
        """Return gradients (rows, *shape) at `count` inputs for each of several weights, computed in one run.

        losses: the largest number of rows per input. words: whether words differ between inputs; other integers are
        the same in all. Raises RUN_ERRORS if some operation does not take several batches at once.
        """
        place = self._next(which)
        recording = self.recordings[place]
        inputs = self.inputs(recording, kept=self._raised[place] > 0, stacked=(count * len(weights),))
        known = recording.program.limits if words else {}
        alone = [k for k, t in enumerate(inputs) if not t.is_floating_point() and known.get(k) is None]
        inputs = tuple(t[0] if k in alone else t for k, t in enumerate(inputs))
        used, own = self._used(place, recording.program, None), recording.parameters
        trusted = (place, words) in self._trusted
        found = stacked_gradients(used, weights, inputs, alone, vectors, losses, self.generator, own, trusted=trusted)
        self._trusted.add((place, words))
        return found

    @property
    def tapped(self) -> bool:
        """Return whether an operation of a recording depends on weights but passes no derivative (see `taps`)."""
        return any(self._used(k, each.program, None).cuts for k, each in enumerate(self.recordings))

    def _used(self, place: int, program: Program, walk: Walk | None) -> Uses:
        """Return the uses of a walk, or no uses, in a recording's program; cached unless it was recorded anew."""
        if program is not self.recordings[place].program:
            return Uses(program) if walk is None else Uses.along(walk, program)
        known, used = self._uses.get((place, walk is None), (None, None))
        if used is None or known is not walk:
            used = Uses(program) if walk is None else Uses.along(walk, program)
            self._uses[place, walk is None] = walk, used
        return used

    def answers(self) -> Answers:
        """Return the model's outputs as functions of its weights, on unused batches and on those that were given."""
        return Answers(self.model, self.batches[0], self.evaluate, self.generator, self.limits, self.given)


def _entries(recording: Recording) -> int:
    """Return the number of entries of all inputs."""
    return sum(recording.values[number].numel() for number in recording.program.inputs)


def _size(recording: Recording) -> float:
    """Return the largest absolute value among the finite entries of the outputs."""
    outputs = (recording.values[number].detach() for number in recording.program.outputs)
    return max((float(y[torch.isfinite(y)].abs().max()) for y in outputs if bool(torch.isfinite(y).any())), default=0.0)
