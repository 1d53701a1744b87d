"""Find the symmetries of a net of many parameters."""

from __future__ import annotations

from functools import cached_property

import torch

from quotient_manifolds.symmetries.charges.finder import Finder
from quotient_manifolds.symmetries.charges.readings import Readings, is_of_sums, read
from quotient_manifolds.symmetries.groups import GL, Gauge, Symmetry, Translation
from quotient_manifolds.symmetries.trace.record import Recording


class Wide(Finder):
    """Find the symmetries of a net of many parameters from inputs x and slopes dL/dy of its maps y = W x, by token.

    No gradient of a weight matrix is formed. Charges of candidates are read off these vectors in two places, and a new
    reading belongs to one of them: `readings.py` for matrices that act on wires, `spans.translations` for translations.
    A reading may propose any candidate, since charges and a finite transformation decide which ones hold. It must
    express a candidate in terms of the weights, evaluated wherever the group acts, and must never store numbers of a
    particular sample (of weights, inputs or activations), because a symmetry holds at all weights.
    """

    @cached_property
    def recording(self) -> Recording:
        """Return the smallest recording of several examples whose sequence of operations is the most common one.

        Charges are computed only at points with the same operations as this recording. An unusual one, such as the only
        one with a padded picture, would leave too few.
        """
        good = self.points.exercised()
        found = [self.points.recordings[place] for place in good]
        alike = [len(set(good).intersection(self.points.like(each.program))) for each in found]
        most = (each for each, count in zip(found, alike, strict=True) if count == max(alike))
        return min(most, key=lambda each: sum(each.values[n].numel() for n in each.program.inputs))

    def everywhere(self) -> Readings:
        """Return the groups on wires, and the translations that are not elements of these groups already."""
        known = read(self.frame, torch.arange(len(self.frame.roots)), self.tokens, self.generator)
        found = self.shifts()
        moved = {name for each in found.symmetries for name in each.names}
        groups = [each for each in known.symmetries if not (is_of_sums(each) and moved.issuperset(each.names))]
        gauges = [each for each in known.symmetries if isinstance(each, Gauge)]
        full = {slot.rows.name for each in gauges if isinstance(each.algebra, GL) for slot in each.wire.slots}
        shifts = (each for each in found.symmetries if not (_outside_span(each) and full.intersection(each.names)))
        return Readings(
            (*groups, *shifts),
            (*known.refused, *found.refused),
            max(known.largest, found.largest),
            min(known.smallest, found.smallest),
        )


def _outside_span(symmetry: Symmetry) -> bool:
    """Return whether a symmetry adds to one weight W what another one, V, does not read: (1 - V^+ V) z, or likewise.

    GL on the channels between both has such elements: A = 1 + X with V X = 0 leaves V alone.
    """
    reads = isinstance(symmetry, Translation) and any(True for part in symmetry.parts for _ in part.read())
    return reads and symmetry.kind in ("unread", "unreached")  # type: ignore[attr-defined]
