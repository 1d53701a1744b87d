"""Find the blocks of channels that may mix, and the tangents of what they allow."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quotient_manifolds.symmetries.wires.relations import Classes, Scales
from quotient_manifolds.symmetries.wires.walk import FIXED, Walk


@dataclass(frozen=True, eq=False)
class Block:
    """Hold channels that mix: their classes' representatives, the kind of group, and in which weights it is orthogonal."""

    kind: str  # linear, complex, orthogonal, centred or mean
    roots: tuple[int, ...]
    weights: Tensor
    classes: Classes

    @property
    def dimension(self) -> int:
        """Of what mixes channels; their scales are counted apart."""
        n = len(self.roots)
        return {
            "linear": n * (n - 1),
            "complex": 1,
            "orthogonal": n * (n - 1) // 2,
            "centred": (n - 1) * (n - 2) // 2,
            "mean": n,
        }[self.kind]

    def generators(self) -> Iterator[Tensor]:
        n, m = len(self.roots), self.weights
        unit = torch.eye(n, dtype=torch.float64)
        if self.kind == "linear":
            for i in range(n):
                for j in range(n):
                    if i != j:
                        yield torch.outer(unit[i], unit[j])
            return
        if self.kind == "mean":
            for j in range(n):
                yield torch.outer(1 / m, unit[j])
            return
        if self.kind == "complex":
            yield torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
            return
        basis = unit
        if self.kind == "centred":
            basis = torch.linalg.qr(torch.cat([torch.ones(n, 1, dtype=torch.float64), unit[:, 1:]], 1))[0][:, 1:].T
        for i in range(len(basis)):
            for j in range(i):
                skew = torch.outer(basis[i], basis[j]) - torch.outer(basis[j], basis[i])
                yield skew * m / m[:, None]


def find_blocks(walk: Walk, *, offset: bool = False) -> list[Block]:
    """Return the blocks of channels that may mix: those without constants that are added to them, or those with."""
    found = [*_blocks(walk, walk.turns, mean=False), *_blocks(walk, walk.means, mean=True)]
    return [each for each in found if offset == bool(np.isin(each.classes.find(walk.offsets())[0], each.roots).any())]


def _blocks(walk: Walk, classes: Classes, *, mean: bool) -> Iterator[Block]:
    """Channels mix whose classes have equal marks: of what was read, written and multiplied, and of norms with their weights."""
    nodes = np.arange(FIXED + 1, walk.count)
    root, weight, dual = classes.find(nodes)
    size = np.where(dual, 1 / weight, weight)
    refused = walk.about("alone")[nodes] | walk.about("dead")[nodes] | (mean & walk.about("normed")[nodes])
    bad = np.zeros(walk.count, bool)
    bad[root[refused]] = True
    total = np.zeros(walk.count, np.int64)
    touched = np.zeros(walk.count, bool)
    with np.errstate(over="ignore"):
        for names, codes in walk.marks:
            owner = root[names - FIXED - 1]
            np.add.at(total, owner, codes)
            touched[owner] = True
    # norms: in which weights a class is orthogonal is told by the first of them, and the others relative to it
    strict: dict[int, list[tuple[str, int, int, float]]] = defaultdict(list)
    for kind, names, codes, width in walk.norms:
        place = names - FIXED - 1
        touched[root[place]] = True
        for owner, code, each in zip(root[place].tolist(), codes.tolist(), size[place].tolist(), strict=True):
            strict[owner].append((kind, code, width, each))
    planes: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for p, q in walk.planes:
        for pair in zip(classes.find(p)[0].tolist(), classes.find(q)[0].tolist(), strict=True):
            for each in pair:
                planes[each].add(pair)
    cycles: dict[int, list[tuple[bool, float]]] = defaultdict(list)
    for owner, turned, around in classes.cycles:
        cycles[owner].append((turned, around))
    groups: dict[Any, list[int]] = defaultdict(list)
    weights: dict[int, float] = {}
    for owner in np.flatnonzero(touched & ~bad).tolist():
        found = _signature(strict.get(owner, []), cycles.get(owner, []))
        if found is not None:
            key, weights[owner] = found
            flat = tuple(sorted({tuple(sorted(pair)) for pair in planes[owner]})) if owner in planes else ()
            groups[int(total[owner]), key, flat].append(owner)
    for (_, key, plane), roots in groups.items():
        kind = _kind(key, plane, roots, mean)
        if kind == "complex":
            roots = list(next(iter(planes[roots[0]])))
        if kind:
            yield Block(
                kind, tuple(roots), torch.tensor([weights[each] for each in roots], dtype=torch.float64), classes
            )


