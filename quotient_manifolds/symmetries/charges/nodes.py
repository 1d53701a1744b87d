"""Number the channels of wires as nodes, and record how operations join them.

Operations join arrays of pairs of nodes; node 0 stands for any entry that is not a channel. Classes of joined nodes are
updated during the walk. How a node follows from the eldest (first numbered) of its class, by gains or as its
contragredient, is computed once at the end, along a spanning forest of the earliest joins. Paths to the roots are
followed by pointer doubling, so that no loop runs over nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import breadth_first_order, minimum_spanning_tree
from torch import Tensor


class Tie(IntEnum):
    """Rank how closely joined channels are tied, the closest first."""

    SAME = 0
    """The same channel, with the same scale."""
    GAIN = 1
    """The same channel in other units."""
    ALIKE = 2
    """A function of one channel each, so that their groups are solved together channel by channel."""
    TOGETHER = 3
    """Channels that are solved together."""


def firsts(places: Tensor, count: int) -> Tensor:
    """Return the first index in `places` of each of the numbers 0, ..., count - 1."""
    start = torch.full((count,), len(places))
    return start.scatter_reduce(0, places, torch.arange(len(places)), "amin")


def distinct_columns(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first index of each distinct column of nonnegative integers, and for every column its number."""
    place, size = torch.zeros(matrix.shape[1], dtype=torch.long), 1
    if not matrix.numel():
        return place[:1], place
    for row, high in zip(matrix, matrix.amax(1).tolist(), strict=True):
        if size * (high + 1) >= 2**62:  # renumber the distinct columns so far, so that keys fit
            names, place = torch.unique(place, return_inverse=True)
            size = len(names)
        place, size = place * (high + 1) + row, size * (high + 1)
    names, place = torch.unique(place, return_inverse=True)
    return firsts(place, len(names)), place


class Classes:
    """Hold a partition of the nodes as a forest whose roots are the eldest nodes of their classes."""

    def __init__(self, nodes: int = 1) -> None:
        self._up = torch.arange(nodes)
        self._count = nodes

    def __len__(self) -> int:
        return self._count

    def add(self, count: int, *, as_one: bool = False) -> None:
        """Add nodes, each a class of its own, or all in one class."""
        start, self._count = self._count, self._count + count
        if self._count > len(self._up):
            self._up = torch.cat([self._up, torch.empty(self._count, dtype=torch.long)])
        torch.arange(start, self._count, out=self._up[start : self._count])
        if as_one:
            self._up[start : self._count] = start

    def eldest(self, nodes: Tensor) -> Tensor:
        """Return the eldest node of each node's class."""
        up = self._up[nodes]
        while not torch.equal(up, above := self._up[up]):
            self._up[nodes] = up = above
        return up

    @property
    def of(self) -> Tensor:
        """Return the eldest node of the class of every node."""
        self._up = self.eldest(torch.arange(self._count))
        return self._up

    def join(self, a: Tensor, b: Tensor) -> None:
        """Unite the classes of a_i and b_i, for all i."""
        while True:
            a, b = self.eldest(a), self.eldest(b)
            apart = a != b
            if not bool(apart.any()):
                return
            a, b = a[apart], b[apart]
            self._up.scatter_reduce_(0, torch.maximum(a, b), torch.minimum(a, b), "amin")


@dataclass(frozen=True, eq=False)
class Joins:
    """Hold pairs of nodes with b = const * gain^power * a, or the contragredient of this if `dual`."""

    a: Tensor
    b: Tensor
    tie: Tensor
    dual: Tensor
    gain: Tensor
    power: Tensor
    const: Tensor


