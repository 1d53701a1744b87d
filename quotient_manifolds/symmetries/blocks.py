"""Divide units that meet in products into blocks: within one, an invertible matrix may act on both sides.

At each place k of a product's axis units of the left side meet units of the right side. A matrix A that acts on some
places, by A^-1 on the left and A^T on the right, leaves the product alone if all these places have the same factors, by
tokens; where a rotation mixes two places, complex numbers do. A unit that is used in several products says that places
of one are places of the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from quotient_manifolds.symmetries.linear_flow import Flow
from quotient_manifolds.symmetries.place_classes import classes_of


@dataclass(frozen=True, eq=False)
class Rows:
    """Hold units (heads, g, h) of a source that are rows of a factor; steady if with one factor at all tokens.

    Where they meet a parameter, as values do, that factor has to be 1, or biases would be made up for wrongly.
    """

    source: int
    units: Tensor
    steady: bool


@dataclass(frozen=True, eq=False)
class Block:
    """Hold two factors of several heads between which a group acts, and the products in which they meet.

    turns: the group is that of complex numbers. positive: factors depend on signs. mixed: attention weights are in
    between. alone: every place has a factor of its own. reason: the number of the reason why no group acts, 0 if one
    does.
    """

    sides: tuple[tuple[Rows, ...], tuple[Rows, ...]]
    products: tuple[int, ...]
    turns: bool
    positive: bool
    mixed: bool
    alone: bool
    reason: int

    @property
    def h(self) -> int:
        """Return how many places a head has."""
        return self.sides[0][0].units.shape[2]

    def heads(self) -> Iterator[Block]:
        """Yield every head as a block of its own."""
        for head in range(len(self.sides[0][0].units)):
            left, right = (
                tuple(replace(rows, units=rows.units[head : head + 1]) for rows in side) for side in self.sides
            )
            yield replace(self, sides=(left, right))


@dataclass(eq=False)
class _Entries:
    """Hold in columns what meets where: a node is a unit of a source, a place is one k of one product."""

    columns: list[np.ndarray]

    NAMES = ("node", "place", "side", "label", "row", "turns", "positive", "mixed", "steady", "product", "alone")

    def table(self) -> dict[str, np.ndarray]:
        joined = np.concatenate(self.columns, 1) if self.columns else np.zeros((len(self.NAMES), 0), dtype=np.int64)
        return dict(zip(self.NAMES, joined, strict=True))


CLASH = -1  # units that meet themselves, or in two different orders


def blocks_of(flow: Flow) -> list[Block]:
    """Return all blocks, in the order of the products in which they come first."""
    offsets = np.cumsum([0, *(len(source.first) for source in flow.sources)])
    entries = _Entries([])
    labels, rows, places = 0, 0, 0
    for index, product in enumerate(flow.products):
        swapped = product.softmax == "left" or (product.left.parameter and not product.right.parameter)
        for each in range(len(product.left.units)):
            classes = classes_of(flow, product, each)
            where = np.arange(len(classes.label))
            for number in (0, 1):
                for order, (source, units, steady, positive, mixed) in enumerate(classes.nodes[number]):
                    kept = units >= 0
                    label = classes.label[kept]
                    entries.columns.append(
                        np.stack(
                            np.broadcast_arrays(
                                offsets[source] + units[kept],
                                places + where[kept],
                                number ^ swapped,
                                labels + label,
                                rows + (label * 2 + number) * 64 + order,
                                classes.turns[kept],
                                positive,
                                mixed,
                                steady[kept],
                                index,
                                classes.alone[kept],
                            )
                        ).astype(np.int64)
                    )
            labels += int(classes.label.max(initial=0)) + 1
            rows += (int(classes.label.max(initial=0)) + 1) * 128
            places += len(where)
    table = entries.table()
    return list(_resolved(flow, table, offsets)) if len(table["node"]) else []


# ---- all products


def _resolved(flow: Flow, table: dict[str, np.ndarray], offsets: np.ndarray) -> Iterator[Block]:
    nodes, node = np.unique(table["node"], return_inverse=True)
    places, place = np.unique(table["place"], return_inverse=True)
    channel, colour, clash = _channels(len(nodes), len(places), node, place, table["side"])
    sources = np.searchsorted(offsets, nodes, side="right") - 1
    units = nodes - offsets[sources]
    dead = np.zeros(len(nodes), dtype=np.int64)
    for source in np.unique(sources):
        own = sources == source
        dead[own] = flow.sources[source].dead.numpy()[units[own]]
    dead[clash & (dead == 0)] = CLASH
    block, bad = _blocks(channel[node], table)
    # rows: the first row of a product in which a unit stands tells which units stand beside it
    row = np.full(len(nodes), np.iinfo(np.int64).max)
    np.minimum.at(row, node, table["row"])
    order = np.full(int(channel.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(order, channel[node], table["place"])
    of_node = np.zeros(len(nodes), dtype=np.int64)
    of_node[node] = block
    summary = _summary(table, block, bad, node, colour, dead, of_node)
    steady = np.ones(len(nodes), dtype=bool)
    np.logical_and.at(steady, node, table["steady"].astype(bool))
    rank, width = _ranks(channel, order, of_node, len(bad))
    alike = _alike_blocks(summary, width, of_node, colour, sources)
    start = np.full(len(bad), np.iinfo(np.int64).max)
    np.minimum.at(start, of_node, order[channel])
    sort = np.lexsort((rank, row, sources, colour, start[of_node], alike[of_node]))
    groups = np.split(sort, np.flatnonzero(np.diff(alike[of_node[sort]])) + 1)
    for members in sorted(groups, key=lambda each: start[of_node[each]].min()):
        number = of_node[members[0]]
        heads = len(np.unique(of_node[members]))
        grid = members.reshape(heads, -1)
        sides, whole = _grids(grid, int(width[number]), colour, sources, units, row, rank, steady)
        whole = whole and bool(sides[0] and sides[1])
        yield Block(
            sides,
            tuple(int(each) for each in summary["products"][number]),
            bool(summary["turns"][number]),
            bool(summary["positive"][number]),
            bool(summary["mixed"][number]),
            bool(summary["alone"][number]),
            int(summary["reason"][number]) or (0 if whole else CLASH),
        )


def _ranks(channel: np.ndarray, order: np.ndarray, of_node: np.ndarray, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """Return for every node which place of its block it stands at, and for every block how many places it has."""
    of_channel = np.zeros(len(order), dtype=np.int64)
    of_channel[channel] = of_node
    sort = np.lexsort((order, of_channel))
    width = np.bincount(of_channel, minlength=blocks)
    rank = np.zeros(len(order), dtype=np.int64)
    rank[sort] = np.arange(len(order)) - np.repeat(np.cumsum(width) - width, width)
    return rank[channel], width


def _alike_blocks(
    summary: dict[str, np.ndarray], width: np.ndarray, of_node: np.ndarray, colour: np.ndarray, sources: np.ndarray
) -> np.ndarray:
    """Number blocks such that those made of the same sources in the same way have one number."""
    generator = np.random.default_rng(1)

    def names(count: int) -> np.ndarray:
        return generator.integers(1, np.iinfo(np.int64).max, count, dtype=np.int64)

    found = np.zeros(len(width), dtype=np.int64)
    with np.errstate(over="ignore"):
        np.add.at(found, of_node, names(2 * int(sources.max()) + 2)[2 * sources + colour])
        of_product = names(1 + max(int(each.max()) for each in summary["products"]))
        found += np.array([of_product[each].sum() for each in summary["products"]])
        for name in ("turns", "positive", "mixed", "alone", "reason"):
            found += names(1) * summary[name].astype(np.int64)
        found += names(1) * width
    return np.unique(found, return_inverse=True)[1]


def _grids(
    grid: np.ndarray,
    width: int,
    colour: np.ndarray,
    sources: np.ndarray,
    units: np.ndarray,
    row: np.ndarray,
    rank: np.ndarray,
    steady: np.ndarray,
) -> tuple[tuple[tuple[Rows, ...], tuple[Rows, ...]], bool]:
    """Return the units (heads, g, h) of both sides by source, and whether they fill all places of all rows."""
    example = grid[0]
    kind = 2 * sources[example] + colour[example]
    found: tuple[list[Rows], list[Rows]] = ([], [])
    whole = True
    for part in np.split(np.arange(len(example)), np.flatnonzero(np.diff(kind)) + 1):
        own = grid[:, part]
        if own.shape[1] % width:
            whole = False
            own = own[:, :1].repeat(width, 1)
        own = own.reshape(len(own), -1, width)
        whole &= bool((rank[own] == np.arange(width)).all() and (row[own] == row[own][..., :1]).all())
        side, source = int(colour[example[part[0]]]), int(sources[example[part[0]]])
        found[side].append(Rows(source, torch.from_numpy(units[own]), bool(steady[own].all())))
    return (tuple(found[0]), tuple(found[1])), whole


def _channels(
    nodes: int, places: int, node: np.ndarray, place: np.ndarray, side: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return for every node its channel, and which of two sides it is on, and whether it is on both."""
    total = nodes + places
    rows = np.concatenate([node, node + total])
    columns = nodes + np.concatenate([place + side * total, place + (1 - side) * total])
    graph = coo_matrix((np.ones(len(rows)), (rows, columns)), shape=(2 * total, 2 * total))
    component = connected_components(graph, directed=False)[1]
    one, other = component[:nodes], component[total : total + nodes]
    channel = np.unique(np.minimum(one, other), return_inverse=True)[1]
    first = np.full(int(channel.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, channel[node], 2 * place + side)
    # the side that a channel's first place calls the left one is the left one of all
    leading = np.zeros(len(first), dtype=np.int64)
    entry = 2 * place + side
    chosen = entry == first[channel[node]]
    leading[channel[node[chosen]]] = (one > other)[node[chosen]] ^ side[chosen].astype(bool)
    return channel, (one > other).astype(np.int64) ^ leading[channel], one == other


def _blocks(channel: np.ndarray, table: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return for every entry its block: channels that stand together in all products; and bad ones."""
    generator = np.random.default_rng(0)
    big = np.iinfo(np.int64).max
    name_channel = generator.integers(1, big, int(channel.max()) + 1, dtype=np.int64)
    pairs = np.unique(np.stack([table["label"], channel]), axis=1)
    with np.errstate(over="ignore"):
        labels, at = np.unique(pairs[0], return_inverse=True)
        name_label = np.zeros(len(labels), dtype=np.int64)
        np.add.at(name_label, at, name_channel[pairs[1]])
        places = np.unique(np.stack([table["label"], table["place"]]), axis=1)
        wide = np.bincount(np.unique(places[0], return_inverse=True)[1])
        bad_label = np.bincount(at) != wide  # two places of one class are one channel
        turning = np.zeros(len(labels), dtype=bool)
        turning[np.searchsorted(labels, table["label"][table["turns"] == 1])] = True
        turns_channel = np.zeros(len(name_channel), dtype=bool)
        turns_channel[pairs[1][turning[at]]] = True
        counted = turning[at] | ~turns_channel[pairs[1]]
        distinct = np.unique(np.stack([pairs[1], name_label[at]])[:, counted], axis=1)
        name_block = np.zeros(len(name_channel), dtype=np.int64)
        np.add.at(name_block, distinct[0], distinct[1] * 2 + 1)
    block = np.unique(name_block, return_inverse=True)[1]
    bad = np.zeros(int(block.max()) + 1, dtype=bool)
    np.logical_or.at(bad, block[pairs[1]], bad_label[at])
    several = np.bincount(distinct[0], minlength=len(name_channel)) > 1
    bad[block[several & turns_channel]] = True
    return block[channel], bad


def _summary(
    table: dict[str, np.ndarray],
    block: np.ndarray,
    bad: np.ndarray,
    node: np.ndarray,
    colour: np.ndarray,
    dead: np.ndarray,
    of_node: np.ndarray,
) -> dict[str, np.ndarray]:
    found = {name: np.zeros(len(bad), dtype=bool) for name in ("turns", "positive", "mixed")}
    for name, flags in found.items():
        np.logical_or.at(flags, block, table[name].astype(bool))
    alone = np.ones(len(bad), dtype=bool)
    np.logical_and.at(alone, block, table["alone"].astype(bool))
    reason = np.full(len(bad), 0)
    np.maximum.at(reason, of_node, np.maximum(dead, 0))
    clash = bad.copy()
    np.logical_or.at(clash, of_node, dead == CLASH)
    reason[(reason == 0) & clash] = CLASH
    pairs = np.unique(np.stack([block, table["product"]]), axis=1)
    products = np.split(pairs[1], np.flatnonzero(np.diff(pairs[0])) + 1)
    return {**found, "alone": alone, "reason": reason, "products": np.array([*products, None], dtype=object)[:-1]}
