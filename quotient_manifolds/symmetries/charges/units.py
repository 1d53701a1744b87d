"""Propose units that may be permuted: matching parts of a graph.

The vertices are the channels of a walk, the rows and columns of weights that write or read them, the weights, and sets
of channels (`Sets`). Vertices get colors, which are refined by the colors of their neighbors. Vertices with a unique
color stay in place. Without them the graph falls into components, and components with equal colors are units. Weights,
sets and channels that similar units share are fixed in some variants only, to find neurons of each expert, and experts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from quotient_manifolds.symmetries.charges.nodes import Classes, Tie, distinct_columns, every, firsts
from quotient_manifolds.symmetries.charges.sets import Sets
from quotient_manifolds.symmetries.charges.uses import Use
from quotient_manifolds.symmetries.charges.walk import Walk
from quotient_manifolds.symmetries.groups import Permutation, Rows, UnitRows
from quotient_manifolds.symmetries.trace.program import Operation, Ref

_CODES = 2**20


def proposed(walk: Walk) -> Iterator[Permutation]:
    """Yield candidate permutations, each once."""
    graph = _Graph(walk)
    known = set[tuple[bytes, ...]]()
    for units in graph.groups():
        key = tuple(sorted(unit.sort()[0].numpy().tobytes() for unit in units))
        if key not in known and (parts := graph.parts(units)):
            known.add(key)
            yield Permutation(parts)


@dataclass(frozen=True, eq=False)
class _Side:
    """Hold one side of a use: the vertex of each row, or -1. hub: the vertex of the weight."""

    use: int
    out: bool
    vertices: Tensor
    hub: int


class _Graph:
    """Hold vertices and edges: channels and sets by number, then weights, then rows, columns and entries, then sums.

    Summands are one channel only after the sum: a new vertex, to which the vertices of the summands are joined.
    """

    def __init__(self, walk: Walk) -> None:
        self.walk, self.sets = walk, Sets(walk)
        self.names: dict[tuple[object, ...], int] = {}
        self.edges: dict[int, list[Tensor]] = defaultdict(list)
        self.tints: list[Tensor] = []
        self.nodes = len(walk.nodes)
        self.count = self.first_hub = self.sets.count
        self.leaf = torch.full((self.nodes,), -1)
        for name, nodes in walk.leaves.items():
            at = torch.nonzero(nodes)[:, 0]
            self.leaf[nodes[at]] = walk.entries.start[name] + at
        summed = self._join()
        self.sides: list[_Side] = []
        self._rows()
        self.source, self.target, self.code = torch.unique(torch.cat(list(self._settled(summed)), 1), dim=1)

    def _name(self, *key: object) -> int:
        return self.names.setdefault(key, len(self.names))

    def _edge(self, place: int, a: Tensor, b: Tensor, code: int | Tensor) -> None:
        keep = (a > 0) & (b > 0)
        if bool(keep.any()):
            self.edges[place].append(torch.stack([a[keep], b[keep], torch.as_tensor(code).expand(len(a))[keep]]))

    def _tint(self, vertices: Tensor, code: int | Tensor) -> None:
        self.tints.append(torch.stack([vertices, torch.as_tensor(code).expand(len(vertices))]))

    def _join(self) -> dict[int, Tensor]:
        """Add tints (initial colors) and edges of channels, coded by joining operations. Return summed channels."""
        walk, joins, sets = self.walk, every(self.walk.joins), self.sets
        kind = torch.tensor(
            [self._name(*_kind(o), d) for o, d in zip(walk.program.operations, sets.depth, strict=True)] or [0]
        )
        made = torch.tensor([nodes for nodes, _ in walk.made])
        own = torch.ones(self.nodes, dtype=torch.bool)
        own[0], own[self.leaf >= 0] = False, False
        at = torch.nonzero(own)[:, 0]
        self._tint(at, kind[torch.bucketize(at, made, right=True).clamp(max=len(kind) - 1)])
        beside = torch.zeros(self.nodes, dtype=torch.bool)
        for name, placed in (("buffer", sets.beside), ("set", sets.members), ("pair", sets.pairs)):
            for place, (a, b) in placed:
                self._edge(place, a, b, self._name(name))
        for _, pairs in sets.beside:
            beside[pairs[1]] = True
        free = self._moving([pairs[0] for _, pairs in sets.beside])
        held = self.nodes + torch.nonzero(~free[self.nodes : sets.first])[:, 0]
        self._tint(held, torch.tensor([self._name("constant", k) for k in range(len(held))]).long())
        const = torch.where(beside[joins.b], 1.0, joins.const)
        const = torch.unique((const * 1e12).round(), return_inverse=True)[1]
        apart = beside[joins.b] & ~beside[joins.a]
        same = joins.tie == Tie.SAME
        plain = same & (joins.dual == 0) & (joins.const == 1) & (joins.gain < 0) & ~apart
        sizes = torch.tensor([0, *(len(each.a) for each in walk.joins)]).cumsum(0)
        ends = sizes[torch.tensor([0, *(count for _, count in walk.made)])].tolist()
        summed: dict[int, Tensor] = {}
        for place, (start, end) in enumerate(pairwise(ends)):
            some, other = plain[start:end], ~plain[start:end]
            a, b = joins.a[start:end], joins.b[start:end]
            if bool(some.any()):
                summed[place] = torch.stack([a[some], b[some]])
            how = torch.stack([same.long(), joins.dual.long(), joins.power.long() + 1, const])[:, start:end][:, other]
            first, which = distinct_columns(how)
            if len(first):
                codes = torch.tensor(
                    [self._name("join", int(kind[place]), *how[:, k].tolist()) for k in first.tolist()]
                )
                self._edge(place, a[other], b[other], codes[which])
        return summed

    def _moving(self, marks: list[Tensor]) -> Tensor:
        """Return which marks are among these, or members of sets that are."""
        free = torch.zeros(self.sets.count, dtype=torch.bool)
        for each in marks:
            free[each] = True
        for _, (a, b) in reversed(self.sets.members):
            free[b[free[a]]] = True
        return free

    def _settled(self, summed: Mapping[int, Tensor]) -> Iterator[Tensor]:
        """Yield all edges, between the vertices that channels have at the operation of each edge."""
        classes, vertex = Classes(self.nodes), torch.arange(self.nodes)
        self.count, reads = self.last_row, set[int]()
        for use in self.walk.uses:  # channels read through one node get sums like channels read through several
            if use.operation in summed and bool((use.into > 0).any()):
                own = use.into[use.into > 0].expand(2, -1)
                summed = {**summed, use.operation: torch.cat([summed[use.operation], own], 1)}
                reads.add(use.operation)

        def at(numbers: Tensor) -> Tensor:
            nodes = numbers < self.nodes
            return torch.where(nodes, vertex[classes.eldest(numbers.where(nodes, 0))], numbers)

        for place in sorted({*summed, *self.edges}):
            if place in summed:
                tops = classes.eldest(summed[place]).unique()
                classes.join(*summed[place])
                new, which, size = torch.unique(classes.eldest(tops), return_inverse=True, return_counts=True)
                fresh = self.count + torch.arange(len(new))
                size = size if place not in reads or int(size.max()) == 1 else size.clamp(min=2)
                some = size[which] > 1
                self._tint_in_turn(tops[some], which[some])
                yield torch.stack(
                    [vertex[tops[some]], fresh[which[some]], torch.full((int(some.sum()),), self._name("+"))]
                )
                vertex[new[size > 1]] = fresh[size > 1]
                self.count += len(new)
            for a, b, code in self.edges.get(place, ()):
                a, b = at(a), at(b)
                yield torch.stack([a, b, code])[:, a != b]
        for number in self.walk.program.outputs:
            fixed = torch.cat(
                [at(each).reshape(-1) for each in (self.sets.nodes(number), self.sets.of(number))]
            ).unique()
            self._tint(fixed, torch.tensor([self._name("output", number, v) for v in fixed.tolist()]).long())

    def _tint_in_turn(self, nodes: Tensor, sums: Tensor) -> None:
        """Tint entries of a parameter that are added to one channel, as at several positions, by their order."""
        entries = self.leaf[nodes]
        some = entries >= 0
        key = self._owners(entries[some]) * len(nodes) + sums[some]
        order = torch.argsort(key, stable=True)
        sizes = torch.unique_consecutive(key[order], return_counts=True)[1]
        turn = torch.arange(len(key)) - torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
        names = torch.tensor([self._name("turn", k) for k in range(int(sizes.max()) if len(sizes) else 0)]).long()
        self._tint(nodes[some][order], names[turn])

    def _rows(self) -> None:
        """Add vertices for weights, their rows and columns, and entries; equal sets of entries share a vertex."""
        walk = self.walk
        uses = [(k, out) for k in range(len(walk.uses)) for out in (True, False)]
        wholes = [_key(walk.uses[k].entries.reshape(1, -1)) for k, _ in uses]
        single = [self.leaf[self.leaf >= 0], *(gain.entries for gain in walk.gains)]
        keys = [*(_key(_table(walk.uses[k], out)) for k, out in uses), *(_key(each[:, None]) for each in single)]
        hub, which_hub = distinct_columns(torch.cat(wholes, 1)) if wholes else (torch.zeros(0).long(),) * 2
        first, which = distinct_columns(torch.cat(keys, 1))
        self.hubs = self.count + torch.arange(len(hub))
        self.first_row = self.first_hub + len(hub)
        self.last_row = self.first_row + len(first)
        parts = which.split([key.shape[1] for key in keys])
        self.home = torch.full((2, len(first)), -1)  # the side of each row, and its number there
        for n, ((k, out), part) in enumerate(zip(uses, parts[: len(uses)], strict=True)):
            use = walk.uses[k]
            self._side(n, use, k, out, part, self.hubs[which_hub[n : n + 1]])
        self.entry = torch.full((len(first),), -1)
        for k, (entries, part) in enumerate(zip(single, parts[len(uses) :], strict=True)):
            self.entry[part] = entries
            if not k:
                codes = torch.tensor([self._leaf(name) for name in walk.entries.shapes] or [0])[self._owners(entries)]
                self._edge(-1, self.first_row + part, torch.nonzero(self.leaf >= 0)[:, 0], codes)
                continue
            gain = walk.gains[k - 1]
            for end, nodes in enumerate((gain.before, gain.after)):
                code = self._name("gain", end, gain.power, self.sets.depth[gain.operation])
                self._edge(gain.operation, self.first_row + part, nodes, code)

    def _side(self, n: int, use: Use, k: int, out: bool, part: Tensor, hub: Tensor) -> None:
        """Add the edges of the rows of one side of a use."""
        depth, place = self.sets.depth[use.operation], use.operation
        nodes, none = use.out if out else use.into, torch.zeros(len(part), dtype=torch.long)
        marks = none if out else self.sets.read.get(k, none)
        vertices = torch.where((nodes > 0) | (marks > 0), self.first_row + part, -1)
        self.sides.append(_Side(k, out, vertices, int(hub)))
        self._edge(place, vertices, nodes, self._name("row", out, depth))
        self._edge(place, vertices, marks, self._name("row of a set", out, depth))
        self._edge(place, vertices, hub.expand(len(part)), self._name("of", out, depth))
        self._tint(hub, self._name("weight", tuple(use.entries.shape), out, depth))
        self.home[:, part] = torch.stack([torch.full_like(part, n), torch.arange(len(part))])

    def _leaf(self, parameter: str) -> int:
        """Return a code for the use of a parameter as an activation."""
        numbers = {n for n, name in self.walk.program.parameters.items() if name == parameter}
        first = next((k for k, o in enumerate(self.walk.program.operations) if numbers & {*o.ins}), -1)
        shape = tuple(self.walk.entries.shapes[parameter])
        return self._name("leaf", self.walk.program.operations[first].name, self.sets.depth[first], shape)

    # Colors

    @property
    def _start(self) -> Tensor:
        tints = torch.unique(torch.cat(self.tints, 1), dim=1)
        sums = self._sums(tints[0], tints[1])
        kind = torch.bucketize(
            torch.arange(self.count),
            torch.tensor([self.nodes, self.first_hub, self.first_row, self.last_row]),
            right=True,
        )
        return distinct_columns(torch.stack([kind, *sums]))[1]

    def _sums(self, at: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Return two sums per vertex of a random number for each code; equal multisets of codes have equal sums."""
        generator = torch.Generator().manual_seed(13)
        table = torch.randint(_CODES, (2, int(codes.max()) + 1 if len(codes) else 1), generator=generator)
        zero = torch.zeros(self.count, dtype=torch.long)
        return zero.index_add(0, at, table[0][codes]), zero.index_add(0, at, table[1][codes])

    def colors(self, color: Tensor) -> Tensor:
        """Refine colors until vertices of one color have neighbors of the same colors."""
        ends, others = torch.cat([self.target, self.source]), torch.cat([self.source, self.target])
        codes = torch.cat([2 * self.code, 2 * self.code + 1])
        count = int(color.max()) + 1
        while True:
            names = torch.unique(codes * count + color[others], return_inverse=True)[1]
            pairs = torch.unique(ends * (int(names.max()) + 1 if len(names) else 1) + names, return_inverse=True)[1]
            once = firsts(pairs, int(pairs.max()) + 1 if len(pairs) else 0)
            color = distinct_columns(torch.stack([color, *self._sums(ends[once], names[once])]))[1]
            before, count = count, int(color.max()) + 1
            if before == count:
                return color

    def groups(self) -> Iterator[Tensor]:
        """Yield vertices (units, k): if a unit replaces another, its vertices replace the other's in this order."""
        base = self.colors(self._start)
        every = torch.arange(self.count)
        shared, summed = self._shared(base, self.code >= 0), self._shared(base, self.code == self._name("+"))
        hubs, sets, own = (torch.zeros_like(shared) for _ in range(3))
        hubs[self.hubs], sets[self.sets.first : self.first_hub] = True, True
        own[self.nodes : self.sets.first] = own[self.first_row : self.last_row] = True
        own &= shared
        variants = (hubs, hubs | own, hubs | shared, shared, summed, hubs | sets, hubs | sets | shared)
        known = set[bytes]()
        for held in variants:
            fixed = torch.unique(torch.where(held, base.max() + 1 + every, base), return_inverse=True)[1]
            if (key := fixed.numpy().tobytes()) not in known:
                known.add(key)
                yield from self._alike(self.colors(fixed))

    def _shared(self, color: Tensor, edges: Tensor) -> Tensor:
        """Return which channels and entries have several neighbors of one color, along some edges of one code."""
        source, target, code = self.source[edges], self.target[edges], self.code[edges]
        ends, others, codes = (
            torch.cat([target, source]),
            torch.cat([source, target]),
            torch.cat([2 * code, 2 * code + 1]),
        )
        triples, counts = torch.unique(torch.stack([ends, codes, color[others]]), dim=1, return_counts=True)
        some = torch.zeros(self.count, dtype=torch.bool)
        some[triples[0, counts > 1]] = True
        some[self.sets.first : self.first_row] = False
        return some

    def _alike(self, color: Tensor) -> Iterator[Tensor]:
        """Yield components with equal colors, after vertices with a unique color are removed."""
        loose = torch.bincount(color)[color] > 1
        loose &= torch.bincount(torch.cat([self.source, self.target]), minlength=self.count) > 0
        held = loose[self.source] & loose[self.target]
        pairs = self.source[held].numpy(), self.target[held].numpy()
        graph = coo_matrix((torch.ones(len(pairs[0])).numpy(), pairs), shape=(self.count, self.count))
        part = torch.from_numpy(connected_components(graph, directed=False)[1]).long()
        vertices = torch.nonzero(loose)[:, 0]
        order = torch.argsort(color[vertices], stable=True)
        vertices = vertices[order]
        vertices = vertices[torch.argsort(part[vertices], stable=True)]
        sizes = torch.unique_consecutive(part[vertices], return_counts=True)[1].tolist()
        alike: dict[bytes, list[Tensor]] = defaultdict(list)
        for piece in vertices.split(sizes):
            piece = piece[
                (piece >= self.first_hub) & (piece < self.last_row) | (piece >= self.nodes) & (piece < self.sets.first)
            ]
            alike[color[piece].numpy().tobytes()].append(piece)
        yield from (torch.stack(units) for key, units in alike.items() if key and len(units) > 1)

    # Parts of parameters

    def parts(self, units: Tensor) -> tuple[UnitRows, ...]:
        """Return the rows of units in parameters; nothing if the rows of different units do not correspond."""
        moved = {int(h): units[:, k] for k, h in enumerate(units[0].tolist()) if self.first_hub <= h < self.first_row}
        made: list[UnitRows] = []
        try:
            for hubs in moved.values():
                made.append(self._weights(hubs, units))
            whole = {int(h) for hubs in moved.values() for h in hubs}
            made += self._lines(units[:, (units[0] >= self.first_row) & (units[0] < self.last_row)], whole)
            made += self._statistics(units[:, (units[0] >= self.nodes) & (units[0] < self.sets.count)])
        except ValueError:
            return ()
        return tuple(made)

    def _weights(self, hubs: Tensor, units: Tensor) -> UnitRows:
        """Return whole weights as units, with rows and columns in the order of the units' vertices."""
        rows: list[Rows] = []
        for hub, unit in zip(hubs.tolist(), units, strict=True):
            out, into = (next(s for s in self.sides if s.hub == hub and s.out == side) for side in (True, False))
            entries = self.walk.uses[out.use].entries
            for side, axis in ((out, 0), (into, 1)):
                entries = entries.index_select(axis, self._order(side, unit))
            rows.append(self._named(entries.reshape(1, -1)))
        return UnitRows(tuple(rows), torch.arange(len(rows))[:, None])

    def _order(self, side: _Side, unit: Tensor) -> Tensor:
        """Return the rows of a side in the order of a unit's vertices, followed by the rows outside the unit."""
        place = torch.full((self.count + 1,), len(unit))
        place[unit] = torch.arange(len(unit))
        return torch.argsort(place[side.vertices], stable=True)  # -1 indexes the last place

    def _lines(self, units: Tensor, whole: set[int]) -> Iterator[UnitRows]:
        """Yield rows, columns and single entries; lines of the same side are yielded together."""
        home = self.home[:, units - self.first_row]  # (2, units, lines)
        several: dict[object, list[int]] = defaultdict(list)
        for k in range(units.shape[1]):
            side = int(home[0, 0, k])
            if side < 0:
                several["entry", self._owner(self.entry[units[:, k] - self.first_row])].append(k)
            elif not {self.sides[n].hub for n in home[0, :, k].tolist()} & whole:
                several[tuple(home[0, :, k].tolist())].append(k)
        for key, lines in several.items():
            some = units[:, lines] - self.first_row
            if isinstance(key, tuple) and key[0] == "entry":
                entries = self.entry[some][..., None]
            else:
                of = self.sides[int(home[0, 0, lines[0]])]
                if len({*key}) > 1:  # type: ignore[misc]
                    raise ValueError("Rows of units must be of one weight")
                entries = _table(self.walk.uses[of.use], of.out)[self.home[1, some]]
            keep = (entries >= 0).flatten(0, 1)
            if not bool((keep == keep[:1]).all()):
                raise ValueError("Rows of units must have constants in the same places")
            yield from self._units(entries[..., keep[0]])

    def _units(self, entries: Tensor) -> Iterator[UnitRows]:
        """Yield entries (units, m, columns) as rows of one parameter, or of one parameter for each unit."""
        owner = self._owners(entries)
        k, m, _ = entries.shape
        if not bool((owner == owner[:1]).all()):
            yield UnitRows(tuple(self._named(unit) for unit in entries), torch.arange(k * m).view(k, m))
            return
        for path in torch.unique(owner[0], dim=0):
            lines = torch.nonzero((owner[0] == path).all(1))[:, 0]
            for one in path.unique().tolist():
                some = entries[:, lines][..., path == one]
                at = torch.arange(k * len(lines)).view(k, -1)
                yield UnitRows((self._named(some.flatten(0, 1)),), at)

    @property
    def _starts(self) -> Tensor:
        return torch.tensor([*self.walk.entries.start.values()])

    def _owners(self, entries: Tensor) -> Tensor:
        return torch.bucketize(entries, self._starts, right=True) - 1

    def _owner(self, entries: Tensor) -> tuple[int, ...]:
        return tuple(self._owners(entries).tolist())

    def _named(self, entries: Tensor) -> Rows:
        owner = self._owners(entries).unique()
        if len(owner) != 1:
            raise ValueError("Rows must be of one parameter")
        name = list(self.walk.entries.start)[int(owner)]
        return Rows.at(name, tuple(self.walk.entries.shapes[name]), entries - self.walk.entries.start[name])

    def _statistics(self, units: Tensor) -> Iterator[UnitRows]:
        """Yield the entries of buffers among the vertices of units."""
        recording = self.walk.recording
        for number, name in recording.buffers.items():
            shape, start = tuple(recording.values[number].shape), self.sets.buffers[name]
            size = torch.Size(shape).numel()
            some = units[:, ((units >= start) & (units < start + size)).all(0)] - start
            if some.numel():
                yield UnitRows(
                    (Rows.at(name, shape, some.reshape(-1, 1)),), torch.arange(some.numel()).view(some.shape)
                )


def _table(use: Use, out: bool) -> Tensor:
    """Return the entries of a use, with one row for each output or for each input."""
    return (use.entries if out else use.entries.transpose(0, 1)).flatten(1)


def _key(entries: Tensor) -> Tensor:
    """Return a key (3, n) of n sets of k entries: the size, smallest entry and sum of each set."""
    own = entries >= 0
    size = own.sum(1)
    least = torch.where(own, entries, 2**40).amin(1)
    return torch.stack([size, least, torch.where(own, entries, 0).sum(1)])


def _kind(operation: Operation) -> tuple[object, ...]:
    """Return the name of an operation, and its arguments except tensors."""
    return operation.name, repr(_plain((operation.args, dict(operation.kwargs))))


def _plain(tree: object) -> object:
    if isinstance(tree, Ref):
        return None
    if isinstance(tree, (list, tuple)):
        return [_plain(item) for item in tree]
    return {key: _plain(item) for key, item in tree.items()} if isinstance(tree, dict) else tree