class Nodes:
    """Collect the channels of a walk and the joins between them."""

    def __init__(self) -> None:
        self.wires, self.solved, self.tensors = Classes(), Classes(), Classes()
        self.joins: list[Joins] = []
        self.sources: list[tuple[Tensor, Tensor]] = []
        self.gains = 0

    def __len__(self) -> int:
        return len(self.wires)

    def add(self, count: int, *, one_tensor: bool = True) -> Tensor:
        """Return the numbers of new nodes: channels of one tensor, or of several."""
        start = len(self)
        self.wires.add(count)
        self.solved.add(count)
        self.tensors.add(count, as_one=one_tensor)
        return torch.arange(start, start + count)

    def add_gains(self, count: int) -> Tensor:
        """Return the numbers of new gains."""
        self.gains += count
        return torch.arange(self.gains - count, self.gains)

    def join(
        self,
        a: Tensor,
        b: Tensor,
        tie: Tie = Tie.SAME,
        *,
        dual: bool = False,
        gain: Tensor | int = -1,
        power: int = 1,
        const: Tensor | float = 1.0,
    ) -> None:
        """Join channel b_i to channel a_i. Only the first of equal pairs is kept."""
        a, b = torch.broadcast_tensors(a, b)
        shape, a, b = a.shape, a.reshape(-1), b.reshape(-1)
        keep = torch.nonzero((a > 0) & (b > 0) & (a != b))[:, 0]
        if not len(keep):
            return
        keep = keep[distinct_columns(torch.stack([a[keep], b[keep]]))[0]]

        def kept(each: Tensor | float, like: Tensor) -> Tensor:
            if isinstance(each, Tensor):
                return each.expand(shape).reshape(-1)[keep].to(like.dtype)
            return torch.full((len(keep),), each, dtype=like.dtype)

        made = Joins(
            *map(kept, (a.view(shape), b.view(shape), int(tie), int(dual), gain, power, const), _EMPTY.values())
        )
        self.joins.append(made)
        if tie <= Tie.GAIN:
            self.wires.join(made.a, made.b)
            self.tensors.join(made.a, made.b)
        self.solved.join(made.a, made.b)

    def solve_together(self, *labels: Tensor) -> None:
        """Mark all these channels to be solved together."""
        nodes = torch.cat([each.reshape(-1) for each in labels]).unique()
        nodes = nodes[nodes > 0]
        if len(nodes) > 1:
            self.solved.join(nodes[:1].expand_as(nodes[1:]), nodes[1:])

    def take_units(self, nodes: Tensor, sources: Tensor) -> None:
        """Give nodes that are the eldest of their wires the units of `sources`, which they are functions of."""
        self.sources.append((nodes, sources))

    def settled(self) -> Channels:
        """Compute the relations of all nodes from the joins. These are dropped, so call it only once."""
        count = len(self)
        joins = every(self.joins)
        self.joins.clear()

        def classes(tie: Tie) -> Tensor:
            made = Classes(count)
            keep = joins.tie <= tie
            made.join(joins.a[keep], joins.b[keep])
            return made.of

        scales, wires = classes(Tie.SAME), self.wires.of
        up, by = _forest(joins, Tie.GAIN, wires)
        turned = _parities(joins, *_forest(joins, Tie.SAME, scales)) if bool(joins.dual.any()) else torch.zeros(count)
        turn = 1 - 2 * turned.double()
        step = Step.along(joins, by)
        dual = _parities(joins, up, by)
        for nodes, sources in self.sources:
            eldest = up[nodes] == 0
            up[nodes[eldest]] = sources[eldest]
        return Channels(wires, scales, classes(Tie.ALIKE), self.solved.of, dual.bool(), turn, up, step)


_EMPTY = {
    "a": torch.zeros(0, dtype=torch.long),
    "b": torch.zeros(0, dtype=torch.long),
    "tie": torch.zeros(0, dtype=torch.int8),
    "dual": torch.zeros(0, dtype=torch.int8),
    "gain": torch.zeros(0, dtype=torch.long),
    "power": torch.zeros(0, dtype=torch.int8),
    "const": torch.zeros(0, dtype=torch.float64),
}
_NONE = 0, 0, 0, 0, -1, 1, 1.0
"""The join of a node that follows from no other."""


