"""Find units that may change places: neurons, heads, experts, channels of a stream."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import scipy.sparse
import torch
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from quotient_manifolds.symmetries.pair import Params
from quotient_manifolds.symmetries.wires.blocks import find_blocks
from quotient_manifolds.symmetries.wires.codes import hashed, mixed
from quotient_manifolds.symmetries.wires.entries import Entries
from quotient_manifolds.symmetries.wires.equations import Equations
from quotient_manifolds.symmetries.wires.labels import common_path
from quotient_manifolds.symmetries.wires.linear_algebra import Array
from quotient_manifolds.symmetries.wires.walk import Walk

FUNCTIONS = (
    *("gelu", "silu", "relu", "tanh", "sigmoid", "elu", "softplus", "leaky_relu", "hardswish", "erf", "exp", "sin"),
    *("abs", "clamp", "maximum", "minimum", "where"),
)
"""Functions after which neurons are called, if they have several after the first of these."""
ROUNDS = 4  # of refinement between counts of colors
MOST_FREE = 3  # sets of vertices that are left free, one after the other, where nothing comes apart


@dataclass(frozen=True, eq=False)
class Part:
    """Say where units stand in a parameter (taps, out, in), or each in one of its own: places along axes."""

    entries: tuple[Entries, ...]
    rows: Tensor | None  # (units, k), of one parameter all different
    columns: Tensor | None

    def permute(self, params: Params, order: Tensor) -> None:
        """Put unit order[i] in the place of unit i, in place."""
        if len(self.entries) == 1:
            W = self.entries[0].read(params)
            for axis, places in ((1, self.rows), (2, self.columns)):
                if places is not None:
                    W = W.index_copy(axis, places.reshape(-1), W.index_select(axis, places[order].reshape(-1)))
            self.entries[0].write(params, W)
            return
        units = [self.unit(params, i) for i in order.tolist()]
        for i, (entries, unit) in enumerate(zip(self.entries, units, strict=True)):
            W = entries.read(params)
            rows = torch.arange(W.shape[1]) if self.rows is None else self.rows[i]
            columns = torch.arange(W.shape[2]) if self.columns is None else self.columns[i]
            W[:, rows[:, None], columns] = unit
            entries.write(params, W)

    @property
    def key(self) -> object:
        """Return what parts of the same units in the same parameters have in common."""
        sides = ([] if each is None else each.sort(1).values.tolist() for each in (self.rows, self.columns))
        return frozenset(each.key for each in self.entries), *(frozenset(map(tuple, side)) for side in sides)

    def units(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return the numbers of all units (units, taps, out, in)."""
        if len(self.entries) > 1:
            return torch.stack([self.unit(params, i) for i in range(len(self.entries))])
        W = self.entries[0].read(params)
        if self.rows is None:
            assert self.columns is not None
            return W[:, :, self.columns].movedim(2, 0)
        W = W[:, self.rows].movedim(1, 0)  # (units, taps, k, in)
        return W if self.columns is None else torch.stack([w[..., c] for w, c in zip(W, self.columns, strict=True)])

    def unit(self, params: Mapping[str, Tensor], i: int) -> Tensor:
        """Return the numbers of a unit (taps, out, in)."""
        W = self.entries[i if len(self.entries) > 1 else 0].read(params)
        W = W if self.rows is None else W[:, self.rows[i]]
        return W if self.columns is None else W[:, :, self.columns[i]]


