"""Find the blocks of channels that may mix, and the tangents of what they allow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quotient_manifolds.symmetries.wires.codes import hashed
from quotient_manifolds.symmetries.wires.linear_algebra import Array
from quotient_manifolds.symmetries.wires.nodes import FIXED, earlier
from quotient_manifolds.symmetries.wires.relations import Classes
from quotient_manifolds.symmetries.wires.walk import Walk

_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class Block:
    """Hold channels that mix: their classes' representatives, the group, and the weights in which it is orthogonal."""

    kind: str  # linear, complex, orthogonal, centred or mean
    roots: tuple[int, ...]
    weights: Tensor
    classes: Classes

    @property
    def dimension(self) -> int:
        """Of what mixes channels; their scales are counted apart."""
        n = len(self.roots)
        return {
            "linear": n**2 - 1,
            "complex": 1,
            "orthogonal": n * (n - 1) // 2,
            "centred": (n - 1) * (n - 2) // 2,
            "mean": n,
        }[self.kind]


def find_blocks(walk: Walk) -> list[Block]:
    """Return the blocks of channels that may mix, to none of which a constant is added."""
    found = list[Block]()
    for classes, mean in ((walk.turns, False), (walk.means, True)):
        added = set(classes.find(walk.offsets())[0].tolist())
        found += [each for each in _blocks(walk, classes, mean=mean) if added.isdisjoint(each.roots)]
    return found


def _blocks(walk: Walk, classes: Classes, *, mean: bool) -> Iterator[Block]:
    """Channels mix whose classes have equal marks: of what was read, written and multiplied, and of norms."""
    root, _, dual = classes.find(np.arange(walk.count))
    refused = walk.about("alone") | walk.about("dead") | (mean & walk.about("normed"))
    bad, touched, total = (np.zeros(walk.count, kind) for kind in (bool, bool, np.int64))
    bad[root[FIXED + 1 :][refused[FIXED + 1 : walk.count]]] = True
    for _, names, *_ in walk.norms if mean else ():  # a norm leaves I + 1 v^T free, of the dual the transposes
        bad[root[names[dual[names]]]] = True
    copy = walk.copies(root)
    if walk.marks:
        marked, codes, places, rows = zip(*walk.marks, strict=True)
        sizes, names = [*map(len, rows)], np.concatenate(marked)
        beside = earlier(root[np.concatenate(rows)], np.repeat(np.arange(len(rows)), sizes))
        first = np.repeat(np.cumsum([0, *sizes[:-1]]), [*map(len, marked)])
        code = hashed(np.concatenate(codes), copy[names], beside[first + np.concatenate(places)])
        with np.errstate(over="ignore"):
            np.add.at(total, root[names], code)
        touched[root[names]] = True
    norms, planes, cycles = (
        Norms(walk, classes, copy),
        _planes(walk, classes),
        defaultdict[int, list[tuple[bool, float]]](list),
    )
    touched[norms.owner] = True
    for owner, turned, ratio in classes.cycles:
        cycles[owner].append((turned, ratio))
    owners, related = np.flatnonzero(touched & ~bad), {*cycles, *planes}
    groups: dict[Any, list[int]] = defaultdict(list)
    for owner in owners[np.isin(owners, [*related])].tolist():
        around = norms.around(owner, cycles[owner]) if owner in cycles else ()
        flat = tuple(sorted({tuple(sorted(pair)) for pair in planes[owner]})) if owner in planes else ()
        groups[int(total[owner]), int(norms.code[owner]), around, flat].append(owner)
    rest = owners[~np.isin(owners, [*related])]
    order = np.lexsort((norms.code[rest], total[rest]))
    same = np.stack([total, norms.code])[:, rest[order]]
    bounds = np.array([0, *(1 + np.flatnonzero((same[:, 1:] != same[:, :-1]).any(0))), len(rest)])
    wide = np.diff(bounds) > 1
    every = [(around, flat, roots) for (_, _, around, flat), roots in groups.items() if len(roots) > 1]
    for start, stop in zip(bounds[:-1][wide].tolist(), bounds[1:][wide].tolist(), strict=True):
        every.append(((), (), rest[order[start:stop]].tolist()))
    for around, plane, roots in sorted(every, key=itemgetter(2)):
        kind = _kind(norms.of(roots[0]), around, plane, roots, mean)
        if kind == "complex":
            roots = list(next(iter(planes[roots[0]])))
        if kind:
            yield Block(kind, tuple(roots), torch.from_numpy(norms.weight[roots]), classes)


def _planes(walk: Walk, classes: Classes) -> dict[int, set[tuple[int, int]]]:
    """Return the planes that are turned, by the classes of which they are."""
    found: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for p, q in walk.planes:
        for pair in zip(classes.find(p)[0].tolist(), classes.find(q)[0].tolist(), strict=True):
            for each in pair:
                found[each].add(pair)
    return found


