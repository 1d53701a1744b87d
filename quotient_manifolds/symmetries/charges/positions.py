"""Align the channels of wide wires: positions, wires of positions with the same ports, and their token vectors.

Rows of entries that several uses share are tied: groups must act on their channels alike. Channels that ties identify,
also as contragredients of one another, form one position. A position on which ties allow no action is held.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from quotient_manifolds.symmetries.charges.entries import Reading
from quotient_manifolds.symmetries.charges.frame import Frame
from quotient_manifolds.symmetries.charges.nodes import Classes, distinct_columns, firsts
from quotient_manifolds.symmetries.charges.samples import Sample
from quotient_manifolds.symmetries.charges.uses import Gain
from quotient_manifolds.symmetries.groups import Wire

_EQUAL = 1e-9
_NAMED = 3
"""The number of parameters that a message names."""


@dataclass(frozen=True, eq=False)
class Tied:
    """Hold n rows of entries with two roles each: the nodes (2, n), and the actions of their ports.

    way: 1 for writers, -1 for readers. covariant: whether X acts on the row in the channel's units; else -X^T does.
    """

    nodes: Tensor
    way: Tensor
    covariant: Tensor


@dataclass(frozen=True, eq=False)
class Vectors:
    """Hold the token vectors of one sample in the units of channels.

    ports: a and b (tokens, rows) of each port; its charge is a^T b. gains: derivatives by the logarithm of each gain,
    divided by the number of uses of its entry. units: of all nodes.
    """

    ports: tuple[tuple[Tensor, Tensor], ...]
    gains: tuple[Tensor, ...]
    units: Tensor


@dataclass(frozen=True, eq=False)
class Wired:
    """Hold positions with the same ports, and for each port their rows in order, or None for all rows."""

    positions: Tensor
    rows: Mapping[int, Tensor | None]


def components(size: int, a: Tensor, b: Tensor) -> Tensor:
    """Return the number of the connected component of each of `size` vertices."""
    graph = coo_matrix((np.ones(len(a)), (a.numpy(), b.numpy())), (size, size))
    return torch.from_numpy(connected_components(graph, directed=False)[1]).long()


def names(count: int, generator: torch.Generator) -> Tensor:
    """Return random integers whose sums identify sets."""
    return torch.randint(1 << 62, (count,), generator=generator)


def vectors(frame: Frame) -> list[str]:
    """Return the parameters whose gradients samples need: activations themselves, and gains."""
    at, found = frame.entries.start, set(frame.walk.leaves)
    entries = torch.cat([torch.zeros(0, dtype=torch.long), *(gain.entries for gain in frame.walk.gains)])
    gained = set(frame.owners(entries).unique().tolist())
    return [name for number, name in enumerate(at, 1) if name in found or number in gained]


def _by(tensor: Tensor, factors: Tensor) -> Tensor:
    """Return the tensor times factors; the tensor itself if all factors are 1, as they mostly are."""
    return tensor if bool((factors == 1).all()) else tensor * factors


class Positions:
    """Hold the positions of some channels of a frame, at weights that determine which units are equal.

    position, flipped: the position of each of `channels`, and whether it is the contragredient of this. ports: of
    positions. held: positions on which only log-scales may act alone. loose: ties that are not within one position.
    wires: positions with the same ports. component: of each position, by functions and ties. fixed: nodes to which ties
    allow no log-scale.
    """

    def __init__(self, frame: Frame, channels: Tensor, weights: Mapping[str, Tensor]) -> None:
        self.frame, self.channels = frame, channels
        self.generator = torch.Generator().manual_seed(1)
        self.units = frame.units(frame.entries.read(weights.__getitem__))
        inside = torch.zeros(len(frame.roots), dtype=torch.bool).index_fill_(0, channels, True)
        self.ties, held = self._ties(inside, weights)
        self.fixed = held
        loose = self._folded()
        C = len(frame.roots)
        self.of = torch.full((C,), -1)
        self.of[channels] = self.position
        self.held = torch.zeros(len(self.position.unique()), dtype=torch.bool)
        self.held[self.of[frame.channel_of[held]]] = True
        self.loose = Tied(*(each[:, loose] for each in (self.ties.nodes, self.ties.way, self.ties.covariant)))
        self.mixed = self.held.clone()
        self.mixed[self.of[frame.channel_of[self.loose.nodes]].reshape(-1)] = True
        self.ports = list(frame.placed(channels, self.position, self.flipped))
        self.components = self._components()
        """The component of each node."""
        self.component = torch.zeros(len(self.held), dtype=torch.long)
        self.component[self.position] = self.components[frame.roots[channels]]
        self.wires = self._wires()
        self.wire_of, self.place_of = torch.zeros(2, len(self.held), dtype=torch.long)
        for number, wire in enumerate(self.wires):
            self.wire_of[wire.positions], self.place_of[wire.positions] = number, torch.arange(len(wire.positions))

    def _ties(self, inside: Tensor, weights: Mapping[str, Tensor]) -> tuple[Tied, Tensor]:
        """Return tied rows, and the nodes of rows with constants or with entries that also have other uses."""
        frame, shares, last = self.frame, self.frame.shares, len(self.frame.walk.uses)
        several = bool((shares > 1).any())
        keys, nodes, more, held = [], [], [], []
        for port in frame.ports:
            rows = torch.nonzero(inside[port.channels])[:, 0]
            if len(rows) and frame.entries.affine(port.memory) is None:
                values = frame.entries.read(weights.__getitem__).at(port.memory, port.places[rows])[0]
                held.append(port.nodes[rows[((port.entries[rows] < 0) & (values != 0)).any(1)]])
            if not several or not len(rows):
                continue
            entries = port.entries[rows]
            uses = shares[entries.clamp(0)]
            uses = torch.where(entries < 0, 1.0, uses)
            most, least = uses.amax(1), uses.amin(1)
            some = most > 1
            other = port.use >= last or frame.entries.affine(port.memory) != (1.0, 0.0)
            lone = some & ((least < most) | other)
            held.append(port.nodes[rows[lone]])
            some = some & ~lone
            entries = entries[some]
            if len(entries):
                keys.append(torch.stack([entries.amin(1), entries.amax(1)]))
                nodes.append(port.nodes[rows[some]])
                number, way = port.use, 1 if port.writes else -1
                more.append(torch.tensor([[number], [way], [int(port.covariant)]]).expand(3, len(entries)))
                uses = most[some]
                more[-1] = torch.cat([more[-1], uses.long()[None]])
        empty = torch.zeros(2, 0, dtype=torch.long)
        if not keys:
            return Tied(empty, empty, empty), torch.cat([empty[0], *held])
        key, node, (use, way, covariant, wanted) = torch.cat(keys, 1), torch.cat(nodes), torch.cat(more, 1)
        first, which = distinct_columns(key)
        pairs = distinct_columns(torch.stack([which, use]))[0]
        alone = torch.bincount(which[pairs], minlength=len(first))[which] != wanted
        held.append(node[alone])
        keep = torch.nonzero(~alone)[:, 0]
        keep = keep[torch.argsort(which[keep], stable=True)]
        follows = which[keep[1:]] == which[keep[:-1]]
        both = torch.stack([keep[:-1][follows], keep[1:][follows]])
        return Tied(node[both], way[both], covariant[both]), torch.cat(held)

    def _folded(self) -> Tensor:
        """Merge channels that are tied in equal units into one position. Return which ties remain between two."""
        frame, ties, C = self.frame, self.ties, len(self.frame.roots)
        channel = frame.channel_of[ties.nodes]
        units = self.units[ties.nodes] ** ties.way
        ratio = units[0] / units[1]
        flip = (ties.covariant[0] != ties.covariant[1]).long()
        # A constant ratio on all channels with the same ports does not change their matrices
        role = torch.unique(
            torch.cat([frame.kinds[channel], ties.way, ties.covariant.long()]), dim=1, return_inverse=True
        )[1]
        count = int(role.max()) + 1 if len(role) else 0
        lead = ratio[firsts(role, count)[role]]
        unequal = torch.zeros(count, dtype=torch.bool)
        unequal[role[(ratio - lead).abs() > _EQUAL * lead.abs()]] = True
        loose = unequal[role]
        for _ in range(2):
            a, b, f = channel[0, ~loose], channel[1, ~loose], flip[~loose]
            part = components(2 * C, torch.cat([a, a + C]), torch.cat([b + f * C, b + (1 - f) * C]))
            mirrored = part[:C] == part[C:]
            loose = loose | mirrored[channel].any(0)
        part = part[torch.stack([self.channels, self.channels + C])]
        self.position = torch.unique(part.amin(0), return_inverse=True)[1]
        self.flipped = part[1] < part[0]
        return loose

    def _components(self) -> Tensor:
        """Return the eldest node to which functions, ties and shared gains connect each node, channel by channel."""
        frame = self.frame
        classes = Classes(len(frame.nodes.wires))
        classes.join(frame.nodes.components, torch.arange(len(frame.nodes.wires)))
        classes.join(
            frame.roots[frame.channel_of[self.ties.nodes[0]]], frame.roots[frame.channel_of[self.ties.nodes[1]]]
        )
        gains = frame.walk.gains
        if gains:
            entries = torch.cat([gain.entries for gain in gains]).repeat(2)
            ends = torch.cat([*(gain.before for gain in gains), *(gain.after for gain in gains)])
            entries, ends = entries[(ends > 0) & (entries >= 0)], ends[(ends > 0) & (entries >= 0)]
            if len(ends):
                first, which = distinct_columns(entries[None])
                classes.join(ends[first][which], ends)
        return classes.of

    def _wires(self) -> list[Wired]:
        sets = torch.zeros(len(self.held), dtype=torch.long)
        for port in self.ports:
            sets[port.channels] += names(1, self.generator)
        first, place = distinct_columns(sets[None])
        order = torch.argsort(place, stable=True)
        parts = order.split(torch.bincount(place, minlength=len(first)).tolist())
        parts = sorted((part.sort()[0] for part in parts if len(part)), key=lambda part: int(part[0]))
        rows: list[dict[int, Tensor | None]] = [{} for _ in parts]
        number = torch.zeros(len(self.held), dtype=torch.long)
        for k, part in enumerate(parts):
            number[part] = k
        for p, port in enumerate(self.ports):  # rows of a port are in the order of positions
            of = number[port.channels]
            found = of.unique().tolist()
            for k in found:
                rows[k][p] = torch.nonzero(of == k)[:, 0] if len(found) > 1 else None
        return [Wired(part, each) for part, each in zip(parts, rows, strict=True)]

    def drawn(self, samples: Iterable[tuple[Mapping[str, Tensor], Sample]]) -> list[Vectors]:
        """Return the token vectors of samples."""
        made: list[Vectors] = []
        last: tuple[Any, ...] = (None,)
        for weights, sample in samples:
            if last[0] is not weights:
                reading = self.frame.entries.read(weights.__getitem__)
                w, units = self._row(weights), self.frame.units(reading)
                last = weights, self._values(sample, w, units), w, reading, units
            made.append(self._vectors(sample, *last[1:]))
        return made

    def _values(self, sample: Sample, w: Tensor, units: Tensor) -> list[Tensor]:
        """Return the values that each port reads or writes, in the units of channels, equal for all losses."""
        found = []
        for port, at in zip(self.ports, self._leaves, strict=True):
            side = sample.written if port.writes else sample.read
            values = w[at].T if at is not None else side[port.use].values[:, port.rows]
            found.append(_by(values, 1 / units[port.nodes]))
        return found

    def _row(self, numbers: Mapping[str, Tensor]) -> Tensor:
        """Return the entries of the parameters `names` as one vector."""
        every = [numbers[name].reshape(-1).double() for name in self.names]
        return torch.cat(every) if every else torch.zeros(0, dtype=torch.float64)

    def _vectors(self, sample: Sample, values: Sequence[Tensor], w: Tensor, reading: Reading, units: Tensor) -> Vectors:
        frame, ports, g = self.frame, [], self._row(sample.gradients)
        for port, at, b in zip(self.ports, self._leaves, values, strict=True):
            side = sample.written if port.writes else sample.read
            slopes = g[at].T if at is not None else side[port.use].slopes[:, port.rows]
            a = _by(slopes, units[port.nodes] if port.writes else -units[port.nodes])
            ports.append((-b, a) if port.dual else (a, b))
        gains = []
        for gain, at, alive in self._gains:
            v, slope = reading.at(gain.memory, gain.places)
            rate = torch.where(alive & (slope != 0), v / torch.where(slope != 0, slope, 1.0), 0.0)
            gains.append(g[at] * rate / frame.shares[gain.entries.clamp(0)])
        return Vectors(tuple(ports), tuple(gains), units)

    @cached_property
    def _leaves(self) -> list[Tensor | None]:
        last = len(self.frame.walk.uses)
        return [self._flat(port.entries) if port.use >= last else None for port in self.ports]

    @cached_property
    def _gains(self) -> list[tuple[Gain, Tensor, Tensor]]:
        return [(gain, self._flat(gain.entries.clamp(0)), gain.entries >= 0) for gain in self.frame.walk.gains]

    @cached_property
    def names(self) -> list[str]:
        """Return the parameters whose gradients samples contain."""
        return vectors(self.frame)

    def _flat(self, entries: Tensor) -> Tensor:
        """Return the index of entries of theta in the vector of these parameters, 0 for others."""
        offsets, at = torch.full((len(self.frame.entries.start) + 1,), -1 << 60), 0
        for number, (name, shape) in enumerate(self.frame.entries.shapes.items()):
            if name in self.names:
                offsets[number + 1] = at - self.frame.entries.start[name]
                at += shape.numel()
        return (entries + offsets[self.frame.owners(entries)]).clamp(0)

    def parameters(self, positions: Tensor) -> str:
        """Name some of the parameters that write or read positions."""
        inside = torch.zeros(len(self.held), dtype=torch.bool).index_fill_(0, positions.reshape(-1), True)
        made = self.frame.entries.strided
        memories = dict.fromkeys(port.memory for port in self.ports if bool(inside[port.channels].any()))
        found = [made[memory].name if memory in made else "a function of parameters" for memory in memories]
        found = list(dict.fromkeys(found))
        return ", ".join(found[:_NAMED]) + (f" and {len(found) - _NAMED} more" if len(found) > _NAMED else "")

    def wire(self, positions: Tensor) -> Wire:
        """Return the wire of positions, in this order, with all channels that are folded onto them."""
        return self.folded(positions[None], torch.zeros(1, dtype=torch.bool))

    def folded(self, positions: Tensor, flip: Tensor) -> Wire:
        """Combine aligned wires into one. positions: (wires, n). flip: which wires are contragredients."""
        place, turn = torch.full((len(self.held),), -1), torch.zeros(len(self.held), dtype=torch.bool)
        place[positions] = torch.arange(positions.shape[1]).expand_as(positions)
        turn[positions] = flip[:, None].expand_as(positions)
        wire = torch.full((len(self.held),), -1)
        wire[positions] = torch.arange(len(positions))[:, None].expand_as(positions)
        at = torch.nonzero(place[self.position] >= 0)[:, 0]
        at = at[torch.argsort(wire[self.position[at]], stable=True)]
        of = self.position[at]
        return self.frame.wire(self.channels[at], place[of], self.flipped[at] ^ turn[of])

    def stacked(self, wire: Wired, sample: Vectors, shared: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Concatenate a and b (tokens, positions) of ports of a wire along tokens: its charge is a^T b."""
        found = []
        for p in shared:
            at, pair = wire.rows[p], sample.ports[p]
            found.append(pair if at is None else (pair[0][:, at], pair[1][:, at]))
        a, b = zip(*found, strict=True)
        return torch.cat(a), torch.cat(b)