@dataclass(frozen=True, eq=False)
class Permutation:
    """Describe units that the model treats alike: in any order, they compute the same function."""

    name: str
    size: int
    parts: tuple[Part, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the parameters that hold the units, each once."""
        return tuple(dict.fromkeys(each.name for part in self.parts for each in part.entries))

    def permute(self, params: Params, order: Sequence[int] | Tensor) -> None:
        """Put unit order[i] in the place of unit i, in place (clone the tensors first)."""
        order = torch.as_tensor(order)
        if sorted(order.tolist()) != [*range(self.size)]:
            raise ValueError(f"order must have each of 0 to {self.size - 1} once. Found {order.tolist()}")
        for part in self.parts:
            part.permute(params, order)

    def matrices(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return all numbers of each unit as a row (units, features), in float64, to assign units to others."""
        return torch.cat([part.units(params).flatten(1) for part in self.parts], 1)


def permutations(walk: Walk) -> tuple[Permutation, ...]:
    """Return the units of a walk that may change places, but channels that a continuous group mixes already.

    Vertices of the equations that none is like stay where they are. Without them the graph falls apart: parts that are
    alike in all of their edges may change places. Where one part is alike to none, parts are sought inside of it.
    """
    graph = Equations(walk)
    if not graph.whole or not graph.edges:
        return ()
    search = _Search(graph)
    mixing = _mixing(walk)
    found: dict[object, Permutation] = {}
    for units in search.groups():
        parts = tuple(search.parts(units))
        alone = all(len(part.entries) in (1, len(units)) for part in parts)
        if parts and alone and not _is_mixed(parts, mixing):
            found.setdefault(
                frozenset(part.key for part in parts), Permutation(_name(search, units, parts), len(units), parts)
            )
    return tuple(_told_apart([*found.values()]))


class _Search:
    """Find sets of disjoint parts of a graph that may change places."""

    def __init__(self, graph: Equations) -> None:
        self.graph = graph
        self.source, self.target, self.code = (np.concatenate(each) for each in zip(*graph.edges, strict=True))
        self.start = np.zeros(graph.count, np.int64)
        with np.errstate(over="ignore"):
            for vertices, codes in graph.tints:
                np.add.at(self.start, vertices, codes)
        self.start[0] = 1
        ends, others = np.concatenate([self.target, self.source]), np.concatenate([self.source, self.target])
        order = np.argsort(ends, kind="stable")
        self._ends, self._first = np.unique(ends[order], return_index=True)
        self._others = others[order]
        self._messages = hashed(np.concatenate([self.code, ~self.code]))[order]
        self.home = np.full((3, graph.count), -1)
        """Of each vertex the use of a parameter, its axis and its place there."""
        for number, use in enumerate(graph.uses):
            for axis, vertices in enumerate((use.rows, use.columns)):
                self.home[:, vertices] = (
                    np.full(len(vertices), number),
                    np.full(len(vertices), axis),
                    np.arange(len(vertices)),
                )

    def groups(self) -> Iterator[Array]:
        """Yield vertices (units, k): a unit that takes another's place takes them in this order."""
        color = self.colors(self.start)
        every = np.arange(self.graph.count)
        known = set[tuple[int, ...]]()
        waiting = [(color, every > 0, 0)]
        while waiting:
            color, inside, depth = waiting.pop(0)
            groups, whole = self.apart(color, inside)
            for units in groups:
                key = tuple(np.sort(units[:, 0]).tolist())
                if key not in known:
                    known.add(key)
                    yield units
            if depth < 2:
                waiting += self.inner(color, groups, whole, depth)

    def inner(
        self, color: Array, groups: list[Array], whole: list[Array], depth: int
    ) -> list[tuple[Array, Array, int]]:
        """Return what to search next: inside of the units of each group, and of parts that are like none.

        Such a part may be a grid, as of heads and of channels that all heads have: vertices of one color are left free,
        and what does not depend on them stays where it is.
        """
        found = []
        single = np.zeros(self.graph.count, bool)
        fixed = color.copy()
        for units in groups:
            fixed[units] = hashed(color[units], units[:, :1])
            single[units] = units.shape[1] > 1
        if single.any():
            found.append((self.colors(fixed), single, depth + 1))
        tried = np.zeros(self.graph.count, bool)
        for _ in range(MOST_FREE):
            fixed, inside = color.copy(), np.zeros(self.graph.count, bool)
            for part in whole:
                left = part[~tried[part]]
                if len(left):
                    _, cell, size = np.unique(color[left], return_inverse=True, return_counts=True)
                    some = left[cell == size.argmin()]
                    fixed[some] = hashed(color[some], some)
                    inside[part] = True
            if not inside.any():
                break
            sizes, split = _sizes(color), _sizes(self.colors(fixed))
            tried |= inside & (split == 1)
            other = np.flatnonzero(inside & (split == sizes))
            fixed = color.copy()
            fixed[other] = hashed(color[other], other)
            found.append((self.colors(fixed), inside, depth + 1))
        return found

    def colors(self, color: Array) -> Array:
        """Refine colors until vertices of one color have neighbours of the same colors."""
        count = 0
        while True:
            for _ in range(ROUNDS):
                total = np.zeros(len(color), np.int64)
                with np.errstate(over="ignore"):
                    messages = mixed(color[self._others] + self._messages, 5)
                    total[self._ends] = np.add.reduceat(messages, self._first)
                color = hashed(color, total)
                color[0] = 1
            before, count = count, int((np.diff(np.sort(color)) != 0).sum())
            if before == count:
                return color

    def apart(self, color: Array, inside: Array) -> tuple[list[Array], list[Array]]:
        """Return groups of parts that are alike (units, k), and parts that are like none, without single vertices."""
        loose = _sizes(color) > 1
        held = loose[self.source] & loose[self.target]
        pairs = self.source[held], self.target[held]
        graph = scipy.sparse.coo_matrix((np.ones(len(pairs[0]), bool), pairs), shape=(len(color), len(color)))
        part = connected_components(graph, directed=False)[1]
        vertices = np.flatnonzero(loose)
        vertices = vertices[np.lexsort((vertices, color[vertices], part[vertices]))]
        first = np.flatnonzero(np.diff(part[vertices], prepend=-1))
        length = np.diff(first, append=len(vertices))
        local = np.full(len(color), -1)
        local[vertices] = np.arange(len(vertices)) - np.repeat(first, length)
        code = self._code(color, part, local, vertices, first)
        good = np.logical_and.reduceat(inside[vertices], first) if len(first) else np.zeros(0, bool)
        alike: dict[tuple[int, int], list[Array]] = defaultdict(list)
        for key, n, start in zip(code[good].tolist(), length[good].tolist(), first[good].tolist(), strict=True):
            alike[key, n].append(vertices[start : start + n])
        groups = [np.stack(each) for each in alike.values() if len(each) > 1]
        return groups, [each[0] for each in alike.values() if len(each) == 1]

    def _code(self, color: Array, part: Array, local: Array, vertices: Array, first: Array) -> Array:
        """Return a code of each part: of its colors, and of its edges, inside of it and to what is fixed."""
        name = np.where(local >= 0, local, hashed(color, np.arange(len(color))))
        edge = hashed(name[self.source], name[self.target], self.code, local[self.source] >= 0, local[self.target] >= 0)
        total = np.zeros(len(color), np.int64)
        with np.errstate(over="ignore"):
            for end, other in ((self.source, self.target), (self.target, self.source)):
                there = (local[end] >= 0) & ((local[other] < 0) | (end is self.source))
                np.add.at(total, part[end[there]], edge[there])
            if not len(first):
                return np.zeros(0, np.int64)
            colors = np.add.reduceat(mixed(color[vertices], 5), first)
        return hashed(total[part[vertices[first]]], colors)

    def parts(self, units: Array) -> Iterator[Part]:
        """Yield where units stand in parameters."""
        number, axis, place = self.home[:, units]
        together: dict[tuple[int, ...], tuple[list[Array], list[Array]]] = {}
        for local in np.flatnonzero(number[0] >= 0).tolist():
            uses = tuple(dict.fromkeys(number[:, local].tolist()))
            sides = together.setdefault(uses, ([], []))
            sides[axis[0, local]].append(place[:, local])
        for uses, sides in sorted(together.items()):
            rows, columns = (torch.from_numpy(np.stack(side, 1)) if side else None for side in sides)
            yield Part(tuple(self.graph.uses[each].entries for each in uses), rows, columns)


def _sizes(color: Array) -> Array:
    """Return how many vertices have the color of each."""
    _, cell, size = np.unique(color, return_inverse=True, return_counts=True)
    return size[cell]


def _mixing(walk: Walk) -> dict[tuple[str, int], dict[int, tuple[int, int]]]:
    """Return which group mixes channels, and which of its channels they are: by parameter, axis and first entry."""
    root = walk.turns.find(np.arange(walk.count))[0]
    group = np.full(walk.count, -1)
    for number, block in enumerate(each for each in find_blocks(walk) if each.kind != "mean"):
        group[list(block.roots)] = number
    found = defaultdict[tuple[str, int], dict[int, tuple[int, int]]](dict)
    for linear in walk.linears:
        index = linear.entries.index()[0].numpy()
        for axis, nodes, first in ((0, linear.outs[0], index[:, 0]), (1, linear.takes, index[0])):
            about = zip(group[root[nodes]].tolist(), root[nodes].tolist(), strict=True)
            known = zip(first.tolist(), about, strict=True)
            found[linear.entries.name, axis].update((place, each) for place, each in known if each[0] >= 0)
    return found


def _is_mixed(parts: Sequence[Part], mixing: Mapping[tuple[str, int], Mapping[int, tuple[int, int]]]) -> bool:
    """Return whether units are channels that one continuous group mixes."""
    for part in parts:
        for axis, places in enumerate((part.rows, part.columns)):
            if places is None or len(part.entries) > 1:
                continue
            first = part.entries[0].index()[0].movedim(axis, 0)[:, 0]
            known = mixing.get((part.entries[0].name, axis), {})
            for several in first[places].T.tolist():
                found = {known[each] for each in several if each in known}
                if len(found) == len(several) and len({group for group, _ in found}) == 1:
                    return True
    return False


def _name(search: _Search, units: Array, parts: Sequence[Part]) -> str:
    """Name units by what they compute, and by the module that has them."""
    starts = [start for start, _ in search.graph.made]
    own = np.searchsorted(starts, units[0], "right") - 1
    operations = {search.graph.made[place][1] for place in own.tolist()}
    names = [each.name for part in parts for each in part.entries]
    written = [part for part in parts if part.rows is not None]
    wide = any(part.rows is not None and part.rows.shape[1] > 1 for part in parts)
    functions = [each for each in FUNCTIONS if each in operations]
    if "score" in operations:
        what = "heads"
    elif "weight" in operations and wide:
        what = "experts"
    elif functions:
        what, names = f"{functions[0]} neurons", [each.name for part in written[:1] for each in part.entries] or names
    else:
        what = "channels"
    return f"{what} of {common_path(names) or 'the model'}"


def _told_apart(found: Sequence[Permutation]) -> Iterator[Permutation]:
    """Give each a name of its own."""
    names: dict[str, int] = defaultdict(int)
    for each in found:
        names[each.name] += 1
        again = names[each.name]
        yield each if again == 1 else Permutation(f"{each.name} ({again})", each.size, each.parts)