class Norms:
    """Hold for each class the norms in which it stands: kinds, codes, numbers of channels.

    The first of them tells in which weights it is orthogonal; a code has how the others stand to it.
    """

    def __init__(self, walk: Walk, classes: Classes, copy: Array) -> None:
        self._turned = set[int]()
        self._kinds = sorted({kind for kind, *_ in walk.norms})
        parts = [
            (nodes, np.full(len(nodes), self._kinds.index(kind)), hashed(code, copy[nodes]), np.full(len(nodes), width))
            for kind, nodes, code, width in walk.norms
        ]
        nodes, kind, code, width = (np.concatenate(each) for each in zip(*parts, strict=True)) if parts else [_NONE] * 4
        root, size, dual = classes.find(nodes)
        size = np.where(dual, 1 / size, size)
        order = np.lexsort((size, width, code, kind, root))
        self.owner, size = root[order], size[order]
        self._about = np.stack([kind, code, width], 1)[order]
        first, start = np.unique(self.owner, return_index=True)
        self.weight, self.code = np.ones(walk.count), np.zeros(walk.count, np.int64)
        self.weight[first] = size[start]
        ratio = (size / self.weight[self.owner]).round(9)
        if "orthogonal" in self._kinds:  # lengths tell no signs, means do
            ratio = np.where(self._about[:, 0] == self._kinds.index("orthogonal"), np.abs(ratio), ratio)
        with np.errstate(over="ignore"):
            np.add.at(self.code, self.owner, hashed(*self._about.T, ratio.view(np.int64)))

    def of(self, root: int) -> list[tuple[str, int, int]]:
        """Return kind, code and number of channels of every norm of a class."""
        start, stop = np.searchsorted(self.owner, [root, root + 1])
        found = [(self._kinds[kind], code, width) for kind, code, width in self._about[start:stop].tolist()]
        return [*found, ("orthogonal", 0, 0)] if root in self._turned else found

    def around(self, root: int, cycles: list[tuple[bool, float]]) -> tuple[tuple[bool, float], ...]:
        """Return what relates a class to itself; by X = -w X^T / w it is orthogonal in weights |w|^-1/2."""
        duals = [ratio for dual, ratio in cycles if dual]
        if duals and not self.of(root):
            self.weight[root] = abs(duals[0]) ** -0.5
        if duals:
            self._turned.add(root)
        weight = self.weight[root]
        turned = (float(np.copysign(round(abs(w) ** -0.5 / weight, 9), w)) if dual else w for dual, w in cycles)
        return tuple(sorted(zip((dual for dual, _ in cycles), turned, strict=True)))


def _kind(strict: list[tuple[str, int, int]], around: Any, plane: Any, roots: list[int], mean: bool) -> str | None:
    """Return the kind of group that acts on these classes, by the norms and cycles in which each of them stands."""
    orthogonal = {code for kind, code, _ in strict if kind == "orthogonal"}
    centred = {code for kind, code, _ in strict if kind == "centred"}
    if mean:
        whole = centred and orthogonal <= centred and not plane and not around
        whole = whole and all(width == len(roots) for kind, _, width in strict if kind == "centred")
        return "mean" if whole and len(roots) > 1 else None
    if len(roots) < 2:
        return None
    if plane:
        return "complex" if len(plane) == 1 and len(roots) == 2 and not strict else None
    if centred:
        return "centred" if orthogonal and len(roots) > 2 else None
    return "orthogonal" if orthogonal else "linear"


@dataclass(frozen=True, eq=False)
class Copy:
    """Say where channels of a block stand along an axis: places, and the channels there with weight and duality."""

    places: Tensor  # (k,)
    channels: Tensor  # (k,)
    weights: Tensor  # (k,)
    dual: bool

    def element(self, A: Tensor, C: Tensor) -> Tensor:
        """Return what A with its inverse C does to the channels that stand here: S A S^-1, or of C^T."""
        part, weights = C.mT if self.dual else A, self.weights.to(A.dtype)
        return weights[:, None] * part[self.channels][:, self.channels] / weights


def copies(block: Block, nodes: Any) -> tuple[Copy, ...]:
    """Return where the channels of a block stand in a list of nodes: what stands there twice is in two copies."""
    names, roots = np.asarray(nodes, np.int64), np.array(block.roots)
    root, weight, dual = block.classes.find(names)
    order = np.argsort(roots)
    channel = order[np.searchsorted(roots[order], root) % len(roots)]
    places = np.flatnonzero((names > FIXED) & (roots[channel] == root))
    by_channel = places[np.argsort(channel[places], kind="stable")]
    _, start, count = np.unique(channel[by_channel], return_index=True, return_counts=True)
    number = np.arange(len(places)) - np.repeat(start, count)
    found = []
    for k in range(int(count.max(initial=0))):
        here = np.sort(by_channel[number == k])
        place, own, size = (torch.from_numpy(each[here]) for each in (np.arange(len(names)), channel, weight))
        found.append(Copy(place, own, size, bool(dual[here[0]])))
    return tuple(found)
