"""Exchange channels of a wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quotient_manifolds.symmetries.groups.rows import Draft, Params, Record, integers
from quotient_manifolds.symmetries.groups.wire import Wire


@dataclass(frozen=True, eq=False)
class Permutation(Record):
    """Let permutations of k units act on a wire, each of m channels (a neuron, a head), in all slots at once.

    Gains are per channel, so they are exchanged, too, unlike under a `Gauge`. Statistics of BatchNorm are slots like
    others, if `params` holds the buffers.

    blocks: int64 (k, m), the channels of each unit, distinct; each channel of the wire if None.
    """

    wire: Wire
    blocks: Tensor | None = None

    def __post_init__(self) -> None:
        channels = torch.arange(self.wire.channels)[:, None]
        blocks = channels if self.blocks is None else integers(self.blocks, "blocks")
        inside = blocks.ndim == 2 and bool(((blocks >= 0) & (blocks < self.wire.channels)).all())
        if not inside or len(blocks.unique()) < blocks.numel():
            raise ValueError(
                f"blocks must be rows of distinct channels from 0 to {self.wire.channels - 1}. Found others."
            )
        self._store(blocks=blocks)

    @property
    def units(self) -> int:
        """Return how many units are exchanged."""
        return len(self._blocks)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the parameters that `act` changes, each once."""
        gains = (gain.entries.name for slot in self.wire.slots for gain in slot.gains)
        return tuple(dict.fromkeys([*self.wire.names, *gains]))

    def element(self, generator: torch.Generator) -> Tensor:
        """Draw a permutation of the units, int64 (k,)."""
        return torch.randperm(self.units, generator=generator)

    def act(self, params: Mapping[str, Tensor], order: Tensor) -> Params:
        """Return the parameters whose unit i is unit order[i] of those given: act(act(w, p), q) = act(w, p[q]).

        ValueError for what is no permutation, a slot that covers only some of the exchanged channels, entries that
        tied uses or channels sharing a gain would give two values, and a missing parameter or one of another shape.
        """
        order = integers(order, "order")
        if not torch.equal(order.sort()[0], torch.arange(self.units)):
            raise ValueError(f"order must be a permutation of 0 to {self.units - 1}. Found another tensor.")
        source = torch.arange(self.wire.channels)
        source[self._blocks] = self._blocks[order]
        plain = Wire(tuple(replace(slot, gains=()) for slot in self.wire.slots), self.wire.channels)
        return self._gains(params, plain.act(params, torch.eye(len(source), dtype=torch.float64)[source]), source)

    def _gains(self, params: Mapping[str, Tensor], changed: Params, source: Tensor) -> Params:
        """Return the changed parameters with the gains of the channels they come from."""
        draft, written = Draft(changed), []
        for slot in self.wire.slots:
            row_of = torch.full_like(source, -1).index_copy(0, slot.channels, torch.arange(len(slot.channels)))
            for gain in slot.gains:
                values = gain.entries.read(params)
                at = gain.at.to(values.device)
                wanted = values[at[row_of[source[slot.channels]].to(at.device)]]
                entries = values.index_copy(0, at, wanted)
                draft.write(gain.entries, entries)
                written.append((gain, wanted))
        for gain, wanted in written:
            given = gain.entries.read(draft)[gain.at.to(wanted.device)]
            if not torch.allclose(given, wanted, rtol=1e-10, atol=0.0):  # scales and offsets round
                raise ValueError(
                    f"exchanged channels must have gains of their own. Found shared ones in {gain.entries.name!r}."
                )
        return draft.finished()

    @property
    def _blocks(self) -> Tensor:
        assert self.blocks is not None
        return self.blocks
