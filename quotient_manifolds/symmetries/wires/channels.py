"""Find groups of channels that change among themselves, and where these stand in parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import scipy.sparse
import torch

from quotient_manifolds.symmetries.wires.blocks import Block, find_blocks
from quotient_manifolds.symmetries.wires.entries import Entries
from quotient_manifolds.symmetries.wires.linear_algebra import Array
from quotient_manifolds.symmetries.wires.nodes import FIXED, moving
from quotient_manifolds.symmetries.wires.relations import Component, alone
from quotient_manifolds.symmetries.wires.relations import parts_of as components_of
from quotient_manifolds.symmetries.wires.uses import Linear, Vector
from quotient_manifolds.symmetries.wires.walk import Walk

MOST = 64  # dimensions of a component of scales that is taken apart
SMALL = 1e-9


@dataclass(frozen=True, eq=False)
class Part:
    """Hold the rows or the columns of one parameter, one for each of several channels.

    Those of channel i are the entries first[i] + rows, counted as the parameter is stored. rows: None if no such
    numbers tell where they are. family: one for all parts of an operation that differ in nothing but which of its
    entries they are: groups, experts.
    """

    source: Linear | Vector
    reads: bool
    nodes: Array
    first: Array
    rows: Array | None
    family: int

    @property
    def name(self) -> str:
        return self.source.entries.name

    @property
    def length(self) -> int:
        return 0 if self.rows is None else len(self.rows)


@dataclass(eq=False)
class Bundle:
    """Hold channels that one group acts on: nodes, ascending, of which of them they are, and -1 where the inverse acts.

    block: the block that they are, None if they are one channel with a scale. places: by part and side, 0 where the
    group acts and 1 where its inverse does, where each channel stands in the part, (channels, copies). bent: the group
    acts in other ways in some places, by factors that differ.
    """

    acts: Literal["linear", "complex", "scale"]
    size: int
    nodes: Array
    channel: Array
    sign: Array
    block: Block | None = None
    places: dict[tuple[int, bool], Array] = field(default_factory=dict)
    bent: bool = False

    @property
    def start(self) -> int:
        return int(self.nodes[0])

    def scales(self) -> Iterator[tuple[Array, Array]]:
        """Yield the log-scales of its diagonal: the nodes at which they are not 0, and their values there."""
        for channel in range(self.size) if self.acts == "linear" else (None,):
            here = slice(None) if channel is None else self.channel == channel
            yield self.nodes[here], self.sign[here]


def parts_of(walk: Walk) -> list[Part]:
    """Return where channels stand in parameters: what uses the same entries in the same way is there once."""
    found, known = list[Part](), set()
    families: dict[object, int] = {}
    sources = walk.uses
    for each in sources:
        if each.entries.key in known or (isinstance(each, Vector) and each.gain):
            continue
        known.add(each.entries.key)
        if isinstance(each, Vector):
            found += _vector_parts(walk, each, families.setdefault(id(each), len(families)))
            continue
        for axis, nodes in ((1, moving(each.outs)), (2, each.takes)):
            if axis == 1 or not each.table:
                about = each.entries.name, axis, each.at, each.shape
                family = families.setdefault(about, len(families))
                where = _elements(each.entries, axis)
                found.append(Part(each, axis == 2, nodes, *where, family))
    return found


def _vector_parts(walk: Walk, vector: Vector, family: int) -> list[Part]:
    """Return one part if all rows of a vector are the same channels, and one for each row otherwise."""
    nodes = vector.outs
    relation = np.stack(walk.turns.find(nodes), -1)
    if bool((relation == relation[:1]).all()):
        return [Part(vector, False, nodes[0], *_elements(vector.entries, 1), family)]
    first = vector.entries.index().numpy()
    usable = vector.entries.offset == 0
    return [
        Part(vector, False, row, place, np.zeros(1, np.int64) if usable else None, family)
        for row, place in zip(nodes, first, strict=True)
    ]


def _elements(entries: Entries, axis: int) -> tuple[Array, Array | None]:
    """Return the first entry at each place of an axis, and where the others are from there."""
    layout = entries.layout
    if layout.is_meta:
        where = [torch.arange(n) * step for n, step in zip(layout.shape, layout.stride(), strict=True)]
        first = where.pop(axis) + int(layout.storage_offset())
        rows = torch.zeros(1, dtype=torch.long)
        for each in where:
            rows = (rows[:, None] + each).reshape(-1)
        usable = entries.offset == 0 and 0 not in (
            s for n, s in zip(layout.shape, layout.stride(), strict=True) if n > 1
        )
        return first.numpy(), rows.sort().values.numpy() if usable else None
    lines = layout.movedim(axis, 0).flatten(1).sort(1).values
    rows = lines - lines[:, :1]
    alike = entries.offset == 0 and bool((rows == rows[:1]).all())
    return lines[:, 0].numpy(), rows[0].numpy() if alike else None


def find_bundles(walk: Walk, parts: list[Part]) -> list[Bundle]:
    """Return blocks of channels that any matrix or any complex number may act on, and channels with a scale alone."""
    blocks = [each for each in find_blocks(walk) if each.kind in ("linear", "complex")]
    found = [each for each in _of_blocks(walk, blocks, parts) if not each.bent and each.places]
    # Where a gain is between their weights they are no pair, and their gauge scales them; its place has gains of 1.
    root = walk.turns.find(np.arange(walk.count))[0]
    gained = {int(n) for each in walk.vectors if each.gain for n in root[each.outs].reshape(-1)}
    mixed = [n for block in blocks if block.kind == "linear" and gained.intersection(block.roots) for n in block.roots]
    inside = np.isin(root, mixed)
    for bundle in found:
        inside[bundle.nodes] = True
    written = np.zeros(walk.count, bool)
    for part in parts:
        written[part.nodes] |= isinstance(part.source, Linear) and not part.reads
    gains = np.zeros(walk.count, bool)
    for vector in walk.vectors:
        gains[vector.unknowns] = True
    unknowns, solutions = walk.scales.solutions()
    lone = alone(solutions)
    rounds = [list(_alone(unknowns, solutions[:, lone].tocsc(), written & ~inside, gains | inside))]
    for component in components_of(unknowns, solutions[:, ~lone].tocsr()):
        if inside[component.unknowns].any():
            continue
        for place, bundle in enumerate(_of_component(component, written, gains)):
            rounds += [[]] if place == len(rounds) else []
            rounds[place].append(bundle)
    for several in rounds:
        _place(walk, several, parts)
    return [*found, *(each for several in rounds for each in several if not each.bent and each.places)]


def _of_blocks(walk: Walk, blocks: list[Block], parts: list[Part]) -> list[Bundle]:
    """Return the blocks that may also grow and shrink as a whole, whatever grows beside them."""
    if not blocks:
        return []
    every = np.arange(walk.count)
    root, weight, dual = walk.turns.find(every)
    owner, channel = np.full(walk.count, -1), np.zeros(walk.count, np.int64)
    for number, block in enumerate(blocks):
        owner[list(block.roots)], channel[list(block.roots)] = number, np.arange(len(block.roots))
    owner, channel = owner[root], channel[root]
    owner[: FIXED + 1] = -1
    sign = np.where(dual, -1.0, 1.0)
    free = walk.scales.obeyed(owner, sign, len(blocks))
    order = np.flatnonzero(owner >= 0)
    order = order[np.argsort(owner[order], kind="stable")]
    groups = np.split(order, np.flatnonzero(np.diff(owner[order])) + 1)
    found = [
        Bundle(
            "linear" if block.kind == "linear" else "complex",
            len(block.roots),
            nodes,
            channel[nodes],
            sign[nodes],
            block,
        )
        for block, nodes in zip(blocks, groups, strict=True)
    ]
    _place(walk, found, parts, weight)
    return [each for each, is_free in zip(found, free.tolist(), strict=True) if is_free]


def _alone(unknowns: Array, solutions: scipy.sparse.csc_matrix, written: Array, refused: Array) -> Iterator[Bundle]:
    """Yield what `_of_component` does of components of one dimension, all at once."""
    column = np.repeat(np.arange(solutions.shape[1]), np.diff(solutions.indptr))
    there = np.abs(solutions.data) > SMALL
    names, values, column = unknowns[solutions.indices[there]], solutions.data[there], column[there]
    start = np.flatnonzero(np.diff(column, prepend=-1))
    if not len(start):
        return
    stop = np.append(start[1:], len(names))
    first = np.where(written[names], np.arange(len(names)), len(names))
    first = np.minimum.reduceat(first, start)  # a row that is written, if one is
    size = np.repeat(np.where(first < len(names), values[np.minimum(first, len(names) - 1)], 1.0), stop - start)
    good = np.logical_and.reduceat(~refused[names] & (np.abs(np.abs(values / size) - 1) < SMALL), start)
    sign, channel = np.sign(values / size), np.zeros(len(names), np.int64)
    some = good & (first < len(names))
    for a, b in zip(start[some].tolist(), stop[some].tolist(), strict=True):
        yield Bundle("scale", 1, names[a:b], channel[a:b], sign[a:b])


def _of_component(component: Component, written: Array, gains: Array) -> Iterator[Bundle]:
    """Yield solutions in which one row that is written is free, no gain changes, and all change by as much or not."""
    if component.dimension > MOST:
        return
    names, basis = component.unknowns, component.basis
    first = np.flatnonzero(gains[names])
    for vector in _reduced(basis, [*first, *np.flatnonzero(written[names] & ~gains[names])], len(first)):
        there = np.abs(vector) > SMALL
        if there.any() and bool((np.abs(np.abs(vector[there]) - 1) < SMALL).all()):
            nodes = names[there]
            yield Bundle("scale", 1, nodes, np.zeros(len(nodes), np.int64), np.sign(vector[there]))


def _reduced(basis: Array, order: Iterable[int], skipped: int) -> list[Array]:
    """Return solutions that are 1 at one of these places and 0 at those where others are 1; not of those skipped."""
    left, found = basis.T.copy(), list[Array]()
    pivots: list[int] = []
    for number, place in enumerate(order):
        if not len(left):
            break
        best = int(np.abs(left[:, place]).argmax())
        if abs(left[best, place]) < SMALL:
            continue
        row = left[best] / left[best, place]
        left = np.delete(left, best, 0)
        left = left - left[:, [place]] * row
        found = [each - each[place] * row for each in found] + [row]
        pivots.append(number)
    return [each for each, number in zip(found, pivots, strict=True) if number >= skipped]


def _place(walk: Walk, bundles: list[Bundle], parts: list[Part], weight: Array | None = None) -> None:
    """Write into bundles, which have no node in common, where their channels stand."""
    owner, sign, channel = np.full(walk.count, -1), np.ones(walk.count), np.zeros(walk.count, np.int64)
    for number, bundle in enumerate(bundles):
        owner[bundle.nodes], sign[bundle.nodes], channel[bundle.nodes] = number, bundle.sign, bundle.channel
    for number, part in enumerate(parts):
        inside = np.flatnonzero(owner[part.nodes] >= 0)
        nodes = part.nodes[inside]
        key = 2 * owner[nodes] + ((sign[nodes] < 0) ^ part.reads)
        order = np.lexsort((channel[nodes], key))
        inside, own = inside[order], channel[nodes[order]]
        keys, start, count = np.unique(key[order], return_index=True, return_counts=True)
        for k, first, many in zip(keys.tolist(), start.tolist(), count.tolist(), strict=True):
            bundle, here = bundles[k // 2], slice(first, first + many)
            size = bundle.size if many % bundle.size == 0 else 1
            regular = bundle.size == 1 or bool((own[here].reshape(size, -1) == np.arange(bundle.size)[:, None]).all())
            bundle.bent |= part.rows is None or not regular
            bundle.places[number, bool(k % 2)] = inside[here].reshape(size, -1)
    if weight is not None:
        for bundle in bundles:
            bundle.bent = bundle.bent or _is_bent(bundle, parts, weight)


def _is_bent(bundle: Bundle, parts: list[Part], weight: Array) -> bool:
    """Return whether the group acts in other ways on other parts, for their channels have factors that differ."""
    first, side = np.ones(bundle.size), -1
    for (number, here), places in bundle.places.items():
        size = weight[parts[number].nodes[places]]  # (channels, copies)
        acting = here ^ parts[number].reads
        if side < 0:
            first, side = size[:, 0], acting
        ratio = size / first[:, None] if acting == side else size * first[:, None]
        if bool((np.abs(ratio / ratio[:1] - 1) > SMALL).any()):
            return True
    return False
