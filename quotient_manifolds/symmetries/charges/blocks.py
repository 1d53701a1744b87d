"""Put maps of the same channels side by side, as blocks of one matrix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from quotient_manifolds.symmetries.charges.frame import Frame, Port, Table
from quotient_manifolds.symmetries.charges.kernel import NOISE
from quotient_manifolds.symmetries.charges.nodes import firsts
from quotient_manifolds.symmetries.charges.uses import Lookup
from quotient_manifolds.symmetries.groups.rows import Rows

_STEP = 0.5
_FLOOR = 1e-6
"""Of a gradient's largest entry: sums of smaller ones may be rounding."""


@dataclass(frozen=True, eq=False)
class Map:
    """Hold some columns of one use of a parameter as a matrix, by rows that other maps share.

    port: its entries; the matrix is scale * w, by slopes and units of the rows. columns: which columns these are of all
    that the use has. units: of the rows.
    """

    frame: Frame
    port: Port
    scale: Tensor
    columns: Tensor
    units: Tensor

    @property
    def use(self) -> int:
        """Return the number of its use; of a bias `len(walk.uses)` or more."""
        return self.port.use

    @property
    def entries(self) -> Tensor:
        """Return the entries of theta (rows, columns)."""
        return self.port.entries

    @property
    def rows(self) -> Rows:
        """Return the entries as the groups take them."""
        name, entries, theta = self.frame.name_of(self.port), self.frame.entries, self.port.theta
        scale = 1.0 if bool((self.scale == 1).all()) else self.scale
        starts = theta.starts - entries.start[name]
        return Rows(name, tuple(entries.shapes[name]), starts, theta.steps, scale=scale)


@dataclass(frozen=True, eq=False)
class Block:
    """Hold maps with the same rows, side by side: their null vectors n are over all columns."""

    maps: tuple[Map, ...]
    outputs: bool

    @property
    def columns(self) -> Tensor:
        """Return which columns of their uses its columns are."""
        return torch.cat([m.columns for m in self.maps])

    @property
    def entries(self) -> Tensor:
        """Return the entries of theta (rows, columns)."""
        return torch.cat([m.entries for m in self.maps], 1)

    def vectors(self, gradients: Tensor) -> Tensor:
        """Return rows (n, columns) that null vectors are orthogonal to."""
        return torch.cat([gradients[:, m.entries] / m.scale for m in self.maps], 2).flatten(0, 1)

    def moved(self, theta: Tensor, N: Tensor, generator: torch.Generator) -> Tensor:
        """Return theta, moved along random z n^T."""
        z = torch.randn(len(self.maps[0].entries), N.shape[1], generator=generator, dtype=torch.float64)
        change = (z @ N.T) / torch.cat([m.scale.expand(m.entries.shape) for m in self.maps], 1)
        return _moved(theta, self.entries, change)


@dataclass(frozen=True, eq=False)
class Shifts:
    """Hold entries that add constants to channels, each constant with its entries: null vectors n are over these.

    Biases, columns of tables, and rows of a weight whose inputs x have c . x = 1, of which c is added to a row. every,
    of, by: the entries, of which constant each is, and how it moves with it. source: of each constant a number, the
    same for those of one use.
    """

    every: Tensor
    of: Tensor
    by: Tensor
    source: Tensor
    outputs = True

    @property
    def entries(self) -> Tensor:
        """Return an entry of theta of each constant (1, n)."""
        return self.every[firsts(self.of, len(self.source))][None]

    def vectors(self, gradients: Tensor) -> Tensor:
        """Return rows (n, constants) that null vectors are orthogonal to: sums, 0 if only rounding is left of them."""
        terms = gradients[:, self.every] * self.by
        made, size = torch.zeros(2, len(gradients), len(self.source), dtype=torch.float64)
        made.index_add_(1, self.of, terms)
        size.index_add_(1, self.of, terms.abs())
        size = torch.maximum(size, _FLOOR * gradients.abs().amax(1, keepdim=True))
        return torch.where(made.abs() > NOISE * size, made, 0.0)

    def idle(self, source: int, gradients: Tensor) -> bool:
        """Return whether nothing depends on any of the constants of a source."""
        return not bool(self.vectors(gradients)[:, self.source == source].any())

    def moved(self, theta: Tensor, N: Tensor, generator: torch.Generator) -> Tensor:
        """Return theta, moved by random constants."""
        change = N @ torch.randn(N.shape[1], generator=generator, dtype=torch.float64)
        return _moved(theta, self.every, change[self.of] * self.by)


def _moved(theta: Tensor, entries: Tensor, change: Tensor) -> Tensor:
    size = _STEP * (theta[entries].norm() + 0.1) / change.norm().clamp(min=1e-300)
    moved = theta.clone()
    moved[entries] += size * change
    return moved


