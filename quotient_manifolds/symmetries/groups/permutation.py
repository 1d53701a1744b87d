"""Permute units: neurons, attention heads, experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quotient_manifolds.symmetries.groups.rows import Draft, Params, Record, Rows, integers
from quotient_manifolds.symmetries.groups.wire import Wire


@dataclass(frozen=True, eq=False)
class UnitRows(Record):
    """Assign rows of parameters to units.

    rows: of one parameter, or of several that hold one unit each; all with the same number of columns. at: int64
    (k, m), the m rows of each of k units, as indices into the concatenation of `rows`.
    """

    rows: tuple[Rows, ...]
    at: Tensor

    def __post_init__(self) -> None:
        self._store(rows=tuple(self.rows), at=integers(self.at, "at"))
        count = sum(map(len, self.rows))
        if self.at.ndim != 2 or not bool(((self.at >= 0) & (self.at < count)).all()):
            raise ValueError(f"rows of units must be numbers from 0 to {count - 1}, (units, rows). Found others.")
        if len({len(each.steps) for each in self.rows}) > 1:
            raise ValueError("rows of units must have as many columns in all parameters. Found different ones.")

    @property
    def places(self) -> frozenset[tuple[tuple[str, int], ...]]:
        """Return the entries of each unit, which are equal for two uses of a parameter."""
        every = [(r.name, place) for r in self.rows for place in r.places.tolist()]
        return frozenset(
            tuple(sorted((every[k][0], entry) for k in unit for entry in every[k][1])) for unit in self.at.tolist()
        )

    def read(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return all rows, concatenated, float64."""
        return torch.cat([each.read(params) for each in self.rows])

    def exchange(self, draft: Draft, order: Tensor) -> None:
        """Put unit order[i] in the place of unit i. Raises ValueError if a row would get two values."""
        old, at = self.read(draft), self.at
        wanted = old[at[order].to(old.device)]
        new = old.index_put((at.to(old.device),), wanted)
        if not torch.allclose(new[at.to(old.device)], wanted, rtol=1e-10, atol=0.0):  # with scales, rows are rounded
            raise ValueError(
                f"exchanged units must have rows and gains of their own. Found shared ones in {self.rows[0].name!r}."
            )
        for rows, values in zip(self.rows, new.split([len(each) for each in self.rows]), strict=True):
            draft.write(rows, values)


@dataclass(frozen=True, eq=False)
class Permutation(Record):
    """Act by permutations of k units; a unit is some rows of parameters and buffers (statistics of BatchNorm).

    parts: each with the same number of units. Two parts may be the rows and the columns of one matrix.
    """

    parts: tuple[UnitRows, ...]

    def __post_init__(self) -> None:
        self._store(parts=tuple(self.parts))
        if not self.parts or len({len(part.at) for part in self.parts}) > 1:
            raise ValueError("parts of units must be of as many units each. Found others, or none.")

    @classmethod
    def of(cls, wire: Wire, blocks: Tensor | None = None) -> Permutation:
        """Return the permutations of disjoint blocks of channels of a wire, int64 (k, m); of single channels if None.

        Gains belong to channels, so they are permuted, too, unlike under a `Gauge`. Raises ValueError for channels that
        the wire does not have, and for a slot that covers only some of the permuted channels.
        """
        blocks = torch.arange(wire.channels)[:, None] if blocks is None else integers(blocks, "blocks")
        inside = blocks.ndim == 2 and bool(((blocks >= 0) & (blocks < wire.channels)).all())
        if not inside or len(blocks.unique()) < blocks.numel():
            raise ValueError(f"blocks must be rows of distinct channels from 0 to {wire.channels - 1}. Found others.")
        parts: list[UnitRows] = []
        for slot in wire.slots:
            row = torch.full((wire.channels,), -1).index_copy(0, slot.channels, torch.arange(len(slot.channels)))
            at = row[blocks]
            if bool(((at >= 0) != (at[:1] >= 0)).any()):
                raise ValueError(f"A must not mix channels that a slot covers with others. Found {slot.name!r}.")
            at = at[:, at[0] >= 0]
            if at.numel():
                parts += [UnitRows((slot.rows,), at), *(UnitRows((g.entries,), g.at[at]) for g in slot.gains)]
        return cls(tuple({part.places: part for part in reversed(parts)}.values())[::-1])

    @property
    def units(self) -> int:
        """Return the number of units."""
        return len(self.parts[0].at)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the parameters and buffers that `act` changes, each once."""
        return tuple(dict.fromkeys(rows.name for part in self.parts for rows in part.rows))

    def element(self, generator: torch.Generator) -> Tensor:
        """Draw a permutation of the units, int64 (k,)."""
        return torch.randperm(self.units, generator=generator)

    def act(self, params: Mapping[str, Tensor], order: Tensor) -> Params:
        """Return parameters whose unit i is unit order[i] of `params`, so that act(act(w, p), q) = act(w, p[q]).

        Raises ValueError unless `order` is a permutation, if units share a gain that would get two values, and if a
        parameter is missing or has another shape.
        """
        order = integers(order, "order")
        if not torch.equal(order.sort()[0], torch.arange(self.units)):
            raise ValueError(f"order must be a permutation of 0 to {self.units - 1}. Found another tensor.")
        draft = Draft(params)
        for part in self.parts:
            part.exchange(draft, order)
        return draft.finished()

    def inverse(self, order: Tensor) -> Tensor:
        """Return the inverse permutation."""
        return order.argsort()

    def compose(self, first: Tensor, then: Tensor) -> Tensor:
        """Return the permutation that acts like `first` followed by `then`."""
        return first[then]

    def condition(self, order: Tensor) -> float:
        """Return 1, as permutations are orthogonal."""
        return 1.0

    def some(self, units: Tensor) -> Permutation:
        """Return the permutations of a subset of the units."""
        return Permutation(tuple(UnitRows(part.rows, part.at[units]) for part in self.parts))

    def numbers(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return the entries of each unit as a row (units, features), float64, for matching units with others."""
        return torch.cat([part.read(params)[part.at].flatten(1) for part in self.parts], 1)
