"""Turn the proposals of a walk into ports: rows of parameter entries that write or read channels.

A channel is represented by the eldest of all nodes that are tied to it (`Channels.wires`). A node is u times its
channel, or the contragredient of this; u is the product of the gains and constants between them, the units of the node.
Ports become the slots of `groups.Wire`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from quotient_manifolds.symmetries.charges.constants import Step, taken_up, without_common
from quotient_manifolds.symmetries.charges.entries import Reading, numbers
from quotient_manifolds.symmetries.charges.nodes import distinct_columns
from quotient_manifolds.symmetries.charges.walk import Walk
from quotient_manifolds.symmetries.groups.gains import Constants, Gain
from quotient_manifolds.symmetries.groups.rows import Rows
from quotient_manifolds.symmetries.groups.torus import Slices, Torus
from quotient_manifolds.symmetries.groups.wire import Slot, Wire

_AFFINE = 1e-9


@dataclass(frozen=True, eq=False)
class Table:
    """Hold a matrix of entry numbers (rows, columns) as starts (rows, 1 or columns) + steps (columns,)."""

    starts: Tensor
    steps: Tensor

    @classmethod
    def of(cls, dense: Tensor) -> Table:
        """Return a table of given numbers."""
        return cls(dense, torch.zeros(dense.shape[1], dtype=torch.long))

    @classmethod
    def side(cls, view: Tensor, writes: bool) -> Table:
        """Return a use (outputs, inputs, *taps) as rows: outputs if `writes`, else inputs (see `entries.numbers`)."""
        view = view if writes else view.transpose(0, 1)
        if not view.is_meta or not view.numel():
            return cls.of(numbers(view).flatten(1))
        row = numbers(view[0]).flatten()
        return cls((torch.arange(len(view)) * view.stride(0) + row[0])[:, None], row - row[0])

    @property
    def dense(self) -> Tensor:
        """Compute the full matrix."""
        return self.starts + self.steps

    def at(self, index: Tensor, columns: Tensor | None = None) -> Table:
        """Return some rows and columns."""
        starts = self.starts[index]
        if columns is None:
            return Table(starts, self.steps)
        return Table(starts if starts.shape[1] == 1 else starts[:, columns], self.steps[columns])


@dataclass(frozen=True, eq=False)
class Port:
    """Hold the rows of entries by which one use of a weight writes or reads channels, each channel once.

    use: number of the use in the walk; from `len(walk.uses)` on, a parameter that is itself an activation. rows: which
    of the channels that the use writes or reads. theta: entries of theta, -1 for constants; spots: places in `memory`.
    """

    use: int
    memory: int
    writes: bool
    dual: bool
    rows: Tensor
    nodes: Tensor
    channels: Tensor
    theta: Table
    spots: Table

    @property
    def entries(self) -> Tensor:
        """Compute the entries of theta (rows, columns)."""
        return self.theta.dense

    @property
    def places(self) -> Tensor:
        """Compute the places in the memory (rows, columns)."""
        return self.spots.dense

    @property
    def covariant(self) -> bool:
        """Return whether X acts on the rows in the channels' units; otherwise -X^T does."""
        return self.writes != self.dual

    def at(self, index: Tensor, columns: Tensor | None = None) -> Port:
        """Return some of its rows and columns."""
        if columns is None and torch.equal(index, torch.arange(len(self.rows))):
            return self
        return replace(
            self,
            rows=self.rows[index],
            nodes=self.nodes[index],
            channels=self.channels[index],
            theta=self.theta.at(index, columns),
            spots=self.spots.at(index, columns),
        )