def every(joins: list[Joins]) -> Joins:
    """Concatenate joins."""
    return Joins(*(torch.cat([empty, *(getattr(each, name) for each in joins)]) for name, empty in _EMPTY.items()))


@dataclass(frozen=True, eq=False)
class Step:
    """Hold how each node follows from another: as const * gain^power times it, or its contragredient if `dual`."""

    const: Tensor
    gain: Tensor
    power: Tensor
    dual: Tensor

    @classmethod
    def along(cls, joins: Joins, by: Tensor) -> Step:
        """Return the steps along joins: k + 1 stands for join k, -(k + 1) for its reverse, 0 for no join."""
        none = Joins(
            *(
                torch.cat([torch.full((1,), value, dtype=each.dtype), each])
                for each, value in zip(vars(joins).values(), _NONE, strict=True)
            )
        )
        k = by.abs()
        const, power, dual = none.const[k], none.power[k], none.dual[k] > 0
        back = (by < 0) & ~dual
        return cls(torch.where(back, 1 / const, const), none.gain[k], torch.where(back, -power, power), dual)


@dataclass(frozen=True, eq=False)
class Channels:
    """Hold the wire, scale, component of ties and solved-together set of each node, each as its eldest node.

    dual: whether the node is the contragredient of its wire's eldest. turn: the sign of its log-scale relative to its
    scale's eldest. up: the node that it follows from (0 for the eldest). step: how it follows.
    """

    wires: Tensor
    scales: Tensor
    components: Tensor
    solved: Tensor
    dual: Tensor
    turn: Tensor
    up: Tensor
    step: Step

    def units(self, gains: Tensor) -> Tensor:
        """Return u with channel = u * eldest channel, at these values of all gains (n,)."""
        values = torch.cat([gains.double(), torch.ones(1, dtype=torch.float64)])
        units = self.step.const * values[self.step.gain] ** self.step.power
        sign, to = torch.where(self.step.dual, -1, 1), self.up
        while bool(to.any()):  # u = step * u_up; across a contragredient, step / u_up
            units, sign, to = torch.where(sign > 0, units * units[to], units / units[to]), sign * sign[to], to[to]
        return units


def _forest(joins: Joins, tie: Tie, eldest: Tensor) -> tuple[Tensor, Tensor]:
    """Return the node that each node follows from, and by which join, along a forest of the earliest joins."""
    count, ids = len(eldest), torch.nonzero(joins.tie <= tie)[:, 0].numpy()
    a, b = joins.a.numpy()[ids], joins.b.numpy()[ids]
    pairs = np.minimum(a, b) * count + np.maximum(a, b)
    first = np.unique(pairs, return_index=True)[1]
    early = minimum_spanning_tree(coo_matrix((first + 1.0, (a[first], b[first])), (count, count))).tocoo().data
    at = early.astype(np.int64) - 1
    tops = 1 + np.flatnonzero(eldest.numpy()[1:] == np.arange(1, count))
    a, b = a[at], b[at]
    edges = np.ones(len(at) + len(tops)), (np.r_[a, 0 * tops], np.r_[b, tops])
    up = breadth_first_order(coo_matrix(edges, (count, count)).tocsr(), 0, directed=False)[1].astype(np.int64)
    up[0] = 0
    up = np.where(up < 0, 0, up)
    by = np.zeros(count, dtype=np.int64)
    by[np.where(up[b] == a, b, a)] = np.where(up[b] == a, 1 + ids[at], -1 - ids[at])
    return torch.from_numpy(up), torch.from_numpy(by)


def _parities(joins: Joins, up: Tensor, by: Tensor) -> Tensor:
    """Return 1 for nodes with an odd number of contragredient joins up to the root, else 0."""
    if not len(joins.a):
        return torch.zeros_like(up)
    parity, to = torch.where(by != 0, joins.dual[by.abs() - 1], 0), up
    while bool(to.any()):
        parity, to = parity ^ parity[to], to[to]
    return parity
