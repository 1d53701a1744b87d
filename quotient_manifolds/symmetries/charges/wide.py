"""Find the symmetries of a net of many parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from quotient_manifolds.messages import first_line
from quotient_manifolds.symmetries.charges.finder import Finder
from quotient_manifolds.symmetries.charges.parts import Extent, at_once, dealt_in_parts, parts
from quotient_manifolds.symmetries.charges.readings import Readings, read
from quotient_manifolds.symmetries.charges.samples import Sample, Undecided, Uses
from quotient_manifolds.symmetries.charges.stacks import Stacks
from quotient_manifolds.symmetries.charges.taps import cuts
from quotient_manifolds.symmetries.charges.tokens import Matrices, dealt, read_wide
from quotient_manifolds.symmetries.groups import FromSum, Gauge, Symmetry
from quotient_manifolds.symmetries.outputs import RUN_ERRORS
from quotient_manifolds.symmetries.trace.record import Recording


class Wide(Finder):
    """Find the symmetries of a net of many parameters by token vectors: no gradient of a weight is formed."""

    _shape = 0  # turn of the next sample of all uses

    @cached_property
    def recording(self) -> Recording:
        """Return the smallest recording of several examples."""
        found = [self.points.recordings[place] for place in self.points.exercised()]
        return min(found, key=lambda each: sum(each.values[n].numel() for n in each.program.inputs))

    def everywhere(self) -> Readings:
        every = torch.arange(len(self.frame.roots))
        return read(self.frame, every, self.tokens, self.generator)

    def here(self) -> Stacks:
        def elsewhere(
            weights: Mapping[str, Tensor], count: int, names: Sequence[str], some: Collection[int] | None
        ) -> Sample:
            try:  # of other signs, so that a unit that is off at all inputs is on at some
                return self._dealt(self.points.weights(signed=True), count, names, some)
            except Undecided:
                return self._dealt(self.points.weights(), count, names, some)

        self.__dict__.pop("_sources", None)  # a failed move may have added some
        deal = self._dealt_in_parts if self.large and not cuts(self.walk.program) else None  # taps are of one batch
        return read_wide(self.frame, self._dealt, elsewhere, self.all_own, len(self._sources), deal)

    def apart(self, symmetries: Sequence[Symmetry], stacks: Stacks) -> Stacks:
        sums = [each for each in symmetries if isinstance(each, Gauge) and isinstance(each.algebra, FromSum)]
        moved = {slot.rows.name for each in sums for slot in each.wire.slots if slot.writes}  # to all constants
        kept = (s for s in stacks.found if s.family != "shift" or not moved.intersection(s.translation.names))
        return replace(stacks, found=tuple(kept))

    @cached_property
    def _sources(self) -> list[tuple[Recording, int]]:
        """Return recordings and how many tokens a use has there, in the middle; those with few for one example first.

        What has one token for each example, as a pooler, has enough of them soonest there.
        """
        recordings = [self.points.recordings[place] for place in self.points.places(self.walk.program)]
        found = []
        for recording in (*recordings, *self.points.shorter(self.recording)):
            layouts, operations = recording.program.layouts, recording.program.operations
            uses = Uses.along(self.walk, recording.program).uses
            shapes = [(torch.Size(layouts[operations[u.operation].outs[0]].shape), len(u.out)) for u in uses]
            rows = sorted(max(1, shape.numel() // max(1, outputs)) for shape, outputs in shapes)
            found.append((recording, rows[len(rows) // 2], rows[0] / rows[len(rows) // 2]))
        return [each[:2] for each in sorted(found, key=lambda each: -each[2])]

    def _dealt_in_parts(
        self, weights: Mapping[str, Tensor], count: int, matrices: Matrices, some: Collection[int]
    ) -> Iterator[tuple[Collection[int], Sample]]:
        """Yield the uses of each part, the last part first, and samples of these, of few of all tokens each."""
        recording, rows = self._sources[0]
        batches, program = -(-count // rows), recording.program
        used = Uses.along(self.walk, program)
        places = [use.operation for use in used.uses]
        extents = [Extent(min(p), max(p), size) for n, size in matrices if (p := [places[use] for use in n])]
        every = parts(program, extents, batches)
        length = min(at_once(program, part.places) for part in every)
        inputs = self.points.inputs(recording, stacked=(batches,))
        chunks = list(zip(*(each.split(length) for each in inputs), strict=True))
        for part, found in dealt_in_parts(used, weights, chunks, self.generator, every, some):
            uses = {n for n, place in enumerate(places) if place in part.places}
            yield from ((uses, sample) for sample in found)

    def _dealt(
        self, weights: Mapping[str, Tensor], count: int, names: Sequence[str], some: Collection[int] | None
    ) -> Sample:
        """Return a sample of about so many tokens, to which all words are dealt; of the next shape if of all uses."""
        first = self._shape if some is None else 0
        self._shape += some is None
        for k in range(len(self._sources)):
            recording, rows = self._sources[(first + k) % len(self._sources)]
            batches = -(-count // rows)
            if self.large and some is None:
                batches = min(batches, at_once(recording.program, range(len(recording.program.operations))))
            inputs = self.points.inputs(recording, stacked=(batches,))
            used = Uses.along(self.walk, recording.program)
            try:
                return dealt(used, weights, list(zip(*inputs, strict=True)), self.generator, names, some)
            except RUN_ERRORS as error:
                why = first_line(error)
        raise Undecided(f"The model must run on other inputs of the sizes it was recorded at. Found: {why}")