class Frame:
    """Hold the ports of a walk, and number its channels and log-scales.

    roots: the eldest node of each channel. scales: the eldest node of each log-scale. shares: the number of uses of
    each entry of theta, by which its gradient is divided. uses: the number of the use of each port, then of each gain.
    """

    def __init__(self, walk: Walk) -> None:
        self.walk, self.nodes, self.entries = walk, walk.channels, walk.entries
        ports = [self._without_copies(piece) for whole in self._wholes() for piece in self._pieces(whole)]
        self.roots = torch.cat([port.channels for port in ports]).unique() if ports else torch.zeros(0).long()
        place = torch.full((len(self.nodes.wires),), -1)
        place[self.roots] = torch.arange(len(self.roots))
        self.channel_of = place[self.nodes.wires]
        """The channel of each node, or -1."""
        self.ports = [replace(port, channels=place[port.channels]) for port in ports]
        last = len(walk.uses) + len(self.entries.plain)
        self.uses = [port.use for port in self.ports] + list(range(last, last + len(walk.gains)))
        touched = [p.nodes for p in self.ports] + [n[n > 0] for g in walk.gains for n in (g.before, g.after)]
        self.scales = self.nodes.scales[torch.cat(touched)].unique() if touched else torch.zeros(0).long()
        self._known_gains: dict[bytes, Gain] = {}
        self._known_steps: dict[bytes, tuple[Tensor, list[Step]]] = {}

    def _wholes(self) -> Iterator[Port]:
        """Yield a port for each side of a use and each parameter that is an activation; dual nodes get their own."""
        wires, dual = self.nodes.wires, self.nodes.dual
        for number, use in enumerate(self.walk.uses):
            for writes, nodes in ((True, use.out), (False, use.into)):
                e, p = (Table.side(each, writes) for each in (use.theta, use.spots))
                for parity in (False, True):
                    k = torch.nonzero((nodes > 0) & (dual[nodes] == parity))[:, 0]
                    if len(k):
                        yield Port(number, use.memory, writes, parity, k, nodes[k], wires[nodes[k]], e.at(k), p.at(k))
        number = len(self.walk.uses)
        for memory, name in self.entries.plain.items():
            start = self.entries.start[name]
            nodes = self.walk.leaves.get(name, torch.zeros(0, dtype=torch.long)).reshape(-1)
            for parity in (False, True):
                at = torch.nonzero((nodes > 0) & (dual[nodes] == parity))[:, 0]
                for rows in self._equal_rows(at, nodes):
                    n = nodes[rows[:, 0]]
                    tables = (Table.of(each) for each in (start + rows, rows))
                    yield Port(number, memory, True, parity, rows[:, 0], n, wires[n], *tables)
            number += 1

    def _equal_rows(self, at: Tensor, nodes: Tensor) -> Iterator[Tensor]:
        """Yield places of a parameter as rows, one for each channel and scale, grouped by their number of columns."""
        if not len(at):
            return
        key = self.nodes.wires[nodes[at]] * len(self.nodes.wires) + self.nodes.scales[nodes[at]]
        order = torch.argsort(key, stable=True)
        counts = torch.unique_consecutive(key[order], return_counts=True)[1]
        for size in counts.unique().tolist():
            keep = torch.repeat_interleave(counts == size, counts)
            yield at[order[keep]].view(-1, size)

    @staticmethod
    def _pieces(port: Port) -> Iterator[Port]:
        """Split a port into ports with each channel once: first the first rows of all channels, then the second."""
        left = torch.arange(len(port.rows))
        while len(left):
            order = torch.argsort(port.channels[left], stable=True)
            fresh = torch.ones(len(left), dtype=torch.bool)
            fresh[1:] = port.channels[left[order]][1:] != port.channels[left[order]][:-1]
            yield port.at(left[order[fresh]])
            left = left[order[~fresh]].sort()[0]

    def _without_copies(self, port: Port) -> Port:
        """Return a port without duplicate columns, on which actions on rows are the same."""
        table, made = port.theta, self.entries.affine(port.memory) is None
        numbered = (table.steps - table.steps.min())[None] if table.starts.shape[1] == 1 else table.dense + 1
        first = distinct_columns(numbered)[0]
        if made and len(first) < len(table.steps):
            places, fitted = port.places, self._affine[port.memory]
            known = [places] if fitted is None else [each[places] for each in fitted]
            functions = [each.unique(return_inverse=True)[1] for each in known]
            first = distinct_columns(torch.cat([port.entries + 1, *functions]))[0]
        return port if len(first) == len(table.steps) else port.at(torch.arange(len(port.rows)), first.sort()[0])

    @cached_property
    def shares(self) -> Tensor:
        """Return the number of uses of each entry of theta (P,), at least 1."""
        count = torch.zeros(self.entries.size, dtype=torch.int16)
        for use in self.walk.uses:
            view = use.theta
            if view.is_meta and _once_each(view):
                count.as_strided(view.shape, view.stride(), int(view.storage_offset())).add_(1)
                continue
            at = use.entries[use.entries >= 0]
            count[at] = count[at] + 1  # one use counts once, however often an entry occurs in it
        for name, nodes in self.walk.leaves.items():
            start = self.entries.start[name]
            count[start : start + nodes.numel()] += nodes.reshape(-1) > 0
        for gain in self.walk.gains:
            at = gain.entries[gain.entries >= 0]
            count.index_add_(0, at, torch.ones(len(at), dtype=count.dtype))
        return count.clamp_(min=1)

    def gains(self, reading: Reading) -> Tensor:
        """Return the values of all gains, for `Channels.units`."""
        found = [reading.at(gain.memory, gain.places)[0] for gain in self.walk.gains]
        return torch.cat(found) if found else torch.zeros(0, dtype=torch.float64)

    def units(self, reading: Reading) -> Tensor:
        """Return u with node = u * channel, for all nodes."""
        return self.nodes.units(self.gains(reading))

    def scale_of(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the number and the sign of each node's log-scale."""
        return torch.searchsorted(self.scales, self.nodes.scales[nodes]), self.nodes.turn[nodes]

    @cached_property
    def constants(self) -> Constants:
        """Return the constants added to channels that biases absorb."""
        return taken_up(self.walk, self.shares, self._steps, self.gained)

    # Groups

    def wire(self, channels: Tensor, positions: Tensor | None = None, flipped: Tensor | None = None) -> Wire:
        """Return the wire of these channels. Raises ValueError if the groups cannot act on their entries.

        positions: the place of each channel in the wire, by default in order; several channels may share a place.
        flipped: which of the channels are contragredients of their position.
        """
        place = torch.arange(len(channels)) if positions is None else positions
        flip = torch.zeros(len(channels), dtype=torch.bool) if flipped is None else flipped
        slots = [slot for port in self.placed(channels, place, flip) for slot in self._slots(port)]
        constants = self.constants.of([slot.name for slot in slots])
        return Wire(tuple(slots), int(place.max()) + 1, constants)

    def torus(self, slices: Sequence[Slices], size: int) -> Torus:
        """Return the torus of these slices. Raises ValueError if `Torus` does."""
        return Torus(tuple(slices), size, self.constants)

    def placed(self, channels: Tensor, positions: Tensor, flipped: Tensor) -> Iterator[Port]:
        """Yield the rows of ports on some channels, as ports of positions, in order and each once in a port.

        flipped: which channels are contragredients of their position: whether their rows are dual is reversed. Channels
        of one position belong to different wires, in the order in which they are given.
        """
        place, copy = torch.full((2, len(self.roots)), -1)
        place[channels] = positions
        order = torch.argsort(positions, stable=True)
        _, which, size = torch.unique_consecutive(positions[order], return_inverse=True, return_counts=True)
        copy[channels[order]] = 2 * (torch.arange(len(order)) - (size.cumsum(0) - size)[which])
        copy[channels] += flipped.long()
        kind, holders = self._holders
        numbers = {number for one in kind[channels].unique().tolist() for number in holders[one]}
        for number in sorted(numbers):
            port = self.ports[number]
            inside = place[port.channels] >= 0
            for one in copy[port.channels[inside]].unique().tolist():
                some = torch.nonzero(inside & (copy[port.channels] == one))[:, 0]
                at, order = place[port.channels[some]].sort()
                yield replace(port.at(some[order]), channels=at, dual=port.dual != bool(one % 2))

    @cached_property
    def _holders(self) -> tuple[Tensor, list[list[int]]]:
        """Return the kind of each channel, and for each kind the numbers of the ports with such channels."""
        generator = torch.Generator().manual_seed(1)
        names = torch.randint(1 << 62, (len(self.ports),), generator=generator)
        sets = torch.zeros(len(self.roots), dtype=torch.long)  # a sum of random names identifies a set of ports
        for name, port in zip(names, self.ports, strict=True):
            sets[port.channels] += name
        unique, kind = sets.unique(return_inverse=True)
        holders: list[list[int]] = [[] for _ in unique]
        for number, port in enumerate(self.ports):
            for one in kind[port.channels].unique().tolist():
                holders[one].append(number)
        return kind, holders

    def holding(self, channel: int) -> list[Port]:
        """Return the ports that contain a channel."""
        kind, holders = self._holders
        return [self.ports[number] for number in holders[int(kind[channel])]]

    @property
    def kinds(self) -> Tensor:
        """Return the kind of each channel; channels with the same ports have the same number."""
        return self._holders[0]

    def _slots(self, port: Port) -> Iterator[Slot]:
        """Yield the slots of a port, with entries of one parameter each."""
        for piece in self.by_parameter(port):
            constant, steps = self._steps(piece.nodes)
            units = None if bool((constant == 1).all()) else constant
            yield Slot(self.rows(piece), piece.channels, port.writes, port.dual, units, self.gained(steps), port.use)

    def by_parameter(self, port: Port) -> Iterator[Port]:
        """Split a port into ports whose entries belong to one parameter each."""
        if self._of_one(port.theta):
            yield port
            return
        owner = self.owners(port.entries)
        every = torch.arange(len(port.rows))
        for one in owner.unique().tolist():
            if one > 0:
                inside = owner == one
                if bool((inside == inside[:1]).all()):
                    yield port.at(every, torch.nonzero(inside[0])[:, 0])
                    continue
                patterns, which = torch.unique(inside, dim=1, return_inverse=True)
                for k, rows in enumerate(patterns.T):
                    if bool(rows.any()):
                        yield port.at(every[rows], torch.nonzero(which == k)[:, 0])

    def _of_one(self, table: Table) -> bool:
        """Return whether all sums of starts and steps belong to one parameter, by the smallest and the largest."""
        if table.starts.shape[1] != 1 or not table.starts.numel() or not table.steps.numel():
            return False
        (a, b), (c, d) = table.starts.aminmax(), table.steps.aminmax()
        first, last = self.owners(torch.stack([a + c, b + d])).tolist()
        return 0 < first == last

    def owners(self, entries: Tensor) -> Tensor:
        """Return the number of the parameter of each entry, counted from 1; 0 for constants."""
        return torch.bucketize(entries.contiguous(), self._starts, right=True)

    @cached_property
    def _starts(self) -> Tensor:
        return torch.tensor(list(self.entries.start.values()), dtype=torch.long)

    def rows(self, port: Port) -> Rows:
        """Return a port of one parameter as `Rows`. Raises ValueError for a function of it that is not affine."""
        name = self.name_of(port)
        start, shape, steps = self.entries.start[name], tuple(self.entries.shapes[name]), port.theta.steps
        function = self._function(port.memory, port.places)
        if port.theta.starts.shape[1] == 1:
            return Rows(name, shape, port.theta.starts + (steps[0] - start), steps - steps[0], **function)
        return Rows.at(name, shape, port.entries - start, **function)

    def name_of(self, port: Port) -> str:
        """Return the name of the parameter of a port's first entry."""
        first = port.theta.starts[0, 0] + port.theta.steps[0]
        return list(self.entries.start)[int(torch.bucketize(first, self._starts, right=True)) - 1]

    def slopes(self, port: Port) -> Tensor:
        """Return the scale of each entry's affine function, (1, 1) or (rows, columns). Raises as `rows` does."""
        known = self.entries.affine(port.memory)
        scale = known[0] if known is not None else self._function(port.memory, port.places).get("scale", 1.0)
        return scale if isinstance(scale, Tensor) else torch.full((1, 1), scale, dtype=torch.float64)

    def _function(self, memory: int, places: Tensor) -> dict[str, float | Tensor]:
        """Return scale and offset of a function of a parameter, empty for the identity; ValueError if not affine."""
        if (known := self.entries.affine(memory)) is not None:
            scale, offset = known
            return {} if known == (1.0, 0.0) else {"scale": scale, "offset": offset}
        fitted = self._affine[memory]
        if fitted is None or not bool(torch.isfinite(fitted[0][places]).all() and (fitted[0][places] != 0).all()):
            raise ValueError("Groups act on affine functions of parameters. Found another")
        scales, offsets = (each[places] for each in fitted)
        plain = bool((scales == 1).all()) and not bool(offsets.any())
        return {} if plain else {"scale": scales, "offset": offsets}

    @cached_property
    def _affine(self) -> dict[int, tuple[Tensor, Tensor] | None]:
        """Return by memory scale and offset of each function of parameters, None if it is not affine."""
        generator, made = torch.Generator().manual_seed(5), self.entries.made
        found: dict[int, list[tuple[Tensor, Tensor]]] = {memory: [] for memory in made}
        for _ in range(3):
            theta = torch.rand(self.entries.size, generator=generator, dtype=torch.float64) + 0.5
            shapes = self.entries.shapes.items()
            weights = {name: theta[self.entries.start[name] :][: shape.numel()].view(shape) for name, shape in shapes}
            reading = self.entries.read(weights.__getitem__)
            for memory, entries in made.items():
                value, slope = reading.at(memory, torch.arange(len(entries)))
                found[memory].append((slope, value - slope * torch.where(entries >= 0, theta[entries.clamp(0)], 0.0)))

        def same(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> bool:
            return all(torch.allclose(a, b, rtol=_AFFINE, atol=_AFFINE) for a, b in zip(one, other, strict=True))

        return {m: first if all(same(first, each) for each in more) else None for m, (first, *more) in found.items()}

    def gained(self, steps: Sequence[tuple[Tensor, Tensor, Tensor]]) -> tuple[Gain, ...]:
        """Return steps as gains of all rows. Raises ValueError for gains that groups cannot read."""
        found = []
        for which, number, power in steps:
            for one in which[which >= 0].unique():
                rows = torch.nonzero(which == one)[:, 0]
                gain = self._gain(number[rows], float(power[rows[0]]))
                found.append(replace(gain, at=torch.full_like(which, -1).index_copy(0, rows, gain.at)))
        return tuple(found)

    def _gain(self, gains: Tensor, power: float) -> Gain:
        key = gains.numpy().tobytes()
        if key not in self._known_gains:
            self._known_gains[key] = self._gain_of(gains)
        return replace(self._known_gains[key], power=power)

    def _gain_of(self, gains: Tensor) -> Gain:
        """Return the gain of some rows, given the number of each row's gain."""
        which = torch.bucketize(gains.contiguous(), self._first_gain, right=True) - 1
        of = self.walk.gains[int(which[0])]
        at = gains - self._first_gain[which[0]]
        entries, places = of.entries[at], of.places[at]
        if bool((entries < 0).any()):
            raise ValueError("Gains must be entries of parameters. Found constants")
        owner = torch.bucketize(entries.contiguous(), self._starts, right=True) - 1
        if bool((owner != owner[0]).any()):
            raise ValueError("Gains of a slot must be of one parameter. Found several")
        name = list(self.entries.start)[int(owner[0])]
        local = entries - self.entries.start[name]
        unique, inverse = local.unique(return_inverse=True)
        first = torch.full((len(unique),), len(local)).scatter_reduce(0, inverse, torch.arange(len(local)), "amin")
        affine = {
            key: value[first][:, None] if isinstance(value, Tensor) else value
            for key, value in self._function(of.memory, places).items()
        }
        return Gain(Rows.at(name, tuple(self.entries.shapes[name]), unique[:, None], **affine), inverse)

    @cached_property
    def _first_gain(self) -> Tensor:
        sizes = torch.tensor([0, *(len(gain.after) for gain in self.walk.gains)])
        return sizes.cumsum(0)[:-1]

    def ratio(self, above: Sequence[Tensor], below: Sequence[Tensor]) -> tuple[Tensor, tuple[Gain, ...]]:
        """Return products of units above / below, by rows, as constants and gains. Raises as `gained` does."""
        constant, steps = torch.ones(len((*above, *below)[0]), dtype=torch.float64), list[Step]()
        for nodes, power in (*((n, 1) for n in above), *((n, -1) for n in below)):
            c, some = self._steps(nodes)
            constant = constant * c**power
            steps += [(which, number, power * p) for which, number, p in some]
        return constant, self.gained(without_common(steps))

    def _steps(self, nodes: Tensor) -> tuple[Tensor, list[Step]]:
        """Return the units of nodes as a constant and steps: (which use of a gain or -1, number of the gain, power)."""
        key = nodes.numpy().tobytes()
        if key not in self._known_steps:
            self._known_steps[key] = self._stepped(nodes)
        return self._known_steps[key]

    def _stepped(self, nodes: Tensor) -> tuple[Tensor, list[Step]]:
        step, up, at = self.nodes.step, self.nodes.up, nodes
        constant, sign = torch.ones(len(nodes), dtype=torch.float64), torch.ones(len(nodes))
        steps: list[Step] = []
        while bool((at > 0).any()):
            constant = constant * step.const[at] ** sign
            gain = step.gain[at]
            if bool((gain >= 0).any()):
                which = torch.where(gain >= 0, torch.bucketize(gain.contiguous(), self._first_gain, right=True) - 1, -1)
                power = sign * step.power[at]
                steps.append((torch.where(gain >= 0, 2 * which + (power > 0), -1), gain, power))
            sign = torch.where(step.dual[at], -sign, sign)
            at = up[at]
        return constant, steps


def _once_each(view: Tensor) -> bool:
    """Return whether a view has no number twice: each stride exceeds the reach of all smaller ones."""
    reach = 0
    for stride, size in sorted(zip(view.stride(), view.shape, strict=True)):
        if size > 1 and stride <= reach:
            return False
        reach += stride * (size - 1)
    return True
