"""Find the symmetries of a net of many parameters."""

from __future__ import annotations

from functools import cached_property

import torch

from quotient_manifolds.symmetries.charges.finder import Finder
from quotient_manifolds.symmetries.charges.readings import Readings, is_of_sums, read
from quotient_manifolds.symmetries.groups import GL, Gauge, Symmetry, Translation
from quotient_manifolds.symmetries.trace.record import Recording


class Wide(Finder):
    """Find the symmetries of a net of many parameters by token vectors: no gradient of a weight is formed.

    Readings are of two kinds, and a new one belongs to one of them: `read` returns matrices that act on wires, `shifts`
    returns translations. A reading may propose anything, since charges and a finite transformation decide. What it
    returns must consist of weights, which are read where the group acts, and never of numbers of a sample: symmetries
    hold at all weights.
    """

    @cached_property
    def recording(self) -> Recording:
        """Return the smallest recording of several examples, of those with the operations that most of these have.

        Charges are of points with its operations: a picture that is padded may be the only one.
        """
        good = self.points.exercised()
        found = [self.points.recordings[place] for place in good]
        alike = [len(set(good).intersection(self.points.like(each.program))) for each in found]
        most = (each for each, count in zip(found, alike, strict=True) if count == max(alike))
        return min(most, key=lambda each: sum(each.values[n].numel() for n in each.program.inputs))

    def everywhere(self) -> Readings:
        known = read(self.frame, torch.arange(len(self.frame.roots)), self.tokens, self.generator)
        found = self.shifts()
        moved = {name for each in found.symmetries for name in each.names}
        groups = [each for each in known.symmetries if not (is_of_sums(each) and moved.issuperset(each.names))]
        gauges = [each for each in known.symmetries if isinstance(each, Gauge)]
        full = {slot.rows.name for each in gauges if isinstance(each.algebra, GL) for slot in each.wire.slots}
        shifts = (each for each in found.symmetries if not (_of_spans(each) and full.intersection(each.names)))
        return Readings(
            (*groups, *shifts),
            (*known.refused, *found.refused),
            max(known.largest, found.largest),
            min(known.smallest, found.smallest),
        )


def _of_spans(symmetry: Symmetry) -> bool:
    """Return whether a map is moved beyond the span of another: where all matrices act between both, most do that."""
    reads = isinstance(symmetry, Translation) and any(True for part in symmetry.parts for _ in part.read())
    return reads and symmetry.kind in ("unread", "unreached")  # type: ignore[attr-defined]