def _signature(strict: list[tuple[str, int, int, float]], cycles: list[tuple[bool, float]]) -> tuple[Any, float] | None:
    """Return what the channels of a block have in common, and the weight in which this one is orthogonal."""
    if not strict and not cycles:
        return ((), ()), 1.0
    strict = sorted(strict)
    duals = [weight for dual, weight in cycles if dual]  # X = -w X^T / w: orthogonal in weights |w|^-1/2
    weight = strict[0][3] if strict else abs(duals[0]) ** -0.5 if duals else 1.0
    ratios = [(kind, code, width, round(abs(size / weight), 9)) for kind, code, width, size in strict]
    ratios += [("orthogonal", 0, 0, round(float(np.copysign(abs(w) ** -0.5 / weight, w)), 9)) for w in duals]
    rest = tuple(sorted(w for dual, w in cycles if not dual))
    return (tuple(sorted(Counter(ratios).items())), rest), weight


def _kind(key: Any, plane: Any, roots: list[int], mean: bool) -> str | None:
    strict = [ratio for ratio, _ in key[0]]
    orthogonal = {code for kind, code, _, _ in strict if kind == "orthogonal"}
    centred = {code for kind, code, _, _ in strict if kind == "centred"}
    if mean:
        whole = centred and orthogonal <= centred and not plane and not key[1]
        whole = whole and all(width == len(roots) for kind, _, width, _ in strict if kind == "centred")
        return "mean" if whole and len(roots) > 1 else None
    if len(roots) < 2:
        return None
    if plane:
        return "complex" if len(plane) == 1 and len(roots) == 2 and not strict else None
    if centred:
        return "centred" if orthogonal and len(roots) > 2 else None
    return "orthogonal" if orthogonal else "linear"


class Places:
    """Say where the channels of a block stand in a list of nodes: positions, weights and duality, for each copy."""

    def __init__(self, block: Block, nodes: list[int]) -> None:
        position = {root: i for i, root in enumerate(block.roots)}
        seen: Counter[int] = Counter()
        self.copies: dict[int, list[tuple[int, int, float, bool]]] = defaultdict(list)
        names = np.array(nodes, np.int64)
        for place, node, root, weight, dual in zip(
            range(len(nodes)), nodes, *(each.tolist() for each in block.classes.find(names)), strict=True
        ):
            if node > FIXED and root in position:
                self.copies[seen[root]].append((place, position[root], weight, dual))
                seen[root] += 1

    def __bool__(self) -> bool:
        return bool(self.copies)

    def of(self, X: Tensor) -> Iterator[tuple[list[int], Tensor]]:
        """Yield positions and the change of the channels that stand there."""
        for copy in self.copies.values():
            places, roots = [each[0] for each in copy], [each[1] for each in copy]
            w = torch.tensor([each[2] for each in copy], dtype=torch.float64)
            part = X[roots][:, roots]
            if copy[0][3]:
                part = -part.T
            yield places, w[:, None] * part / w


@dataclass(frozen=True, eq=False)
class Direction:
    """Hold a direction X of a block, or of log-scales: its tangent, and X c for constants c that are added to channels."""

    label: str
    tangent: dict[str, Tensor]
    offsets: dict[int, float]