class Layout:
    """List the blocks of a frame at some weights: single maps by both sides, maps of the same channels, and shifts."""

    def __init__(
        self,
        frame: Frame,
        weights: Mapping[str, Tensor],
        *,
        tied: bool = False,
        constants: Mapping[int, Tensor] | None = None,
    ) -> None:
        """Take entries that several uses have as entries of the first of them if they are `tied`, else of none.

        constants: by use, c with c . x = 1 for all that it reads.
        """
        self.frame, self.walk = frame, frame.walk
        self._first = self._first_uses() if tied else None
        self.reading = frame.entries.read(weights.__getitem__)
        self.units = frame.units(self.reading)
        self.starts = torch.tensor(list(frame.entries.start.values()), dtype=torch.long)
        self.refused: dict[str, None] = {}
        self.tables = {n for n, use in enumerate(self.walk.uses) if isinstance(use.tokens, Lookup)}
        self.outputs, self.inputs = dict[int, Block](), dict[int, Block]()
        """By use: its map by inputs, of which outputs are null vectors, and by outputs, of which inputs are."""
        for n in range(len(self.walk.uses)):
            if by_inputs := self._maps(self._side(n, False)):
                self.outputs[n] = Block(by_inputs, True)
            if n not in self.tables and (by_outputs := self._maps(self._side(n, True))):
                self.inputs[n] = Block(by_outputs, False)
        self.constants = {n: c for n, c in (constants or {}).items() if len(self.lone(n))}

    def _side(self, n: int, writes: bool) -> Port:
        """Return a use by outputs, or by inputs and taps, as rows that are channels of no wire."""
        use = self.walk.uses[n]
        both = use.theta, use.spots
        if writes or use.shape[2] == 1:
            theta, spots = (Table.side(each, writes) for each in both)
        else:
            theta, spots = (Table.of(each.flatten(1).T) for each in (use.entries, use.places))
        rows = torch.arange(len(theta.starts))
        return Port(n, use.memory, writes, False, rows, torch.zeros_like(rows), rows, theta, spots)

    def _maps(self, port: Port) -> tuple[Map, ...]:
        """Return the columns of a port that have entries of their own, by parameter; of units 0 nothing."""
        units = torch.where(port.nodes > 0, self.units[port.nodes], 1.0)
        if not bool(torch.isfinite(units).all()) or not bool(units.all()):
            return ()
        found = []
        for columns, piece in self._own(port):
            try:
                slopes = self.frame.slopes(piece)
            except ValueError as error:
                name = self.frame.name_of(piece)
                self.refused[f"{name}: {error}"] = None
                continue
            scale = slopes / units[:, None] if port.writes else slopes * units[:, None]
            found.append(Map(self.frame, piece, scale, columns, units))
        return tuple(found)

    def _first_uses(self) -> Tensor:
        """Return the number of the first use of each entry of theta."""
        first = torch.full((self.frame.entries.size,), len(self.walk.uses))
        for n, use in reversed([*enumerate(self.walk.uses)]):
            first[use.entries[use.entries >= 0]] = n
        return first

    def _own(self, port: Port) -> Iterator[tuple[Tensor, Port]]:
        """Yield columns of a port with entries of one parameter each, which nothing else uses, or not before."""
        every, shares = torch.arange(len(port.theta.steps)), self.frame.shares
        name = self.frame.entries.plain.get(port.memory)
        if name is not None:
            start = self.frame.entries.start[name]
            alone = float(shares[start : start + self.frame.entries.shapes[name].numel()].max()) == 1
            table = port.theta
            if alone and all(len(each.unique()) == each.numel() for each in (table.starts, table.steps)):
                yield every, port
                return
        entries = port.entries
        own = (entries >= 0) & (shares[entries.clamp(0)] == 1)
        if self._first is not None and port.use < len(self.walk.uses):
            own = (entries >= 0) & (self._first[entries.clamp(0)] == port.use)
        owner = torch.bucketize(entries.contiguous(), self.starts, right=True)
        fit = own.all(0) & (owner == owner[:1]).all(0)
        for each in owner[0, fit].unique().tolist():
            columns = torch.nonzero(fit & (owner[0] == each))[:, 0]
            piece = port.at(torch.arange(len(port.rows)), columns)
            if len(piece.entries.unique()) == piece.entries.numel():
                yield columns, piece

    @cached_property
    def shared(self) -> list[Block]:
        """Return blocks of several ports that write, or read, the same channels."""
        found = []
        for writes in (True, False):
            for dual in (False, True):
                ports = [p for p in self.frame.ports if p.writes == writes and p.dual == dual]
                found += [self._of_channels(some, channels) for some, channels in self.sets(ports)]
        return [*(block for block in found if block is not None), *self._of_inputs()]

    def _of_inputs(self) -> Iterator[Block]:
        """Yield maps that read the same inputs of the model, which are no channels."""
        readers: dict[tuple[object, ...], list[int]] = {}
        for n, use in enumerate(self.walk.uses):
            if n in self.outputs and n not in self.tables and use.shape[2] == 1 and not bool(use.into.any()):
                read = self.walk.program.operations[use.operation].args[use.tokens.place or 0]
                layout = self.walk.program.layouts[read.number]
                key = (layout.memory, layout.shape, layout.stride, layout.offset, use.tokens)
                readers.setdefault(key, []).append(n)
        for uses in readers.values():
            maps = [m for n in uses for m in self.outputs[n].maps]
            if len(uses) > 1 and len({len(m.entries) for m in maps}) == 1:
                yield Block(tuple(maps), True)

    def sets(self, ports: Sequence[Port], least: int = 2) -> Iterator[tuple[list[Port], Tensor]]:
        """Yield channels that the same ports have, at least so many, and these."""
        names = torch.randint(1 << 62, (len(ports),), generator=torch.Generator().manual_seed(1))
        pattern = torch.zeros(len(self.frame.roots), dtype=torch.long)  # sums of names are names of sets
        count = torch.zeros_like(pattern)
        for name, port in zip(names, ports, strict=True):
            pattern[port.channels] += name
            count[port.channels] += 1
        for each in pattern[count >= least].unique():
            channels = torch.nonzero((pattern == each) & (count >= least))[:, 0]
            yield [p for p in ports if bool((p.channels == channels[0]).any())], channels

    @staticmethod
    def of_channels(port: Port, channels: Tensor) -> Port:
        """Return the rows of a port that have these channels, in their order."""
        order = torch.argsort(port.channels)
        rows = order[torch.searchsorted(port.channels[order], channels)]
        return port if torch.equal(rows, torch.arange(len(port.rows))) else port.at(rows)

    def _of_channels(self, ports: Sequence[Port], channels: Tensor) -> Block | None:
        """Return some channels of ports as a block, None if these are fewer than two maps, or biases alone."""
        maps: list[Map] = []
        for port in ports:
            if port.use in self.tables or (not port.writes and port.use not in self.outputs):
                continue
            maps += self._maps(self.of_channels(port, channels))
        if len(maps) < 2 or min(m.use for m in maps) >= len(self.walk.uses):
            return None
        return Block(tuple(maps), not ports[0].writes)

    @cached_property
    def shifts(self) -> Shifts | None:
        """Return the constants that are moved together, None if there are none."""
        uses, first, one = self.walk.uses, self._first, torch.ones(1, dtype=torch.float64)
        alone = self.frame.shares == 1 if first is None else torch.ones_like(self.leaves)
        leaves, parts = self.leaves & alone, list[tuple[int, Tensor, Tensor]]()
        for n in sorted(self.tables):
            e = uses[n].entries[..., 0]
            mine = alone[e] if first is None else first[e] == n
            if n in self.outputs and bool((e >= 0).all()) and bool(mine.all()):
                parts.append((n, e, one))
                leaves[e] = False
        parts.insert(0, (len(uses), torch.nonzero(leaves), one))
        parts += [(n, uses[n].entries[self.lone(n), :, 0], c) for n, c in self.constants.items()]
        parts = [part for part in parts if part[1].numel()]
        if not parts:
            return None
        sizes = torch.tensor([e.shape[1] for _, e, _ in parts for _ in e])
        source = torch.tensor([n for n, e, _ in parts for _ in e])
        every = torch.cat([e.reshape(-1) for _, e, _ in parts])
        by = torch.cat([c.expand(e.shape).reshape(-1) for _, e, c in parts])
        return Shifts(every, torch.repeat_interleave(torch.arange(len(sizes)), sizes), by, source)

    def lone(self, n: int) -> Tensor:
        """Return which outputs of a use have entries that are parameters of this use alone, and no bias beside them."""
        maps = self.inputs[n].maps if n in self.inputs else ()
        if len(maps) != 1 or not bool((maps[0].scale == 1).all()) or self.walk.uses[n].shape[2] > 1:
            return torch.zeros(0, dtype=torch.long)
        free = torch.ones(len(self.walk.uses[n].out), dtype=torch.bool)
        for block in self.shared:
            if not block.outputs and any(m.use >= len(self.walk.uses) for m in block.maps):
                for m in block.maps:
                    if m.use == n:
                        free[m.port.rows] = False
        return torch.nonzero(free)[:, 0]

    @property
    def leaves(self) -> Tensor:
        """Return which entries of theta are used as activations."""
        found = torch.zeros(self.frame.entries.size, dtype=torch.bool)
        for name, occurring in self.walk.occurring.items():
            start = self.frame.entries.start[name]
            found[start : start + len(occurring)] = occurring
        return found

    def owner(self, entries: Tensor) -> tuple[str, Tensor]:
        """Return the parameter of some entries of theta, and which of its entries they are."""
        k = int(torch.bucketize(entries.reshape(-1)[0], self.starts, right=True)) - 1
        return list(self.frame.entries.start)[k], entries - self.starts[k]

    @property
    def every(self) -> list[Block | Shifts]:
        """Return all blocks and the shifts."""
        last = [] if self.shifts is None else [self.shifts]
        return [*self.outputs.values(), *self.inputs.values(), *self.shared, *last]