def gauge_tangents(walk: Walk) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield a tangent for every direction of every block, and of every solution of the log-scales."""
    for each in _directions(walk, find_blocks(walk), walk.scales):
        yield each.label, each.tangent


def offset_directions(walk: Walk) -> Iterator[Direction]:
    """Yield directions that need a shift beside them, for constants that are added to their channels."""
    if any(flow.kind == "offset" for flow in walk.flows):
        for each in _directions(walk, find_blocks(walk, offset=True), walk.loose):
            if each.offsets or each.label != "scale":  # scales that need none are among those without
                yield each


def _directions(walk: Walk, blocks: Iterable[Block], scales: Scales) -> Iterator[Direction]:
    values = {id(each): each.entries.read(walk.parameters) for each in (*walk.linears, *walk.vectors)}
    offsets = [flow for flow in walk.flows if flow.kind == "offset"]
    for block in blocks:
        linears = [(each, Places(block, each.outs[0]), Places(block, each.takes)) for each in walk.linears]
        linears = [each for each in linears if each[1] or each[2]]
        vectors = [(each, Places(block, sum(each.outs, []))) for each in walk.vectors if not each.gain]
        vectors = [each for each in vectors if each[1]]
        constants = [(flow, Places(block, flow.outs.tolist())) for flow in offsets]
        for X in block.generators():
            tangent = zeros(walk)
            done: set[Any] = set()
            for linear, out, ins in linears:
                if linear.entries.key in done:
                    continue
                done.add(linear.entries.key)
                W = values[id(linear)]
                change = torch.zeros_like(W)
                for places, part in out.of(X):
                    change[:, places] += part @ W[:, places]
                for places, part in ins.of(X):
                    change[:, :, places] -= W[:, :, places] @ part
                linear.entries.add_to(tangent, change)
            for vector, out in vectors:
                if vector.entries.key in done:
                    continue
                done.add(vector.entries.key)
                b = values[id(vector)]
                change = torch.zeros_like(b)
                for places, part in out.of(X):
                    change.view(-1)[places] += part @ b.reshape(-1)[places]
                vector.entries.add_to(tangent, change)
            moved: dict[int, float] = {}
            for flow, constant in constants:
                for places, part in constant.of(X):
                    c = torch.from_numpy(flow.plus[places])
                    moved.update((int(flow.outs[i]), x) for i, x in zip(places, (part @ c).tolist(), strict=True) if x)
            yield Direction(f"{block.kind} {len(block.roots)}", tangent, moved)
    for solution in solutions(scales):
        tangent = zeros(walk)
        done = set()
        for each in (*walk.linears, *walk.vectors):
            if each.entries.key in done:
                continue
            done.add(each.entries.key)
            if hasattr(each, "gain"):
                if each.gain:
                    index, weights = walk.notes["gain index", id(each)]
                    flat = tangent[each.entries.name].view(-1)
                    for place, unknown, value in zip(index, each.unknowns[0], weights, strict=True):
                        flat[place] = solution.get(unknown, 0.0) * value / each.entries.scale
                    continue
                size = torch.tensor([[solution.get(n, 0.0) for n in row] for row in each.outs], dtype=torch.float64)
                each.entries.add_to(tangent, size * values[id(each)])
                continue
            out = torch.tensor([solution.get(n, 0.0) for n in each.outs[0]], dtype=torch.float64)
            ins = torch.tensor([solution.get(n, 0.0) for n in each.takes], dtype=torch.float64)
            each.entries.add_to(tangent, values[id(each)] * (out[:, None] - ins))
        if any(bool(part.any()) for part in tangent.values()):
            moved = {
                n: solution[n] * c
                for flow in offsets
                for n, c in zip(flow.outs.tolist(), flow.plus.tolist(), strict=True)
                if solution.get(n, 0.0) * c
            }
            yield Direction("scale", tangent, moved)


def solutions(scales: Scales) -> Iterator[dict[int, float]]:
    """Yield every direction of every component as numbers by unknown."""
    for component in scales.components():
        for column in component.basis.T:
            yield dict(zip(component.unknowns.tolist(), column.tolist(), strict=True))


def zeros(walk: Walk) -> dict[str, Tensor]:
    return {name: torch.zeros(shape, dtype=torch.float64) for name, shape in walk.shapes.items()}
